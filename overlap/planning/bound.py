"""Lower bound of a training step, with which a search skips layouts that cannot win.

A rank runs one compute after the other, and begins when the first microbatch has passed the stages before it. Exchanges
of `tp` and `ep` within an action of the schedule lie between its computes, except while layers are computed again. The
gradients of the last microbatch, and the new weights, pass the busiest wire of their group one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topology import Cluster

from .. import Virtual
from ..cost.select import plan
from ..parallel.schedules import FAMILIES
from ..simulation.compute_cost import ComputeCosts, Profile, Roofline
from .amounts import Amounts, Compute
from .device import Device
from .layout import Layout
from .model import Model

_SPLIT = frozenset(name for name, of in FAMILIES.items() if of.make(1, 2, of.chunks or 2).splits_backward)


def bound_s(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    virtual: Virtual,
    *,
    planned: bool = True,
    device: Device | None = None,
) -> float:
    """Return seconds that no simulation of the step is below.

    Args:
        model: What is trained.
        layout: How it lies.
        cluster: Where.
        virtual: What is assumed.
        planned: Whether collectives count, which takes a plan of each; else only computes do.
        device: Measured rates of computes, as in `estimate`.

    Raises:
        TopologyError: If a group of ranks is illegal there.
    """
    return _Bound(model, layout, cluster, virtual, device, planned=planned).step_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Seconds of one microbatch."""

    forward: float
    backward: float  # until its gradient is there for the stage before
    weights: float  # later


class _Bound:
    """The bound of one layout."""

    def __init__(
        self, model: Model, layout: Layout, cluster: Cluster, virtual: Virtual, device: Device | None, *, planned: bool
    ) -> None:
        self._model, self._layout, self._cluster, self._virtual = model, layout, cluster, virtual
        self._plans = planned
        self._amounts = Amounts(model=model, layout=layout, device=device)
        rates = {"efficiency": virtual.efficiency, "memory_efficiency": virtual.memory_efficiency}
        profile = virtual.profile
        self._costs = ComputeCosts(
            roofline=Roofline.of(cluster, dtype=layout.dtype, **rates),
            profile=profile if isinstance(profile, Profile) or profile is None else Profile.read(profile),
        )
        self._half_s = self._exchange_s()

    def step_s(self) -> float:
        """Return the bound."""
        layout = self._layout
        stages = [self._stage(stage) for stage in range(layout.pp * layout.chunks)]
        return max(self._of_rank(stages, rank) for rank in range(layout.pp))

    def _of_rank(self, stages: list[_Stage], rank: int) -> float:
        layout, m = self._layout, self._layout.microbatches
        own_stages = [stages[stage] for stage in layout.stages_of(rank)]
        before_s = sum(stage.forward for stage in stages[:rank])
        after_s = sum(stage.backward for stage in stages[:rank])
        once_s = sum(stage.forward + stage.backward + stage.weights for stage in own_stages)
        last_s = sum(stage.backward + stage.weights for stage in own_stages)
        reduced_s, gathered_s = self._replicas_s(rank)
        waiting_s = max(0.0, reduced_s - last_s) if layout.shards < 2 else 0.0
        own_s = before_s + m * once_s + waiting_s + max(self._update_s(rank), gathered_s)
        later_s = sum(stage.weights for stage in own_stages)  # may be computed while the stages before end
        return max(own_s, before_s + m * (once_s - later_s) + after_s + self._update_s(0))

    # -- one microbatch --------------------------------------------------------------------------------------------

    def _stage(self, stage: int) -> _Stage:
        layers = self._layout.layers_of(self._model, stage)
        kinds, split = self._model.kinds(layers), self._layout.schedule in _SPLIT
        forward = sum(self._layer_s(layer, "forward", 0.0) * like for layer, like in kinds)
        backward = sum(self._layer_s(layer, "backward", 1.0 if split else 2.0) * like for layer, like in kinds)
        again = forward - (self._half_s if layers else 0.0) * len(layers) if self._again else 0.0
        if stage == self._layout.pp * self._layout.chunks - 1:
            forward += self._s("scores", self._amounts.scoring())
            backward += self._s("scores backward", self._amounts.scoring(1.0 if split else 2.0))
        weights = sum(self._weights_s(layer) * like for layer, like in kinds) if split else 0.0
        slack = 2 * self._half_s  # the last exchange of an action may lie beside the first compute of the next
        return _Stage(forward=max(0.0, forward - slack), backward=max(0.0, backward + again - slack), weights=weights)

    @property
    def _again(self) -> bool:
        return self._layout.checkpointing == "full"

    def _layer_s(self, layer: int, phase: str, times: float) -> float:
        """Return the time of a layer's computes, and of the exchanges of `tp` and `ep` between them."""
        amounts, back = self._amounts, phase == "backward"
        scores = amounts.scores(1 if back else 0)
        projections = amounts.projections(times)
        if self._layout.cp > 1:
            sum_s = self._s(f"projections {phase}", projections) + self._layout.cp * self._s(f"scores {phase}", scores)
        else:
            sum_s = self._s(f"attention {phase}", projections.plus(scores))
        sum_s += self._half_s
        if back and self._again:
            sum_s -= self._gather_s  # of the gradient, while the layer is computed again
        if self._model.has_experts(layer):
            return sum_s + self._sparse_s(times, phase)
        return sum_s + self._s(f"perceptron {phase}", amounts.perceptron(layer, times)) + self._half_s

    def _sparse_s(self, times: float, phase: str) -> float:
        """Return the time of half a layer with experts; shared experts may compute while tokens travel."""
        amounts, there_s, back_s, around_s = self._amounts, 0.0, 0.0, 0.0
        if self._layout.ep > 1:
            there_s = back_s = self._planned_s("all_to_all", amounts.routed_bytes, "ep")
        if amounts.gathers_routed:
            nbytes = amounts.routed_bytes * self._layout.tp
            there_s += self._planned_s("all_gather", nbytes, "tp")
            back_s += self._planned_s("reduce_scatter", nbytes, "tp")
        else:
            around_s = self._half_s
        shared_s = self._s(f"shared {phase}", amounts.shared(times)) if self._model.shared_experts else 0.0
        router_s = self._s(f"router {phase}", amounts.router(times))
        experts_s = self._s(f"experts {phase}", amounts.experts(times))
        combine_s = self._s(f"combine {phase}", amounts.combining())
        return around_s + router_s + max(there_s, shared_s) + experts_s + back_s + combine_s

    def _weights_s(self, layer: int) -> float:
        return self._s("weights backward", self._amounts.weight_gradients(layer))

    def _s(self, name: str, work: Compute) -> float:
        priced = self._costs.duration_ns(name, flops=work.flops, bytes_moved=work.nbytes, seconds=work.seconds)
        return priced[0] / 1e9

    # -- groups ------------------------------------------------------------------------------------------------------

    def _exchange_s(self) -> float:
        """Return the time of the exchange of `tp` for half a layer."""
        self._gather_s = 0.0
        if self._layout.tp == 1:
            return 0.0
        nbytes = self._amounts.tokens * self._model.hidden * self._amounts.itemsize
        if not self._layout.sequence_parallel:
            return self._planned_s("all_reduce", nbytes, "tp")
        self._gather_s = self._planned_s("all_gather", nbytes, "tp")
        return self._gather_s + self._planned_s("reduce_scatter", nbytes, "tp")

    def _planned_s(self, op: str, nbytes: int, *axes: str) -> float:
        if not self._plans:
            return 0.0
        return _planned(op, nbytes, self._cluster, _group(self._layout, axes), self._layout.carried, self._peer)[0]

    @property
    def _peer(self) -> bool:
        return self._virtual.peer_direct

    def _replicas_s(self, rank: int) -> tuple[float, float]:
        """Return the seconds that gradients, and new weights, take on the busiest wire of the replicas."""
        layout = self._layout
        if layout.replicas == 1 or not self._plans:
            return 0.0, 0.0
        nbytes = self._dense(rank) * self._amounts.itemsize
        group = _group(layout, ("dp", "cp", "ep"))

        def busy_s(op: str) -> float:
            return _planned(op, layout.bucket_bytes, self._cluster, group, layout.carried, self._peer)[1] * nbytes

        alone = layout.sharers == 1
        reduced_s = 0.0 if alone else busy_s("reduce_scatter" if layout.shards else "all_reduce")
        gathers = layout.shards in (1, 2) and not (alone or layout.gathers_ahead)
        return reduced_s, busy_s("all_gather") if gathers else 0.0

    def _dense(self, rank: int) -> int:
        return sum(self._amounts.held(stage)[0] for stage in self._layout.stages_of(rank))

    def _update_s(self, rank: int) -> float:
        share = self._layout.sharers if self._layout.shards else 1
        return self._s("update", self._amounts.updating(self._dense(rank) / share))


def _group(layout: Layout, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks of the first group along some axes."""
    found, stride = [0], layout.world_size
    for axis, size in layout.axes.items():
        stride //= size
        if axis in axes:
            found = [rank + place * stride for rank in found for place in range(size)]
    return tuple(found)


@lru_cache(maxsize=4096)
def _planned(
    op: str, nbytes: int, cluster: Cluster, group: tuple[int, ...], dtype: str, peer_direct: bool
) -> tuple[float, float]:
    """Return the seconds of an operation alone, and the seconds of its busiest wire for each byte."""
    chosen = plan(op, nbytes, cluster, group, dtype=dtype, peer_direct=peer_direct)
    return chosen.predicted_s, chosen.busiest.busy_s / nbytes if chosen.busiest and nbytes else 0.0
