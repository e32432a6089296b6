"""Many spans as columns: eighteen numbers each instead of objects, which are made when somebody asks for one.

A column has an element for each span. Texts and groups are numbered once; a column of them holds the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from .span import CollectiveInfo, Kind, Span

if TYPE_CHECKING:
    from .measure.intervals import Interval

Wholes: TypeAlias = NDArray[np.int64]
Indexes: TypeAlias = NDArray[np.int32]
Group: TypeAlias = tuple[str, tuple[int, ...]]
"""Name and ranks."""

KINDS: tuple[Kind, ...] = ("compute", "comm", "step", "program", "wires")
NONE = int(np.iinfo(np.int64).min)
"""No step, or nobody knows when it was issued."""

WHOLES = ("start_ns", "end_ns", "issued_ns", "met_ns", "seq", "nbytes", "priority", "step", "awaited_ns")
INDEXES = ("kind", "lane", "name", "op", "algorithm", "dtype", "call_site", "group")
_TIMES = (0, 1, 2, 3, 8)  # rows of the wholes that are instants
_KIND_ORDER = np.array([sorted(KINDS).index(kind) for kind in KINDS], np.int32)

T = TypeVar("T")


class Table(dict[T, int]):
    """Numbers what it is asked for, in the order of the first asking."""

    def __missing__(self, item: T) -> int:
        self[item] = number = len(self)
        return number


_NO_INFO = CollectiveInfo(
    op="", algorithm="", group="", seq=0, nbytes=0, dtype="", issued_ns=0, met_ns=0, priority=0, call_site="",
    start_ns=0, end_ns=0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanColumns:
    """The columns of n spans."""

    texts: tuple[str, ...]  # What the columns of names number
    groups: tuple[Group, ...]  # What the column of groups numbers
    rank: Wholes  # n ranks
    whole: Wholes  # A row for each of `WHOLES`; `NONE` where there is none or nobody knows
    index: Indexes  # A row for each of `INDEXES`; `op` is -1 where a span has no `CollectiveInfo`

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def start_ns(self) -> Wholes:
        """When each began."""
        return cast(Wholes, self.whole[0])

    @property
    def end_ns(self) -> Wholes:
        """When each ended."""
        return cast(Wholes, self.whole[1])

    @property
    def issued_ns(self) -> Wholes:
        """When each was called, or `NONE`."""
        return cast(Wholes, self.whole[2])

    @property
    def met_ns(self) -> Wholes:
        """When the last rank had come; 0 for what is no operation."""
        return cast(Wholes, self.whole[3])

    @property
    def step(self) -> Wholes:
        """In which step each was issued, or `NONE`."""
        return cast(Wholes, self.whole[7])

    @property
    def is_operation(self) -> NDArray[np.bool_]:
        """Whether each has a `CollectiveInfo`."""
        return cast(NDArray[np.bool_], self.index[3] >= 0)

    def is_kind(self, kind: Kind) -> NDArray[np.bool_]:
        """Whether each is of that kind."""
        return cast(NDArray[np.bool_], self.index[0] == KINDS.index(kind))

    def of_kind(self, kind: Kind, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return which of some spans, by number, are of that kind; the others are not looked at."""
        return cast(NDArray[np.intp], rows[self.index[0, rows] == KINDS.index(kind)])

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SpanColumns:
        """Return the columns of spans. Cost: about 5 microseconds each.

        Raises:
            OverflowError: A number has more than 64 bits.
        """
        infos = [span.info or _NO_INFO for span in spans]
        texts, groups = Table[str](), Table[Group]()
        wholes = [
            [span.start_ns for span in spans],
            [span.end_ns for span in spans],
            [_issued_ns(span) for span in spans],
            [info.met_ns for info in infos],
            [info.seq for info in infos],
            [info.nbytes for info in infos],
            [info.priority for info in infos],
            [NONE if span.step is None else span.step for span in spans],
            [NONE if info.awaited_ns is None else info.awaited_ns for info in infos],
        ]
        indexes = [
            [KINDS.index(span.kind) for span in spans],
            [texts[span.lane] for span in spans],
            [texts[span.name] for span in spans],
            [-1 if info is _NO_INFO else texts[info.op] for info in infos],
            [texts[info.algorithm] for info in infos],
            [texts[info.dtype] for info in infos],
            [texts[span.info.call_site if span.info else span.call_site] for span in spans],
            [groups[info.group, info.ranks] for info in infos],
        ]
        return cls(
            texts=tuple(texts), groups=tuple(groups), rank=np.array([span.rank for span in spans], np.int64),
            whole=np.array(wholes, np.int64), index=np.array(indexes, np.int32),
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Iterable[SpanColumns]) -> SpanColumns:
        """Return the columns of several one after the other, their texts numbered anew."""
        texts, groups = Table[str](), Table[Group]()
        texts[""], groups["", ()]
        ranks, wholes, indexes = (
            [np.zeros(0, np.int64)],
            [np.zeros((len(WHOLES), 0), np.int64)],
            [np.zeros((len(INDEXES), 0), np.int32)],
        )
        for part in parts:
            new_text, new_group = np.full(len(part.texts) + 1, -1, np.int32), np.zeros(len(part.groups), np.int32)
            for number in np.unique(part.index[1:7]).tolist():  # a part of a timeline does not use all
                new_text[number] = texts[part.texts[number]] if number >= 0 else -1
            for number in np.unique(part.index[7]).tolist():
                new_group[number] = groups[part.groups[number]]
            ranks.append(part.rank)
            wholes.append(part.whole)
            indexes.append(np.concatenate([part.index[:1], new_text[part.index[1:7]], new_group[part.index[7:]]]))
        return cls(
            texts=tuple(texts), groups=tuple(groups), rank=np.concatenate(ranks),
            whole=np.concatenate(wholes, axis=1), index=np.concatenate(indexes, axis=1),
        )  # fmt: skip

    def canonical(self) -> SpanColumns:
        """Return the same with only those texts and groups that are used, in order: equal spans have equal columns."""
        used = np.unique(self.index[1:7]).tolist()
        texts = sorted({self.texts[number] for number in used if number >= 0})
        groups = sorted({self.groups[number] for number in np.unique(self.index[7]).tolist()})
        new_text = {text: number for number, text in enumerate(texts)}
        new_group = {group: number for number, group in enumerate(groups)}
        text_of = np.array([*(new_text.get(text, -1) for text in self.texts), -1], np.int32)
        group_of = np.array([*(new_group.get(group, -1) for group in self.groups), -1], np.int32)
        return self._renumbered(tuple(texts), tuple(groups), text_of, group_of)

    def _renumbered(
        self, texts: tuple[str, ...], groups: tuple[Group, ...], text_of: Indexes, group_of: Indexes
    ) -> SpanColumns:
        """Return the same with other tables; the last element of each says that none remains none."""
        index = np.concatenate([self.index[:1], text_of[self.index[1:7]], group_of[self.index[7:]]])
        return replace(self, texts=texts, groups=groups, index=index)

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> SpanColumns:
        """Return the columns of some of the spans: those of a mask, or of their numbers, in that order."""
        return replace(self, rank=self.rank[which], whole=self.whole[:, which], index=self.index[:, which])

    def by_rank(self) -> dict[int, SpanColumns]:
        """Return the columns of each rank that has any, ranks ascending, in the order of these."""
        rows = self.rows_by_rank(np.ones(len(self), bool))
        return {rank: self.take(which) for rank, which in rows.items()}

    def rows_by_rank(self, which: NDArray[np.bool_]) -> dict[int, NDArray[np.intp]]:
        """Return the numbers of the spans of a mask by rank, ranks ascending, each in the order of these."""
        rows = np.flatnonzero(which)
        rank = self.rank[rows]
        if rank.min(initial=0) >= 0 and rank.max(initial=0) < 1 << 15:
            rank = rank.astype(np.int16)  # NumPy sorts 16 bits by counting
        rows = rows[np.argsort(rank, kind="stable")]
        ranks, firsts = np.unique(self.rank[rows], return_index=True)
        return dict(zip(ranks.tolist(), np.split(rows, firsts[1:]), strict=False))

    def order(self) -> NDArray[np.intp]:
        """Return the numbers of the spans in the order of `span_order`."""
        by_start = np.argsort(self.start_ns, kind="stable")
        starts = self.start_ns[by_start]
        same = np.concatenate([[False], starts[1:] == starts[:-1], [False]])
        tied = same[1:] | same[:-1]
        if tied.any():  # few spans begin at one instant, and one key sorts faster than seven
            among = by_start[tied]
            keys = self.take(among)._order_keys()
            by_start[tied] = among[np.lexsort(keys[::-1])]
        return by_start

    def _order_keys(self) -> list[NDArray[np.int64] | NDArray[np.int32]]:
        place = np.empty(len(self.texts) + 1, np.int32)
        place[sorted(range(len(self.texts)), key=self.texts.__getitem__)] = np.arange(len(self.texts), dtype=np.int32)
        kind, lane, name = _KIND_ORDER[self.index[0]], place[self.index[1]], place[self.index[2]]
        seq = np.where(self.is_operation, self.whole[4], -1)
        return [self.start_ns, self.rank, kind, lane, self.end_ns, name, seq]

    def near(self, window: Interval) -> NDArray[np.bool_]:
        """Whether each touches a window, or what touches it: all that can matter to an instant inside.

        Whoever takes part in an operation that touches the window is there when its last rank comes, so that a look
        from the first to the last instant of those finds them all.
        """
        if window[0] <= self.start_ns.min(initial=window[0]) and self.end_ns.max(initial=window[1]) <= window[1]:
            return np.ones(len(self), bool)
        touches = (self.end_ns >= window[0]) & (self.start_ns <= window[1])
        operations = touches & self.is_operation
        first_ns = min(window[0], int(self.start_ns[operations].min(initial=window[0])))
        last_ns = max(window[1], int(self.end_ns[operations].max(initial=window[1])))
        called_ns = np.where(self.is_operation, np.minimum(self.issued_ns, self.start_ns), self.start_ns)
        found: NDArray[np.bool_] = (self.end_ns >= first_ns) & (called_ns <= last_ns)
        return found

    def shifted(self, offset_ns: int) -> SpanColumns:
        """Return the same on another clock."""
        whole = self.whole.copy()
        for row in _TIMES:
            known = self.is_operation if row == 3 else whole[row] != NONE
            whole[row] += np.where(known, offset_ns, 0)
        return replace(self, whole=whole)

    def spans(self) -> Iterator[Span]:
        """Yield the spans. Cost: about 4 microseconds each."""
        texts, groups = self.texts, self.groups
        for rank, whole, index in zip(self.rank.tolist(), self.whole.T.tolist(), self.index.T.tolist(), strict=True):
            start_ns, end_ns, issued_ns, met_ns, seq, nbytes, priority, step, awaited_ns = whole
            kind, lane, name, op, algorithm, dtype, call_site, group = index
            info = None
            if op >= 0:
                info = CollectiveInfo(
                    op=texts[op], algorithm=texts[algorithm], group=groups[group][0], seq=seq, nbytes=nbytes,
                    dtype=texts[dtype], issued_ns=issued_ns, met_ns=met_ns, priority=priority,
                    call_site=texts[call_site], start_ns=start_ns, end_ns=end_ns, ranks=groups[group][1],
                    awaited_ns=None if awaited_ns == NONE else awaited_ns,
                )  # fmt: skip
            yield Span(
                rank=rank, kind=KINDS[kind], lane=texts[lane], name=texts[name], start_ns=start_ns, end_ns=end_ns,
                info=info, step=None if step == NONE else step, call_site="" if info else texts[call_site],
                issued_ns=None if info or issued_ns == NONE else issued_ns,
            )  # fmt: skip


def _issued_ns(span: Span) -> int:
    if span.info:
        return span.info.issued_ns
    return NONE if span.issued_ns is None else span.issued_ns


class SpanList(Sequence[Span]):
    """Columns that look like a list of spans; each is made once, when somebody asks for it."""

    def __init__(self, columns: SpanColumns) -> None:
        self.columns = columns
        self._made: list[Span | None] = []  # None, or the span; empty as long as nobody has asked
        self._are_all_made = False

    def chosen(self, numbers: Sequence[int]) -> list[Span]:
        """The spans of these numbers; no others are made."""
        made = self._made or [None] * len(self)
        self._made = made
        if missing := [number for number in numbers if made[number] is None]:
            for number, span in zip(missing, self.columns.take(np.array(missing)).spans(), strict=True):
                made[number] = span
        return cast("list[Span]", [made[number] for number in numbers])

    def _all(self) -> list[Span]:
        if not self._are_all_made:
            self.chosen(range(len(self)))
            self._are_all_made = True
        return cast("list[Span]", self._made)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Span: ...
    @overload
    def __getitem__(self, at: slice) -> list[Span]: ...
    def __getitem__(self, at: int | slice) -> Span | list[Span]:
        numbers = range(len(self))[at]
        return self.chosen([numbers])[0] if isinstance(numbers, int) else self.chosen(numbers)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == list(other) if isinstance(other, list | SpanList) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())
