"""What each rank did, when, on which lane. Recording is a tuple and an append; the rest happens when somebody reads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import CodeType
from typing import Literal, TypeAlias, cast

Kind: TypeAlias = Literal["compute", "comm", "step", "program", "wires"]
Clock: TypeAlias = Literal["real", "virtual"]

RawGroup: TypeAlias = str | tuple[str, tuple[int, ...]]
"""Name, and if possible the ranks: groups of one name (the axes of a mesh) are told apart by them."""

RawMatch: TypeAlias = tuple[str, str, RawGroup, int, int, object, int]
"""(op, algorithm, group, seq, nbytes, dtype, met_ns): what ranks of one collective share."""

RawCollective: TypeAlias = tuple[RawMatch, int, int, str | CodeType, int, int | None]
"""(meeting, issued_ns, priority, code, instruction, step): one rank's part; a text for the code is the call site."""

RawCompute: TypeAlias = tuple[str | CodeType, int, int, int | None]
"""(code, instruction, issued_ns, step); a text for the code is the call site."""

RawSpan: TypeAlias = tuple[Kind, str, str, int, int, RawCollective | RawCompute | int | None]
"""(kind, lane, name, start_ns, end_ns, info); comm has a `RawCollective` or None, compute a `RawCompute` or, as steps
have, the step's index."""

DEFAULT_CAPACITY = 20_000
"""Spans kept per rank: about 8 MB when every one is a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveInfo:
    """What a communication span did, and where its time went.

    Instants are integer nanoseconds of the timeline's clock. `call_site` is "file:line" of the call, or "". `ranks` are
    the group's, in its order, or () if unknown.
    """

    op: str
    algorithm: str
    group: str
    seq: int
    nbytes: int
    dtype: str
    issued_ns: int
    met_ns: int
    priority: int
    call_site: str
    start_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()

    @property
    def queue_wait_ns(self) -> int:
        """From the call to the instant the operation became active on this rank."""
        return self.start_ns - self.issued_ns

    @property
    def last_rank_wait_ns(self) -> int:
        """From active here to active on every rank of the group: time that somebody else's lateness cost."""
        return self.met_ns - self.start_ns

    @property
    def transfer_ns(self) -> int:
        """From active on every rank to done here."""
        return self.end_ns - self.met_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named interval `[start_ns, end_ns)` of one rank on one lane.

    `lane` is "compute", "step", "program" (which kept the event loop busy), "wires" (instants at which something has
    happened to the connections between processes), or the name of a communication stream.
    `info` is set on communication that is known in detail. `step` is the index of the step in which the operation was
    issued, however much later it ran; on a span of kind "step", its own. Of a compute, `call_site` is "file:line" of
    the call, or "", and `issued_ns` when that was, if it is known.
    """

    rank: int
    kind: Kind
    lane: str
    name: str
    start_ns: int
    end_ns: int
    info: CollectiveInfo | None = None
    step: int | None = None
    call_site: str = ""
    issued_ns: int | None = None

    @property
    def duration_ns(self) -> int:
        """Length of the span."""
        return self.end_ns - self.start_ns

    def shifted(self, offset_ns: int) -> Span:
        """The same on another clock."""
        info = self.info
        if info is not None:
            info = replace(
                info,
                issued_ns=info.issued_ns + offset_ns,
                met_ns=info.met_ns + offset_ns,
                start_ns=info.start_ns + offset_ns,
                end_ns=info.end_ns + offset_ns,
            )
        return replace(
            self,
            start_ns=self.start_ns + offset_ns,
            end_ns=self.end_ns + offset_ns,
            issued_ns=None if self.issued_ns is None else self.issued_ns + offset_ns,
            info=info,
        )


def span_order(span: Span) -> tuple[int, int, str, str, int, str, int]:
    """Sort key of a timeline: by start, then by everything that tells spans apart, so that equal runs sort equally."""
    seq = span.info.seq if span.info else -1
    return span.start_ns, span.rank, span.kind, span.lane, span.end_ns, span.name, seq


class Recorder:
    """Records the spans of one rank in a bounded ring; the oldest go first.

    Attributes:
        rank: the rank in the world.
        append: takes one `RawSpan`, from any thread. It costs about 0.1 microseconds: the tuple is stored as it is, and
            read only by `spans`.
    """

    __slots__ = ("_appended", "_looks", "_ring", "append", "rank")

    def __init__(self, rank: int, *, capacity: int = DEFAULT_CAPACITY) -> None:
        self.rank = rank
        self._ring: deque[RawSpan] = deque(maxlen=capacity)
        self._appended = count()
        self._looks = 0
        self.append: Callable[[RawSpan], None] = _counting(self._ring, self._appended)

    @property
    def dropped(self) -> int:
        """How many spans fell out of the ring."""
        appended = next(self._appended) - self._looks
        self._looks += 1
        return appended - len(self._ring)

    @property
    def last(self) -> RawSpan | None:
        """The span appended last, for those who only ask whether there is a new one: it costs nothing to look."""
        return self._ring[-1] if self._ring else None

    def spans(self) -> list[Span]:
        """The spans still in the ring, in the order they were appended (an operation is appended when it ends)."""
        places: dict[tuple[int, int], str] = {}  # a program has few, and finding a line is slow
        return [_span(self.rank, raw, places) for raw in self._ring.copy()]

    def __repr__(self) -> str:
        return f"<Recorder rank {self.rank}: {len(self._ring)} of {self._ring.maxlen} spans>"


def _counting(ring: deque[RawSpan], appended: count[int]) -> Callable[[RawSpan], None]:
    """An append that counts: `next` of a count is one uninterrupted step, `+= 1` from two threads would lose some."""
    push = ring.append

    def append(raw: RawSpan) -> None:
        next(appended)
        push(raw)

    return append


def _span(rank: int, raw: RawSpan, places: dict[tuple[int, int], str]) -> Span:
    kind, lane, name, start_ns, end_ns, info = raw
    if not isinstance(info, tuple):
        return Span(rank=rank, kind=kind, lane=lane, name=name, start_ns=start_ns, end_ns=end_ns, step=info)
    if kind == "compute":
        code, instruction, issued_ns, step = cast(RawCompute, info)
        return Span(
            rank=rank, kind=kind, lane=lane, name=name, start_ns=start_ns, end_ns=end_ns, step=step,
            call_site=_place(code, instruction, places), issued_ns=issued_ns,
        )  # fmt: skip
    raw_collective = cast(RawCollective, info)
    return Span(
        rank=rank, kind=kind, lane=lane, name=name, start_ns=start_ns, end_ns=end_ns, step=raw_collective[-1],
        info=_collective(raw_collective, start_ns, end_ns, places),
    )  # fmt: skip


def _place(code: str | CodeType, instruction: int, places: dict[tuple[int, int], str]) -> str:
    if isinstance(code, str):
        return code
    key = id(code), instruction  # the ring keeps the program's code alive
    return places[key] if key in places else places.setdefault(key, call_site(code, instruction))


def call_site(code: CodeType, instruction: int) -> str:
    """Return "file:line" of an instruction (`frame.f_lasti`) of the user's program.

    The path is relative to the current folder if it lies inside. Finding the line costs too much to do at each call.
    """
    line = next((n for start, end, n in code.co_lines() if start <= instruction < end), code.co_firstlineno)
    path = code.co_filename
    here = os.getcwd() + os.sep
    return f"{path[len(here) :] if path.startswith(here) else os.path.basename(path)}:{line}"


def _collective(raw: RawCollective, start_ns: int, end_ns: int, places: dict[tuple[int, int], str]) -> CollectiveInfo:
    (op, algorithm, group, seq, nbytes, dtype, met_ns), issued_ns, priority, code, instruction, _ = raw
    name, ranks = (group, ()) if isinstance(group, str) else group
    return CollectiveInfo(
        op=op, algorithm=algorithm, group=name, ranks=ranks, seq=seq, nbytes=nbytes,
        dtype="" if dtype is None else str(dtype), issued_ns=issued_ns, met_ns=met_ns, priority=priority,
        call_site=_place(code, instruction, places), start_ns=start_ns, end_ns=end_ns,
    )  # fmt: skip


@dataclass(kw_only=True)
class Timeline:
    """The spans of a run, or of the part of it that one process saw.

    Attributes:
        spans: sorted by `span_order`; `collect` does that.
        world_size: ranks in the whole run, seen here or not.
        clock: "real", or "virtual" for simulated time.
        dropped: spans that no longer fitted the rings.
        meta: free text about the run, such as the script's name.
    """

    spans: list[Span]
    world_size: int
    clock: Clock = "real"
    dropped: int = 0
    meta: dict[str, str] = field(default_factory=dict)

    @classmethod
    def collect(
        cls,
        recorders: Iterable[Recorder],
        *,
        world_size: int,
        clock: Clock = "real",
        meta: Mapping[str, str] | None = None,
    ) -> Timeline:
        """Gather what the recorders of a process hold. Cost: a few microseconds per span, so after the run."""
        recorders = list(recorders)
        spans = sorted((span for recorder in recorders for span in recorder.spans()), key=span_order)
        dropped = sum(recorder.dropped for recorder in recorders)
        return cls(spans=spans, world_size=world_size, clock=clock, dropped=dropped, meta=dict(meta or {}))

    def ranks(self) -> list[int]:
        """The ranks that have spans here, ascending."""
        return sorted({span.rank for span in self.spans})

    def for_rank(self, rank: int) -> list[Span]:
        """The spans of one rank, in order of start."""
        return [span for span in self.spans if span.rank == rank]

    def shifted(self, offset_ns: int) -> Timeline:
        """The same on another clock: what that showed when this one showed 0 is `offset_ns`."""
        return replace(self, spans=[span.shifted(offset_ns) for span in self.spans])

    def by_rank(self) -> dict[int, list[Span]]:
        """The spans of each rank that has any, ranks ascending, each in order of start."""
        found: dict[int, list[Span]] = {rank: [] for rank in self.ranks()}
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def steps(self) -> list[int]:
        """The step indices that any rank recorded, ascending."""
        return sorted({span.step for span in self.spans if span.kind == "step" and span.step is not None})
