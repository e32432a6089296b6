"""Figures of the last moments of a running world: time, bytes and lateness of each rank. Pure.

A record says of each operation when it was issued, when it began on its rank and when it ended; an operation that has
not ended counts as active from its call, or from the end of the one before it at the same place. Its bytes move from
the moment at which the last member has come, as far as the members' records are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from ..flight.reading import CallWords, RankTable
from ..timeline.measure.intervals import Interval, Merged, intersect, length, merge, subtract
from ..timeline.measure.metrics import Breakdown

Kind: TypeAlias = Literal["in process", "on host", "network"]
"""The medium that the bytes of a group travel over."""

Place: TypeAlias = tuple[str, int]
"""A host, and a process there."""

RankSnapshot: TypeAlias = tuple[Place, RankTable, Mapping[int, CallWords]]
"""Place of a rank, its last operations, and the calls of its process."""

_Meeting: TypeAlias = tuple[str, int]
_UNKNOWN = CallWords("", "", "", (), "", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Figures of one rank in a window."""

    times: Breakdown  # Where its time went; `step` is that in which it is
    step_ns: int | None  # Duration of a step, from end to end; None before the second end of a step
    in_flight_bytes: int  # Bytes of unfinished operations
    doing: str  # The oldest unfinished work, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFigures:
    """Figures of all ranks in a window."""

    ranks: Sequence[RankFigures]  # Ascending
    # Bytes of ended operations, by the medium; each operation counts once on each rank.
    bytes_per_s: Mapping[Kind, float]
    late_ns: Mapping[int, int]  # How long others waited for a rank, added up over them

    @property
    def step(self) -> int | None:
        """The step that the slowest rank is in; None before the first step."""
        return min((each.times.step for each in self.ranks if each.times.step is not None), default=None)

    @property
    def step_ns(self) -> int | None:
        """Duration of a step in nanoseconds, the median over the ranks; None if no rank knows it."""
        known = [each.step_ns for each in self.ranks if each.step_ns is not None]
        return int(median(known)) if known else None

    def share(self, part: Callable[[Breakdown], int]) -> float:
        """Return the sum of a part of the time of all ranks, as a fraction of their whole time, 0 to 1."""
        wall_ns = sum(each.times.wall_ns for each in self.ranks)
        return sum(part(each.times) for each in self.ranks) / wall_ns if wall_ns else 0.0


@dataclass(frozen=True, slots=True)
class _Operation:
    words: CallWords
    meeting: _Meeting
    begin_ns: int
    end_ns: int
    has_ended: bool
    issued_ns: int


def figures(ranks: Sequence[RankSnapshot], window: Interval) -> WorldFigures:
    """Measure the time, bytes and lateness of ranks.

    Args:
        ranks: The known ranks.
        window: From when to now, in nanoseconds since 1970.
    """
    places = {table.rank: place for place, table, _ in ranks}
    by_rank = {table.rank: _read_operations(table, calls, window) for _, table, calls in ranks}
    arrivals = _Arrivals(by_rank)
    late_ns = dict.fromkeys(by_rank, 0)
    _count_lateness(by_rank, arrivals, window, late_ns)
    rows = [_measure_rank(table, by_rank[table.rank], arrivals, window) for _, table, _ in ranks]
    moved: dict[Kind, float] = {}
    seconds = (window[1] - window[0]) / 1e9
    for operations in by_rank.values():
        for operation in operations:
            if operation.has_ended and operation.words.nbytes and window[0] <= operation.end_ns:
                kind = _find_medium(operation.words.members, places)
                moved[kind] = moved.get(kind, 0.0) + operation.words.nbytes / seconds
    return WorldFigures(ranks=sorted(rows, key=lambda row: row.times.rank), bytes_per_s=moved, late_ns=late_ns)


def _find_medium(members: tuple[int, ...], places: Mapping[int, Place]) -> Kind:
    """Return the medium between members; a rank without a known place counts as on another host."""
    among = {places.get(rank) for rank in members}
    if len(among) <= 1 and None not in among:
        return "in process"
    hosts = {place and place[0] for place in among}
    return "network" if None in hosts or len(hosts) > 1 else "on host"


def _read_operations(table: RankTable, calls: Mapping[int, CallWords], window: Interval) -> list[_Operation]:
    """Return the operations of a rank, in order of issue."""
    operations: list[_Operation] = []
    free_ns: dict[str, int] = {}  # until when the operations before it at the same place took
    rows = sorted(table.operations.T.tolist())
    for issued_ns, number, call, _, ended_ns, started_ns in rows:
        words = calls.get(call, _UNKNOWN)
        if words.kind == "compute":
            if not started_ns:
                continue
            begin_ns = started_ns
        else:
            begin_ns = started_ns or (issued_ns if ended_ns else max(issued_ns, free_ns.get(words.key, 0)))
        ended_ns = abs(ended_ns)  # negative: badly
        end_ns = ended_ns or window[1]
        if ended_ns:
            free_ns[words.key] = max(free_ns.get(words.key, 0), ended_ns)
        operations.append(
            _Operation(words, (words.key, number), min(begin_ns, end_ns), end_ns, bool(ended_ns), issued_ns)
        )  # fmt: skip
    return operations


class _Arrivals:
    """Instants at which ranks arrived at operations, as far as their records are on this host."""

    def __init__(self, by_rank: Mapping[int, Sequence[_Operation]]) -> None:
        self._when: dict[_Meeting, dict[int, int]] = {}
        self._newest: dict[tuple[str, int], int] = {}
        self._known = set(by_rank)
        for rank, operations in by_rank.items():
            for one in operations:
                if one.words.kind != "compute":
                    self._when.setdefault(one.meeting, {})[rank] = one.begin_ns
                    place = one.meeting[0], rank
                    self._newest[place] = max(self._newest.get(place, 0), one.meeting[1])

    def missing(self, operation: _Operation) -> list[int]:
        """Return the members with a record on this host that have not arrived at an operation; none if it has ended."""
        if operation.has_ended:
            return []
        key, number = operation.meeting
        return [r for r in operation.words.members if r in self._known and self._newest.get((key, r), -1) < number]

    def met_ns(self, operation: _Operation) -> int:
        """Return when the last member arrived at an operation; the end of the window if one is missing."""
        return operation.end_ns if self.missing(operation) else max(self._when[operation.meeting].values())

    def last(self, operation: _Operation) -> list[int]:
        """Return the members that an operation waits for, or the one that arrived last."""
        when = self._when[operation.meeting]
        return self.missing(operation) or [max(when, key=lambda rank: (when[rank], -rank))]


def _count_lateness(
    by_rank: Mapping[int, Sequence[_Operation]], arrivals: _Arrivals, window: Interval, late_ns: dict[int, int]
) -> None:
    """Add to `late_ns` the time for which others waited for each rank that arrived last, or has not arrived."""
    for rank, operations in by_rank.items():
        for operation in operations:
            if operation.words.kind == "compute" or operation.end_ns < window[0]:
                continue
            waited_ns = min(arrivals.met_ns(operation), operation.end_ns) - max(operation.begin_ns, window[0])
            for other in arrivals.last(operation) if waited_ns > 0 else ():
                if other != rank:
                    late_ns[other] += waited_ns


def _measure_rank(
    table: RankTable, operations: Sequence[_Operation], arrivals: _Arrivals, window: Interval
) -> RankFigures:
    """Return the figures of a rank in a window: compute, communication, and how much of it was hidden or waited."""
    if table.cut and operations:  # earlier operations are not known
        window = max(window[0], min(op.end_ns for op in operations)), window[1]
    whole = merge([window])

    def inside(intervals: list[Interval]) -> Merged:
        """Return the parts of intervals that are in the window, merged."""
        return intersect(merge(intervals), whole)

    comm = [op for op in operations if op.words.kind != "compute"]
    compute = inside([(op.begin_ns, op.end_ns) for op in operations if op.words.kind == "compute"])
    active = inside([(op.begin_ns, op.end_ns) for op in comm])
    moving = inside([(min(arrivals.met_ns(op), op.end_ns), op.end_ns) for op in comm])
    exposed = subtract(active, compute)
    unfinished = [op for op in operations if not op.has_ended]
    return RankFigures(
        times=Breakdown(
            rank=table.rank,
            step=None if table.last_step < 0 else table.last_step,
            wall_ns=max(window[1] - window[0], 0),
            compute_ns=length(compute),
            comm_ns=length(active),
            overlapped_ns=length(intersect(active, compute)),
            waiting_ns=length(subtract(exposed, moving)),
            transfer_ns=length(moving),
            queued_ns=0,
        ),
        step_ns=_step_ns(table),
        in_flight_bytes=sum(op.words.nbytes for op in unfinished),
        doing="" if table.left else _name_running(unfinished),
    )


def _step_ns(table: RankTable) -> int | None:
    """Return the mean nanoseconds between the last ends of successive steps; None for less than two steps."""
    _, _, _, step, ended, _ = table.operations
    last: dict[int, int] = {}
    unfinished = set() if table.left else {max(step.tolist(), default=-1)}  # the newest may have more to come
    for at_ns, index in zip(ended.tolist(), step.tolist(), strict=True):
        if index >= 0:
            last[index] = max(last.get(index, 0), abs(at_ns))
            if not at_ns:
                unfinished.add(index)
    whole = sorted(last.keys() - unfinished)
    if len(whole) < 2:
        return None
    low, high = whole[0], whole[-1]
    return max(last[high] - last[low], 0) // (high - low)


def _name_running(unfinished: Sequence[_Operation]) -> str:
    """Return the name of the last running compute, else of the oldest unfinished operation; "" without."""
    running = [one for one in unfinished if one.words.kind == "compute"]
    first = running[-1:] or unfinished[:1]
    return first[0].words.name if first else ""
