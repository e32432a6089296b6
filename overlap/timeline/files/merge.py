"""Merging the timelines of the processes of one run into one: the last rank of each operation becomes known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...collectives.kinds import Collective
from ...errors import UsageError
from ..columnar import SpanColumns, run_starts
from ..spans import CUT, STARVED, Timeline

CLOCK_ERROR = "clock_error_ns"
"""Key in `meta`: how far, at most, any instant may be from the common clock."""


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Join the timelines of the processes of one run, all on one clock already.

    Each process knows only when its own ranks came to a collective; merging tells when the last of all came.

    Raises:
        UsageError: They cannot be of one run: their world sizes or clocks differ, or a rank is in two of them.
    """
    first, *rest = timelines
    for other in rest:
        if (other.world_size, other.clock) != (first.world_size, first.clock):
            raise UsageError(
                f"not of one run: {first.world_size} ranks on the {first.clock} clock, "
                f"and {other.world_size} on the {other.clock} clock; name the files of one run"
            )
    ranks = sorted(rank for timeline in timelines for rank in timeline.ranks())
    for rank, following in pairwise(ranks):
        if rank == following:
            raise UsageError(f"not parts of one run: rank {rank} is in two of them; name the files of one run")
    columns = SpanColumns.concatenate(timeline.columns for timeline in timelines) if rest else first.columns
    dropped = sum(timeline.dropped for timeline in timelines)
    return Timeline.of_columns(
        _with_meetings(columns), world_size=first.world_size, clock=first.clock, dropped=dropped,
        meta=_merged_meta([timeline.meta for timeline in timelines]),
    )  # fmt: skip


def _merged_meta(metas: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the facts of all parts together: those of the first, and the largest clock error."""
    meta = dict(metas[0])
    if errors := [int(each[CLOCK_ERROR]) for each in metas if CLOCK_ERROR in each]:
        meta[CLOCK_ERROR] = str(max(errors))
    if cut := [each[CUT] for each in metas if CUT in each]:
        meta[CUT] = cut[0]
    if starved := [each[STARVED] for each in metas if STARVED in each]:
        meta[STARVED] = " ".join(starved)
    return meta


def _with_meetings(columns: SpanColumns) -> SpanColumns:
    """Return columns with `met_ns` of each operation whose ranks are all here."""
    rows = np.flatnonzero(columns.is_operation)
    if not len(rows):
        return columns
    kind = columns.operation_kind[rows]
    order = np.lexsort((columns.seq[rows], kind))
    rows, kind = rows[order], kind[order]
    firsts = run_starts(kind, columns.seq[rows])
    sizes = np.array([len(group.ranks) for group in columns.groups])
    came = np.diff(np.append(firsts, len(rows)))
    is_complete = np.repeat(came == sizes[columns.group[rows[firsts]]], came)
    last_ns = np.repeat(np.maximum.reduceat(columns.start_ns[rows], firsts), came)
    rows, last_ns = rows[is_complete], last_ns[is_complete]
    met_ns, end_ns = columns.met_ns.copy(), columns.end_ns[rows]
    # A send may end before its receiver comes: it has not waited. No other operation ends before the last rank has
    # come; where clocks say so, they are off by less than their error.
    ended_early = (last_ns > end_ns) & _is_send(columns)[rows]
    met_ns[rows] = np.where(ended_early, columns.start_ns[rows], np.minimum(last_ns, end_ns))
    return replace(columns, met_ns=met_ns)


def _is_send(columns: SpanColumns) -> NDArray[np.bool_]:
    """Whether each span is the sender's end of a message."""
    sources = np.array([group.ranks[0] if group.ranks else -1 for group in columns.groups], np.int64)
    message = [number for number, text in enumerate(columns.texts) if text == Collective.P2P.text]
    found: NDArray[np.bool_] = np.isin(columns.op, message) & (sources[columns.group] == columns.rank)
    return found
