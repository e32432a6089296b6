"""Parameters of the cost model: a few overheads and efficiencies with a physical meaning.

They are the `[collectives]` of a machine's file, with the source of each: published, or fitted to published
measurements, over all sizes and collectives of a machine at once and never to single ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology import Cluster, Curve, Figure

from ..collectives.placement import Floats
from ..errors import UsageError
from .measurements import COLLECTIVES

ByKind = tuple[tuple[str, float], ...]
Curves = tuple[tuple[str, tuple[tuple[float, float], ...]], ...]

# Pieces in flight if a file has no figure: the default of Neuron's runtime
# (aws-neuron/aws-neuron-sdk:src/libnrt/include/nrt/nec.h).
_SLICES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """Overheads and efficiencies. The defaults describe a perfect machine."""

    launch_s: float = 0.0  # to start an operation, once
    start_s: ByKind = ()  # to start a message, on the sender, by kind of its first wire; 0 for kinds left out
    # between two messages that one rank starts in one step, by kind of the first wire; 0 for kinds left out.
    gap_s: ByKind = ()
    incast_s: ByKind = ()  # for each further message that arrives at a rank in one step, by kind of its last wire
    reduce_s: ByKind = ()  # to start reducing the data of one message, by kind of its last wire
    # share of a wire's latency that counts where bytes only pass through a device on their way.
    cut_through: float = 1.0
    # share of a wire's bandwidth that payload gets, by kind, at the best size; 1 for kinds left out.
    efficiency: ByKind = ()
    curves: Curves = ()  # efficiency by the size of a message, as (bytes, share), for kinds where it depends on that
    memory_efficiency: float = 1.0  # share of a memory's bandwidth that collectives get
    dma_s_per_byte: float = 0.0  # time of the engines that move a rank's messages, 0 if not known
    reduction_s_per_byte: float = 0.0  # time of the reducer of one rank, 0 if memory is the limit
    reduction_overlaps: bool = True  # whether reducing goes on while more arrives, as with chunks cut in slices
    chunk_pieces: int = 1  # pieces into which rings cut each chunk that they reduce and pass on
    # most pieces of the data of a composed collective, which are pipelined through its phases.
    most_slices: int = _SLICES
    slice_bytes: float = 0.0  # least bytes of such a piece
    # processors that all ranks share, where their nodes are processes of one computer; None: no limit.
    cores: float | None = None
    # factor on the processor time of a byte while several processes work on the processor in a step.
    crowding: float = 1.0
    busy_s: ByKind = ()  # processor time of a message, at both ends together, by kind of its first wire
    busy_s_per_byte: ByKind = ()  # processor time of a byte of a message, at both ends, by kind of its first wire
    wake_s: float = 0.0  # processor time of a rank in each step in which it waits for messages
    copied_s_per_byte: float = 0.0  # processor time of a byte that a rank reads or writes to copy

    def efficiencies(self, kind: NDArray[np.str_]) -> Floats:
        """Return the efficiency of each wire."""
        return by_kind(self.efficiency, kind, otherwise=1.0)


def by_kind(figures: ByKind, kind: NDArray[np.str_], *, otherwise: float = 0.0) -> Floats:
    """Return the figure of each wire, given the figures by kind and the kinds of the wires."""
    figure_of = np.full(len(kind), otherwise)
    for name, figure in figures:
        figure_of[kind == name] = figure
    return figure_of


IDEAL = CostParameters()
"""Only published figures, for comparison with closed forms."""


def parameters(
    cluster: Cluster,
    *,
    peer_direct: bool = True,
    ranks_per_process: int = 1,
    processes: int = 1,
    nodes: int | None = None,
    networked: bool = False,
) -> CostParameters:
    """Return the figures of collectives in a machine's file; a file without any describes a perfect machine.

    Args:
        cluster: The machine.
        peer_direct: Whether adapters read device memory themselves; matters if the file has a cost of copies.
        ranks_per_process: Number of ranks in a process; matters if one loop starts their messages.
        networked: Whether the operation crosses the network.
        processes: Number of processes; matters if they share processors.
        nodes: Number of nodes that the operation needs, all by default; matters if the file has figures between nodes.
    """
    collectives = cluster.machine.collectives
    figures = (
        collectives.usual
        if (nodes or cluster.nodes) == 1 or collectives.between_nodes is None
        else collectives.between_nodes
    )
    if not peer_direct and collectives.host_copies is not None:
        figures = collectives.host_copies
    network = cluster.machine.network
    handshakes = [
        wire.launch_s.value for wire in figures.wires if wire.launch_s and network and wire.kind == network.link
    ]
    times = ranks_per_process if figures.shared_loop else 1
    crowd = max(1.0, processes / figures.cores.value) if figures.cores else 1.0
    memory = figures.memory_bytes_per_s if figures.cores else None
    reducer, dma = figures.reducer_bytes_per_s, cluster.machine.chip.dma_bytes_per_s
    return CostParameters(
        launch_s=times * crowd * _figure_value(figures.launch_s, 0.0) + (sum(handshakes) if networked else 0.0),
        start_s=tuple((wire.kind, times * wire.step_s.value) for wire in figures.wires if wire.step_s),
        gap_s=tuple((wire.kind, times * wire.gap_s.value) for wire in figures.wires if wire.gap_s),
        incast_s=tuple((wire.kind, wire.incast_s.value) for wire in figures.wires if wire.incast_s),
        reduce_s=tuple((wire.kind, wire.reduce_s.value) for wire in figures.wires if wire.reduce_s),
        cut_through=_figure_value(figures.cut_through, 1.0),
        efficiency=tuple((wire.kind, _best_efficiency(wire.efficiency)) for wire in figures.wires if wire.efficiency),
        curves=tuple((w.kind, w.efficiency.points) for w in figures.wires if isinstance(w.efficiency, Curve)),
        memory_efficiency=_figure_value(figures.memory_efficiency, 1.0),
        dma_s_per_byte=1 / (dma.value * cluster.lnc) if dma else 0.0,
        reduction_s_per_byte=1 / (reducer.value * cluster.lnc) if reducer else 0.0,
        reduction_overlaps=not figures.serial_reduction,
        chunk_pieces=int(_figure_value(figures.chunk_pieces, 1)),
        most_slices=int(_figure_value(figures.slices, _SLICES)),
        slice_bytes=_figure_value(figures.slice_bytes, 0.0),
        cores=figures.cores.value if figures.cores else None,
        crowding=_figure_value(figures.crowding, 1.0),
        busy_s=tuple((wire.kind, wire.busy_s.value) for wire in figures.wires if wire.busy_s),
        busy_s_per_byte=tuple((w.kind, 1 / w.busy_bytes_per_s.value) for w in figures.wires if w.busy_bytes_per_s),
        wake_s=_figure_value(figures.wake_s, 0.0) if crowd > 1 else 0.0,
        copied_s_per_byte=1 / memory.value if memory else 0.0,
    )


def _figure_value(figure: Figure | None, otherwise: float) -> float:
    return otherwise if figure is None else figure.value


def _best_efficiency(efficiency: Figure | Curve) -> float:
    return efficiency.most if isinstance(efficiency, Curve) else efficiency.value


def is_measured(cluster: Cluster, ranks: int, collective: str, nbytes: int, dtype: str) -> bool:
    """Return whether a prediction lies inside a measured shape; all others are extrapolations.

    A shape is a machine, a number of ranks, a collective and a dtype, between the smallest and the largest size
    published.
    """
    sizes = known_sizes(cluster, ranks, collective, dtype)
    return bool(sizes) and min(sizes) <= nbytes <= max(sizes)


def known_sizes(cluster: Cluster, ranks: int, collective: str, dtype: str) -> tuple[int, ...]:
    """Return the sizes with a published measurement, in bytes; none if the shape was never measured."""
    if cluster.lnc != cluster.machine.chip.lnc[0]:
        return ()
    shape = cluster.name, ranks, collective, dtype
    return tuple(
        row.nbytes
        for row in COLLECTIVES
        if (row.machine, row.ranks, row.collective, row.dtype) == shape and not (row.group or row.beyond_bytes)
    )


def itemsize_bytes(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        UsageError: If there is no such dtype.
    """
    try:
        return np.dtype(dtype).itemsize
    except (TypeError, ValueError):  # ValueError: not a name, from a file
        import ml_dtypes

        found_type = getattr(ml_dtypes, str(dtype), None)
        if not isinstance(found_type, type):
            raise UsageError(f"dtype: {dtype!r} is unknown; expected a name such as float32 or bfloat16") from None
        return np.dtype(found_type).itemsize
