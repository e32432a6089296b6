"""Metrics of overlap: how much communication hid behind compute, per rank and per step, in exact nanoseconds.

    wall = compute_only + overlapped + exposed + kept + copy + queued + idle
    exposed = waiting + wire

hold exactly, because every term is a length of merged intervals inside one window. While a program keeps the event
loop, nothing of its process goes on: that time is no communication, however many operations are in flight. The overlap
ratio is defined as in HolisticTraceAnalysis (communication_analysis.py): time both busy / communication time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ...errors import UsageError
from ...ranklist import listed
from ..columnar import NONE, Int64s, Mask, SpanColumns, run_starts
from ..span import Kind
from ..spans import Timeline
from .intervals import Interval, Merged, clip, intersect, length, subtract, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the wall time of one rank went, in one step (or the whole run when `step` is None)."""

    rank: int
    step: int | None  # Also None if the rank marks no steps
    wall_ns: int  # The length of the window
    compute_ns: int  # Time in which the rank computed
    comm_ns: int  # Time in which an operation was active: it waited for its last rank, or its bytes moved
    overlapped_ns: int  # Time in which the rank computed while an operation was active
    waiting_ns: int  # Exposed time in which no bytes moved: every active operation waited for a rank
    transfer_ns: int  # Time in which bytes moved, exposed or not
    queued_ns: int  # Time in which nothing was busy, and an operation had been called that could not begin
    kept_ns: int = 0  # Time without compute in which a program kept the event loop of this rank
    copy_ns: int = 0  # Time in which only copies and sets of a device's memory ran

    @property
    def compute_only_ns(self) -> int:
        """Time in which the rank computed and no operation was active."""
        return self.compute_ns - self.overlapped_ns

    @property
    def exposed_ns(self) -> int:
        """Time in which an operation was active and the rank did not compute: the time that overlap can remove."""
        return self.comm_ns - self.overlapped_ns

    @property
    def wire_ns(self) -> int:
        """Exposed time in which bytes moved."""
        return self.exposed_ns - self.waiting_ns

    @property
    def idle_ns(self) -> int:
        """Time in which nothing was busy and no operation had been called: the program did something else, or slept."""
        return self.wall_ns - self.compute_ns - self.exposed_ns - self.kept_ns - self.copy_ns - self.queued_ns

    @property
    def overlap_ratio(self) -> float | None:
        """Overlapped time as part of communication, from 0 to 1; None without communication."""
        return self.overlapped_ns / self.comm_ns if self.comm_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The merged intervals of one rank inside its window; a `Breakdown` measures them, and a drawing shows them."""

    rank: int
    step: int | None
    window: Interval
    compute: Merged
    comm: Merged
    transfer: Merged
    called: Merged  # from the call of an operation to its end
    kept: Merged  # where a program kept the event loop, and the rank did not compute; the three before are without it
    copy: Merged  # where only copies and sets of a device's memory ran

    @property
    def overlapped(self) -> Merged:
        """Where an operation is active while the rank computes."""
        return intersect(self.comm, self.compute)

    @property
    def exposed(self) -> Merged:
        """Where an operation is active and the rank does not compute."""
        return subtract(self.comm, self.compute)

    @property
    def waiting(self) -> Merged:
        """Where communication is exposed and no bytes move: every active operation waits for a rank."""
        return subtract(self.exposed, self.transfer)

    @property
    def wire(self) -> Merged:
        """Where communication is exposed and bytes move."""
        return intersect(self.exposed, self.transfer)

    @property
    def queued(self) -> Merged:
        """Where the rank neither computes nor communicates, although an operation has been called and not ended."""
        return subtract(subtract(self.called, self.comm), self.compute)

    def within(self, window: Interval) -> Coverage:
        """Return the part inside another window. Cost: proportional to that part."""
        compute, comm, transfer, called, kept, copy = (
            clip(part, window) for part in (self.compute, self.comm, self.transfer, self.called, self.kept, self.copy)
        )
        return replace(
            self, window=window, compute=compute, comm=comm, transfer=transfer, called=called, kept=kept, copy=copy
        )

    def breakdown(self) -> Breakdown:
        """Return the lengths of these intervals, in nanoseconds."""
        comm_ns, exposed = length(self.comm), self.exposed
        return Breakdown(
            rank=self.rank,
            step=self.step,
            wall_ns=self.window[1] - self.window[0],
            compute_ns=length(self.compute),
            comm_ns=comm_ns,
            overlapped_ns=comm_ns - length(exposed),
            waiting_ns=length(subtract(exposed, self.transfer)),
            transfer_ns=length(self.transfer),
            queued_ns=length(self.queued),
            kept_ns=length(self.kept),
            copy_ns=length(self.copy),
        )


Measured = TypeVar("Measured", Breakdown, Coverage)


def coverage(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Coverage]:
    """Return the merged intervals of each rank, clipped to its window.

    The window of a step is the rank's own step span (the latest one, if an index was used twice). A program that is
    ahead of its computes leaves a step before they have run: its window ends with the last compute that was issued in
    it, and begins when the computes of the steps before are over, so that the windows of such steps follow each other.
    A rank that recorded no steps at all has the window from the first to the last instant of the ranks that did, and no
    step: `of_steps` leaves it out.
    Without a step the window runs from the first start to the last end over all ranks. Cost: a sort of the spans.

    Args:
        timeline: The run.
        step: A step index, or None for the whole run.
        ranks: World ranks to look at; None means all that have spans (and, with a step, that recorded that step).

    Raises:
        UsageError: If the timeline is empty, no rank recorded that step, or `ranks` is empty or has one without spans.
    """
    windows = windows_of(timeline, step)
    chosen = _select_ranks(sorted(windows), ranks)
    window = min(windows[rank][0] for rank in chosen), max(windows[rank][1] for rank in chosen)
    marked = set(timeline.columns.rank[timeline.columns.is_kind("step")].tolist())
    spans = timeline.columns.near(window) & np.isin(timeline.columns.rank, chosen)
    columns = timeline.columns if spans.all() else timeline.columns.take(spans)
    rows = columns.rows_by_rank(np.ones(len(columns), bool))
    moved_ns, called_ns, nothing = columns.moved_ns, columns.called_ns, np.zeros(0, np.intp)

    def cover(rank: int) -> Coverage:
        """Return the merged intervals of one rank inside its window."""
        rank_rows, window = rows.get(rank, nothing), windows[rank]

        def inside(start_ns: Int64s, kind: Kind) -> Merged:
            """Return the union of the rank's spans of a kind, from `start_ns` on, inside its window."""
            on = columns.of_kind(kind, rank_rows) if window[0] < window[1] else nothing
            return clip(union(start_ns[on], columns.end_ns[on]), window)

        compute = inside(columns.start_ns, "compute")
        held = subtract(inside(columns.start_ns, "program"), compute)
        comm, transfer, called = (
            subtract(inside(start_ns, "comm"), held) for start_ns in (columns.start_ns, moved_ns, called_ns)
        )
        copy = subtract(inside(columns.start_ns, "copy"), compute)
        return Coverage(
            rank=rank,
            step=step if rank in marked else None,
            window=window,
            compute=compute,
            comm=comm,
            transfer=transfer,
            called=called,
            kept=held,
            copy=subtract(copy, called) if len(copy) else copy,
        )

    return [cover(rank) for rank in chosen]


def breakdowns(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Breakdown]:
    """Return the times of each rank by activity; arguments and errors as for `coverage`."""
    return [covered.breakdown() for covered in coverage(timeline, step=step, ranks=ranks)]


def breakdowns_by_step(timeline: Timeline) -> dict[int | None, list[Breakdown]]:
    """Return the times of each rank by activity in each step, or in the whole run, None, if no step is recorded.

    Cost: one look at all spans, and some 0.1 milliseconds for each step of each rank.

    Raises:
        UsageError: The timeline has no spans.
    """
    covers = coverage(timeline)
    ranks, windows = timeline.ranks(), _step_windows(timeline)
    found: dict[int | None, list[Breakdown]] = {}
    for step in timeline.steps():
        of_step = _windows_of_step(ranks, windows, step)
        found[step] = [
            replace(cover.within(of_step[cover.rank]), step=step if cover.rank in windows else None).breakdown()
            for cover in covers if cover.rank in of_step
        ]  # fmt: skip
    return found or {None: [cover.breakdown() for cover in covers]}


def of_steps(measured: Sequence[Measured]) -> list[Measured]:
    """Return the measures of ranks that mark steps: other ranks have no part in the figures of a step.

    If no rank does, and for the whole run, all are returned.
    """
    return [one for one in measured if one.step is not None] or list(measured)


def median_step(timeline: Timeline) -> int | None:
    """Return the step of median wall time of its longest rank; None without steps. Of two, the shorter.

    Of three and more the first one is left out: caches are cold in it, and whatever is made once is made there.
    """
    walls: dict[int, int] = {}
    for windows in _step_windows(timeline).values():
        for step, (start_ns, end_ns) in windows.items():
            walls[step] = max(walls.get(step, 0), end_ns - start_ns)
    if len(walls) > 2:
        del walls[min(walls)]
    ordered = sorted(walls, key=lambda step: (walls[step], step))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _select_ranks(recorded: list[int], ranks: Iterable[int] | None) -> list[int]:
    """Return the chosen ranks, ascending, all known ones by default; raise UsageError for none, or unknown ones."""
    chosen = recorded if ranks is None else sorted(set(ranks))
    if not chosen:
        raise UsageError("ranks: an empty selection shows nothing; name one or more")
    if missing := sorted(set(chosen) - set(recorded)):
        raise UsageError(f"ranks: {listed(missing)} not recorded here; recorded are {listed(recorded)}")
    return chosen


def windows_of(timeline: Timeline, step: int | None) -> dict[int, Interval]:
    """Return, by rank, the window of a step or of the whole run; windows and errors as for `coverage`."""
    if not timeline.spans:
        raise UsageError(
            "the timeline has no spans: nothing was computed, communicated or marked as a step; record a run that does"
        )
    if step is None:
        start_ns, end_ns = int(timeline.columns.start_ns.min()), int(timeline.columns.end_ns.max())
        return dict.fromkeys(timeline.ranks(), (start_ns, end_ns))
    windows = _windows_of_step(timeline.ranks(), _step_windows(timeline), step)
    if not windows:
        raise UsageError(f"step: nobody recorded step {step}; recorded are {listed(timeline.steps()) or 'none'}")
    return windows


def _windows_of_step(
    ranks: Sequence[int], steps: Mapping[int, Mapping[int, Interval]], step: int
) -> dict[int, Interval]:  # fmt: skip
    """Return the windows of a step by rank, also of ranks that mark no steps; none if no rank recorded it."""
    windows = {rank: windows[step] for rank, windows in steps.items() if step in windows}
    if not windows:
        return {}
    all_of_it = min(start for start, _ in windows.values()), max(end for _, end in windows.values())
    return windows | {rank: all_of_it for rank in ranks if rank not in steps}


def issued_in(timeline: Timeline, windows: Mapping[int, Interval], step: int | None) -> Mask:
    """Return a mask over spans: operations that ranks with a window issued in a step, whenever they ran.

    Of a rank whose operations have no step, and without a step, those count that begin in its window.
    """
    columns = timeline.columns
    ranks = np.array(sorted(windows), np.int64)
    low_ns, high_ns = np.array([windows[rank] for rank in ranks.tolist()], np.int64).reshape(-1, 2).T
    # For each span, the position of its rank among the ranks with a window; others get a wrong one, and are masked.
    index = np.minimum(np.searchsorted(ranks, columns.rank), len(ranks) - 1)
    is_chosen = columns.is_operation & (ranks[index] == columns.rank)
    begins_inside: Mask = is_chosen & (low_ns[index] <= columns.start_ns) & (columns.start_ns < high_ns[index])
    if step is None:
        return begins_inside
    blocks, labelled = _step_blocks(columns), is_chosen & (columns.step != NONE)
    begun_ns = np.array([blocks.get(rank, {}).get(step, windows[rank])[0] for rank in ranks.tolist()], np.int64)
    issued = labelled & (columns.step == step) & (columns.called_ns >= begun_ns[index])
    return np.where(np.isin(columns.rank, columns.rank[labelled]), issued, begins_inside)


def _step_blocks(columns: SpanColumns) -> dict[int, dict[int, Interval]]:
    """Return, by rank and step, the interval of the step span; the latest, if an index was used twice."""
    blocks: dict[int, dict[int, Interval]] = {}
    marked = columns.take(columns.is_kind("step") & (columns.step != NONE))
    rows = (marked.rank, marked.step, marked.start_ns, marked.end_ns)
    for rank, step, start_ns, end_ns in zip(*(row.tolist() for row in rows), strict=True):
        blocks.setdefault(rank, {})[step] = start_ns, end_ns
    return blocks


def _step_windows(timeline: Timeline) -> dict[int, dict[int, Interval]]:
    """Return the window of each step, by rank and step, as `coverage` defines it."""
    columns = timeline.columns
    blocks = _step_blocks(columns)
    computed = _compute_intervals(columns)
    return {rank: _rank_step_windows(steps, computed.get(rank, {})) for rank, steps in blocks.items()}


def _compute_intervals(columns: SpanColumns) -> dict[int, dict[int, Interval]]:
    """Return, by rank and step, the interval from first to last compute that was issued in the step."""
    issued = columns.take(columns.is_kind("compute") & (columns.step != NONE))
    issued = issued.take(np.lexsort((issued.step, issued.rank)))
    firsts = run_starts(issued.rank, issued.step)
    intervals: dict[int, dict[int, Interval]] = {}
    if len(firsts):
        start_ns = np.minimum.reduceat(issued.start_ns, firsts)
        end_ns = np.maximum.reduceat(issued.end_ns, firsts)
        rows = (issued.rank[firsts], issued.step[firsts], start_ns, end_ns)
        for rank, step, first_ns, last_ns in zip(*(row.tolist() for row in rows), strict=True):
            intervals.setdefault(rank, {})[step] = first_ns, last_ns
    return intervals


def _rank_step_windows(blocks: Mapping[int, Interval], computed: Mapping[int, Interval]) -> dict[int, Interval]:
    """Return the windows of one rank's steps, from step spans and computes; computes run in the order of issue."""
    free_ns = sorted(end_ns for _, end_ns in computed.values())
    windows: dict[int, Interval] = {}
    for step, (start_ns, end_ns) in blocks.items():
        first_ns, last_ns = computed.get(step, (start_ns, end_ns))
        before = bisect_right(free_ns, first_ns)  # steps whose computes were over by then
        start_ns = max(start_ns, free_ns[before - 1]) if before else start_ns
        windows[step] = start_ns, max(start_ns, end_ns, last_ns)
    return windows
