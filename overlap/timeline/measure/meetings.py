"""Meetings of ranks: which spans are one operation on several ranks, and which rank came last to each operation."""

from __future__ import annotations

import numpy as np

from ..columnar import Int64s, Rows, SpanColumns, run_starts

PAIRED = frozenset({"send", "recv", "send/recv"})
"""Operations between two ranks, whose sequence numbers do not match a whole group."""


def last_rows(columns: SpanColumns) -> Rows:
    """Return, for each of n spans, the row of the span of the rank that came last to the same operation.

    The spans of one operation have the same group, stream, operation and sequence number. Messages of different tags
    between two ranks have the same numbers, but have met at different instants. The row is -1 where the last rank is
    not known: for a span that is no operation, and for an operation that only one rank has recorded. Of several last
    ranks the lowest counts. Cost: a sort of the operations.
    """
    last_row = np.full(len(columns), -1, np.intp)
    rows = np.flatnonzero(columns.is_operation)
    if not len(rows):
        return last_row
    operations = columns.take(rows)
    keys = _match_keys(operations)
    order = np.lexsort((-rows, -operations.rank, operations.start_ns, *keys))
    firsts = run_starts(*(key[order] for key in keys))
    counts = np.diff(np.append(firsts, len(rows)))
    rank, rows = operations.rank[order], rows[order]
    is_shared = np.minimum.reduceat(rank, firsts) != np.maximum.reduceat(rank, firsts)
    last_row[rows] = np.repeat(np.where(is_shared, rows[firsts + counts - 1], -1), counts)
    return last_row


def _match_keys(operations: SpanColumns) -> list[Int64s]:
    """Return the sort keys of operations, equal for spans of one operation; those of messages include their instant."""
    paired = [number for number, text in enumerate(operations.texts) if text in PAIRED]
    met_ns = np.where(np.isin(operations.op, paired), operations.met_ns, 0)
    return [operations.operation_kind, operations.seq, *([met_ns] if met_ns.any() else [])]
