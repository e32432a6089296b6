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

from .columnar import INT32_COLUMNS, INT64_COLUMNS, KINDS, NO_GROUP, NONE, ROLES, IndexTable, SpanColumns, SpanGroup
from .span import Kind, RoleName, Span

RawGroup: TypeAlias = str | tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], int]
"""The name of a group, and if possible its ranks: groups of one name (the axes of a mesh) differ in their ranks. Of
messages, also their tag."""

RawMatch: TypeAlias = tuple[str, str, RawGroup, int, int, object, int]
"""(op, algorithm, group, seq, nbytes, dtype, met_ns): facts that all ranks of one collective share."""

RawCollective: TypeAlias = (
    tuple[RawMatch, int, int, str | CodeType, int, int | None]
    | tuple[RawMatch, int, int, str | CodeType, int, int | None, int | None]
)
"""(match, issued_ns, priority, code, instruction, awaited_ns, step): facts of one rank. `code` may be the call site as
text. The shorter form has no `awaited_ns`: the program has not waited for the operation."""

RawCompute: TypeAlias = tuple[str | CodeType, int, int, int | None]
"""(code, instruction, issued_ns, step). `code` may be the call site as text."""

RawSpan: TypeAlias = tuple[Kind, str, str, int, int, RawCollective | RawCompute | int | None]
"""(kind, lane, name, start_ns, end_ns, info). `info` of kind "comm" is a `RawCollective` or None; of a step, its index;
of a compute, a `RawCompute` or the index of its step. A name that is a `RoleName` has the role; any other is of the
program."""

DEFAULT_CAPACITY = 20_000
"""Spans kept per rank: about 8 MB when every one is a collective."""


STEPS_CAPACITY = 50 * DEFAULT_CAPACITY
"""Spans kept per rank if the last N steps are to be kept: a bound for programs whose steps never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSteps:
    """The steps of a long run that are recorded; spans outside of steps always are."""

    last: int | None = None  # Number of last steps; None: as many as fit into `DEFAULT_CAPACITY` spans
    every: int = 1  # Only steps whose index is a multiple of this

    @classmethod
    def from_setting(cls, text: str | None) -> KeptSteps | None:
        """Parse the setting of a run; None if it is not set, which means all steps."""
        return None if text is None else cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> KeptSteps:
        """Parse "last:100", "every:10" or "last:100,every:10".

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
    """Recorder of the spans of one rank in a bounded ring; when it is full, a new span replaces the oldest.

    Attributes:
        rank: The rank in the world.
        append: Takes one `RawSpan`, from any thread. It costs about 0.1 microseconds, as the tuple is stored as it is.
        count, push: `append` in two parts, for code on the path of every operation: call `count()`, then `push(span)`.

    Args:
        rank: The rank in the world.
        capacity: Number of spans; None: `DEFAULT_CAPACITY`, or `STEPS_CAPACITY` if `steps.last` is set.
        steps: Steps whose spans are recorded; None: all.
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
            self.count = int  # does nothing: the filter itself counts the spans that it stores

    @property
    def dropped(self) -> int:
        """Number of spans that were replaced in the ring. Spans of steps that are not recorded do not count."""
        # Reading an `itertools.count` advances it, so the number of reads is subtracted.
        appended = next(self._appended) - self._count_reads
        self._count_reads += 1
        return appended - len(self._ring)

    @property
    def last(self) -> RawSpan | None:
        """Span appended last, or None. If `last is earlier_last`, no span was appended in between."""
        return self._ring[-1] if self._ring else None

    def since(self, seen: RawSpan | None) -> list[RawSpan]:
        """Return the spans appended after `seen`; all in the ring if `seen` is None or replaced. From any thread."""
        if self.last is seen:
            return []
        raws = list(self._ring)
        # `seen` is found by identity, from the end, where it usually is.
        at = next((at for at in range(len(raws) - 1, -1, -1) if raws[at] is seen), -1)
        return raws[at + 1 :]

    def columns(self) -> SpanColumns:
        """Return the spans in the ring as columns, in the order they were appended. Cost: 2 microseconds each."""
        return columns_from_raw(self.rank, self._ring.copy())

    def spans(self) -> list[Span]:
        """Return the spans in the ring, in the order they were appended (an operation is appended when it ends)."""
        return list(self.columns().spans())

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        return f"<Recorder rank {self.rank}: {len(self._ring)} of {self._ring.maxlen} spans>"


def _make_counting_append(ring: deque[RawSpan], appended: count[int]) -> Callable[[RawSpan], None]:
    """Return `Recorder.append`, which counts its calls: `next` of a count is atomic in threads, unlike `+= 1`."""
    push = ring.append

    def append(raw: RawSpan) -> None:
        next(appended)
        push(raw)

    return append


def _make_filtering_append(ring: deque[RawSpan], appended: count[int], steps: KeptSteps) -> Callable[[RawSpan], None]:
    """Return `Recorder.append` for recording some steps: it ignores spans of other steps, and drops older steps."""
    push, every, last = ring.append, steps.every, steps.last
    order = count()  # spans stored here; `appended` also counts how often it was read
    ends: deque[int] = deque()  # for each of the last steps: the number of spans stored when it ended

    def append(raw: RawSpan) -> None:
        """Store a span if its step is recorded. At the end of a step, drop the spans of the oldest step."""
        info = raw[5]
        step = info[-1] if isinstance(info, tuple) else info
        # A span without a step is always recorded.
        if step is not None and step % every:
            return
        number = next(order)
        next(appended)
        push(raw)
        if last is not None and raw[0] == "step":  # steps end on one thread
            ends.append(number + 1)
            if len(ends) > last:
                # The number of spans up to the end of that step, less those that have left the ring already.
                for _ in range(ends.popleft() - (number + 1 - len(ring))):
                    ring.popleft()

    return append


def columns_from_raw(rank: int, raws: Collection[RawSpan]) -> SpanColumns:
    """Turn the raw spans of a rank into columns, in their order. Cost: 2 microseconds each."""
    encoder = _RowEncoder()
    rows = [encoder.encode(raw) for raw in raws]
    names = (*INT64_COLUMNS, *INT32_COLUMNS)
    columns = dict(zip(names, np.array(rows, np.int64).reshape(len(rows), len(names)).T, strict=True))
    return SpanColumns.from_named(columns | {"rank": np.full(len(rows), rank)}, encoder.texts, encoder.groups)


def columns_from_spans(spans: Sequence[Span]) -> SpanColumns:
    """Turn spans into columns, in their order. Cost: about 5 microseconds each.

    Raises:
        OverflowError: A number has more than 64 bits.
    """
    raws = [_to_raw_span(span) for span in spans]
    return replace(columns_from_raw(0, raws), rank=np.array([span.rank for span in spans], np.int64))


def _to_raw_span(span: Span) -> RawSpan:
    """Return a span in the form in which a recorder stores it."""
    info: RawCollective | RawCompute | int | None = span.step
    if (of := span.info) is not None:
        match = of.op, of.algorithm, (of.group, of.ranks, of.tag), of.seq, of.nbytes, of.dtype, of.met_ns
        info = match, of.issued_ns, of.priority, of.call_site, 0, of.awaited_ns, span.step
    elif span.call_site or span.issued_ns is not None:
        info = span.call_site, 0, NONE if span.issued_ns is None else span.issued_ns, span.step
    return span.kind, span.lane, RoleName(span.name, span.role), span.start_ns, span.end_ns, info


class _RowEncoder:
    """Encoder of raw spans as rows of numbers: `INT64_COLUMNS`, then `INT32_COLUMNS`.

    Attributes:
        texts, groups: The tables into which the rows have indexes.
    """

    def __init__(self) -> None:
        self.texts, self.groups = IndexTable[str](), IndexTable[SpanGroup]()
        self._empty_text, self._no_group = self.texts[""], self.groups[NO_GROUP]
        # By (id of the code object, instruction): a program has few call sites, and finding a line is slow.
        self._call_site_numbers: dict[tuple[int, int], int] = {}
        self._group_numbers: dict[int, int] = {}  # by id of the tuple: hashing a thousand ranks is slow
        self._dtype_numbers: dict[object, int] = {None: self._empty_text}

    def encode(self, raw: RawSpan) -> tuple[int, ...]:
        """Return the numbers of one span, 64-bit columns first; new texts and groups are added to the tables."""
        kind, lane, name, start_ns, end_ns, info = raw
        texts, empty_text = self.texts, self._empty_text
        role = _PROGRAM if kind in ("compute", "comm") else 0
        if isinstance(name, RoleName):
            role = _ROLE_NUMBERS[name.role]
            name = str(name)
        # Values of a span that is no operation.
        issued_ns, met_ns, seq, nbytes, priority, awaited_ns, group = NONE, 0, 0, 0, 0, None, self._no_group
        op, algorithm, dtype, place = -1, empty_text, empty_text, empty_text
        if not isinstance(info, tuple):
            step = info
        elif len(info) == 4:  # a `RawCompute`
            code, instruction, issued_ns, step = info
            place = self._call_site_number(code, instruction)
        else:  # a `RawCollective`: `waits` is [awaited_ns], or [] if the program has not waited
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
        """Return the index in `texts` of a call site, which is given as text or as an instruction of a code object."""
        if isinstance(code, str):
            return self.texts[code]
        key = id(code), instruction  # an id stays valid, as the raw spans refer to the code objects
        if key not in self._call_site_numbers:
            self._call_site_numbers[key] = self.texts[format_call_site(code, instruction)]
        return self._call_site_numbers[key]

    def _dtype_number(self, dtype: object) -> int:
        """Return the index in `texts` of a dtype's name; each dtype object is converted to text once."""
        number = self._dtype_numbers.get(dtype)
        return self._dtype_numbers.setdefault(dtype, self.texts[str(dtype)]) if number is None else number

    def _group_number(self, group: RawGroup) -> int:
        """Return the index of a group in `groups`; the tuple that describes it is looked up by identity."""
        number = self._group_numbers.get(id(group))
        if number is None:
            number = self.groups[SpanGroup(group, ()) if isinstance(group, str) else SpanGroup(*group)]
            self._group_numbers[id(group)] = number
        return number


_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_PROGRAM = _ROLE_NUMBERS["program"]
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def format_call_site(code: CodeType, instruction: int) -> str:
    """Return "file:line" of an instruction (`frame.f_lasti`) of a code object.

    A path inside the working directory is shortened to the part relative to it, any other absolute path to the file's
    name. It is too slow to be done at each call, so spans store the instruction.
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
