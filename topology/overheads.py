"""What collectives cost on a machine beyond bytes on its wires, as records: the `[collectives]` table of its file.

Everything here is a figure with its source, or absent: what is absent costs nothing, or loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .grouprules import Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its origin."""

    value: float  # in the unit that the name of the field says
    source: str  # where it was published, as ``repository:path`` or an address
    # "A" vendor, "B" published run with its configuration, "C" published with gaps, "D" derived arithmetic, "E" an
    # estimate of ours or a number of the user's.
    confidence: Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A share that depends on the size of a message, with its origin."""

    # (bytes, share), ascending in bytes; between two of them the share is linear in the logarithm of the size, outside
    # it is that of the nearest.
    points: tuple[tuple[float, float], ...]
    source: str  # as of a figure
    confidence: Confidence  # as of a figure

    @property
    def most(self) -> float:
        """The largest share."""
        return max(share for _, share in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOverheads:
    """What messages over one kind of wire cost besides its latency and its bytes."""

    kind: str  # of the wire: the first one of a message's way, or the last one for `incast_s`
    # to start an operation that needs such wires between its nodes, once: their handshake.
    launch_s: Figure | None = None
    step_s: Figure | None = None  # to start a step's message, on the sender
    gap_s: Figure | None = None  # between two messages that one rank starts in one step
    incast_s: Figure | None = None  # for each further message that comes to one rank in one step
    # to start reducing what came in one message; further messages of the step hide as much as their gaps take, and what
    # is passed on around a ring hides it in `chunk_pieces`.
    reduce_s: Figure | None = None
    # share of the wire's bandwidth that payload gets, of any message or by its size.
    efficiency: Figure | Curve | None = None
    # what a message takes of processors, at both ends together; matters where `Overheads.cores` are shared.
    busy_s: Figure | None = None
    busy_bytes_per_s: Figure | None = None  # bytes of messages that one processor handles, at both ends together


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What one operation costs besides its messages."""

    launch_s: Figure | None = None  # to start it, once
    # share of a wire's latency that counts where bytes only pass through a device on their way; 1 if absent.
    cut_through: Figure | None = None
    # what reads and writes of all ranks of a node get together, where they share one memory and the chip names none;
    # where nodes are processes that share `cores`, what one of these gets for copies.
    memory_bytes_per_s: Figure | None = None
    # of all reads and writes, up to which caches give `cached_bytes_per_s`; the rest goes at `memory_bytes_per_s`. No
    # caches if absent.
    cached_bytes: Figure | None = None
    cached_bytes_per_s: Figure | None = None  # what they give
    memory_efficiency: Figure | None = None  # share of a memory's bandwidth that collectives get; 1 if absent
    reducer_bytes_per_s: Figure | None = None  # what the reducer of one physical core adds; no limit if absent
    # whether a rank receives nothing while it reduces, but for what rings pass on in pieces.
    serial_reduction: bool | None = None
    # that rings cut each chunk in which they reduce and pass on: while one is on the wire another one is reduced, and
    # starts and latencies of one hide behind bytes of the others; 1 if absent.
    chunk_pieces: Figure | None = None
    # pieces of the data that may be in flight through the phases of a composed collective; 3 if absent.
    slices: Figure | None = None
    slice_bytes: Figure | None = None  # the vector is not cut in pieces that are shorter; any length if absent
    # whether ranks of one process start things one after the other, so that launches, steps, gaps and meetings count
    # once for each of them.
    shared_loop: bool | None = None
    # processors that all ranks share, where their nodes are processes of one computer: launches, messages and
    # reductions of all of them take no less than these can do; no limit if absent.
    cores: Figure | None = None
    # how many times as much a byte of a message takes of one of them as long as several nodes work on it in a step,
    # which evict each other's memory from its caches; once as much if absent.
    crowding: Figure | None = None
    # what a rank takes of them in each step that it waits for messages in, where there are more processes than cores:
    # it sleeps, is woken, and another one has to leave its place; nothing if absent.
    wake_s: Figure | None = None
    # for a rank to meet the others of its process, where they read each other's memory; between nodes that share
    # memory, for all of them.
    meeting_s: Figure | None = None
    phase_s: Figure | None = None  # for ranks of several processes to tell each other how far they have come, each time
    piece_s: Figure | None = None  # to read or add one rank's part of another's result, whatever its size
    inline_bytes: Figure | None = None  # of all ranks' vectors, from which threads do the work; none if absent
    handing_s: Figure | None = None  # to hand it to them and back
    # of all reads and writes of these threads, up to which caches give `spread_bytes_per_s`; the rest goes at
    # `memory_bytes_per_s`. As one processor alone if absent.
    spread_bytes: Figure | None = None
    spread_bytes_per_s: Figure | None = None  # what they give
    # at which a sum is copied to those ranks of a process that did not make it; counted with other reads and writes if
    # absent.
    copied_bytes_per_s: Figure | None = None
    shared_memory: bool | None = None  # whether nodes are processes of one host whose ranks read each other's memory
    wires: tuple[WireOverheads, ...] = ()  # by kind of wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What starting a program that holds collectives costs, each time."""

    launch_s: Figure | None = None  # with collectives or without
    barrier_s: Figure | None = None  # for four ranks to meet before a program with collectives
    doubling_s: Figure | None = None  # for each time that the largest group is twice as large
    trigger_s: Figure | None = None  # for each collective, until its first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What the machine's own library chooses from; measurements of it are judged by the best of these."""

    algorithms: tuple[str, ...]  # their names, as plans spell them
    source: str  # as of a figure
    confidence: Confidence  # as of a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The `[collectives]` table."""

    usual: Overheads = field(default=Overheads())  # what holds
    # the same, where adapters reach host memory only; None if nothing is known of that.
    host_copies: Overheads | None = None
    between_nodes: Overheads | None = None  # the same on more than one node, None if nothing differs there
    program: Program = field(default=Program())  # of whole programs
    library: Library | None = None  # of collectives, that comes with the machine; None if it is not known what that has
