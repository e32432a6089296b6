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

_SPLIT_SCHEDULES = frozenset(name for name, of in FAMILIES.items() if of.make(1, 2, of.chunks or 2).splits_backward)


def bound_s(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    virtual: Virtual,
    *,
    planned: bool = True,
    device: Device | None = None,
) -> float:
    """Return a lower bound of the simulated time of a step, in seconds.

    Args:
        model: The trained model.
        layout: Its layout on the ranks.
        cluster: The machines.
        virtual: The assumptions.
        planned: Whether collectives count, which takes a plan of each; else only computes count.
        device: Measured rates of computes, as in `estimate`.

    Raises:
        TopologyError: If a group of ranks is illegal there.
    """
    return _Bound(model, layout, cluster, virtual, device, planned=planned).step_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageSeconds:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float  # until the stage before can receive its gradient
    weights: float  # gradients of weights, where the schedule computes them later


class _Bound:
    """Lower bound of the step of one layout."""

    def __init__(
        self, model: Model, layout: Layout, cluster: Cluster, virtual: Virtual, device: Device | None, *, planned: bool
    ) -> None:
        self._model, self._layout, self._cluster, self._virtual = model, layout, cluster, virtual
        self._counts_collectives = planned
        self._amounts = Amounts(model=model, layout=layout, device=device)
        rates = {"efficiency": virtual.efficiency, "memory_efficiency": virtual.memory_efficiency}
        profile = virtual.profile
        self._costs = ComputeCosts(
            roofline=Roofline.of(cluster, dtype=layout.dtype, **rates),
            profile=profile if isinstance(profile, Profile) or profile is None else Profile.read(profile),
        )
        self._exchange_half_s = self._exchange_s()

    def step_s(self) -> float:
        """Return the bound of the whole step: the largest of the bounds of the places in the pipeline."""
        layout = self._layout
        stages = [self._stage_seconds(stage) for stage in range(layout.pp * layout.chunks)]
        return max(self._rank_bound_s(stages, rank) for rank in range(layout.pp))

    def _rank_bound_s(self, stages: list[_StageSeconds], rank: int) -> float:
        """Return the bound by one place of the pipeline: wait for the first microbatch, computes, update."""
        layout, m = self._layout, self._layout.microbatches
        own_stages = [stages[stage] for stage in layout.stages_of(rank)]
        before_s = sum(stage.forward for stage in stages[:rank])
        after_s = sum(stage.backward for stage in stages[:rank])
        once_s = sum(stage.forward + stage.backward + stage.weights for stage in own_stages)
        last_s = sum(stage.backward + stage.weights for stage in own_stages)
        reduced_s, gathered_s = self._replicas_s(rank)
        waiting_s = max(0.0, reduced_s - last_s) if layout.zero_in_step < 2 else 0.0
        own_s = before_s + m * once_s + waiting_s + max(self._update_s(rank), gathered_s)
        later_s = sum(stage.weights for stage in own_stages)  # may be computed while the stages before end
        return max(own_s, before_s + m * (once_s - later_s) + after_s + self._update_s(0))

    # -- one microbatch --------------------------------------------------------------------------------------------

    def _stage_seconds(self, stage: int) -> _StageSeconds:
        """Return the least time of one microbatch on a stage, forward and backward."""
        layers = self._layout.layers_of(self._model, stage)
        kinds, split = self._model.layer_kinds(layers), self._layout.schedule in _SPLIT_SCHEDULES
        forward = sum(self._layer_s(layer, "forward", 0.0) * number for layer, number in kinds)
        backward = sum(self._layer_s(layer, "backward", 1.0 if split else 2.0) * number for layer, number in kinds)
        recomputed = (
            forward - (self._exchange_half_s if layers else 0.0) * len(layers) if self._recomputes_layers else 0.0
        )
        if stage == self._layout.pp * self._layout.chunks - 1:
            forward += self._compute_s("scores", self._amounts.vocabulary_scores())
            backward += self._compute_s("scores backward", self._amounts.vocabulary_scores(1.0 if split else 2.0))
        weights = sum(self._weight_gradients_s(layer) * number for layer, number in kinds) if split else 0.0
        slack = 2 * self._exchange_half_s  # the last exchange of an action may overlap the first compute of the next
        return _StageSeconds(
            forward=max(0.0, forward - slack), backward=max(0.0, backward + recomputed - slack), weights=weights
        )

    @property
    def _recomputes_layers(self) -> bool:
        """Whether the backward pass computes whole layers again."""
        return self._layout.checkpointing == "full"

    def _layer_s(self, layer: int, phase: str, times: float) -> float:
        """Return the time of a layer: its computes (backward, `times` forward products) and exchanges of `tp`, `ep`."""
        amounts, back = self._amounts, phase == "backward"
        scores = amounts.scores(1 if back else 0)
        projections = amounts.projections(times)
        if self._layout.cp > 1:
            sum_s = self._compute_s(f"projections {phase}", projections) + self._layout.cp * self._compute_s(
                f"scores {phase}", scores
            )
        else:
            sum_s = self._compute_s(f"attention {phase}", projections.plus(scores))
        sum_s += self._exchange_half_s
        if back and self._recomputes_layers:
            sum_s -= self._gather_s  # of the gradient, while the layer is computed again
        if self._model.has_experts(layer):
            return sum_s + self._expert_layer_s(times, phase)
        return sum_s + self._compute_s(f"perceptron {phase}", amounts.perceptron(layer, times)) + self._exchange_half_s

    def _expert_layer_s(self, times: float, phase: str) -> float:
        """Return the time of half a layer with experts; the shared experts compute while tokens travel."""
        amounts, dispatch_s, return_s, exchange_s = self._amounts, 0.0, 0.0, 0.0
        if self._layout.ep > 1:
            dispatch_s = return_s = self._collective_s("all_to_all", amounts.routed_bytes, "ep")
        if amounts.gathers_routed:
            nbytes = amounts.routed_bytes * self._layout.tp
            dispatch_s += self._collective_s("all_gather", nbytes, "tp")
            return_s += self._collective_s("reduce_scatter", nbytes, "tp")
        else:
            exchange_s = self._exchange_half_s
        shared_s = (
            self._compute_s(f"shared {phase}", amounts.shared_perceptron(times)) if self._model.shared_experts else 0.0
        )
        router_s = self._compute_s(f"router {phase}", amounts.router(times))
        experts_s = self._compute_s(f"experts {phase}", amounts.experts(times))
        combine_s = self._compute_s(f"combine {phase}", amounts.expert_sum())
        return exchange_s + router_s + max(dispatch_s, shared_s) + experts_s + return_s + combine_s

    def _weight_gradients_s(self, layer: int) -> float:
        """Return the time of the gradients of a layer's weights alone."""
        return self._compute_s("weights backward", self._amounts.weight_gradients(layer))

    def _compute_s(self, name: str, work: Compute) -> float:
        """Return the time of a compute in seconds, by the profile or the roofline."""
        priced = self._costs.duration_ns(name, flops=work.flops, bytes_moved=work.nbytes, seconds=work.seconds)
        return priced[0] / 1e9

    # -- groups ------------------------------------------------------------------------------------------------------

    def _exchange_s(self) -> float:
        """Return the time of the exchanges of `tp` for half a layer; notes that of the all_gather alone."""
        self._gather_s = 0.0
        if self._layout.tp == 1:
            return 0.0
        nbytes = self._amounts.tokens * self._model.hidden * self._amounts.itemsize
        if not self._layout.sequence_parallel:
            return self._collective_s("all_reduce", nbytes, "tp")
        self._gather_s = self._collective_s("all_gather", nbytes, "tp")
        return self._gather_s + self._collective_s("reduce_scatter", nbytes, "tp")

    def _collective_s(self, op: str, nbytes: int, *axes: str) -> float:
        """Return the predicted seconds of a collective over some axes; 0 if collectives do not count."""
        if not self._counts_collectives:
            return 0.0
        return _collective_costs(
            op, nbytes, self._cluster, _first_group(self._layout, axes), self._layout.storage_dtype, self._peer_direct
        )[0]

    @property
    def _peer_direct(self) -> bool:
        """Whether network adapters read device memory themselves."""
        return self._virtual.peer_direct

    def _replicas_s(self, rank: int) -> tuple[float, float]:
        """Return the seconds that (gradients, new weights) take on the busiest wire between replicas."""
        layout = self._layout
        if layout.replicas == 1 or not self._counts_collectives:
            return 0.0, 0.0
        nbytes = self._dense_parameters(rank) * self._amounts.itemsize
        group = _first_group(layout, ("dp", "cp", "ep"))

        def busy_s(op: str) -> float:
            """Return the time that all buckets of an operation occupy the busiest wire."""
            return (
                _collective_costs(
                    op, layout.bucket_bytes, self._cluster, group, layout.storage_dtype, self._peer_direct
                )[1]
                * nbytes
            )

        alone = layout.sharers == 1
        reduced_s = 0.0 if alone else busy_s("reduce_scatter" if layout.zero_in_step else "all_reduce")
        gathers = layout.zero_in_step in (1, 2) and not (alone or layout.gathers_ahead)
        return reduced_s, busy_s("all_gather") if gathers else 0.0

    def _dense_parameters(self, rank: int) -> int:
        """Return the parameters, without experts, of all stages on a place of the pipeline."""
        return sum(self._amounts.stage_parameters(stage)[0] for stage in self._layout.stages_of(rank))

    def _update_s(self, rank: int) -> float:
        """Return the time of the update of weights on a place of the pipeline."""
        share = self._layout.sharers if self._layout.zero_in_step else 1
        return self._compute_s("update", self._amounts.weight_update(self._dense_parameters(rank) / share))


def _first_group(layout: Layout, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks of the first group along some axes of the mesh."""
    ranks, stride = [0], layout.world_size
    for axis, size in layout.axes.items():
        stride //= size
        if axis in axes:
            ranks = [rank + place * stride for rank in ranks for place in range(size)]
    return tuple(ranks)


@lru_cache(maxsize=4096)
def _collective_costs(
    op: str, nbytes: int, cluster: Cluster, group: tuple[int, ...], dtype: str, peer_direct: bool
) -> tuple[float, float]:
    """Return the seconds of a collective alone, and the seconds of its busiest wire for each byte."""
    chosen = plan(op, nbytes, cluster, group, dtype=dtype, peer_direct=peer_direct)
    return chosen.predicted_s, chosen.busiest.busy_s / nbytes if chosen.busiest and nbytes else 0.0
