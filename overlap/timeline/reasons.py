"""Why communication was exposed: who was waited for, what that rank was doing, and which bytes were on the wire.

Every nanosecond of exposed communication has one cause, so causes add up to it exactly. While any operation moves bytes
the wire is the cause, and the oldest such operation stands for it; else the oldest operation that waits does, and the
cause is what the rank that came last to it was doing at that instant. If that rank was itself waiting, the cause is
further back, and is followed there.

Where a rank is late because it computes something that its victim does not compute, or takes longer for it, that is
what is told, even if it was on to something else by the time that it was waited for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal, TypeAlias

from .excess import Excess
from .intervals import Interval, Merged, merge, subtract
from .meetings import Key, Last, key_of, last_ranks
from .metrics import Coverage, coverage
from .spans import Span, Timeline

__all__ = ["Cause", "Doing", "Reason", "causes", "causes_of", "reasons", "summed"]

Doing: TypeAlias = Literal["compute", "program", "wire", "unknown"]

FOLLOWED = 16
"""Ranks of a chain in which each waits for the next, before it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why communication was exposed on one rank, and for how long altogether.

    Attributes:
        victim: The rank on which it was exposed.
        rank: Whom it waited for, in the end; None where bytes moved, or where nobody knows.
        doing: What that rank did: it computed, it ran its program, or its own bytes moved. "wire" without a rank are
            the victim's own bytes.
        name: Of the compute or the operation; of a program, the operation that it had not come to.
        call_site: Where that was called, or "".
        duration_ns: How long.
    """

    victim: int
    rank: int | None
    doing: Doing
    name: str
    call_site: str
    duration_ns: int

    def __str__(self) -> str:
        """Say what was done, as in "compute 'tokenise' at train.py:31"."""
        at = f" at {self.call_site}" if self.call_site else ""
        if self.doing == "compute":
            return f"compute '{self.name}'{at}"
        if self.doing == "program":
            return f"its program{at}" if not self.name else f"its program, before {self.name}{at}"
        return f"{self.name}{at}" if self.name else "not recorded"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why communication was exposed on `victim` from `start_ns` to `end_ns`; the others as in a `Cause`."""

    victim: int
    start_ns: int
    end_ns: int
    rank: int | None
    doing: Doing
    name: str
    call_site: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a rank did from one instant to another."""

    start_ns: int
    end_ns: int
    doing: Literal["compute", "program", "wire", "waiting"]
    span: Span


def causes(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Cause]:
    """Return the causes of all exposed communication, those that cost most first.

    Arguments and errors are those of `metrics.coverage`. Cost: a sort of the spans, and as many looks at what the last
    rank did as there are waits.
    """
    return causes_of(timeline, coverage(timeline, step=step, ranks=ranks))


def causes_of(timeline: Timeline, covers: Sequence[Coverage]) -> list[Cause]:
    """Do the same with what `coverage` has returned."""
    return summed(reasons(timeline, covers))


def summed(found: Iterable[Reason]) -> list[Cause]:
    """Add up the reasons of each rank that say the same, those that cost most first."""
    totals: dict[tuple[int, int | None, Doing, str, str], int] = {}
    for one in found:
        key = one.victim, one.rank, one.doing, one.name, one.call_site
        totals[key] = totals.get(key, 0) + one.end_ns - one.start_ns
    told = [
        Cause(victim=victim, rank=rank, doing=doing, name=name, call_site=site, duration_ns=duration_ns)
        for (victim, rank, doing, name, site), duration_ns in totals.items()
    ]
    return sorted(told, key=lambda one: (-one.duration_ns, one.victim, str(one)))


def reasons(timeline: Timeline, covers: Sequence[Coverage]) -> list[Reason]:
    """Return, rank by rank, why communication is exposed at every instant at which it is, in order."""
    if not covers:
        return []
    window = min(cover.window[0] for cover in covers), max(cover.window[1] for cover in covers)
    search = _Search(timeline, window)
    found = [reason for cover in covers for reason in search.exposed(cover)]
    return _with_excess(found, Excess(timeline.spans, window))


def _with_excess(found: Sequence[Reason], excess: Excess) -> list[Reason]:
    """Name the compute that makes a rank late instead of the one that it was at."""
    waited_ns: dict[tuple[int, int], int] = {}
    for one in found:
        if one.doing == "compute" and one.rank is not None:
            pair = one.victim, one.rank
            waited_ns[pair] = waited_ns.get(pair, 0) + one.end_ns - one.start_ns
    most = {pair: excess.most(*pair) for pair in waited_ns}
    named = {pair: (name, site) for pair, (name, site, ns) in most.items() if 2 * ns >= waited_ns[pair]}
    return [
        Reason(one.victim, one.start_ns, one.end_ns, one.rank, one.doing, *named[one.victim, one.rank])
        if one.doing == "compute" and one.rank is not None and (one.victim, one.rank) in named
        else one
        for one in found
    ]


class _Search:
    """What every rank did at every instant of a window, as far as somebody asks."""

    def __init__(self, timeline: Timeline, window: Interval) -> None:
        self._last: Mapping[Key, Last] = last_ranks(timeline.spans)
        self._spans: dict[int, list[Span]] = {}
        for span in timeline.spans:
            if span.kind in ("compute", "comm", "program") and span.end_ns > window[0] and span.start_ns < window[1]:
                self._spans.setdefault(span.rank, []).append(span)
        self._pieces: dict[int, tuple[list[int], list[_Piece]]] = {}

    def exposed(self, cover: Coverage) -> Iterator[Reason]:
        """Yield the reasons for what is exposed on a rank."""
        for piece in _oldest(self._spans.get(cover.rank, ()), cover.exposed):
            if piece.doing == "wire":
                yield _reason(cover.rank, None, "wire", piece)
            else:
                yield from self._behind(cover.rank, piece, frozenset([cover.rank]))

    def _behind(self, victim: int, piece: _Piece, passed: frozenset[int]) -> Iterator[Reason]:
        """Yield what is behind a wait."""
        last = self._last_of(piece.span)
        if last is None or last.rank in passed:
            yield _reason(victim, None, "unknown", piece)
            return
        at_ns = piece.start_ns
        for under in [*self._doing(last.rank, piece.start_ns, piece.end_ns), None]:
            free_ns = piece.end_ns if under is None else under.start_ns
            if at_ns < free_ns:
                yield Reason(victim, at_ns, free_ns, last.rank, "program", piece.span.name, last.call_site)
            if under is not None:
                at_ns = under.end_ns
                yield from self._under(victim, piece, under, last, passed | {last.rank})

    def _under(self, victim: int, piece: _Piece, under: _Piece, last: Last, passed: frozenset[int]) -> Iterator[Reason]:
        """Yield what the last rank did meanwhile."""
        if under.doing == "program":
            yield Reason(victim, under.start_ns, under.end_ns, last.rank, "program", "", under.span.name)
        elif under.doing != "waiting":
            yield _reason(victim, last.rank, under.doing, under)
        elif (further := self._last_of(under.span)) and further.rank not in passed and len(passed) < FOLLOWED:
            yield from self._behind(victim, under, passed)
        else:  # whatever it waits for, that waits for it
            name, site = piece.span.name, last.call_site
            yield Reason(victim, under.start_ns, under.end_ns, last.rank, "program", name, site)

    def _last_of(self, span: Span) -> Last | None:
        key = key_of(span)
        return None if key is None else self._last.get(key)

    def _doing(self, rank: int, start_ns: int, end_ns: int) -> Iterator[_Piece]:
        """Yield what a rank did from one instant to another; nothing where only its program can have run."""
        if rank not in self._pieces:
            pieces = _activity(self._spans.get(rank, ()))
            self._pieces[rank] = [piece.end_ns for piece in pieces], pieces
        ends, pieces = self._pieces[rank]
        for index in range(bisect_right(ends, start_ns), len(pieces)):
            piece = pieces[index]
            if piece.start_ns >= end_ns:
                return
            yield _Piece(max(piece.start_ns, start_ns), min(piece.end_ns, end_ns), piece.doing, piece.span)


def _reason(victim: int, rank: int | None, doing: Doing, piece: _Piece) -> Reason:
    return Reason(victim, piece.start_ns, piece.end_ns, rank, doing, piece.span.name, _site(piece.span))


def _site(span: Span) -> str:
    return span.info.call_site if span.info else span.call_site


def _activity(spans: Sequence[Span]) -> list[_Piece]:
    """Return what a rank did, without overlaps, in order: it computes before it moves bytes before it waits."""
    compute = list(_disjoint([span for span in spans if span.kind == "compute"], "compute"))
    program = list(_disjoint([span for span in spans if span.kind == "program"], "program"))
    taken = merge((piece.start_ns, piece.end_ns) for piece in compute)
    comm_in = _outside(taken, spans)
    moved = list(_oldest(spans, comm_in))
    known = merge((piece.start_ns, piece.end_ns) for piece in [*compute, *moved])
    rest = [cut for piece in program for cut in _cut(piece, known)]
    return sorted([*compute, *moved, *rest], key=lambda piece: piece.start_ns)


def _outside(taken: Merged, spans: Sequence[Span]) -> Merged:
    return subtract(merge((span.start_ns, span.end_ns) for span in spans if span.kind == "comm"), taken)


def _cut(piece: _Piece, known: Merged) -> Iterator[_Piece]:
    for start_ns, end_ns in subtract([(piece.start_ns, piece.end_ns)], known):
        yield _Piece(start_ns, end_ns, piece.doing, piece.span)


def _disjoint(spans: Sequence[Span], doing: Literal["compute", "program"]) -> Iterator[_Piece]:
    """Yield spans in order, each from where those before it have ended."""
    at_ns: int | None = None
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        start_ns = span.start_ns if at_ns is None else max(span.start_ns, at_ns)
        if start_ns < span.end_ns:
            yield _Piece(start_ns, span.end_ns, doing, span)
            at_ns = span.end_ns


def _oldest(spans: Sequence[Span], inside: Merged) -> Iterator[_Piece]:
    """Yield, for every instant inside, the oldest operation that moves bytes, or else the oldest that waits."""
    before: _Piece | None = None
    for piece in _elementary(spans, inside):
        if before and (before.end_ns, before.doing) == (piece.start_ns, piece.doing) and before.span is piece.span:
            before = _Piece(before.start_ns, piece.end_ns, piece.doing, piece.span)
            continue
        if before:
            yield before
        before = piece
    if before:
        yield before


def _elementary(spans: Sequence[Span], inside: Merged) -> Iterator[_Piece]:
    comm = [span for span in spans if span.kind == "comm" and span.start_ns < span.end_ns]
    edges_ns = {at for span in comm for at in (span.start_ns, _met_ns(span), span.end_ns)}
    instants = sorted(edges_ns.union(*inside))
    comm.sort(key=lambda span: span.start_ns)
    moving: list[tuple[int, int, int]] = []  # heaps of (issued, number, end)
    waiting: list[tuple[int, int, int]] = []
    meets: list[tuple[int, int]] = []  # when those that wait begin to move
    taken = 0
    edges = iter([*inside, (0, 0)])
    low, high = next(edges)
    for at_ns, next_ns in pairwise(instants):
        while taken < len(comm) and comm[taken].start_ns <= at_ns:
            span = comm[taken]
            heappush(waiting, (_issued_ns(span), taken, _met_ns(span)))
            heappush(meets, (_met_ns(span), taken))
            taken += 1
        while meets and meets[0][0] <= at_ns:
            _, number = heappop(meets)
            heappush(moving, (_issued_ns(comm[number]), number, comm[number].end_ns))
        while high and high <= at_ns:
            low, high = next(edges)
        if not (low <= at_ns and next_ns <= high):
            continue
        if (moves := _first(moving, at_ns)) is not None:
            yield _Piece(at_ns, next_ns, "wire", comm[moves])
        elif (waits := _first(waiting, at_ns)) is not None:
            yield _Piece(at_ns, next_ns, "waiting", comm[waits])


def _first(heap: list[tuple[int, int, int]], at_ns: int) -> int | None:
    while heap and heap[0][2] <= at_ns:
        heappop(heap)
    return heap[0][1] if heap else None


def _met_ns(span: Span) -> int:
    """When bytes began to move; in time that went back, at least inside the span."""
    return span.start_ns if span.info is None else min(max(span.info.met_ns, span.start_ns), span.end_ns)


def _issued_ns(span: Span) -> int:
    return span.start_ns if span.info is None else span.info.issued_ns
