"""Numbers with their origin, and the figures that price a collective: the `[collectives]` table of a machine file.

The annotation of a field declares its key in a file: `tables` reads files by annotations. The unit is in the name of
the field; limits, and the words for them in messages, are in `keys.Numbers`. A figure that is absent costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from .keys import ByName, Numbers, Words, contradiction_error
from .libraries import Library

Confidence = Literal["A", "B", "C", "D", "E"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its origin."""

    value: float  # in the unit that the field's name ends with
    source: str  # where it was published, as ``repository:path`` or an address
    # "A" vendor, "B" published run with its configuration, "C" published with gaps, "D" derived arithmetic, "E" an
    # estimate of ours or a number of the user's.
    confidence: Confidence


_POINT = "a pair of bytes and a share, such as [65536, 0.5]"
_POINTS = "a list of pairs such as [[65536, 0.5], [1e8, 0.9]]"
_NOT_NEGATIVE = Numbers("a number, 0 or more", least=0)
_SHARE = Numbers("a share, more than 0 and at most 1", above=0, most=1)
Point = Annotated[tuple[Annotated[float, _NOT_NEGATIVE], Annotated[float, _SHARE]], Words(_POINT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A share that depends on the size of a message, with its origin."""

    # Pairs of bytes and a share, ascending in bytes. Between two points the share is linear in the logarithm of the
    # bytes; before the first and after the last point it is constant.
    points: Annotated[tuple[Point, ...], Words(_POINTS)]
    source: str  # as in a figure
    confidence: Confidence  # as in a figure

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise contradiction_error("points", "ascending numbers of bytes", tuple(sizes))

    @property
    def most(self) -> float:
        """The largest share."""
        return max(share for _, share in self.points)


Amount = Annotated[Figure, Numbers("a positive number", above=0)]
Duration = Annotated[Figure, _NOT_NEGATIVE]
Whole = Annotated[Figure, Numbers("a whole number, 1 or more", least=1, whole=True)]
Factor = Annotated[Figure, Numbers("a number, 1 or more", least=1)]
Part = Annotated[Figure, Numbers("a share from 0 to 1", least=0, most=1)]
Share = Annotated[Figure, _SHARE]
ShareBySize = Annotated[Figure | Curve, _SHARE]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOverheads:
    """The cost of messages over one kind of wire besides latency and bytes."""

    kind: str  # the wire: the first one of a message's route, or the last one for `incast_s`
    launch_s: Duration | None = None  # to start an operation that needs such wires between its nodes: their handshake
    step_s: Duration | None = None  # to start a step's message, on the sender
    gap_s: Duration | None = None  # between two messages that one rank starts in one step
    incast_s: Duration | None = None  # for each further message that arrives at one rank in one step
    # to start reducing the bytes of one message; further messages of the step hide as much as their gaps take, and
    # pieces that a ring passes on hide it (see `chunk_pieces`).
    reduce_s: Duration | None = None
    efficiency: ShareBySize | None = None  # share of the wire's bandwidth that payload gets, of any message or by size
    busy_s: Duration | None = None  # processor time of a message, at both ends together, where `cores` are shared
    busy_bytes_per_s: Amount | None = None  # bytes of messages that one processor handles, at both ends together


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The cost of one operation besides its messages."""

    launch_s: Duration | None = None  # to start it, once
    # share of a wire's latency that counts where bytes only pass through a device on their way; 1 if absent.
    cut_through: Part | None = None
    # reads and writes of all ranks of a node together, if they share one memory and the chip names none; of one
    # process for copies, if nodes are processes that share `cores`.
    memory_bytes_per_s: Amount | None = None
    memory_efficiency: Share | None = None  # share of a memory's bandwidth that collectives get; 1 if absent
    reducer_bytes_per_s: Amount | None = None  # rate of the reducer of one physical core; no limit if absent
    # whether a rank receives nothing while it reduces, except pieces that rings pass on.
    serial_reduction: bool | None = None
    # pieces into which a ring cuts each chunk that it reduces and passes on: one is reduced while another one is on the
    # wire, and starts and latencies of one hide behind bytes of the others; 1 if absent.
    chunk_pieces: Whole | None = None
    # pieces of the data that may be in flight through the phases of a composed collective; 3 if absent.
    slices: Whole | None = None
    slice_bytes: Amount | None = None  # the vector is not cut into shorter pieces; any length if absent
    # whether ranks of one process start things one after the other, so that launches, steps, gaps and meetings count
    # once for each of them.
    shared_loop: bool | None = None
    # processors that all ranks share, where their nodes are processes of one computer: launches, messages and
    # reductions of all ranks take at least as long as these processors need; no limit if absent.
    cores: Whole | None = None
    # factor on a message's bytes while several nodes work on a processor in a step, and evict each other's memory from
    # its caches; 1 if absent.
    crowding: Factor | None = None
    # processor time of a rank in each step in which it waits for messages, where there are more processes than cores:
    # it sleeps, is woken, and another process leaves its processor; nothing if absent.
    wake_s: Duration | None = None
    # time for a rank to meet the others of its process, if they read each other's memory.
    meeting_s: Duration | None = None
    wires: Annotated[tuple[WireOverheads, ...], ByName("a table of kinds of wires")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The `[collectives]` table."""

    usual: Overheads = field(default=Overheads())  # overheads on one node
    host_copies: Overheads | None = None  # if adapters reach host memory only; None if nothing is known of that
    between_nodes: Overheads | None = None  # on more than one node; None if nothing differs there
    library: Library | None = None  # of collectives, that comes with the machine; None if its choices are not known
