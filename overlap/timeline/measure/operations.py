"""Costs of operations by place in the program: how often, how large, queued, waited, moved, exposed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...collectives.kinds import Collective
from ..columnar import SpanColumns, runs
from ..spans import Timeline
from .intervals import Merged, intersect, length, union
from .metrics import begin_inside, coverage

_COLLECTIVES = {each.value: each for each in Collective} | {each.text: each for each in Collective}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """All operations of one kind from one line of the program, with one algorithm: sums over ranks."""

    op: str  # Name of the operation
    call_site: str  # "file:line", or ""
    algorithm: str  # Which it was carried out with
    ranks: int  # Size of the largest group
    count: int  # How many spans
    nbytes: int  # Of all spans
    queued_ns: int  # From the call to the start
    waiting_ns: int  # For the last rank
    transfer_ns: int  # In which bytes moved
    exposed_ns: int  # Of the two, the time that no compute of the rank covers; simultaneous operations count each

    @property
    def algbw_bytes_per_s(self) -> float:
        """Bytes of an operation by the time in which they moved."""
        return self.nbytes / (self.transfer_ns / 1e9) if self.transfer_ns else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bandwidth of the wires as nccl-tests defines it."""
        kind = _COLLECTIVES.get(self.op)
        return self.algbw_bytes_per_s * (kind.bus_factor(self.ranks) if kind and self.ranks else 1.0)


def operations(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Operations]:
    """Add up the costs of the operations that begin in the window of their rank, the most exposed first.

    Arguments and errors are those of `metrics.coverage`.
    """
    covers = coverage(timeline, step=step, ranks=ranks)
    inside = begin_inside(timeline.columns, {cover.rank: cover.window for cover in covers})
    found = timeline.columns.take(inside & timeline.columns.is_operation)
    order = np.lexsort((found.rank, found.algorithm, found.call_site, found.op))
    found = found.take(order)
    firsts = runs(found.op, found.call_site, found.algorithm)
    parts = np.split(np.arange(len(found)), firsts[1:]) if len(firsts) else []
    exposed = {cover.rank: cover.exposed for cover in covers}
    told = [_added(found.take(rows), exposed) for rows in parts]
    return sorted(told, key=lambda one: (-one.exposed_ns, -one.transfer_ns, one.op, one.call_site, one.algorithm))


def _added(spans: SpanColumns, exposed: Mapping[int, Merged]) -> Operations:
    """Add up operations that are alike."""
    by_rank = spans.rows_by_rank(np.ones(len(spans), bool)).items()
    exposed_ns = sum(
        length(intersect(union(spans.start_ns[rows], spans.end_ns[rows]), exposed[rank])) for rank, rows in by_rank
    )
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
    )
