"""Flight records as a timeline: the last operations of ranks as spans, which are measured as those of traces are.

An operation that has not ended ends now. One whose begin is not known counts from its call, or from the end of the one
before it at the same place. Its bytes move from the moment at which the last member has come; a member that has not
come, and has a record here, comes now, with a span without length. Records do not know which rank kept an event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..timeline.columnar import KINDS, NO_GROUP, NONE, Int64s, Mask, Rows, SpanColumns, SpanGroup, Table
from ..timeline.files.merge import merged
from ..timeline.measure.meetings import PAIRED
from ..timeline.spans import Timeline
from ..waits.ends import CallRecord
from .reading import FORGOTTEN, RankTable

_FIELDS = ("call", "key", "number", "rank", "step", "issued_ns", "start_ns", "end_ns", "is_open")


def timeline_of_records(ranks: Sequence[RankTable], now_ns: int, world_size: int) -> Timeline:
    """Return the operations of some ranks as a timeline, on the clock of their records.

    Args:
        ranks: The ranks.
        now_ns: The present, in nanoseconds since 1970.
        world_size: Ranks of the world, with a record here or not.
    """
    made, keys = Table[CallRecord](), Table[str]()
    rows = [_rank_operations(table, now_ns, made, keys) for table in ranks]
    joined = {name: np.concatenate([each[name] for each in rows]) for name in _FIELDS}
    computes = np.array([each.op == "compute" for each in made], bool)[joined["call"]]
    lacking = _absent_members(joined, computes, [*made], [table.rank for table in ranks], now_ns)
    joined = {name: np.concatenate([joined[name], lacking[name]]) for name in _FIELDS}
    return merged([Timeline.of_columns(_columns(joined, [*made]), world_size=world_size)])


def _rank_operations(table: RankTable, now_ns: int, made: Table[CallRecord], keys: Table[str]) -> dict[str, Int64s]:
    """Return the operations of a rank that have begun, as columns; new calls and places get numbers."""
    issued, number, call, step, ended, started = table.operations[:, np.lexsort(table.operations[1::-1])]
    known, at = np.unique(np.abs(call), return_inverse=True)
    found = [table.calls.get(each, FORGOTTEN) for each in known.tolist()]
    call = np.array([made[each] for each in found], np.int64)[at]
    key = np.array([keys[each.key] for each in found], np.int64)[at]
    is_compute = np.array([each.op == "compute" for each in found], bool)[at]
    ended = np.abs(ended)  # negative: badly
    is_open = ended == 0
    free_ns = np.zeros(len(keys), np.int64)  # until when ended operations took, by place
    np.maximum.at(free_ns, key, ended)
    begun = np.where(started > 0, started, np.where(is_open, np.maximum(issued, free_ns[key]), issued))
    end = np.where(is_open, now_ns, ended)
    runs = ~is_compute | (started > 0)
    columns = (call, key, number, np.full(len(call), table.rank), step, issued, np.minimum(begun, end), end, is_open)
    return {name: column[runs].astype(np.int64) for name, column in zip(_FIELDS, columns, strict=True)}


def _absent_members(
    joined: Mapping[str, Int64s], computes: Mask, made: Sequence[CallRecord], recorded: Iterable[int], now_ns: int
) -> dict[str, Int64s]:  # fmt: skip
    """Return spans without length, now, of the members that open operations lack."""
    newest: dict[tuple[int, int], int] = {}
    places = zip(*(joined[name][~computes].tolist() for name in ("key", "rank", "number")), strict=True)
    for key, rank, number in places:
        newest[key, rank] = max(newest.get((key, rank), -1), number)
    here, rows = set(recorded), dict[tuple[int, int, int], tuple[int, ...]]()
    is_open = np.flatnonzero(~computes & (joined["is_open"] > 0))
    opened = (joined[name][is_open].tolist() for name in ("call", "key", "number", "step"))
    for call, key, number, step in zip(*opened, strict=True):
        for rank in made[call].members:
            if rank in here and newest.get((key, rank), -1) < number:
                rows[key, number, rank] = call, key, number, rank, step, now_ns, now_ns, now_ns, 0
    table = np.array([*rows.values()], np.int64).reshape(-1, len(_FIELDS))
    return dict(zip(_FIELDS, table.T, strict=True))


def _columns(joined: Mapping[str, Int64s], made: Sequence[CallRecord]) -> SpanColumns:
    """Return operations as spans."""
    texts, groups = Table[str](), Table[SpanGroup]()
    texts[""], groups[NO_GROUP]
    call = joined["call"]
    is_compute = np.array([each.op == "compute" for each in made], bool)[call]

    def by_call(numbers: Iterable[int]) -> Rows:
        """Return a number of the call of each operation."""
        return np.array([*numbers], np.int64)[call].astype(np.intp)

    ops = ["send/recv" if each.op in PAIRED else each.op for each in made]
    columns = {
        **{name: joined[name] for name in ("rank", "start_ns", "end_ns", "issued_ns")},
        "seq": joined["number"],
        "step": np.where(joined["step"] < 0, NONE, joined["step"]),
        "met_ns": np.where(is_compute, 0, joined["start_ns"]),  # until the ends of an operation are compared
        "nbytes": by_call(each.nbytes for each in made),
        "kind": np.where(is_compute, KINDS.index("compute"), KINDS.index("comm")),
        "lane": by_call(texts["compute" if each.op == "compute" else "comm"] for each in made),
        "name": by_call(texts[each.name or each.op] for each in made),
        "op": by_call(-1 if each.op == "compute" else texts[op] for each, op in zip(made, ops, strict=True)),
        "call_site": by_call(texts[each.site] for each in made),
        "group": by_call(
            groups[NO_GROUP if each.op == "compute" else SpanGroup(each.key, each.members)] for each in made
        ),
    }  # fmt: skip
    return SpanColumns.from_named(columns, texts, groups)


def step_length_ns(table: RankTable) -> int | None:
    """Return the mean nanoseconds between the last ends of successive steps; None for less than two steps."""
    _, _, _, step, ended, _ = table.operations
    last: dict[int, int] = {}
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
