"""Predicted training steps: simulated with few microbatches, the others added."""

from __future__ import annotations

from dataclasses import dataclass, replace

from topology import Cluster

from .. import Interference, Virtual
from ..errors import UsageError
from ..simulation.compute_cost import Roofline
from ..simulation.conditions import ALL
from ..timeline.spans import Timeline
from .device import Device
from .layout import Layout
from .memory import Memory, memory_of
from .model import Model
from .parts import StepParts
from .simulating import FullSimulation, steady, way_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted training step."""

    model: Model  # The trained model
    layout: Layout  # Its layout on the ranks
    cluster: Cluster  # The machines
    virtual: Virtual  # The assumptions
    parts: StepParts  # The parts of its time
    memory: Memory  # Memory of the fullest rank
    simulated: int  # Microbatches that were simulated; the others were added, each like the last one
    timeline: Timeline | None  # Timeline of the last simulation
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
            f"layout: {layout} makes {layout.world_size} ranks, but {cluster.name} has {cluster.world_size}; "
            "choose sizes with that product"
        )
    virtual = replace(virtual, dtype=layout.dtype, shapes_only=True, alike=layout.stage_of)
    if device is not None and virtual.interference.off:
        virtual = replace(virtual, interference=Interference(compute={ALL: 1 / device.beside}))
    simulation = FullSimulation(model, layout, cluster, virtual, algorithm, device)
    few, period = steady(layout)
    many = layout.microbatches > 2 * few + period
    counts = (few, few + period) if many else (layout.microbatches,)
    way = way_of(simulation, sum(counts))
    parts = [way.parts(count) for count in counts]
    further = (layout.microbatches - few) // period - 1
    return Estimate(
        model=model,
        layout=layout,
        cluster=cluster,
        virtual=virtual,
        parts=parts[0].further(parts[1], further) if many else parts[0],
        memory=memory_of(model, layout),
        simulated=counts[-1],
        timeline=simulation.timeline,
        device=device,
        folded=way is not simulation,
    )


# Measured slow-downs of matrix products beside collectives, and of collectives beside them, are from nothing to that
# much on GPUs whose cores move the bytes; nothing is published of machines with processors of their own for it.
SLOWER = 0.1
