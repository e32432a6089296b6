"""Why communication was exposed: who was waited for, what that rank was doing, and which bytes were on the wire.

Every nanosecond of exposed communication has one cause, so causes add up to it exactly. While any operation moves bytes
the wire is the cause, and the oldest such operation stands for it; else the oldest operation that waits does, and the
cause is what the rank that came last to it was doing at that instant. If that rank was itself waiting, the cause is
further back, and is followed there.

Where a rank is late because it computes something that its victim does not compute, or takes longer for it, that is
what is told, even if it was on to something else by the time that it was waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .activity import Activity, Piece
from .excess import Excess
from .meetings import Last
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
    activity = Activity(timeline, window)
    found = [reason for cover in covers for reason in _exposed(activity, cover)]
    return _with_excess(found, Excess(timeline.near(window), window))


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


def _exposed(activity: Activity, cover: Coverage) -> Iterator[Reason]:
    """Yield the reasons for what is exposed on a rank."""
    for piece in activity.oldest(cover.rank, cover.exposed):
        if piece.doing == "wire":
            yield _reason(cover.rank, None, "wire", piece)
        else:
            yield from _behind(activity, cover.rank, piece, frozenset([cover.rank]))


def _behind(activity: Activity, victim: int, piece: Piece, passed: frozenset[int]) -> Iterator[Reason]:
    """Yield what is behind a wait."""
    last = activity.last_of(piece.span)
    if last is None or last.rank in passed:
        yield _reason(victim, None, "unknown", piece)
        return
    at_ns = piece.start_ns
    for under in [*activity.between(last.rank, piece.start_ns, piece.end_ns), None]:
        free_ns = piece.end_ns if under is None else under.start_ns
        if at_ns < free_ns:
            yield Reason(victim, at_ns, free_ns, last.rank, "program", piece.span.name, last.call_site)
        if under is not None:
            at_ns = under.end_ns
            yield from _under(activity, victim, piece, under, last, passed | {last.rank})


def _under(
    activity: Activity, victim: int, piece: Piece, under: Piece, last: Last, passed: frozenset[int]
) -> Iterator[Reason]:
    """Yield what the last rank did meanwhile."""
    if under.doing == "program":
        yield Reason(victim, under.start_ns, under.end_ns, last.rank, "program", "", under.span.name)
    elif under.doing != "waiting":
        yield _reason(victim, last.rank, under.doing, under)
    elif (further := activity.last_of(under.span)) and further.rank not in passed and len(passed) < FOLLOWED:
        yield from _behind(activity, victim, under, passed)
    else:  # whatever it waits for, that waits for it
        name, site = piece.span.name, last.call_site
        yield Reason(victim, under.start_ns, under.end_ns, last.rank, "program", name, site)


def _reason(victim: int, rank: int | None, doing: Doing, piece: Piece) -> Reason:
    return Reason(victim, piece.start_ns, piece.end_ns, rank, doing, piece.span.name, _site(piece.span))


def _site(span: Span) -> str:
    return span.info.call_site if span.info else span.call_site
