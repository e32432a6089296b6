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
    """The ranks of an operation. The messages of two ranks with different tags are of different groups."""

    name: str
    ranks: tuple[int, ...]  # In the group's order; of messages, the source and the destination
    tag: int = 0  # tag of a message; 0 for collectives


NO_GROUP = SpanGroup("", ())
"""The group of a span that is no operation."""

KINDS: tuple[Kind, ...] = ("compute", "comm", "step", "program", "wires", "copy")
ROLES: tuple[Role, ...] = get_args(Role)
NONE = int(np.iinfo(np.int64).min)
"""Stands for a step, an instant of the call or an instant of the await that is not known."""

INT64_COLUMNS = ("start_ns", "end_ns", "issued_ns", "met_ns", "seq", "nbytes", "priority", "step", "awaited_ns")
"""Columns of 64 bits, in the order in which packed columns store them."""
TEXTS = ("lane", "name", "op", "algorithm", "dtype", "call_site")
INT32_COLUMNS = ("kind", *TEXTS, "group", "role")
"""Columns of 32 bits, which packed columns store after the others."""
_COLUMNS = ("rank", *INT64_COLUMNS, *INT32_COLUMNS)
_DEFAULTS = {"step": NONE, "issued_ns": NONE, "awaited_ns": NONE, "op": -1}
_KIND_ORDER = np.array([sorted(KINDS).index(kind) for kind in KINDS], np.int32)

T = TypeVar("T")


class Table(dict[T, int]):
    """Assigns the next number to each new item."""

    def __missing__(self, item: T) -> int:
        self[item] = number = len(self)
        return number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanColumns:
    """Columns of n spans; the fields of a `Span` and of its `CollectiveInfo` give the meaning of each column."""

    texts: tuple[str, ...]  # The table of names, places and the like
    groups: tuple[SpanGroup, ...]  # The table of groups
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
        """Mask of the spans of operations, which have a `CollectiveInfo`; n booleans."""
        return self.op >= 0

    @property
    def operation_kind(self) -> Int64s:
        """A number for the group, lane and operation of each span; the ends of one operation also have one `seq`."""
        texts = len(self.texts) + 1
        return cast(Int64s, (self.group.astype(np.int64) * texts + self.lane) * texts + self.op)

    @property
    def called_ns(self) -> Int64s:
        """Instant of the call behind each span, never after its start; its start if the call is not known."""
        known = np.where(self.issued_ns == NONE, self.start_ns, self.issued_ns)
        return cast(Int64s, np.minimum(known, self.start_ns))

    @property
    def moved_ns(self) -> Int64s:
        """Instant at which the bytes of each operation began to move; the start of other spans."""
        within_ns = np.minimum(np.maximum(self.met_ns, self.start_ns), self.end_ns)
        return cast(Int64s, np.where(self.is_operation, within_ns, self.start_ns))

    def is_kind(self, kind: Kind) -> Mask:
        """Return the mask of the spans of a kind; n booleans."""
        return cast(Mask, self.kind == KINDS.index(kind))

    @classmethod
    def from_named(
        cls, columns: Mapping[str, NDArray[np.integer]], texts: Iterable[str], groups: Iterable[SpanGroup]
    ) -> SpanColumns:
        """Return the columns of n spans, with the given tables of texts and groups, converted to the fields' types.

        Args:
            columns: By name: "rank" and others, each of n integers. Those that are left out say that the spans are no
                operations (-1), that an instant or a step is not known (`NONE`), or are 0.
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
        """Return the columns of several parts, one after the other, with tables of only the texts and groups in use."""
        texts, groups = Table[str](), Table[SpanGroup]()
        texts[""], groups[NO_GROUP]
        joined_parts = [cls.from_named({"rank": np.zeros(0, np.int64)}, (), ())]
        for part in parts:  # a part of a timeline shares the tables of the whole
            # New index of each old one in the tables of the part; the last element is for -1, no text.
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
        """Return the columns of some spans: a mask keeps their order, row numbers give the order."""
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def rows_by_rank(self, which: Mask) -> dict[int, Rows]:
        """Return the row numbers of selected spans by rank, ranks ascending; the rows of a rank keep their order."""
        rows = np.flatnonzero(which)
        rank = self.rank[rows]
        if rank.min(initial=0) >= 0 and rank.max(initial=0) < 1 << 15:
            rank = rank.astype(np.int16)  # NumPy sorts 16 bits by counting
        rows = rows[np.argsort(rank, kind="stable")]
        ranks, firsts = np.unique(self.rank[rows], return_index=True)
        return dict(zip(ranks.tolist(), np.split(rows, firsts[1:]), strict=False))

    def timeline_order(self) -> Rows:
        """Return the row numbers in the order of a timeline: by start, then by all that tells spans apart."""
        by_start = np.argsort(self.start_ns, kind="stable")
        starts = self.start_ns[by_start]
        same = np.concatenate([[False], starts[1:] == starts[:-1], [False]])
        tied = same[1:] | same[:-1]
        if tied.any():  # few spans begin at one instant, and one key sorts faster than seven
            among = by_start[tied]
            keys = self.take(among)._order_keys()
            by_start[tied] = among[np.lexsort(keys[::-1])]
        return by_start

    def _order_keys(self) -> list[Int64s | Int32s]:
        """Return the columns by which spans are sorted, the most significant first: texts by alphabet, not by index."""
        # Alphabetical position of each text; the last element is for -1, no text.
        place = np.empty(len(self.texts) + 1, np.int32)
        place[sorted(range(len(self.texts)), key=self.texts.__getitem__)] = np.arange(len(self.texts), dtype=np.int32)
        seq = np.where(self.is_operation, self.seq, -1)
        kind, lane, name = _KIND_ORDER[self.kind], place[self.lane], place[self.name]
        return [self.start_ns, self.rank, kind, lane, self.end_ns, name, seq]

    def near(self, window: Interval) -> Mask:
        """Return the mask of spans that touch a window, or touch an operation that touches the window.

        Every rank of an operation that touches the window takes part when its last rank comes, so that one look from
        the first to the last instant of such operations finds all of them.
        """
        if window[0] <= self.start_ns.min(initial=window[0]) and self.end_ns.max(initial=window[1]) <= window[1]:
            return np.ones(len(self), bool)
        touches = (self.end_ns >= window[0]) & (self.start_ns <= window[1])
        operations = touches & self.is_operation
        first_ns = min(window[0], int(self.start_ns[operations].min(initial=window[0])))
        last_ns = max(window[1], int(self.end_ns[operations].max(initial=window[1])))
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
    """Return the first row of each run of equal rows, ascending, in sorted columns of n rows; empty if n is 0."""
    begins = np.ones(len(keys[0]), bool)
    begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(begins)


class SpanList(Sequence[Span]):
    """List of spans over columns; each `Span` object is made once, on first access."""

    def __init__(self, columns: SpanColumns) -> None:
        self.columns = columns
        self._span_objects: dict[int, Span] = {}  # by row

    def spans_at(self, rows: Sequence[int]) -> list[Span]:
        """Return the spans at some rows, in that order; makes only the objects that do not exist yet."""
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
