"""Recorders of spans: recording one is a tuple and an append; everything else happens when the spans are read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import CodeType
from typing import TypeAlias

import numpy as np

from .columnar import INT32_COLUMNS, INT64_COLUMNS, KINDS, NO_GROUP, NONE, ROLES, SpanColumns, SpanGroup, Table
from .span import Kind, RoleName, Span

RawGroup: TypeAlias = str | tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], int]
"""The name of a group, and if possible its ranks: groups of one name (the axes of a mesh) differ in their ranks. Of
messages, also their tag."""

RawMatch: TypeAlias = tuple[str, str, RawGroup, int, int, object, int]
"""(op, algorithm, group, seq, nbytes, dtype, met_ns): the part that all ranks of one collective share."""

RawCollective: TypeAlias = (
    tuple[RawMatch, int, int, str | CodeType, int, int | None]
    | tuple[RawMatch, int, int, str | CodeType, int, int | None, int | None]
)
"""(match, issued_ns, priority, code, instruction, awaited_ns, step): one rank's part; a text for the code is the call
site. Without `awaited_ns`, the program has not waited for the operation."""

RawCompute: TypeAlias = tuple[str | CodeType, int, int, int | None]
"""(code, instruction, issued_ns, step); a text for the code is the call site."""

RawSpan: TypeAlias = tuple[Kind, str, str, int, int, RawCollective | RawCompute | int | None]
"""(kind, lane, name, start_ns, end_ns, info). The info of comm is a `RawCollective` or None; that of a step is its
index; that of a compute is a `RawCompute` or the index of its step. A `RoleName` has the role; what has another name
is of the program."""

DEFAULT_CAPACITY = 20_000
"""Spans kept per rank: about 8 MB when every one is a collective."""


STEPS_CAPACITY = 50 * DEFAULT_CAPACITY
"""Spans kept per rank where the last N steps are asked for: a bound for programs whose steps never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSteps:
    """The steps of a long run that are recorded; spans outside of steps always are."""

    last: int | None = None  # Number of last steps; None: as many as fit into `DEFAULT_CAPACITY` spans
    every: int = 1  # Only steps whose index is a multiple of this

    @classmethod
    def from_setting(cls, text: str | None) -> KeptSteps | None:
        """Return the steps to record, as `parse` reads them from the setting of a run; None if it is not set."""
        return None if text is None else cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> KeptSteps:
        """Read "last:100", "every:10" or "last:100,every:10".

        Raises:
            ValueError: The text is none of these.
        """
        limits: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            if name not in ("last", "every") or name in limits or not number.isdecimal() or int(number) < 1:
                raise ValueError(f"expected last:N, every:N or both, with N from 1, got {text!r}")
            limits[name] = int(number)
        return cls(last=limits.get("last"), every=limits.get("every", 1))


class Recorder:
    """Records the spans of one rank in a bounded ring; the oldest go first.

    Args:
        capacity: Number of spans; by default `DEFAULT_CAPACITY`, or `STEPS_CAPACITY` where the last step is set.
        steps: Steps whose spans are recorded; None: all.

    Attributes:
        rank: The rank in the world.
        append: Takes one `RawSpan`, from any thread. It costs about 0.1 microseconds: the tuple is stored as it is, and
            read only when columns are asked for.
        count, push: The same in two parts, for code that is on the path of every operation: call both, in this order.
    """

    __slots__ = ("_appended", "_count_reads", "_ring", "append", "count", "push", "rank")

    def __init__(self, rank: int, *, capacity: int | None = None, steps: KeptSteps | None = None) -> None:
        self.rank: int = rank
        default_capacity = DEFAULT_CAPACITY if steps is None or steps.last is None else STEPS_CAPACITY
        self._ring: deque[RawSpan] = deque(maxlen=capacity or default_capacity)
        self._appended = count()
        self._count_reads = 0
        self.count: Callable[[], object] = self._appended.__next__
        self.push: Callable[[RawSpan], None] = self._ring.append
        self.append: Callable[[RawSpan], None] = _make_counting_append(self._ring, self._appended)
        if steps is not None:
            self.append = self.push = _make_filtering_append(self._ring, self._appended, steps)
            self.count = int  # the filter counts what it keeps

    @property
    def dropped(self) -> int:
        """Number of spans that fell out of the ring. Spans of steps that are not recorded were never in it."""
        appended = next(self._appended) - self._count_reads
        self._count_reads += 1
        return appended - len(self._ring)

    @property
    def last(self) -> RawSpan | None:
        """Span appended last; None before the first. Comparing it costs less than `since`."""
        return self._ring[-1] if self._ring else None

    def since(self, seen: RawSpan | None) -> list[RawSpan]:
        """Return the spans appended after `seen`, or all that are left if `seen` is None or gone. From any thread."""
        if self.last is seen:
            return []
        raws = list(self._ring)
        at = next((at for at in range(len(raws) - 1, -1, -1) if raws[at] is seen), -1)
        return raws[at + 1 :]

    def columns(self) -> SpanColumns:
        """The spans still in the ring as columns, in the order they were appended. Cost: 2 microseconds each."""
        return columns_from_raw(self.rank, self._ring.copy())

    def spans(self) -> list[Span]:
        """The spans still in the ring, in the order they were appended (an operation is appended when it ends)."""
        return list(self.columns().spans())

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        return f"<Recorder rank {self.rank}: {len(self._ring)} of {self._ring.maxlen} spans>"


def _make_counting_append(ring: deque[RawSpan], appended: count[int]) -> Callable[[RawSpan], None]:
    """Return an append that counts calls: `next` of a count is atomic, while `+= 1` in two threads would lose some."""
    push = ring.append

    def append(raw: RawSpan) -> None:
        next(appended)
        push(raw)

    return append


def _make_filtering_append(ring: deque[RawSpan], appended: count[int], steps: KeptSteps) -> Callable[[RawSpan], None]:
    """Return an append that counts, ignores spans of steps not recorded, and drops spans older than the last steps."""
    push, every, last = ring.append, steps.every, steps.last
    order = count()  # `appended` also counts how often it was read
    ends: deque[int] = deque()  # how many had been appended when each of the last steps ended

    def append(raw: RawSpan) -> None:
        """Store a span of a recorded step; at the end of a step, drop the spans of steps that are no longer kept."""
        info = raw[5]
        step = info[-1] if isinstance(info, tuple) else info
        if step is not None and step % every:
            return
        number = next(order)
        next(appended)
        push(raw)
        if last is not None and raw[0] == "step":  # steps end on one thread
            ends.append(number + 1)
            if len(ends) > last:
                for _ in range(ends.popleft() - (number + 1 - len(ring))):
                    ring.popleft()

    return append


def columns_from_raw(rank: int, raws: Collection[RawSpan]) -> SpanColumns:
    """Return the columns of the spans that a rank has appended, in that order. Cost: 2 microseconds each."""
    encoder = _RowEncoder()
    rows = [encoder.encode(raw) for raw in raws]
    names = (*INT64_COLUMNS, *INT32_COLUMNS)
    columns = dict(zip(names, np.array(rows, np.int64).reshape(len(rows), len(names)).T, strict=True))
    return SpanColumns.from_named(columns | {"rank": np.full(len(rows), rank)}, encoder.texts, encoder.groups)


def columns_from_spans(spans: Sequence[Span]) -> SpanColumns:
    """Return the columns of spans, in their order. Cost: about 5 microseconds each.

    Raises:
        OverflowError: A number has more than 64 bits.
    """
    raws = [_raw_span(span) for span in spans]
    return replace(columns_from_raw(0, raws), rank=np.array([span.rank for span in spans], np.int64))


def _raw_span(span: Span) -> RawSpan:
    """Return a span as a recorder has it."""
    info: RawCollective | RawCompute | int | None = span.step
    if (of := span.info) is not None:
        match = of.op, of.algorithm, (of.group, of.ranks, of.tag), of.seq, of.nbytes, of.dtype, of.met_ns
        info = match, of.issued_ns, of.priority, of.call_site, 0, of.awaited_ns, span.step
    elif span.call_site or span.issued_ns is not None:
        info = span.call_site, 0, NONE if span.issued_ns is None else span.issued_ns, span.step
    return span.kind, span.lane, RoleName(span.name, span.role), span.start_ns, span.end_ns, info


class _RowEncoder:
    """Turns raw spans into rows of numbers: `INT64_COLUMNS`, then `INT32_COLUMNS`."""

    def __init__(self) -> None:
        self.texts, self.groups = Table[str](), Table[SpanGroup]()
        self._none, self._nobody = self.texts[""], self.groups[NO_GROUP]
        self._call_site_numbers: dict[tuple[int, int], int] = {}  # a program has few, and finding a line is slow
        self._group_numbers: dict[int, int] = {}  # by identity: to hash a thousand ranks is slow
        self._dtype_numbers: dict[object, int] = {None: self._none}

    def encode(self, raw: RawSpan) -> tuple[int, ...]:
        """Return the numbers of one span, 64-bit columns first; texts and groups that are new get a number."""
        kind, lane, name, start_ns, end_ns, info = raw
        texts, none = self.texts, self._none
        role = _PROGRAM if kind in ("compute", "comm") else 0
        if isinstance(name, RoleName):
            role = _ROLE_NUMBERS[name.role]
            name = str(name)
        issued_ns, met_ns, seq, nbytes, priority, awaited_ns, group = NONE, 0, 0, 0, 0, None, self._nobody
        op, algorithm, dtype, place = -1, none, none, none
        if not isinstance(info, tuple):
            step = info
        elif len(info) == 4:
            code, instruction, issued_ns, step = info
            place = self._call_site_number(code, instruction)
        else:
            match, issued_ns, priority, code, instruction, *waits, step = info
            awaited_ns = waits[0] if waits else None
            op_name, algorithm_name, raw_group, seq, nbytes, dtype_object, met_ns = match
            op, algorithm, dtype = texts[op_name], texts[algorithm_name], self._dtype_number(dtype_object)
            place, group = self._call_site_number(code, instruction), self._group_number(raw_group)
        step, awaited_ns = NONE if step is None else step, NONE if awaited_ns is None else awaited_ns
        return (
            start_ns, end_ns, issued_ns, met_ns, seq, nbytes, priority, step, awaited_ns, _KIND_NUMBERS[kind],
            texts[lane], texts[name], op, algorithm, dtype, place, group, role,
        )  # fmt: skip

    def _call_site_number(self, code: str | CodeType, instruction: int) -> int:
        """Return the index of "file:line" in `texts`, for a text or for an instruction of a code object."""
        if isinstance(code, str):
            return self.texts[code]
        key = id(code), instruction  # the raw spans keep the code objects alive
        if key not in self._call_site_numbers:
            self._call_site_numbers[key] = self.texts[call_site(code, instruction)]
        return self._call_site_numbers[key]

    def _dtype_number(self, dtype: object) -> int:
        """Return the index of the dtype's name in `texts`; each dtype object is converted to text once."""
        number = self._dtype_numbers.get(dtype)
        return self._dtype_numbers.setdefault(dtype, self.texts[str(dtype)]) if number is None else number

    def _group_number(self, group: RawGroup) -> int:
        """Return the index of a group in `groups`, looked up by the identity of the tuple that describes it."""
        number = self._group_numbers.get(id(group))
        if number is None:
            number = self.groups[SpanGroup(group, ()) if isinstance(group, str) else SpanGroup(*group)]
            self._group_numbers[id(group)] = number
        return number


_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_PROGRAM = _ROLE_NUMBERS["program"]
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def call_site(code: CodeType, instruction: int) -> str:
    """Return "file:line" of an instruction (`frame.f_lasti`) of the user's program.

    The path is relative to the current folder if it lies inside, and if that folder still exists; a relative path, as
    that of a call site given as text, stays as it is. Finding the line costs too much to do at each call.
    """
    line = next((n for start, end, n in code.co_lines() if start <= instruction < end), code.co_firstlineno)
    path = code.co_filename
    if not os.path.isabs(path):
        return f"{path}:{line}"
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:  # the folder was removed
        return f"{os.path.basename(path)}:{line}"
    return f"{path[len(here) :] if path.startswith(here) else os.path.basename(path)}:{line}"
