"""A training step of a model, predicted: simulated with few microbatches, and the rest of them added."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from topology import Cluster, TopologyError, TopologyWarning

from .. import Virtual, run
from ..errors import RankFailedError, UsageError
from ..runtime.rank import Rank
from ..simulation.compute_cost import Roofline
from ..timeline.recording import Recorder
from ..timeline.spans import Timeline
from .layout import Layout
from .memory import Memory, memory_of
from .model import Model
from .parts import Parts
from .program import train


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a step takes."""

    model: Model  # Which
    layout: Layout  # How it lies
    cluster: Cluster  # Where
    virtual: Virtual  # What was assumed
    parts: Parts  # Where the time goes
    memory: Memory  # On the fullest rank
    simulated: int  # Microbatches that were simulated; the others were added, each like the last one
    timeline: Timeline  # Of the last simulation

    @property
    def step_s(self) -> float:
        """How long it takes."""
        return self.parts.step_ns / 1e9

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.layout.global_batch / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.samples_per_s * self.model.sequence

    @property
    def utilisation(self) -> float | None:
        """Model flops utilisation: of the peak, what is not computed twice (arXiv 2204.02311); None if unknown."""
        peak = Roofline.of(self.cluster, dtype=self.virtual.dtype).flops_per_s
        return None if peak is None else self.samples_per_s * self.model.sample_flops / (peak * self.layout.world_size)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank has enough memory; None if nobody knows how much there is."""
        there = self.cluster.memory_bytes()
        return None if there is None else self.memory.total <= there

    def cost_of_sample(self, node_hour: float) -> float:
        """Return the price of a sample, given that of a node and hour."""
        return self.cluster.nodes * node_hour * self.step_s / 3600 / self.layout.global_batch


def estimate(
    model: Model, layout: Layout, cluster: Cluster, virtual: Virtual, *, algorithm: str | None = None
) -> Estimate:
    """Predict a step.

    All ranks of a stage run the same program on alike places, so two of them run for all. From p microbatches on, of p
    stages, each further one costs what the one before did, as in the closed forms of `schedules`: where there are more
    than twice as many, two short steps are simulated, and their difference is added for each of the others. Those of
    schedules with several stages on a rank, which come in rounds, are all simulated.

    Args:
        model: What is trained.
        layout: How it lies; as many ranks as the cluster has.
        cluster: Where.
        virtual: What is assumed.
        algorithm: The only one to use, by default any.

    Raises:
        UsageError: If they do not go together.
        TopologyError: If a group of ranks is illegal there.
    """
    layout.check(model)
    if layout.world_size != cluster.world_size:
        raise UsageError(
            f"layout: {layout} makes {layout.world_size} ranks, but {cluster.name} has {cluster.world_size}"
        )
    virtual = replace(virtual, dtype=layout.dtype, shapes_only=True, alike=layout.stage_of)
    few = layout.pp
    if layout.chunks > 1:
        few = layout.microbatches
    many = layout.microbatches > 2 * few + 1
    counts = (few, few + 1) if many else (layout.microbatches,)
    timelines = [simulated(model, layout.with_microbatches(n), cluster, virtual, algorithm) for n in counts]
    parts = [Parts.of(timeline) for timeline in timelines]
    found = parts[0].further(parts[1], layout.microbatches - few - 1) if many else parts[0]
    return Estimate(
        model=model,
        layout=layout,
        cluster=cluster,
        virtual=virtual,
        parts=found,
        memory=memory_of(model, layout),
        simulated=counts[-1],
        timeline=timelines[-1],
    )


def simulated(
    model: Model, layout: Layout, cluster: Cluster, virtual: Virtual, algorithm: str | None = None
) -> Timeline:
    """Run a step in virtual time, all of it, and return what happened; arguments and errors are those of `estimate`."""
    recorders: dict[int, Recorder] = {}

    async def main(rank: Rank) -> None:
        recorders[rank.rank] = rank.recorder
        await train(rank, model, layout)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TopologyWarning)  # `overlap plan MACHINE` tells of rules that do not bind
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
