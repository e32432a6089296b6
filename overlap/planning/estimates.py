"""Predicted training steps: simulated with few microbatches, the others added; and their change with the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from topology import Cluster
from topology.machine import LinkSpec

from .. import Interference, Virtual
from ..errors import UsageError
from ..simulation.compute_cost import Roofline
from ..simulation.conditions import ALL
from ..timeline.spans import Timeline
from .device import Device
from .layout import Layout
from .memory import Memory, memory_of
from .model import Model
from .parts import Parts
from .simulating import Whole, steady, way_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted training step."""

    model: Model  # The trained model
    layout: Layout  # Its layout on the ranks
    cluster: Cluster  # The machines
    virtual: Virtual  # The assumptions
    parts: Parts  # The parts of its time
    memory: Memory  # Of the fullest rank
    simulated: int  # Microbatches that were simulated; the others were added, each like the last one
    timeline: Timeline | None  # Of the last simulation
    device: Device | None = None  # The measured rates of computes, if they are known
    folded: bool = False  # Whether the insides of layers were simulated once, for all

    @property
    def step_s(self) -> float:
        """Its time in seconds."""
        return self.parts.step_ns / 1e9

    @property
    def samples_per_s(self) -> float:
        """Throughput in samples."""
        return self.layout.global_batch / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Throughput in tokens."""
        return self.samples_per_s * self.model.sequence

    @property
    def utilisation(self) -> float | None:
        """Model flops utilisation (arXiv 2204.02311): the share of the peak without recomputes; None without a peak."""
        peak = Roofline.of(self.cluster, dtype=self.virtual.dtype).flops_per_s
        return None if peak is None else self.samples_per_s * self.model.sample_flops / (peak * self.layout.world_size)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank has enough memory; None if the machine file does not say how much it has."""
        there = self.cluster.memory_bytes()
        return None if there is None else self.memory.total <= there

    @property
    def energy_j(self) -> float | None:
        """Energy of a step in joules at most, of the chips alone; None if their power is unknown."""
        chip = self.cluster.machine.chip
        power = chip.power_limit_w or chip.power_w
        chips = self.layout.world_size / self.cluster.ranks_per_device
        return None if power is None else power.value * chips * self.step_s

    def cost_of_sample(self, node_hour: float) -> float:
        """Return the price of a sample, given that of a node and hour."""
        return self.cluster.nodes * node_hour * self.step_s / 3600 / self.layout.global_batch


def estimate(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    virtual: Virtual,
    *,
    algorithm: str | None = None,
    device: Device | None = None,
) -> Estimate:
    """Predict a step.

    All ranks of a stage run the same program on alike places, so two of them run for all. From p microbatches on, of p
    stages, each further one costs what the one before did, as in the closed forms of `schedules`: where there are more
    than twice as many, two short steps are simulated, and their difference is added for each of the others. Interleaved
    stages repeat in rounds. Of large steps, the insides of layers are simulated once: see `folded`.

    Args:
        model: The trained model.
        layout: Its layout, on all ranks of the cluster.
        cluster: The machines.
        virtual: The assumptions.
        algorithm: The only algorithm to use; by default any.
        device: Measured rates of computes; None: `virtual` prices their operations and bytes.

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
    if layout.offload and (device is None or device.host_bytes_per_s is None):
        raise UsageError(
            f"offload: expected a machine whose chip.host_bytes_per_s is known, which that of {cluster.name} is not"
        )
    if device is not None and virtual.interference.off:
        virtual = replace(virtual, interference=Interference(compute={ALL: 1 / device.beside}))
    whole = Whole(model, layout, cluster, virtual, algorithm, device)
    few, period = steady(layout)
    many = layout.microbatches > 2 * few + period
    counts = (few, few + period) if many else (layout.microbatches,)
    way = way_of(whole, sum(counts))
    found = [way.parts(count) for count in counts]
    further = (layout.microbatches - few) // period - 1
    return Estimate(
        model=model,
        layout=layout,
        cluster=cluster,
        virtual=virtual,
        parts=found[0].further(found[1], further) if many else found[0],
        memory=memory_of(model, layout),
        simulated=counts[-1],
        timeline=whole.timeline,
        device=device,
        folded=way is not whole,
    )


# -- sensitivity -----------------------------------------------------------------------------------------------------

SWAY = 0.2
"""Share by which a figure is changed, up and down."""

# Measured slow-downs of matrix products beside collectives, and of collectives beside them, are from nothing to that
# much on GPUs whose cores move the bytes; nothing is published of machines with processors of their own for it.
SLOWER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The change of a step with one figure of the machine."""

    figure: str  # Name of the figure
    change: str  # The change of the figure
    # Share by which the step is longer if it is `SWAY` lower; negative if shorter. None if there is no lower.
    low: float | None
    high: float  # Share by which the step is longer if it is `SWAY` higher


def sensitivities(of: Estimate, *, algorithm: str | None = None) -> Iterator[Sensitivity]:
    """Simulate a step with one figure changed after the other; yield each result when it is known.

    Args:
        of: The step.
        algorithm: The algorithm of the estimate.
    """

    def longer(cluster: Cluster, virtual: Virtual, device: Device | None = of.device) -> float:
        again = estimate(of.model, of.layout, cluster, virtual, algorithm=algorithm, device=device)
        return again.parts.step_ns / of.parts.step_ns - 1

    for kind, name in _wires(of.cluster):
        low, high = (longer(_faster(of.cluster, kind, 1 + sway), of.virtual) for sway in (-SWAY, SWAY))
        yield Sensitivity(figure=name, change=_CHANGE, low=low, high=high)
    low, high = (longer(of.cluster, *_computing(of, 1 + sway)) for sway in (-SWAY, SWAY))
    yield Sensitivity(figure="efficiency of computes", change=_CHANGE, low=low, high=high)
    if of.virtual.interference.off:
        both = Interference(compute={ALL: 1 + SLOWER}, communication={ALL: 1 + SLOWER})
        high = longer(of.cluster, replace(of.virtual, interference=both))
        change = f"0 to {SLOWER:.0%}"
        yield Sensitivity(figure="slow-down of compute and communication", change=change, low=None, high=high)


_CHANGE = f"+-{SWAY:.0%}"


def _computing(of: Estimate, factor: float) -> tuple[Virtual, Device | None]:
    """Return the assumptions with faster or slower computes."""
    if of.device is not None:
        return of.virtual, of.device.faster(factor)
    return replace(of.virtual, efficiency=min(1.0, of.virtual.efficiency * factor)), None


def _wires(cluster: Cluster) -> list[tuple[str, str]]:
    network = cluster.machine.network
    outer = [(network.link, "NIC bandwidth")] if network is not None and cluster.nodes > 1 else []
    inner = [
        (spec.kind, f"{spec.kind} bandwidth")
        for spec in cluster.machine.links
        if spec.kind == cluster.machine.wires.link
        or (cluster.machine.ultraserver is not None and spec.kind == cluster.machine.ultraserver.link)
    ]
    return [*outer, *inner]


def _faster(cluster: Cluster, kind: str, factor: float) -> Cluster:
    """Return the cluster with faster or slower wires of one kind."""
    links = tuple(_scaled(spec, factor) if spec.kind == kind else spec for spec in cluster.machine.links)
    return replace(cluster, machine=replace(cluster.machine, links=links))


def _scaled(spec: LinkSpec, factor: float) -> LinkSpec:
    figure = spec.bandwidth_bytes_per_s
    return replace(spec, bandwidth_bytes_per_s=replace(figure, value=figure.value * factor))
