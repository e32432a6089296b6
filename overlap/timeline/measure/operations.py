"""Costs of operations by place in the program: how often, how large, queued, waited, moved, exposed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...collectives.kinds import Collective
from ..columnar import Rows, SpanColumns, run_starts
from ..spans import ORIGIN, Timeline
from .activity import WAITING, WIRE, Activity
from .steps import issued_in, of_steps, rank_windows

_COLLECTIVES = {each.value: each for each in Collective} | {each.text: each for each in Collective}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """All operations of one kind from one line of the program, with one algorithm: sums over ranks.

    Profiles of other tools show no lines: there, those of one size.
    """

    op: str  # Name of the operation
    call_site: str  # "file:line", or ""
    algorithm: str  # algorithm of the operations
    ranks: int  # Size of the largest group
    count: int  # How many spans
    nbytes: int  # sum over all spans
    queued_ns: int  # From the call to the start
    waiting_ns: int  # For the last rank
    transfer_ns: int  # In which bytes moved
    # Without compute; of operations in flight together, the oldest that moves bytes has the time, or else the oldest
    # that waits
    exposed_ns: int
    exposed_waiting_ns: int  # The part of that in which it waited for a rank; bytes moved in the rest

    @property
    def algbw_bytes_per_s(self) -> float:
        """Bytes of the operations by the time in which they moved; 0.0 if that is 0."""
        return self.nbytes / (self.transfer_ns / 1e9) if self.transfer_ns else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """Algorithm bandwidth times the bus factor of the operation, as nccl-tests defines it."""
        return self.algbw_bytes_per_s * bus_factor(self.op, self.ranks)


def bus_factor(op: str, ranks: int) -> float:
    """Return the factor from the algorithm bandwidth of an operation to its bus bandwidth; 1.0 if it is not known."""
    kind = _COLLECTIVES.get(op)
    return kind.bus_factor(ranks) if kind and ranks else 1.0


def operations(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Operations]:
    """Return the sums over operations that ranks issued in a step, by line, the most exposed first.

    Exposed time is that inside the windows, so that it adds up to that of the ranks: also that of operations of the
    same line that another step has issued. If none of the operations of a line was issued in the step, those count that
    were under way and exposed. Arguments and errors are those of `rank_windows`.
    """
    return sum_operations(timeline, Activity(timeline, of_steps(rank_windows(timeline, step=step, ranks=ranks))))


def sum_operations(timeline: Timeline, activity: Activity) -> list[Operations]:
    """Return the same of the windows of an activity of ranks that count."""
    windows = activity.windows
    exposed_ns = np.zeros((2, len(activity.columns)), np.int64)  # by row: all, and waiting
    pieces = activity.pieces()
    pieces = pieces.take(np.isin(pieces.doing, (WIRE, WAITING)))
    for window in windows:
        mine = pieces.take(slice(*np.searchsorted(pieces.rank, [window.rank, window.rank + 1])))
        inside_ns = np.minimum(mine.end_ns, window.end_ns) - np.maximum(mine.start_ns, window.start_ns)
        lengths_ns, waits = np.maximum(inside_ns, 0), mine.doing == WAITING
        np.add.at(exposed_ns[0], mine.row, lengths_ns)
        np.add.at(exposed_ns[1], mine.row[waits], lengths_ns[waits])
    (under_way,) = np.nonzero(exposed_ns[0])
    sized = ORIGIN in timeline.meta
    exposed = _rows_by_line(activity.columns, under_way[activity.columns.is_operation[under_way]], sized=sized)
    issued_rows = np.flatnonzero(issued_in(timeline, windows, windows[0].step))
    issued = _rows_by_line(timeline.columns, issued_rows, sized=sized)
    sums = []
    for line, rows in (exposed | issued).items():
        spans = (timeline if line in issued else activity).columns.take(rows)
        sums_ns = exposed_ns[:, exposed[line]].sum(axis=1).tolist() if line in exposed else [0, 0]
        sums.append(_sum_operations(spans, *sums_ns))
    return sorted(sums, key=lambda one: (-one.exposed_ns, -one.transfer_ns, one.op, one.call_site, one.algorithm))


def _rows_by_line(columns: SpanColumns, rows: Rows, *, sized: bool) -> dict[tuple[int, ...], Rows]:
    """Return rows by operation, call site and algorithm, and by size if `sized`; the keys are column values."""
    kinds = [each.astype(np.int64) for each in (columns.op, columns.call_site, columns.algorithm)]
    kinds += [columns.nbytes] if sized else []
    rows = rows[np.lexsort([each[rows] for each in reversed(kinds)])]
    keys = [each[rows] for each in kinds]
    firsts = run_starts(*keys)
    lines = zip(*(key[firsts].tolist() for key in keys), strict=True)
    return dict(zip(lines, np.split(rows, firsts[1:]), strict=False))


def _sum_operations(spans: SpanColumns, exposed_ns: int, exposed_waiting_ns: int) -> Operations:
    """Return the sums over spans of one line; the exposed times, which no span has, are given."""
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
