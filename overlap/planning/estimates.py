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
from .simulating import FullSimulation, choose_simulation, fill_and_period


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
        """Predicted time of a step in seconds."""
        return self.parts.step_ns / 1e9

    @property
    def samples_per_s(self) -> float:
        """Throughput in samples a second."""
        return self.layout.global_batch / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Throughput in tokens a second."""
        return self.samples_per_s * self.model.sequence

    @property
    def utilisation(self) -> float | None:
        """Model flops utilisation (arXiv 2204.02311): the share of the peak without recomputes; None without a peak."""
        peak = Roofline.of(self.cluster, dtype=self.virtual.dtype).flops_per_s
        return None if peak is None else self.samples_per_s * self.model.sample_flops / (peak * self.layout.world_size)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank has enough memory; None if the machine file does not say how much it has."""
        available = self.cluster.memory_bytes()
        return None if available is None else self.memory.total <= available


def estimate(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    virtual: Virtual,
    *,
    algorithm: str | None = None,
    device: Device | None = None,
) -> Estimate:
    """Predict a training step by simulating it, or two short ones from which it is extrapolated.

    All ranks of a stage run the same program in equal places, so two of them run for all. Once the microbatches fill
    the pipeline, each further one takes as long as the one before, as in the closed forms of `schedules`. So of long
    steps two short ones are simulated, and their difference is added for each further microbatch. Interleaved stages
    repeat in rounds. Of large steps, the insides of layers are simulated once: see `folded`.

    Args:
        model: The trained model.
        layout: Its layout, on all ranks of the cluster.
        cluster: The machines.
        virtual: The assumptions.
        algorithm: The only algorithm to use; by default any.
        device: Measured rates of computes; None: `virtual` prices their operations and bytes.

    Raises:
        UsageError: If model, layout and cluster do not fit together.
        TopologyError: If a group of ranks is illegal on the cluster.
    """
    layout.check(model)
    if layout.world_size != cluster.world_size:
        raise UsageError(
            f"layout: {layout} makes {layout.world_size} ranks, but {cluster.name} has {cluster.world_size}; "
            "choose sizes with that product"
        )
    virtual = replace(virtual, dtype=layout.dtype, shapes_only=True, alike=layout.pipeline_place)
    if device is not None and virtual.interference.off:
        virtual = replace(virtual, interference=Interference(compute={ALL: 1 / device.share_beside_collectives}))
    simulation = FullSimulation(model, layout, cluster, virtual, algorithm, device)
    fill, period = fill_and_period(layout)
    extrapolates = layout.microbatches > 2 * fill + period
    counts = (fill, fill + period) if extrapolates else (layout.microbatches,)
    chosen = choose_simulation(simulation, sum(counts))
    parts = [chosen.parts(count) for count in counts]
    periods = (layout.microbatches - fill) // period - 1
    return Estimate(
        model=model,
        layout=layout,
        cluster=cluster,
        virtual=virtual,
        parts=parts[0].extrapolate(parts[1], periods) if extrapolates else parts[0],
        memory=memory_of(model, layout),
        simulated=counts[-1],
        timeline=simulation.timeline,
        device=device,
        folded=chosen is not simulation,
    )


# Published slow-downs of matrix products during collectives, and of collectives during products, are 0 to this share on
# GPUs whose cores copy the bytes. None are published for machines with processors of their own for collectives.
SLOWER = 0.1
