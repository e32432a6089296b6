"""Spans as named numpy columns: one number of each span in each column, and `Span` objects only on request.

A column has one element for each span. Texts and groups are stored once in a table; their columns hold indices into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast, get_args, overload

import numpy as np
from numpy.typing import NDArray

from .span import CollectiveInfo, Kind, Role, Span

if TYPE_CHECKING:
    from .measure.intervals import Interval

Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
Mask: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = NDArray[np.intp]


class SpanGroup(NamedTuple):
    """The group of an operation. Messages count as groups of two ranks, one for each direction and tag."""

    name: str
    ranks: tuple[int, ...]  # In the group's order; for messages (source, destination)
    tag: int = 0  # tag of a message; 0 for collectives


NO_GROUP = SpanGroup("", ())
"""The group of a span that is no operation."""

KINDS: tuple[Kind, ...] = ("compute", "comm", "step", "program", "wires", "copy")
ROLES: tuple[Role, ...] = get_args(Role)
NONE = int(np.iinfo(np.int64).min)
"""Value of `step`, `issued_ns` and `awaited_ns` in a column where there is none, or it is unknown."""

INT64_COLUMNS = ("start_ns", "end_ns", "issued_ns", "met_ns", "seq", "nbytes", "priority", "step", "awaited_ns")
"""Columns of 64 bits, in the order in which packed columns store them."""
TEXTS = ("lane", "name", "op", "algorithm", "dtype", "call_site")
INT32_COLUMNS = ("kind", *TEXTS, "group", "role")
"""Columns of 32 bits, which packed columns store after the others."""
_COLUMNS = ("rank", *INT64_COLUMNS, *INT32_COLUMNS)
_DEFAULTS = {"step": NONE, "issued_ns": NONE, "awaited_ns": NONE, "op": -1}
_KIND_ORDER = np.array([sorted(KINDS).index(kind) for kind in KINDS], np.int32)

T = TypeVar("T")


class IndexTable(dict[T, int]):
    """Dict that numbers items: looking up a new item adds it with the next number, from 0."""

    def __missing__(self, item: T) -> int:
        self[item] = number = len(self)
        return number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanColumns:
    """Columns of n spans; the fields of a `Span` and of its `CollectiveInfo` give the meaning of each column."""

    texts: tuple[str, ...]  # Table of texts; the columns of `TEXTS` hold indexes into it
    groups: tuple[SpanGroup, ...]  # Table of groups; the column `group` holds indexes into it
    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    issued_ns: Int64s  # `NONE` if the instant of the call is not known
    met_ns: Int64s  # 0 for a span that is no operation
    seq: Int64s
    nbytes: Int64s
    priority: Int64s
    step: Int64s  # `NONE` outside of steps
    awaited_ns: Int64s  # `NONE` if the program did not wait for the operation
    kind: Int32s  # Index into `KINDS`
    lane: Int32s
    name: Int32s
    op: Int32s  # -1 for a span that is no operation, that is, without a `CollectiveInfo`
    algorithm: Int32s
    dtype: Int32s
    call_site: Int32s
    group: Int32s
    role: Int32s  # Index into `ROLES`

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def is_operation(self) -> Mask:
        """Mask of the spans that are operations, that is, have a `CollectiveInfo`."""
        return self.op >= 0

    @property
    def operation_key(self) -> Int64s:
        """One number for the (group, lane, operator) of each span.

        Two spans are of one operation, on two ranks, if this number and `seq` are equal.
        """
        texts = len(self.texts) + 1
        return cast(Int64s, (self.group.astype(np.int64) * texts + self.lane) * texts + self.op)

    @property
    def called_ns(self) -> Int64s:
        """Instant at which the program issued each span: at most its start, and its start if that is unknown."""
        known = np.where(self.issued_ns == NONE, self.start_ns, self.issued_ns)
        return cast(Int64s, np.minimum(known, self.start_ns))

    @property
    def moved_ns(self) -> Int64s:
        """Instant at which the bytes of each operation began to move; for other spans, the start."""
        within_ns = np.minimum(np.maximum(self.met_ns, self.start_ns), self.end_ns)
        return cast(Int64s, np.where(self.is_operation, within_ns, self.start_ns))

    def is_kind(self, kind: Kind) -> Mask:
        """Return a mask of the spans of a kind."""
        return cast(Mask, self.kind == KINDS.index(kind))

    @classmethod
    def from_named(
        cls, columns: Mapping[str, NDArray[np.integer]], texts: Iterable[str], groups: Iterable[SpanGroup]
    ) -> SpanColumns:
        """Return spans from a dict of columns; the columns are converted to the fields' types.

        Args:
            columns: Integer columns by name; "rank" is required. Columns left out are -1 for `op` (no operation),
                `NONE` for `step`, `issued_ns` and `awaited_ns`, and 0 for the rest.
            texts: The table of texts; text 0 is "".
            groups: The table of groups; group 0 is `NO_GROUP`.
        """
        typed: dict[str, Any] = {
            name: np.asarray(
                columns.get(name, np.full(len(columns["rank"]), _DEFAULTS.get(name, 0))),
                np.int32 if name in INT32_COLUMNS else np.int64,
            )
            for name in _COLUMNS
        }
        return cls(texts=tuple(texts), groups=tuple(groups), **typed)

    @classmethod
    def concatenate(cls, parts: Iterable[SpanColumns]) -> SpanColumns:
        """Join the spans of several parts, in their order. The new tables have only texts and groups in use."""
        texts, groups = IndexTable[str](), IndexTable[SpanGroup]()
        # Looking up a new item adds it: index 0 becomes "" and `NO_GROUP`.
        texts[""], groups[NO_GROUP]
        joined_parts = [cls.from_named({"rank": np.zeros(0, np.int64)}, (), ())]
        for part in parts:
            # By old index in the tables of the part, the new index; the last element is for -1, no text.
            text_index, group_index = np.full(len(part.texts) + 1, -1, np.int32), np.zeros(len(part.groups), np.int32)
            for number in np.unique(np.concatenate([np.unique(getattr(part, name)) for name in TEXTS])).tolist():
                text_index[number] = texts[part.texts[number]] if number >= 0 else -1
            for number in np.unique(part.group).tolist():
                group_index[number] = groups[part.groups[number]]
            named = {name: text_index[getattr(part, name)] for name in TEXTS}
            joined_parts.append(replace(part, group=group_index[part.group], **named))
        columns = {name: np.concatenate([getattr(part, name) for part in joined_parts]) for name in _COLUMNS}
        return cls(texts=tuple(texts), groups=tuple(groups), **columns)

    def take(self, which: Mask | Rows) -> SpanColumns:
        """Return some of the spans: by a mask in their order, by row numbers in the order of the numbers."""
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def rows_by_rank(self, which: Mask) -> dict[int, Rows]:
        """Return the row numbers of the spans in a mask, by rank, ranks ascending; rows of a rank keep their order."""
        rows = np.flatnonzero(which)
        rank = self.rank[rows]
        if rank.min(initial=0) >= 0 and rank.max(initial=0) < 1 << 15:
            rank = rank.astype(np.int16)  # NumPy sorts 16 bits by counting
        rows = rows[np.argsort(rank, kind="stable")]
        # `split` cuts at the first row of each rank but the first.
        ranks, firsts = np.unique(self.rank[rows], return_index=True)
        return dict(zip(ranks.tolist(), np.split(rows, firsts[1:]), strict=False))

    def timeline_order(self) -> Rows:
        """Return the row numbers in the order of a timeline: by start, rank, kind, lane, end, name and number."""
        by_start = np.argsort(self.start_ns, kind="stable")
        starts = self.start_ns[by_start]
        # same[i]: whether span i starts at the instant of span i - 1. A span is tied if this holds for it or the next.
        same = np.concatenate([[False], starts[1:] == starts[:-1], [False]])
        tied = same[1:] | same[:-1]
        if tied.any():  # few spans begin at one instant, and one key sorts faster than seven
            among = by_start[tied]
            keys = self.take(among)._timeline_sort_keys()
            by_start[tied] = among[np.lexsort(keys[::-1])]
        return by_start

    def _timeline_sort_keys(self) -> list[Int64s | Int32s]:
        """Return the sort keys of spans, the most significant first. Texts are sorted by alphabet, not by index."""
        alphabetical = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        # Alphabetical position of each text; the last element is for index -1, no text, which comes first.
        place = np.full(len(self.texts) + 1, -1, np.int32)
        place[alphabetical] = np.arange(len(self.texts), dtype=np.int32)
        seq = np.where(self.is_operation, self.seq, -1)
        kind, lane, name = _KIND_ORDER[self.kind], place[self.lane], place[self.name]
        return [self.start_ns, self.rank, kind, lane, self.end_ns, name, seq]

    def spans_near(self, window: Interval) -> Mask:
        """Return a mask of the spans that are needed to measure a window.

        These are the spans that touch the window, and on all ranks the spans of the operations that touch it. All spans
        of an operation touch the instant at which its last rank arrives. So the latter are found between the first
        start and the last end of the operations in the window.

        Args:
            window: First and last instant.
        """
        first_ns, last_ns = window
        if first_ns <= self.start_ns.min(initial=first_ns) and self.end_ns.max(initial=last_ns) <= last_ns:
            return np.ones(len(self), bool)
        operations = (self.end_ns >= first_ns) & (self.start_ns <= last_ns) & self.is_operation
        first_ns = int(self.start_ns[operations].min(initial=first_ns))
        last_ns = int(self.end_ns[operations].max(initial=last_ns))
        # Operations count from their call on, as they may be queued in the window.
        begun_ns = np.where(self.is_operation, self.called_ns, self.start_ns)
        return (self.end_ns >= first_ns) & (begun_ns <= last_ns)

    def spans(self) -> Iterator[Span]:
        """Yield the spans as objects. Cost: about 4 microseconds each."""
        texts, groups = self.texts, self.groups
        for row in zip(*(getattr(self, name).tolist() for name in _COLUMNS), strict=True):
            rank, start_ns, end_ns, issued_ns, met_ns, seq, nbytes, priority, step, awaited_ns, *indexes = row
            kind, lane, name, op, algorithm, dtype, call_site, group, role = indexes
            info = None
            if op >= 0:
                info = CollectiveInfo(
                    op=texts[op], algorithm=texts[algorithm], group=groups[group].name, seq=seq, nbytes=nbytes,
                    dtype=texts[dtype], issued_ns=issued_ns, met_ns=met_ns, priority=priority,
                    call_site=texts[call_site], start_ns=start_ns, end_ns=end_ns, ranks=groups[group].ranks,
                    awaited_ns=None if awaited_ns == NONE else awaited_ns, tag=groups[group].tag,
                )  # fmt: skip
            yield Span(
                rank=rank, kind=KINDS[kind], lane=texts[lane], name=texts[name], start_ns=start_ns, end_ns=end_ns,
                info=info, step=None if step == NONE else step, call_site="" if info else texts[call_site],
                issued_ns=None if info or issued_ns == NONE else issued_ns, role=ROLES[role],
            )  # fmt: skip


def run_starts(*keys: NDArray[np.integer]) -> Rows:
    """Return the first row of each run of equal rows: columns [5, 5, 7] and [1, 1, 1] give [0, 2]."""
    begins = np.ones(len(keys[0]), bool)
    begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(begins)


def run_lengths(firsts: Rows, count: int) -> Rows:
    """Return the length of each run of rows: `firsts` [0, 2] (see `run_starts`) and `count` 3 rows give [2, 1]."""
    return np.diff(np.append(firsts, count))


def sum_by_index(index: Rows | NDArray[np.int8], numbers: Int64s, size: int) -> Int64s:
    """Add up numbers by index, exactly: index [0, 2, 0], numbers [3, 4, 5] and size 3 give [8, 0, 4]."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, index, numbers)
    return sums


class SpanList(Sequence[Span]):
    """List of spans over columns; each `Span` object is made once, on first access.

    Args:
        columns: The columns, whose order is that of the list.
    """

    def __init__(self, columns: SpanColumns) -> None:
        self.columns = columns
        self._span_objects: dict[int, Span] = {}  # by row

    def spans_at(self, rows: Sequence[int]) -> list[Span]:
        """Return the spans at some rows, in the order of `rows`; each object is made once."""
        objects = self._span_objects
        if missing := [row for row in rows if row not in objects]:
            objects.update(zip(missing, self.columns.take(np.array(missing)).spans(), strict=True))
        return [objects[row] for row in rows]

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Span: ...
    @overload
    def __getitem__(self, at: slice) -> list[Span]: ...
    def __getitem__(self, at: int | slice) -> Span | list[Span]:
        rows = range(len(self))[at]
        return self.spans_at([rows])[0] if isinstance(rows, int) else self.spans_at(rows)

    def __iter__(self) -> Iterator[Span]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return self[:] == list(other) if isinstance(other, list | SpanList) else NotImplemented

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])
