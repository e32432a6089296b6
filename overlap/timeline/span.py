"""A span: one interval of a rank's activity on one lane, its role, and the details of a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["compute", "comm", "step", "program", "wires", "copy"]
Clock: TypeAlias = Literal["real", "virtual"]
Role: TypeAlias = Literal["", "program", "pack", "update", "bucket", "stage", "library"]
"""What a compute or an operation is for: it puts gradients into a bucket ("pack"), changes parameters ("update"),
carries a bucket or goes from stage to stage; or it is other work of a strategy that has no part in the model itself
("library"). All else is the program's. "" where the trace does not say so."""


class RoleName(str):
    """The name and role of an operation that the library issues itself: only the recorder looks at the role.

    It is a text like all names that programs give, so that their computes and operations carry nothing more.
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

    Instants are integer nanoseconds of the timeline's clock; `awaited_ns` is when the rank's program
    began to wait for it, or None. `call_site` is "file:line" of the call, or "". `ranks` are
    the group's, in its order, or () if unknown; of a message, its source and its destination. `tag` is that of a
    message.
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
        """Time from active on this rank to active on all ranks of the group: what later ranks cost."""
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
    a communication stream. `info` is set on
    communication that is known in detail. `step` is the index of the step in which the operation was issued, however
    much later it ran; on a span of kind "step", its own. `call_site` of a compute is "file:line" of the call, or "",
    and `issued_ns` the instant of the call, if it is known. `role` is that of a compute or an operation.
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
        """Instant of the call behind the span: its start if the call is not known, and never later."""
        issued_ns = self.issued_ns if self.info is None else self.info.issued_ns
        return self.start_ns if issued_ns is None else min(issued_ns, self.start_ns)

    @property
    def moved_ns(self) -> int:
        """Instant at which an operation's bytes began to move: its last rank had arrived; the start of other spans."""
        return self.start_ns if self.info is None else min(max(self.info.met_ns, self.start_ns), self.end_ns)
