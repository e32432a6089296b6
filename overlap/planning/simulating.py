"""Simulations of a step: in full, or with the insides of layers simulated once; the period of pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from math import lcm

from topology import Cluster, TopologyError, TopologyWarning

from .. import Virtual, run
from ..errors import RankFailedError, UsageError
from ..parallel.schedules import FAMILIES
from ..runtime.rank import Rank
from ..timeline.recording import Recorder
from ..timeline.spans import Timeline
from .amounts import Amounts
from .device import Device
from .folded import FOLDED, FoldedStep, Piece, PieceAlone, SimulatedPieces, action_pieces, can_fold
from .layout import Layout
from .model import Model
from .parts import StepParts
from .program import TrainingStep

_MOST_FULL_OPERATIONS = 12_000  # Operations of all ranks that run, beyond which the inside of layers is simulated once


def choose_simulation(whole: FullSimulation, microbatches: int) -> FullSimulation | FoldedSimulation:
    """Return the simulation for steps with `microbatches` in all: large steps are folded if they can be."""
    large = whole.operations(microbatches) > _MOST_FULL_OPERATIONS
    return FoldedSimulation(whole) if large and can_fold(whole.amounts.layout) else whole


def fill_and_period(layout: Layout) -> tuple[int, int]:
    """Return the number of microbatches that fill a pipeline, and the period after which its times repeat.

    With one stage on a rank, the number of ranks fills it and each microbatch repeats. Folded schedules need twice as
    many, one more if an odd number would be left, and repeat every second microbatch. Interleaved stages repeat with
    each round of as many microbatches as ranks, if the ranks divide the microbatches; else nothing repeats.
    """
    p, m = layout.pp, layout.microbatches
    if layout.chunks == 1:
        return p, 1
    if FAMILIES[layout.schedule].folded:
        return 2 * p + (m - 2 * p) % 2, 2
    return (p, p) if m % p == 0 else (m, 1)


class FullSimulation:
    """Simulation of a step in full."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        cluster: Cluster,
        virtual: Virtual,
        algorithm: str | None,
        device: Device | None,
    ) -> None:
        self.amounts: Amounts = Amounts(model=model, layout=layout, device=device)
        self.cluster: Cluster = cluster
        self._virtual, self._algorithm = virtual, algorithm
        self.timeline: Timeline | None = None  # of the last simulation

    def with_layout(self, layout: Layout, cluster: Cluster) -> FullSimulation:
        """Return the simulation of another layout on another cluster, everything else equal."""
        amounts, virtual = self.amounts, replace(self._virtual, alike=layout.pipeline_place)
        return FullSimulation(amounts.model, layout, cluster, virtual, self._algorithm, amounts.device)

    def operations(self, microbatches: int) -> int:
        """Return roughly the number of computes and collectives that the simulated ranks issue together."""
        layout, model = self.amounts.layout, self.amounts.model
        # Of a layer, forward and backward: computes, and exchanges of tp, of experts, and around the ring.
        layer_operations = 4 + 8 * (layout.tp > 1) + 4 * bool(model.experts) + 6 * layout.cp * (layout.cp > 1)
        recomputing = 1.5 if layout.checkpointing == "full" else 1.0
        ranks = min(2, layout.world_size // layout.pp)
        return round(microbatches * (model.layers + model.mtp_layers) * layer_operations * recomputing * ranks)

    def parts(self, microbatches: int) -> StepParts:
        """Simulate a step of `microbatches` microbatches; return the parts of its time."""
        layout = self.amounts.layout.with_microbatches(microbatches)
        amounts = replace(self.amounts, layout=layout)
        self.timeline = self.run(lambda rank: TrainingStep(rank, amounts).run(), layout)
        return StepParts.of(self.timeline)

    def run(self, body: Callable[[Rank], Awaitable[None]], layout: Layout) -> Timeline:
        """Run `body` as a step on all ranks in virtual time, and return its timeline."""
        cluster, virtual, algorithm = self.cluster, self._virtual, self._algorithm
        recorders: dict[int, Recorder] = {}

        async def main(rank: Rank) -> None:
            """Run `body` as step 0 of a rank, and keep its recorder."""
            recorders[rank.rank] = rank.recorder
            with rank.step(0):
                await body(rank)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TopologyWarning)  # `overlap plan MACHINE` prints rules that do not bind
            try:
                run(main, cluster=cluster, clock=virtual, algorithm=algorithm)
            except RankFailedError as error:
                if isinstance(error.cause, TopologyError | UsageError):
                    raise error.cause from None  # not the fault of a rank
                raise
        ordered = [recorders[rank] for rank in sorted(recorders)]
        timeline = Timeline.collect(ordered, world_size=cluster.world_size, clock="virtual", meta=virtual.meta())
        if timeline.dropped:
            raise UsageError(
                f"layout: a step of {layout.microbatches} microbatches has more operations than are recorded; "
                "take a larger micro_batch, or more stages"
            )
        return timeline


class FoldedSimulation:
    """Simulation of a step with the inside of its layers simulated once."""

    def __init__(self, whole: FullSimulation) -> None:
        self._whole, amounts = whole, whole.amounts
        alone = _smallest_simulation(whole)
        parts: dict[Piece, StepParts] = {}
        for piece in action_pieces(amounts):
            parts[piece] = StepParts.of(alone.run(partial(_run_piece, alone.amounts, piece), alone.amounts.layout))
        self._pieces = SimulatedPieces(parts=parts)

    def parts(self, microbatches: int) -> StepParts:
        """Simulate a step of `microbatches` microbatches with folded layers; return the parts of its time."""
        layout = self._whole.amounts.layout.with_microbatches(microbatches)
        amounts = replace(self._whole.amounts, layout=layout)
        counts: dict[Piece, float] = {}

        def count_piece(piece: Piece, times: float) -> None:
            """Add to the number of a folded piece."""
            counts[piece] = counts.get(piece, 0.0) + times

        timeline = self._whole.run(lambda rank: FoldedStep(rank, amounts, self._pieces, count_piece).run(), layout)
        self._whole.timeline, step = timeline, StepParts.of(timeline)
        inside = [(self._pieces.parts[piece], times / len(step.ranks)) for piece, times in counts.items()]
        return step.unfold(inside, FOLDED)


def _smallest_simulation(simulation: FullSimulation) -> FullSimulation:
    """Return the simulation of one stage on the fewest nodes that place its groups inside layers alike.

    Ranks of `tp`, `cp` and `ep` are neighbours of each other wherever the stages are the outermost axis; elsewhere, and
    where no number of whole nodes holds such groups, the whole cluster is simulated, with a microbatch for each stage.
    """
    layout, cluster = simulation.amounts.layout, simulation.cluster
    inside, unit = layout.tp * layout.cp * layout.ep, cluster.servers * cluster.ranks_per_node
    nodes = lcm(inside, unit) // cluster.ranks_per_node
    apart = layout.order.startswith("pp") or (layout.cp * layout.ep == 1 and layout.order.endswith("tp"))
    if not apart or nodes >= cluster.nodes:
        return simulation.with_layout(layout.with_microbatches(layout.pp), cluster)
    dp = nodes * cluster.ranks_per_node // (layout.tp * layout.cp)
    stage_layout = replace(
        layout, pp=1, chunks=1, schedule="1f1b", dp=dp, global_batch=dp * layout.micro_batch, order="pp.dp.tp",
        replicate=1, zero=layout.zero_in_step,
    )  # fmt: skip
    return simulation.with_layout(stage_layout, replace(cluster, nodes=nodes, world_size=stage_layout.world_size))


async def _run_piece(amounts: Amounts, piece: Piece, rank: Rank) -> None:
    """Run one piece on a rank."""
    await PieceAlone(rank, amounts).run_piece(piece)


def simulate_step(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    virtual: Virtual,
    algorithm: str | None = None,
    device: Device | None = None,
) -> Timeline:
    """Run a whole step in virtual time and return its timeline; arguments and errors as in `estimate`."""
    whole = FullSimulation(model, layout, cluster, virtual, algorithm, device)
    amounts = whole.amounts
    return whole.run(lambda rank: TrainingStep(rank, amounts).run(), layout)
