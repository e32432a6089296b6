"""What the cost model knows beyond the published figures of wires and memories: a few numbers with a physical meaning.

Published figures come from the machine's file. The numbers here are either published elsewhere, or fitted to published
measurements, over all sizes and collectives of a machine at once and never to single ones. Each says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology import Cluster, LinkKind

from ...errors import UsageError
from .. import host
from ..placement import Floats
from .measurements import COLLECTIVES

__all__ = ["IDEAL", "ByKind", "Parameters", "itemsize_of", "measured", "parameters"]

ByKind = tuple[tuple[LinkKind, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Overheads and efficiencies. The defaults are those of a perfect machine.

    Attributes:
        launch_s: to start an operation, once.
        start_s: to start a message, on the sender, by kind of its first wire; 0 for kinds left out.
        gap_s: between two messages that one rank starts in one step, by kind of the first wire; 0 for kinds left out.
        cut_through: share of a wire's latency that counts where bytes only pass through a device on their way.
        efficiency: share of a wire's bandwidth that payload gets, by kind; 1 for kinds left out.
        memory_efficiency: share of a memory's bandwidth that collectives get.
        memory_bounds: whether all that a memory reads and writes bounds the whole, and not only step by step: where
            many ranks share one memory, their steps overlap.
        reduction_s_per_byte: for the reducer of one rank, 0 where memory is the limit.
        reduction_overlaps: whether reducing goes on while more arrives, as with chunks cut in slices.
        most_slices: pieces that the data of a composed collective may be cut in, to be pipelined through its phases;
            Neuron's runtime has three in flight (aws-neuron/aws-neuron-sdk:src/libnrt/include/nrt/nec.h).
    """

    launch_s: float = 0.0
    start_s: ByKind = ()
    gap_s: ByKind = ()
    cut_through: float = 1.0
    efficiency: ByKind = ()
    memory_efficiency: float = 1.0
    memory_bounds: bool = False
    reduction_s_per_byte: float = 0.0
    reduction_overlaps: bool = True
    most_slices: int = 3

    def starts_s(self, kind: NDArray[np.str_]) -> Floats:
        """Return the start of messages that leave over wires of some kinds."""
        return _by_kind(kind, self.start_s, 0.0)

    def gaps_s(self, kind: NDArray[np.str_]) -> Floats:
        """Return the gap of messages that leave over wires of some kinds."""
        return _by_kind(kind, self.gap_s, 0.0)

    def efficiencies(self, kind: NDArray[np.str_]) -> Floats:
        """Return the efficiency of each wire."""
        return _by_kind(kind, self.efficiency, 1.0)


def _by_kind(kind: NDArray[np.str_], figures: ByKind, default: float) -> Floats:
    found = np.full(len(kind), default)
    for name, figure in figures:
        found[kind == name] = figure
    return found


IDEAL = Parameters()
"""Published figures only: what closed forms are compared with."""

# Each figure below that is fitted is fitted to one row of `measurements`, which names it; all other rows are predicted.
# Start of a DMA, 1.3 us from semaphore to first byte (aws-neuron/aws-neuron-sdk:
# nki/deep-dives/nki-dma-bandwidth-guide.rst), and 1.5 us for the semaphores of a step: with one wire they are the floor
# of two ranks on a chip, 4 us.
_STEP_S = 1.3e-6 + 1.5e-6
# To issue one more message: from the floor of a 32-rank all-gather, 6.2 us, which has 31.
_GAP_S = 0.07e-6
# For one more completion in the network's proxy (aws/aws-ofi-nccl:src/tuner/nccl_ofi_model.cpp).
_NETWORK_GAP_S = 3e-6
# Payload of device wires, which are PCIe lanes: all-gather of 32 MiB on 64 ranks of trn2.48xlarge, where wires are the
# limit (RDH).
_WIRE_EFFICIENCY = 0.91
# One adapter, RDMA writes, 193.72 of 200 Gbit/s (stas00/ml-engineering:network/README.md).
_NETWORK_EFFICIENCY = 0.97
# Reads and writes of collectives together: the same all-gather of 2 GiB, where memory is the limit (KangaRing).
_MEMORY_EFFICIENCY = 0.74
# Elements that the reducer of one physical core adds: all-reduce of 8 MiB of bytes on inf2.xlarge, where it is the
# limit (54 GB/s while wire and memory would allow four times that).
_REDUCED_ELEMENTS_PER_S = 33e9

# What a received byte of a float32 sum costs a process of this computer, staging included: 64 MiB between two processes
# take 15 ms longer by recursive doubling, which adds all of them twice, than by a ring, which adds each half once.
_HOST_REDUCTION_S_PER_BYTE = 0.45e-9

_DEVICE_WIRES: tuple[LinkKind, ...] = ("chip", "neuronlink", "ultraserver")
_HOST_WIRES: tuple[LinkKind, ...] = ("neuronlink", "efa")

# All-reduce and reduce-scatter of 32 Gaudi at 32 MB, with and without Peer Direct (EFA Peer Direct on DL1 with Gaudi):
# for each setting two times and two unknowns, a fixed cost and the share of the adapters' bandwidth. Phases add up.
_DL1 = {
    True: Parameters(launch_s=0.626e-3, efficiency=(("efa", 0.588),), most_slices=1),
    False: Parameters(launch_s=1.584e-3, efficiency=(("efa", 0.335),), most_slices=1),
}


def parameters(
    cluster: Cluster, *, dtype: str = "float32", peer_direct: bool = True, ranks_per_process: int = 1
) -> Parameters:
    """Return what is known of a cluster.

    Machines with collective processors get the Neuron figures, dl1 its own, the plain machine those of `host`, all
    others the ideal ones with the network's efficiency.

    Args:
        cluster: The machine.
        dtype: Of what is reduced: reducers work by the element.
        peer_direct: Whether adapters read device memory themselves; matters where both were measured (dl1).
        ranks_per_process: How many ranks share a process; matters on the plain machine.

    Raises:
        UsageError: If the dtype is unknown.
    """
    itemsize = itemsize_of(dtype)
    if cluster.machine.name == "dl1.24xlarge":
        return _DL1[peer_direct]
    if cluster.machine.devices is None:
        message_s: ByKind = tuple((kind, host.message_s(ranks_per_process)) for kind in _HOST_WIRES)
        launch_s = host.launch_s(ranks_per_process)
        return Parameters(
            launch_s=launch_s,
            start_s=message_s,
            gap_s=message_s,
            memory_bounds=True,
            reduction_s_per_byte=_HOST_REDUCTION_S_PER_BYTE if cluster.nodes > 1 else 0.0,
            reduction_overlaps=cluster.nodes == 1,
        )
    if cluster.machine.chip.cc_cores is None:
        return Parameters(efficiency=(("efa", _NETWORK_EFFICIENCY),))
    return Parameters(
        start_s=tuple((kind, _STEP_S) for kind in _DEVICE_WIRES),
        gap_s=(*((kind, _GAP_S) for kind in _DEVICE_WIRES), ("efa", _NETWORK_GAP_S)),
        cut_through=0.0,
        efficiency=(*((kind, _WIRE_EFFICIENCY) for kind in _DEVICE_WIRES), ("efa", _NETWORK_EFFICIENCY)),
        memory_efficiency=_MEMORY_EFFICIENCY,
        reduction_s_per_byte=1 / (_REDUCED_ELEMENTS_PER_S * cluster.lnc * itemsize),
    )


def measured(cluster: Cluster, ranks: int, collective: str, nbytes: int) -> bool:
    """Return whether a prediction lies inside a measured shape; all others are extrapolations.

    A shape is a machine, a number of ranks and a collective, between the smallest and the largest size published.
    """
    known = [
        row.nbytes
        for row in COLLECTIVES
        if (row.machine, row.ranks, row.collective) == (cluster.name, ranks, collective)
    ]
    default = cluster.lnc == cluster.machine.chip.lnc[0]
    return default and bool(known) and min(known) <= nbytes <= max(known)


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        UsageError: If there is no such dtype.
    """
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        import ml_dtypes

        known = getattr(ml_dtypes, dtype, None)
        if not isinstance(known, type):
            raise UsageError(f"dtype: {dtype!r} is unknown; expected a name such as float32 or bfloat16") from None
        return np.dtype(known).itemsize
