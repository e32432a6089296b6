"""Joining the timelines of the processes of one run: then it is known when the last rank of each operation arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...collectives.kinds import Collective
from ...errors import UsageError
from ..columnar import SpanColumns, run_lengths, run_starts
from ..spans import CUT, STARVED, Timeline

CLOCK_ERROR = "clock_error_ns"
"""Key in `meta`: the largest error of an instant on the common clock, in nanoseconds."""


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Join the timelines of the processes of one run, whose instants are on one clock already.

    A process knows only when its own ranks arrived at a collective. Here `met_ns`, the arrival of the last rank of all,
    is set.

    Raises:
        UsageError: The timelines cannot be of one run: world sizes or clocks differ, or a rank is in two of them.
    """
    first, *rest = timelines
    for number, other in enumerate(rest, 2):
        if (other.world_size, other.clock) != (first.world_size, first.clock):
            raise UsageError(
                f"not of one run: trace 1 has {first.world_size} ranks on the {first.clock} clock, "
                f"trace {number} has {other.world_size} on the {other.clock} clock; name the files of one run"
            )
    trace_of_rank: dict[int, int] = {}
    for number, timeline in enumerate(timelines, 1):
        for rank in timeline.ranks():
            if (earlier := trace_of_rank.setdefault(rank, number)) != number:
                both = f"rank {rank} is in traces {earlier} and {number}"
                raise UsageError(f"not parts of one run: {both}; name the files of one run")
    columns = SpanColumns.concatenate(timeline.columns for timeline in timelines) if rest else first.columns
    dropped = sum(timeline.dropped for timeline in timelines)
    return Timeline.of_columns(
        _with_meeting_instants(columns), world_size=first.world_size, clock=first.clock, dropped=dropped,
        meta=_merge_meta([timeline.meta for timeline in timelines]),
    )  # fmt: skip


def _merge_meta(metas: Sequence[dict[str, str]]) -> dict[str, str]:
    """Join the facts of the parts: those of the first, the largest clock error, whether any was cut, starved ranks."""
    meta = dict(metas[0])
    if errors := [int(each[CLOCK_ERROR]) for each in metas if CLOCK_ERROR in each]:
        meta[CLOCK_ERROR] = str(max(errors))
    if cut := [each[CUT] for each in metas if CUT in each]:
        meta[CUT] = cut[0]
    if starved := [each[STARVED] for each in metas if STARVED in each]:
        meta[STARVED] = " ".join(starved)
    return meta


def _with_meeting_instants(columns: SpanColumns) -> SpanColumns:
    """Return the spans with `met_ns` (arrival of the last rank) set for each operation whose ranks are all here."""
    rows = np.flatnonzero(columns.is_operation)
    if not len(rows):
        return columns
    # Sort the spans so that those of one operation follow each other.
    kind = columns.operation_key[rows]
    order = np.lexsort((columns.seq[rows], kind))
    rows, kind = rows[order], kind[order]
    firsts = run_starts(kind, columns.seq[rows])
    sizes = np.array([len(group.ranks) for group in columns.groups])
    arrival_counts = run_lengths(firsts, len(rows))
    is_complete = np.repeat(arrival_counts == sizes[columns.group[rows[firsts]]], arrival_counts)
    last_ns = np.repeat(np.maximum.reduceat(columns.start_ns[rows], firsts), arrival_counts)
    rows, last_ns = rows[is_complete], last_ns[is_complete]
    met_ns, end_ns = columns.met_ns.copy(), columns.end_ns[rows]
    # A send may end before its receiver arrives: then it has not waited. No other operation ends before the last rank
    # has arrived; if it seems so, the clocks differ slightly, and the end counts.
    ended_early = (last_ns > end_ns) & _is_send(columns)[rows]
    met_ns[rows] = np.where(ended_early, columns.start_ns[rows], np.minimum(last_ns, end_ns))
    return replace(columns, met_ns=met_ns)


def _is_send(columns: SpanColumns) -> NDArray[np.bool_]:
    # The group of a message is (sender, receiver).
    senders = np.array([group.ranks[0] if group.ranks else -1 for group in columns.groups], np.int64)
    message_ops = [index for index, text in enumerate(columns.texts) if text == Collective.P2P.text]
    is_send: NDArray[np.bool_] = np.isin(columns.op, message_ops) & (senders[columns.group] == columns.rank)
    return is_send
