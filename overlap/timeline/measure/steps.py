"""Windows of steps: from when to when a step of each rank is measured, and which operations it has issued."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from ...errors import UsageError
from ...ranklist import format_rank_list
from ..columnar import NONE, Int64s, Mask, Rows, SpanColumns, run_starts
from ..spans import Timeline
from .intervals import Interval


class RankWindow(NamedTuple):
    """Window of time in which one rank is measured."""

    rank: int
    step: int | None  # None for the whole run, and for a rank that marks no steps
    start_ns: int
    end_ns: int


class _OfStep(Protocol):
    @property
    def step(self) -> int | None: ...


_Measured = TypeVar("_Measured", bound=_OfStep)


def rank_windows(
    timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None
) -> list[RankWindow]:
    """Return the window of each rank, ranks ascending.

    Without a step, the window is from the first start to the last end over all ranks. With a step, it is the step span
    of the rank (the latest one, if an index was used twice). A program may leave a step before its computes have run:
    then the window ends with the last compute that was issued in the step, and begins when the computes of earlier
    steps have ended, so that the windows follow each other. A rank that marks no steps has step None, and the window
    from the first to the last instant of the other ranks; `keep_ranks_with_steps` leaves it out.

    Args:
        timeline: The run.
        step: A step index, or None for the whole run.
        ranks: World ranks to look at; None means all that have spans (and, with a step, that recorded that step).

    Raises:
        UsageError: If the timeline is empty, no rank recorded that step, or `ranks` is empty or has one without spans.
    """
    columns = timeline.columns
    if not len(columns):
        raise UsageError(
            "the timeline has no spans: nothing was computed, communicated or marked as a step; record a run that does"
        )
    if step is None:
        start_ns, end_ns = int(columns.start_ns.min()), int(columns.end_ns.max())
        found = [RankWindow(rank, None, start_ns, end_ns) for rank in timeline.ranks()]
    else:
        found = _windows_of_step(timeline.ranks(), _step_windows(columns), step)
    if not found:
        raise UsageError(
            f"step: nobody recorded step {step}; recorded are {format_rank_list(timeline.steps()) or 'none'}"
        )
    recorded = [window.rank for window in found]
    chosen = recorded if ranks is None else sorted(set(ranks))
    if not chosen:
        raise UsageError("ranks: an empty selection shows nothing; name one or more")
    if missing := sorted(set(chosen) - set(recorded)):
        what = "have no spans" if step is None else f"did not record step {step}"
        raise UsageError(f"ranks: {format_rank_list(missing)} {what}; recorded are {format_rank_list(recorded)}")
    return [window for window in found if window.rank in chosen]


def windows_by_step(timeline: Timeline) -> dict[int | None, list[RankWindow]]:
    """Return the windows of all ranks by step, in order; if no step is recorded, those of the whole run under key None.

    Raises:
        UsageError: The timeline has no spans.
    """
    steps, ranks = _step_windows(timeline.columns), timeline.ranks()
    found: dict[int | None, list[RankWindow]] = {
        step: _windows_of_step(ranks, steps, step) for step in timeline.steps()
    }
    return found or {None: rank_windows(timeline)}


def keep_ranks_with_steps(measured: Sequence[_Measured]) -> list[_Measured]:
    """Keep the windows, or measures, whose `step` is not None: ranks without steps do not count in figures of a step.

    If `step` is None everywhere, as for the whole run, all are kept.
    """
    return [one for one in measured if one.step is not None] or list(measured)


def median_step(timeline: Timeline) -> int | None:
    """Return the step of median length, the shorter one of two in the middle; None if no step is recorded.

    The length of a step is that of its slowest rank. Of three and more steps the first one is left out: it includes
    cold caches and other costs of a start.
    """
    walls: dict[int, int] = {}
    for windows in _step_windows(timeline.columns).values():
        for step, (start_ns, end_ns) in windows.items():
            walls[step] = max(walls.get(step, 0), end_ns - start_ns)
    if len(walls) > 2:
        del walls[min(walls)]
    ordered = sorted(walls, key=lambda step: (walls[step], step))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def issued_in_step(timeline: Timeline, windows: Sequence[RankWindow], step: int | None) -> Mask:
    """Return a mask of the operations that ranks issued in a step, whenever they ran.

    If a rank's operations have no step, those that begin in the rank's window count.

    Args:
        timeline: The run.
        windows: Windows of ranks, ranks ascending; at least one. Other ranks do not count.
        step: The step; None: operations count that begin in the window of their rank.
    """
    columns = timeline.columns
    ranks, low_ns, high_ns = np.array([(one.rank, one.start_ns, one.end_ns) for one in windows], np.int64).T
    # For each span, the index of its rank's window. Ranks without a window get a wrong index, and are masked out.
    index = np.minimum(np.searchsorted(ranks, columns.rank), len(ranks) - 1)
    is_chosen = columns.is_operation & (ranks[index] == columns.rank)
    begins_inside: Mask = is_chosen & (low_ns[index] <= columns.start_ns) & (columns.start_ns < high_ns[index])
    if step is None:
        return begins_inside
    blocks, labelled = _step_span_intervals(columns), is_chosen & (columns.step != NONE)
    # A program may use a step index twice: only calls in the latest step with this index count.
    begun_ns = np.array([blocks.get(one.rank, {}).get(step, (one.start_ns,))[0] for one in windows], np.int64)
    issued = labelled & (columns.step == step) & (columns.called_ns >= begun_ns[index])
    return np.where(np.isin(columns.rank, columns.rank[labelled]), issued, begins_inside)


def _windows_of_step(
    ranks: Sequence[int], steps: Mapping[int, Mapping[int, Interval]], step: int
) -> list[RankWindow]:  # fmt: skip
    """Return the windows of a step, also of ranks that mark no steps; [] if no rank recorded it."""
    own = {rank: windows[step] for rank, windows in steps.items() if step in windows}
    if not own:
        return []
    all_of_it = min(start for start, _ in own.values()), max(end for _, end in own.values())
    return [
        RankWindow(rank, step, *own[rank]) if rank in own else RankWindow(rank, None, *all_of_it)
        for rank in ranks if rank in own or rank not in steps
    ]  # fmt: skip


def _step_span_intervals(columns: SpanColumns) -> dict[int, dict[int, Interval]]:
    """Return the interval of each step span, by rank and step; the latest one, if a step index was used twice."""
    marked = np.flatnonzero(columns.is_kind("step") & (columns.step != NONE))
    return _group_by_rank_and_step(columns, marked, columns.start_ns[marked], columns.end_ns[marked])


def _group_by_rank_and_step(
    columns: SpanColumns, rows: Rows, start_ns: Int64s, end_ns: Int64s
) -> dict[int, dict[int, Interval]]:
    """Arrange intervals of rows by rank and step; of several with one rank and step, the last row counts."""
    found: dict[int, dict[int, Interval]] = {}
    fields = (columns.rank[rows], columns.step[rows], start_ns, end_ns)
    for rank, step, start, end in zip(*(field.tolist() for field in fields), strict=True):
        found.setdefault(rank, {})[step] = start, end
    return found


def _step_windows(columns: SpanColumns) -> dict[int, dict[int, Interval]]:
    """Return the window of each step, by rank and step, as `rank_windows` defines it."""
    computed = _compute_intervals(columns)
    return {
        rank: _rank_step_windows(steps, computed.get(rank, {})) for rank, steps in _step_span_intervals(columns).items()
    }


def _compute_intervals(columns: SpanColumns) -> dict[int, dict[int, Interval]]:
    """Return, by rank and step, the interval from the first to the last compute that was issued in the step."""
    issued = np.flatnonzero(columns.is_kind("compute") & (columns.step != NONE))
    issued = issued[np.lexsort((columns.step[issued], columns.rank[issued]))]
    if not len(issued):
        return {}
    firsts = run_starts(columns.rank[issued], columns.step[issued])
    start_ns = np.minimum.reduceat(columns.start_ns[issued], firsts)
    end_ns = np.maximum.reduceat(columns.end_ns[issued], firsts)
    return _group_by_rank_and_step(columns, issued[firsts], start_ns, end_ns)


def _rank_step_windows(blocks: Mapping[int, Interval], computed: Mapping[int, Interval]) -> dict[int, Interval]:
    """Return the windows of one rank by step, as `rank_windows` describes it.

    `computed` has, for steps with computes, the interval from the first to the last.
    """
    free_ns = sorted(end_ns for _, end_ns in computed.values())  # when the computes of each step had ended
    windows: dict[int, Interval] = {}
    for step, (start_ns, end_ns) in blocks.items():
        first_ns, last_ns = computed.get(step, (start_ns, end_ns))
        before = bisect_right(free_ns, first_ns)  # number of steps whose computes had ended by then
        start_ns = max(start_ns, free_ns[before - 1]) if before else start_ns
        windows[step] = start_ns, max(start_ns, end_ns, last_ns)
    return windows
