"""Parameters of the cost model: a few overheads and efficiencies with a physical meaning.

They are the section `[collectives]` of a machine's file, which gives the source of each: published, or fitted to
published measurements, always to all sizes and collectives of a machine at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology import Cluster, Curve, Figure

from ..collectives.placement import Floats
from ..errors import UsageError
from .measurements import COLLECTIVES

ByKind = tuple[tuple[str, float], ...]  # (kind of wire, figure)
Curves = tuple[tuple[str, tuple[tuple[float, float], ...]], ...]  # (kind of wire, points (bytes, share))

# Pieces in flight if a file has no figure: the default of Neuron's runtime
# (aws-neuron/aws-neuron-sdk:src/libnrt/include/nrt/nec.h).
_SLICES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """Overheads and efficiencies. The defaults describe a perfect machine. Kinds of wires that are left out have 0."""

    launch_s: float = 0.0  # time to start an operation, once
    start_s: ByKind = ()  # time of the sender to start a message, by kind of the message's first wire
    # time between two messages that one rank starts in one step, by kind of the first wire.
    gap_s: ByKind = ()
    incast_s: ByKind = ()  # time for each further message that arrives at a rank in one step, by kind of its last wire
    reduce_s: ByKind = ()  # time to start the reduction of one message, by kind of the message's last wire
    # share of a wire's latency that counts where bytes only pass through a device on their way.
    cut_through: float = 1.0
    # share of a wire's bandwidth that payload gets, by kind, at the best size; 1 for kinds left out.
    efficiency: ByKind = ()
    curves: Curves = ()  # efficiency by the size of a message, for kinds of wires where it depends on the size
    memory_efficiency: float = 1.0  # share of a memory's bandwidth that collectives get
    dma_s_per_byte: float = 0.0  # time of the engines that move a rank's messages, 0 if not known
    reduction_s_per_byte: float = 0.0  # time of the reducer of one rank, 0 if memory is the limit
    reduction_overlaps: bool = True  # whether a rank reduces data while more arrives, as with chunks cut in slices
    chunk_pieces: int = 1  # pieces into which rings cut each chunk that they reduce and pass on
    # most slices of the data of a composed collective, which are pipelined through its phases.
    most_slices: int = _SLICES
    slice_bytes: float = 0.0  # least bytes of such a slice
    # processors that all ranks share, where their nodes are processes of one computer; None: no limit.
    cores: float | None = None
    # factor on the processor time of a byte while several processes work on the processor in a step.
    crowding: float = 1.0
    busy_s: ByKind = ()  # processor time of a message, at both ends together, by kind of its first wire
    busy_s_per_byte: ByKind = ()  # processor time of a byte of a message, at both ends, by kind of its first wire
    wake_s: float = 0.0  # processor time of a rank in each step in which it waits for messages
    copied_s_per_byte: float = 0.0  # processor time of a byte that a rank reads or writes to copy

    def efficiencies(self, kind: NDArray[np.str_]) -> Floats:
        """Return (wires,) the efficiency of each wire, by the kind of the wire."""
        return figures_of_wires(self.efficiency, kind, otherwise=1.0)


def figures_of_wires(figures: ByKind, kind: NDArray[np.str_], *, otherwise: float = 0.0) -> Floats:
    """Return (wires,) the figure of each wire.

    Args:
        figures: Figures by kind.
        kind: (wires,) Kind of each wire.
        otherwise: Figure of kinds that `figures` lacks.
    """
    figure_of = np.full(len(kind), otherwise)
    for name, figure in figures:
        figure_of[kind == name] = figure
    return figure_of


IDEAL = CostParameters()
"""Only published figures, for comparison with closed forms."""


def cost_parameters(
    cluster: Cluster,
    *,
    peer_direct: bool = True,
    ranks_per_process: int = 1,
    processes: int = 1,
    nodes: int | None = None,
    networked: bool = False,
) -> CostParameters:
    """Return the parameters that a machine's file gives; a file without figures describes a perfect machine.

    Args:
        cluster: The machine.
        peer_direct: Whether adapters read device memory themselves; matters if the file has a cost of copies.
        ranks_per_process: Number of ranks in a process; matters if one event loop starts the messages of all of them.
        processes: Number of processes; matters if they share processors.
        nodes: Number of nodes that the operation uses, all by default; matters if the file has figures between nodes.
        networked: Whether the operation crosses the network.
    """
    collectives = cluster.machine.collectives
    figures = collectives.usual
    if (nodes or cluster.nodes) > 1 and collectives.between_nodes is not None:
        figures = collectives.between_nodes
    if not peer_direct and collectives.host_copies is not None:
        figures = collectives.host_copies
    network = cluster.machine.network
    # Times that an operation pays once if it crosses the network.
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
    """Return whether a prediction is within published measurements; all other predictions are extrapolations.

    There must be measurements of this machine, number of ranks, collective and dtype, and `nbytes` must be between the
    smallest and the largest of their sizes.

    Args:
        cluster: The machine.
        ranks: Number of ranks.
        collective: Name of the collective.
        nbytes: Bytes of the whole vector.
        dtype: Type of the elements.
    """
    sizes = measured_sizes(cluster, ranks, collective, dtype)
    return bool(sizes) and min(sizes) <= nbytes <= max(sizes)


def measured_sizes(cluster: Cluster, ranks: int, collective: str, dtype: str) -> tuple[int, ...]:
    """Return the sizes with a published measurement, in bytes; () if there is none. Arguments: see `is_measured`.

    Measurements count only for the machine's default size of logical cores, and if all ranks took part.
    """
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
