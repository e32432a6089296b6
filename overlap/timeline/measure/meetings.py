"""Meetings of ranks: which spans are one operation on several ranks, and which rank came last to each operation."""

from __future__ import annotations

import numpy as np

from ..columnar import Int64s, Rows, SpanColumns, run_lengths, run_starts

PAIRED = frozenset({"send", "recv", "send/recv"})
"""Names of operations between two ranks, which have a sequence of numbers for each pair of ranks and tag."""


def last_arrival_rows(columns: SpanColumns) -> Rows:
    """Return, for each span, the row of the span of the rank that came last to the same operation.

    The row is -1 if the last rank is unknown: for a span that is no operation, and for an operation that only one rank
    has recorded. Of several last ranks the lowest counts. Cost: a sort of the operations.
    """
    last_row = np.full(len(columns), -1, np.intp)
    rows = np.flatnonzero(columns.is_operation)
    if not len(rows):
        return last_row
    operations = columns.take(rows)
    keys = _operation_sort_keys(operations)
    # `lexsort` sorts by its last key first: by operation, then start. So the rank that came last is the last of each.
    order = np.lexsort((-rows, -operations.rank, operations.start_ns, *keys))
    firsts = run_starts(*(key[order] for key in keys))
    counts = run_lengths(firsts, len(rows))
    rank, rows = operations.rank[order], rows[order]
    # If only one rank has recorded the operation, the last rank is unknown.
    is_shared = np.minimum.reduceat(rank, firsts) != np.maximum.reduceat(rank, firsts)
    last_row[rows] = np.repeat(np.where(is_shared, rows[firsts + counts - 1], -1), counts)
    return last_row


def _operation_sort_keys(operations: SpanColumns) -> list[Int64s]:
    """Return columns, for `lexsort`, that are equal for the spans of one operation on all of its ranks.

    Messages of different tags may share kind and number, so the instant at which they met is a key, too.
    """
    paired = [number for number, text in enumerate(operations.texts) if text in PAIRED]
    met_ns = np.where(np.isin(operations.op, paired), operations.met_ns, 0)
    # Without messages, one key less to sort by.
    return [operations.operation_key, operations.seq, *([met_ns] if met_ns.any() else [])]
