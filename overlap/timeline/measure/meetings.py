"""Meetings of ranks: which spans are one operation on several ranks, and which rank came last to each operation."""

from __future__ import annotations

import numpy as np

from ..columnar import Int64s, Rows, SpanColumns, run_starts

PAIRED = frozenset({"send", "recv", "send/recv"})
"""Operations between two ranks, whose sequence numbers do not match a whole group."""


def meetings(columns: SpanColumns) -> Rows:
    """Return the number of the operation that each of n spans is part of; -1 for a span that is no operation.

    The spans of one operation have the same group, stream, operation and sequence number. Messages of different tags
    between two ranks have the same numbers, but have met at different instants. Cost: a sort of the operations.
    """
    rows = np.flatnonzero(columns.is_operation)
    numbers = np.full(len(columns), -1, np.intp)
    if len(rows):
        keys = _match_keys(columns.take(rows))
        order = np.lexsort(keys)
        # The first row of each operation, in sorted order, counts the number of the operation up.
        first = np.zeros(len(rows), np.intp)
        first[run_starts(*(key[order] for key in keys))] = 1
        numbers[rows[order]] = np.cumsum(first) - 1
    return numbers


def _match_keys(operations: SpanColumns) -> list[Int64s]:
    """Return the sort keys of operations, equal for spans of one operation; those of messages include their instant."""
    texts = len(operations.texts) + 1
    paired = [number for number, text in enumerate(operations.texts) if text in PAIRED]
    met_ns = np.where(np.isin(operations.op, paired), operations.met_ns, 0)
    kind = (operations.group.astype(np.int64) * texts + operations.lane) * texts + operations.op
    return [kind, operations.seq, met_ns] if met_ns.any() else [kind, operations.seq]


def last_rows(columns: SpanColumns) -> Rows:
    """Return, for each of n spans, the row of the span of the rank that came last to the same operation.

    It is -1 where that is not known: for a span that is no operation, and for an operation that only one rank has
    recorded. Of several last ranks the lowest counts. Cost: two sorts of the operations.
    """
    meeting = meetings(columns)
    last_row = np.full(len(columns), -1, np.intp)
    rows = np.flatnonzero(meeting >= 0)
    if not len(rows):
        return last_row
    rows = rows[np.argsort(meeting[rows], kind="stable")]
    meeting, firsts = meeting[rows], run_starts(meeting[rows])
    start_ns, rank = columns.start_ns[rows], columns.rank[rows]
    # Per operation: ranks with the latest start, of these the lowest one, and the row of its span.
    is_last = start_ns == np.maximum.reduceat(start_ns, firsts)[meeting]
    lowest = np.minimum.reduceat(np.where(is_last, rank, np.iinfo(np.int64).max), firsts)
    is_last &= rank == lowest[meeting]
    last = np.minimum.reduceat(np.where(is_last, rows, len(columns)), firsts)
    is_shared = np.minimum.reduceat(rank, firsts) != np.maximum.reduceat(rank, firsts)
    last_row[rows] = np.where(is_shared, last, -1)[meeting]
    return last_row
