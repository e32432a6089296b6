"""One span: what a rank did, when, on which lane."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["compute", "comm", "step", "program", "wires"]
Clock: TypeAlias = Literal["real", "virtual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveInfo:
    """What a communication span did, and where its time went.

    Instants are integer nanoseconds of the timeline's clock; `awaited_ns` is when the rank's program
    began to wait for it, or None. `call_site` is "file:line" of the call, or "". `ranks` are
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
    awaited_ns: int | None = None

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
                awaited_ns=None if info.awaited_ns is None else info.awaited_ns + offset_ns,
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
