"""A span: one interval of a rank's activity on one lane, its role, and the details of a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["compute", "comm", "step", "program", "wires", "copy"]
Clock: TypeAlias = Literal["real", "virtual"]
Role: TypeAlias = Literal["", "program", "pack", "update", "bucket", "stage", "library"]
"""Purpose of a compute or an operation. "pack": it copies gradients into a bucket; "update": it changes parameters;
"bucket": it reduces a bucket; "stage": it sends from one pipeline stage to another; "library": other work of the
library that is no part of the model; "program": the program issued it. "" if the trace does not record it."""


class RoleName(str):
    """Name of an operation that the library issues itself, with a role, which only the recorder looks at.

    It is a `str`, like the names that programs give: so operations need no field for the role.
    """

    __slots__ = ("role",)
    role: Role

    def __new__(cls, name: str, role: Role) -> RoleName:
        """Return a text equal to `name` that also carries the role."""
        made = str.__new__(cls, name)
        made.role = role
        return made

    def __getnewargs__(self) -> tuple[str, Role]:  # type: ignore[override]
        return str(self), self.role


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveInfo:
    """Details of a communication span: the operation, and where its time went.

    Instants are integer nanoseconds of the timeline's clock. The program issued the operation at `issued_ns`; it became
    active on this rank at `start_ns`, and on all ranks of the group at `met_ns`; `awaited_ns` is when the program began
    to wait for it, or None. `call_site` is "file:line" of the call, or "". `ranks` are the ranks of the group in its
    order, (source, destination) of a message, or () if unknown. `tag` is the tag of a message.
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
    awaited_ns: int | None = None
    tag: int = 0

    @property
    def queue_wait_ns(self) -> int:
        """Time from the call to the instant the operation became active on this rank."""
        return self.start_ns - self.issued_ns

    @property
    def last_rank_wait_ns(self) -> int:
        """Time from active on this rank to active on all ranks of the group: the cost of later ranks."""
        return self.met_ns - self.start_ns

    @property
    def transfer_ns(self) -> int:
        """Time from the instant the operation was active on all ranks to its end on this rank."""
        return self.end_ns - self.met_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named interval `[start_ns, end_ns)` of one rank on one lane.

    `lane` is "compute", "step", "program" (the program kept the event loop busy), "wires" (instants at which
    connections between processes were lost or came back), "copy" (copies and sets of a device's memory), or the name of
    a communication stream. `info` has the details of communication, if they are known. `step` is the index of the step
    in which the operation was issued, even if it ran later; for a span of kind "step", its own index. For a compute,
    `call_site` is "file:line" of the call, or "", and `issued_ns` the instant of the call, or None. `role` is the
    purpose of a compute or an operation.
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
    role: Role = ""

    @property
    def duration_ns(self) -> int:
        """Length of the span, in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def called_ns(self) -> int:
        """Instant at which the program issued the span: at most its start, and its start if that is unknown."""
        issued_ns = self.issued_ns if self.info is None else self.info.issued_ns
        return self.start_ns if issued_ns is None else min(issued_ns, self.start_ns)

    @property
    def moved_ns(self) -> int:
        """Instant at which the last rank of an operation had arrived and bytes moved; for other spans, the start."""
        return self.start_ns if self.info is None else min(max(self.info.met_ns, self.start_ns), self.end_ns)
