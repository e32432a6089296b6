"""Flight records as a timeline: the last operations of ranks as spans, which are measured like those of traces.

An operation that has not ended gets a span that ends now. If the start is unknown, the span begins with the call, or
with the end of the operation before it in the same group. Bytes move from the moment at which the last member has
arrived; a member that has a record here and has not arrived gets a span without length now. Records do not show which
rank kept an event loop busy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..timeline.columnar import KINDS, NO_GROUP, NONE, IndexTable, Int64s, SpanColumns, SpanGroup
from ..timeline.files.merge import merged
from ..timeline.measure.meetings import PAIRED
from ..timeline.spans import Timeline
from .reading import FORGOTTEN, RankTable


def timeline_of_records(ranks: Sequence[RankTable], now_ns: int, world_size: int) -> Timeline:
    """Return the operations of some ranks as a timeline, with instants in nanoseconds since 1970.

    Args:
        ranks: The operations of each rank.
        now_ns: The present, in nanoseconds since 1970.
        world_size: Ranks of the world, with a record here or not.
    """
    columns = SpanColumns.concatenate(_rank_spans(table, now_ns) for table in ranks)
    absent = _absent_member_spans(columns, {table.rank for table in ranks}, now_ns)
    return merged([Timeline.of_columns(SpanColumns.concatenate([columns, absent]), world_size=world_size)])


def _rank_spans(table: RankTable, now_ns: int) -> SpanColumns:
    """Return a rank's operations as spans; open ones end now. Computes without a recorded start are left out."""
    # Sorted by the instant of issue, then by number: rows 1 and 0, as `lexsort` takes its last key first.
    issued, number, call, step, ended, started = table.operations[:, np.lexsort(table.operations[1::-1])]
    known, at = np.unique(np.abs(call), return_inverse=True)
    calls = [table.calls.get(each, FORGOTTEN) for each in known.tolist()]
    texts, groups = IndexTable[str]({"": 0}), IndexTable[SpanGroup]({NO_GROUP: 0})

    def by_call(numbers: Iterable[int]) -> Int64s:
        """Return a column for the operations from one number for each call."""
        return np.array([*numbers], np.int64)[at]

    is_compute = by_call(each.op == "compute" for each in calls) > 0
    ended = np.abs(ended)  # a negative end: with an error
    end = np.where(ended == 0, now_ns, ended)
    key = by_call(texts[each.key] for each in calls)
    free_ns = np.zeros(len(texts), np.int64)  # by key of the group: when its last ended operation ended
    np.maximum.at(free_ns, key, ended)
    # Without a known start, an operation that has ended counts from its call; an open one from the later of its call
    # and the last end in its group.
    begun = np.where(started > 0, started, np.where(ended == 0, np.maximum(issued, free_ns[key]), issued))
    start = np.minimum(begun, end)
    ops = ["send/recv" if each.op in PAIRED else each.op for each in calls]
    columns = {
        "rank": np.full(len(call), table.rank),
        "start_ns": start,
        "end_ns": end,
        "issued_ns": issued,
        "met_ns": np.where(is_compute, 0, start),  # until the ends of an operation are compared
        "seq": number,
        "step": np.where(step < 0, NONE, step),
        "nbytes": by_call(each.nbytes for each in calls),
        "kind": np.where(is_compute, KINDS.index("compute"), KINDS.index("comm")),
        "lane": by_call(texts["compute" if each.op == "compute" else "comm"] for each in calls),
        "name": by_call(texts[each.name or each.op] for each in calls),
        "op": by_call(-1 if op == "compute" else texts[op] for op in ops),
        "call_site": by_call(texts[each.site] for each in calls),
        "group": by_call(
            groups[NO_GROUP if each.op == "compute" else SpanGroup(each.key, each.members)] for each in calls
        ),
    }
    return SpanColumns.from_named(columns, texts, groups).take(~is_compute | (started > 0))


def _absent_member_spans(columns: SpanColumns, recorded: Collection[int], now_ns: int) -> SpanColumns:
    """Return a span without length for each member with a record that has not arrived at an operation open now."""
    newest: dict[tuple[str, int], int] = {}  # number of the last operation, by group and rank
    absent: dict[tuple[str, int, int], int] = {}  # row of a member's span, by group, number, and absent rank
    operations = columns.take(columns.is_operation)
    fields = (getattr(operations, name).tolist() for name in ("group", "seq", "rank", "end_ns"))
    ends = [(columns.groups[group], seq, rank, end_ns) for group, seq, rank, end_ns in zip(*fields, strict=True)]
    for group, seq, rank, _ in ends:
        newest[group.name, rank] = max(newest.get((group.name, rank), -1), seq)
    for row, (group, seq, _, end_ns) in enumerate(ends):
        for rank in group.ranks if end_ns == now_ns else ():
            if rank in recorded and newest.get((group.name, rank), -1) < seq:
                absent[group.name, seq, rank] = row
    ranks, now = np.array([rank for *_, rank in absent], np.int64), np.full(len(absent), now_ns)
    lacked = operations.take(np.array([*absent.values()], np.intp))
    return replace(lacked, rank=ranks, start_ns=now, end_ns=now, issued_ns=now, met_ns=now)


def step_length_ns(table: RankTable) -> int | None:
    """Return the mean nanoseconds between the ends of successive steps; None if fewer than two are complete.

    A step ends with the last of its operations. A step with an unfinished operation is not complete, nor is the newest
    one unless the program has finished.
    """
    _, _, _, step, ended, _ = table.operations
    last: dict[int, int] = {}  # end of the last operation, by step
    unfinished = set() if table.left else {max(step.tolist(), default=-1)}  # the newest may have more to come
    for at_ns, index in zip(ended.tolist(), step.tolist(), strict=True):
        if index >= 0:
            last[index] = max(last.get(index, 0), abs(at_ns))
            if not at_ns:
                unfinished.add(index)
    whole = sorted(last.keys() - unfinished)
    if len(whole) < 2:
        return None
    low, high = whole[0], whole[-1]
    return max(last[high] - last[low], 0) // (high - low)
