"""What collectives cost on a machine beyond bytes on its wires, as records: the `[collectives]` table of its file.

Everything here is a figure with its source, or absent: what is absent costs nothing, or loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .grouprules import Confidence

__all__ = ["Collectives", "Curve", "Figure", "Library", "Overheads", "Program", "WireOverheads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its origin.

    Attributes:
        value: in the unit that the name of the field says.
        source: where it was published, as ``repository:path`` or an address.
        confidence: "A" vendor, "B" published run with its configuration, "C" published with gaps, "D" derived
            arithmetic, "E" an estimate of ours or a number of the user's.
    """

    value: float
    source: str
    confidence: Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A share that depends on the size of a message, with its origin.

    Attributes:
        points: (bytes, share), ascending in bytes; between two of them the share is linear in the logarithm of the
            size, outside it is that of the nearest.
        source: as of a figure.
        confidence: as of a figure.
    """

    points: tuple[tuple[float, float], ...]
    source: str
    confidence: Confidence

    @property
    def most(self) -> float:
        """The largest share."""
        return max(share for _, share in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOverheads:
    """What messages over one kind of wire cost besides its latency and its bytes.

    Attributes:
        kind: of the wire: the first one of a message's way, or the last one for `incast_s`.
        launch_s: to start an operation that needs such wires between its nodes, once: their handshake.
        step_s: to start a step's message, on the sender.
        gap_s: between two messages that one rank starts in one step.
        incast_s: for each further message that comes to one rank in one step.
        reduce_s: to start reducing what came in one message; further messages of the step hide as much as their gaps
            take, and what is passed on around a ring hides it in `chunk_pieces`.
        efficiency: share of the wire's bandwidth that payload gets, of any message or by its size.
        busy_s: what a message takes of processors, at both ends together; matters where `Overheads.cores` are shared.
        busy_bytes_per_s: bytes of messages that one processor handles, at both ends together.
    """

    kind: str
    launch_s: Figure | None = None
    step_s: Figure | None = None
    gap_s: Figure | None = None
    incast_s: Figure | None = None
    reduce_s: Figure | None = None
    efficiency: Figure | Curve | None = None
    busy_s: Figure | None = None
    busy_bytes_per_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What one operation costs besides its messages.

    Attributes:
        launch_s: to start it, once.
        cut_through: share of a wire's latency that counts where bytes only pass through a device on their way; 1 if
            absent.
        memory_bytes_per_s: what reads and writes of all ranks of a node get together, where they share one memory and
            the chip names none; where nodes are processes that share `cores`, what one of these gets for copies.
        cached_bytes: of all reads and writes, up to which caches give `cached_bytes_per_s`; the rest goes
            at `memory_bytes_per_s`. No caches if absent.
        cached_bytes_per_s: what they give.
        memory_efficiency: share of a memory's bandwidth that collectives get; 1 if absent.
        reducer_bytes_per_s: what the reducer of one physical core adds; no limit if absent.
        serial_reduction: whether a rank receives nothing while it reduces, but for what rings pass on in pieces.
        chunk_pieces: that rings cut each chunk in which they reduce and pass on: while one is on the wire another one
            is reduced, and starts and latencies of one hide behind bytes of the others; 1 if absent.
        slices: pieces of the data that may be in flight through the phases of a composed collective; 3 if absent.
        slice_bytes: the vector is not cut in pieces that are shorter; any length if absent.
        shared_loop: whether ranks of one process start things one after the other, so that launches, steps, gaps and
            meetings count once for each of them.
        cores: processors that all ranks share, where their nodes are processes of one computer: launches, messages and
            reductions of all of them take no less than these can do; no limit if absent.
        crowding: how many times as much a byte of a message takes of one of them as long as several nodes work on it
            in a step, which evict each other's memory from its caches; once as much if absent.
        wake_s: what a rank takes of them in each step that it waits for messages in, where there are more processes
            than cores: it sleeps, is woken, and another one has to leave its place; nothing if absent.
        meeting_s: for a rank to meet the others of its process, where they read each other's memory; between nodes that
            share memory, for all of them.
        phase_s: for ranks of several processes to tell each other how far they have come, each time.
        piece_s: to read or add one rank's part of another's result, whatever its size.
        inline_bytes: of all ranks' vectors, from which threads do the work; none if absent.
        handing_s: to hand it to them and back.
        spread_bytes: of all reads and writes of these threads, up to which caches give `spread_bytes_per_s`; the rest
            goes at `memory_bytes_per_s`. As one processor alone if absent.
        spread_bytes_per_s: what they give.
        copied_bytes_per_s: at which a sum is copied to those ranks of a process that did not make it; counted with
            other reads and writes if absent.
        shared_memory: whether nodes are processes of one host whose ranks read each other's memory.
        wires: by kind of wire.
    """

    launch_s: Figure | None = None
    cut_through: Figure | None = None
    memory_bytes_per_s: Figure | None = None
    cached_bytes: Figure | None = None
    cached_bytes_per_s: Figure | None = None
    memory_efficiency: Figure | None = None
    reducer_bytes_per_s: Figure | None = None
    serial_reduction: bool | None = None
    chunk_pieces: Figure | None = None
    slices: Figure | None = None
    slice_bytes: Figure | None = None
    shared_loop: bool | None = None
    cores: Figure | None = None
    crowding: Figure | None = None
    wake_s: Figure | None = None
    meeting_s: Figure | None = None
    phase_s: Figure | None = None
    piece_s: Figure | None = None
    inline_bytes: Figure | None = None
    handing_s: Figure | None = None
    spread_bytes: Figure | None = None
    spread_bytes_per_s: Figure | None = None
    copied_bytes_per_s: Figure | None = None
    shared_memory: bool | None = None
    wires: tuple[WireOverheads, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What starting a program that holds collectives costs, each time.

    Attributes:
        launch_s: with collectives or without.
        barrier_s: for four ranks to meet before a program with collectives.
        doubling_s: for each time that the largest group is twice as large.
        trigger_s: for each collective, until its first step.
    """

    launch_s: Figure | None = None
    barrier_s: Figure | None = None
    doubling_s: Figure | None = None
    trigger_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What the machine's own library chooses from; measurements of it are judged by the best of these.

    Attributes:
        algorithms: their names, as plans spell them.
        source: as of a figure.
        confidence: as of a figure.
    """

    algorithms: tuple[str, ...]
    source: str
    confidence: Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The `[collectives]` table.

    Attributes:
        usual: what holds.
        host_copies: the same, where adapters reach host memory only; None if nothing is known of that.
        between_nodes: the same on more than one node, None if nothing differs there.
        program: of whole programs.
        library: of collectives, that comes with the machine; None if it is not known what that has.
    """

    usual: Overheads = field(default=Overheads())
    host_copies: Overheads | None = None
    between_nodes: Overheads | None = None
    program: Program = field(default=Program())
    library: Library | None = None
