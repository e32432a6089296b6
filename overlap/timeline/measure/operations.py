"""Costs of operations by line of the program: number, bytes, and time queued, waiting, moving and exposed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...collectives.kinds import Collective
from ..columnar import Rows, SpanColumns, run_starts
from ..spans import ORIGIN, Timeline
from .activity import WAITING, WIRE, Activity
from .steps import issued_in_step, keep_ranks_with_steps, rank_windows

_COLLECTIVES = {each.value: each for each in Collective} | {each.text: each for each in Collective}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """All operations of one kind from one line of the program, with one algorithm, added up over ranks.

    Traces of other tools show no lines: there, operations of one kind and size are added up.
    """

    op: str  # Name of the operation
    call_site: str  # "file:line", or ""
    algorithm: str  # Algorithm of the operations
    ranks: int  # Size of the largest group
    count: int  # Number of spans
    nbytes: int  # Sum over all spans
    queued_ns: int  # Time from calls to starts
    waiting_ns: int  # Time from starts to the arrival of the last rank
    transfer_ns: int  # Time in which bytes moved
    # Time without compute. If several operations are in flight, it goes to the oldest one that moves bytes; if none
    # does, to the oldest one that waits.
    exposed_ns: int
    exposed_waiting_ns: int  # The part of `exposed_ns` in which an operation waited for a rank

    @property
    def algbw_bytes_per_s(self) -> float:
        """Bytes of the operations divided by the time in which they moved; 0.0 if that is 0."""
        return self.nbytes / (self.transfer_ns / 1e9) if self.transfer_ns else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """Algorithm bandwidth times the bus factor of the operation, as nccl-tests defines it."""
        return self.algbw_bytes_per_s * bus_factor(self.op, self.ranks)


def bus_factor(op: str, ranks: int) -> float:
    """Return the factor from algorithm bandwidth to bus bandwidth of an operation; 1.0 for unknown operations."""
    kind = _COLLECTIVES.get(op)
    return kind.bus_factor(ranks) if kind and ranks else 1.0


def sum_operations_by_line(
    timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None
) -> list[Operations]:
    """Add up the operations that ranks issued in a step, by line of the program; the most exposed line is first.

    The exposed time of a line is that inside the windows of the ranks, also of its operations from other steps. So the
    sum over all lines is the exposed time of the ranks. If no operation of a line was issued in the step, the other
    sums are over its operations that were exposed in it.

    Args:
        timeline: The run.
        step: A step index, or None for the whole run.
        ranks: World ranks to look at; None means all. Ranks that mark no steps, while others do, are left out.

    Raises:
        UsageError: The timeline is empty, no rank recorded the step, or `ranks` is empty or has one without spans.
    """
    return sum_operations_in_windows(
        timeline, Activity(timeline, keep_ranks_with_steps(rank_windows(timeline, step=step, ranks=ranks)))
    )


def sum_operations_in_windows(timeline: Timeline, activity: Activity) -> list[Operations]:
    """Add up operations by line, as `sum_operations_by_line` does, in the windows of an activity.

    Args:
        timeline: The run.
        activity: What ranks did in some windows of one step, or of the whole run.
    """
    windows = activity.windows
    # Exposed time, and the waiting part of it, of each span of the activity.
    exposed_ns, waiting_ns = (np.zeros(len(activity.columns), np.int64) for _ in range(2))
    pieces = activity.pieces()
    pieces = pieces.take(np.isin(pieces.doing, (WIRE, WAITING)))
    for window in windows:
        own = pieces.take(slice(*np.searchsorted(pieces.rank, [window.rank, window.rank + 1])))
        inside_ns = np.minimum(own.end_ns, window.end_ns) - np.maximum(own.start_ns, window.start_ns)
        lengths_ns = np.maximum(inside_ns, 0)
        np.add.at(exposed_ns, own.row, lengths_ns)
        np.add.at(waiting_ns, own.row, np.where(own.doing == WAITING, lengths_ns, 0))
    (under_way,) = np.nonzero(exposed_ns)
    sized = ORIGIN in timeline.meta
    exposed = _rows_by_line(activity.columns, under_way[activity.columns.is_operation[under_way]], sized=sized)
    issued_rows = np.flatnonzero(issued_in_step(timeline, windows, windows[0].step))
    issued = _rows_by_line(timeline.columns, issued_rows, sized=sized)
    sums = []
    for line, rows in (exposed | issued).items():
        spans = (timeline if line in issued else activity).columns.take(rows)
        exposed_rows = exposed.get(line, rows[:0])
        times_ns = int(exposed_ns[exposed_rows].sum()), int(waiting_ns[exposed_rows].sum())
        sums.append(_sum_operations_of_line(spans, *times_ns))
    return sorted(sums, key=lambda one: (-one.exposed_ns, -one.transfer_ns, one.op, one.call_site, one.algorithm))


def _rows_by_line(columns: SpanColumns, rows: Rows, *, sized: bool) -> dict[tuple[int, ...], Rows]:
    """Group rows by (operation, call site, algorithm), and by bytes if `sized`; the keys are values of the columns."""
    kinds = [column.astype(np.int64) for column in (columns.op, columns.call_site, columns.algorithm)]
    kinds += [columns.nbytes] if sized else []
    rows = rows[np.lexsort([column[rows] for column in reversed(kinds)])]
    keys = [column[rows] for column in kinds]
    firsts = run_starts(*keys)
    lines = zip(*(key[firsts].tolist() for key in keys), strict=True)
    return dict(zip(lines, np.split(rows, firsts[1:]), strict=False))


def _sum_operations_of_line(spans: SpanColumns, exposed_ns: int, exposed_waiting_ns: int) -> Operations:
    """Sum the operations (at least one) that one line issued: same op, call site and algorithm.

    The exposed times of the line do not follow from the spans.
    """
    return Operations(
        op=spans.texts[spans.op[0]],
        call_site=spans.texts[spans.call_site[0]],
        algorithm=spans.texts[spans.algorithm[0]],
        ranks=max(len(spans.groups[group].ranks) for group in np.unique(spans.group).tolist()),
        count=len(spans),
        nbytes=int(spans.nbytes.sum()),
        queued_ns=int((spans.start_ns - spans.issued_ns).sum()),
        waiting_ns=int((spans.met_ns - spans.start_ns).sum()),
        transfer_ns=int((spans.end_ns - spans.met_ns).sum()),
        exposed_ns=exposed_ns,
        exposed_waiting_ns=exposed_waiting_ns,
    )
