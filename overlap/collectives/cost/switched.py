"""Nodes of GPUs: a switch inside each, rails between them.

`topology` knows no such machine: here they only judge the model.

An all-reduce reduces and scatters inside nodes, runs around a ring between them on each GPU's share of the adapters,
and gathers inside, in pieces: the phases of `hierarchy`, on stars instead of a placement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..generators import generate
from ..schedule import Schedule
from .option import Part
from .parameters import Parameters
from .phased import pipeline_s
from .placed import on
from .rounds import rounds
from .star import Star

__all__ = ["P5", "Switched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """A kind of node.

    Attributes:
        gpus: in a node.
        inside_s: latency of a message through the switch of a node.
        inside_bytes_per_s: of a GPU, each way.
        network_s: latency of a message between nodes.
        network_bytes_per_s: of the adapters that a GPU has for itself, each way.
        completion_s: for each completion in the network's proxy, on top of the latency.
        parameters: of the model: what starting an operation costs, and how many pieces are in flight.
    """

    gpus: int
    inside_s: float
    inside_bytes_per_s: float
    network_s: float
    network_bytes_per_s: float
    completion_s: float
    parameters: Parameters

    def all_reduce_s(self, nodes: int, nbytes: int) -> float:
        """Return the time of an all-reduce over all GPUs of some nodes."""
        inside = Star(self.gpus, latency_s=self.inside_s, bytes_per_s=self.inside_bytes_per_s)
        latency_s = self.network_s + self.completion_s
        between = Star(nodes, latency_s=latency_s, bytes_per_s=self.network_bytes_per_s)
        parts = (
            self._part(inside, generate("reduce_scatter", "mesh", self.gpus)),
            self._part(between, generate("all_reduce", "ring", nodes), share=1 / self.gpus),
            self._part(inside, generate("all_gather", "mesh", self.gpus)),
        )
        return self.parameters.launch_s + min(
            pipeline_s([part.total_s(nbytes / slices) for part in parts], slices)
            for slices in range(1, self.parameters.most_slices + 1)
        )

    def _part(self, star: Star, schedule: Schedule, share: float = 1.0) -> Part:
        return Part(on(star, rounds(schedule), parameters=replace(self.parameters, launch_s=0.0)), share)


# Inside: NVLink 4, 900 GB/s both ways (NVIDIA H100 data sheet), and a latency that is an estimate. Between: four rails
# of 12.5 GB/s for each GPU, 20 us and 3 us for each completion (aws/aws-ofi-nccl:src/tuner/nccl_ofi_model.cpp), of
# which RDMA writes get 193.72 of 200 Gbit/s (stas00/ml-engineering:network/README.md). Three pieces in flight are those
# of Neuron's runtime, carried over. Only the fixed cost is fitted: to 32 MiB on two nodes.
P5 = Switched(
    gpus=8,
    inside_s=2e-6,
    inside_bytes_per_s=450e9,
    network_s=20e-6,
    network_bytes_per_s=0.97 * 4 * 12.5e9,
    completion_s=3e-6,
    parameters=Parameters(launch_s=0.18e-3, most_slices=3),
)
"""p5.48xlarge: eight H100 behind an NVSwitch, 32 adapters of 100 Gbit/s."""
