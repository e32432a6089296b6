"""What each rank did at every instant: it computes before it moves bytes, and moves bytes before it waits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

from .intervals import Interval, Merged, merge, subtract
from .meetings import Key, Last, key_of, last_ranks
from .spans import Span, Timeline

__all__ = ["Activity", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank did from one instant to another."""

    start_ns: int
    end_ns: int
    doing: Literal["compute", "program", "wire", "waiting"]
    span: Span


class Activity:
    """What every rank did in a window, as far as somebody asks.

    Args:
        timeline: The run.
        window: From when to when.
    """

    def __init__(self, timeline: Timeline, window: Interval) -> None:
        near = timeline.near(window)
        self._last: Mapping[Key, Last] = last_ranks(near)
        self._spans: dict[int, list[Span]] = {}
        for span in near:
            if span.kind in ("compute", "comm", "program") and span.end_ns > window[0] and span.start_ns < window[1]:
                self._spans.setdefault(span.rank, []).append(span)
        self._pieces: dict[int, tuple[list[int], list[Piece]]] = {}

    def last_of(self, span: Span) -> Last | None:
        """Return who came last to an operation, if that is known."""
        key = key_of(span)
        return None if key is None else self._last.get(key)

    def oldest(self, rank: int, inside: Merged) -> Iterator[Piece]:
        """Yield, for every instant inside, the oldest operation that moves bytes, or else the oldest that waits."""
        return _oldest(self._spans.get(rank, ()), inside)

    def of(self, rank: int) -> tuple[list[int], list[Piece]]:
        """Return all that a rank did, in order and without overlaps, and when each begins.

        Where there is nothing only its program can have run.
        """
        if rank not in self._pieces:
            pieces = _activity(self._spans.get(rank, ()))
            self._pieces[rank] = [piece.start_ns for piece in pieces], pieces
        return self._pieces[rank]

    def between(self, rank: int, start_ns: int, end_ns: int) -> Iterator[Piece]:
        """Yield what a rank did from one instant to another."""
        starts, pieces = self.of(rank)
        for index in range(max(bisect_right(starts, start_ns) - 1, 0), len(pieces)):
            piece = pieces[index]
            if piece.start_ns >= end_ns:
                return
            if piece.end_ns > start_ns:
                yield Piece(max(piece.start_ns, start_ns), min(piece.end_ns, end_ns), piece.doing, piece.span)


def _activity(spans: Sequence[Span]) -> list[Piece]:
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


def _cut(piece: Piece, known: Merged) -> Iterator[Piece]:
    for start_ns, end_ns in subtract(merge([(piece.start_ns, piece.end_ns)]), known):
        yield Piece(start_ns, end_ns, piece.doing, piece.span)


def _disjoint(spans: Sequence[Span], doing: Literal["compute", "program"]) -> Iterator[Piece]:
    """Yield spans in order, each from where those before it have ended."""
    at_ns: int | None = None
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        start_ns = span.start_ns if at_ns is None else max(span.start_ns, at_ns)
        if start_ns < span.end_ns:
            yield Piece(start_ns, span.end_ns, doing, span)
            at_ns = span.end_ns


def _oldest(spans: Sequence[Span], inside: Merged) -> Iterator[Piece]:
    """Yield, for every instant inside, the oldest operation that moves bytes, or else the oldest that waits."""
    before: Piece | None = None
    for piece in _elementary(spans, inside):
        if before and (before.end_ns, before.doing) == (piece.start_ns, piece.doing) and before.span is piece.span:
            before = Piece(before.start_ns, piece.end_ns, piece.doing, piece.span)
            continue
        if before:
            yield before
        before = piece
    if before:
        yield before


def _elementary(spans: Sequence[Span], inside: Merged) -> Iterator[Piece]:
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
            yield Piece(at_ns, next_ns, "wire", comm[moves])
        elif (waits := _first(waiting, at_ns)) is not None:
            yield Piece(at_ns, next_ns, "waiting", comm[waits])


def _first(heap: list[tuple[int, int, int]], at_ns: int) -> int | None:
    while heap and heap[0][2] <= at_ns:
        heappop(heap)
    return heap[0][1] if heap else None


def _met_ns(span: Span) -> int:
    """When bytes began to move; in time that went back, at least inside the span."""
    return span.start_ns if span.info is None else min(max(span.info.met_ns, span.start_ns), span.end_ns)


def _issued_ns(span: Span) -> int:
    return span.start_ns if span.info is None else span.info.issued_ns
