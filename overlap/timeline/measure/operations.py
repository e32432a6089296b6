"""What each operation costs, by place in the program: how often, how large, queued, waited, moved, exposed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...collectives.kinds import Collective
from ..span import CollectiveInfo, Span
from ..spans import Timeline
from .intervals import intersect, length, merge
from .metrics import Coverage, coverage

_COLLECTIVES = {each.value: each for each in Collective} | {each.text: each for each in Collective}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """All operations of one kind from one line of the program, with one algorithm: sums over ranks."""

    op: str  # Name of the operation
    call_site: str  # "file:line", or ""
    algorithm: str  # What it became
    ranks: int  # Size of the largest group
    count: int  # How many spans
    nbytes: int  # Of all spans
    queued_ns: int  # From the call to the start
    waiting_ns: int  # For the last rank
    transfer_ns: int  # In which bytes moved
    exposed_ns: int  # Of the two, what no compute of the rank covers; operations at the same time count each

    @property
    def algbw_bytes_per_s(self) -> float:
        """Bytes of an operation by the time in which they moved."""
        return self.nbytes / (self.transfer_ns / 1e9) if self.transfer_ns else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """The same as nccl-tests defines it for wires."""
        kind = _COLLECTIVES.get(self.op)
        return self.algbw_bytes_per_s * (kind.bus_factor(self.ranks) if kind and self.ranks else 1.0)


def operations(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Operations]:
    """Add up what the operations cost that begin in the window of their rank, the most exposed first.

    Arguments and errors are those of `metrics.coverage`.
    """
    covers = {cover.rank: cover for cover in coverage(timeline, step=step, ranks=ranks)}
    found: dict[tuple[str, str, str], list[tuple[Span, CollectiveInfo]]] = {}
    hull = min(cover.window[0] for cover in covers.values()), max(cover.window[1] for cover in covers.values())
    for span in timeline.near(hull):
        info, cover = span.info, covers.get(span.rank)
        if info is not None and cover is not None and cover.window[0] <= span.start_ns < cover.window[1]:
            found.setdefault((info.op, info.call_site, info.algorithm), []).append((span, info))
    told = [_added(key, members, covers) for key, members in found.items()]
    return sorted(told, key=lambda one: (-one.exposed_ns, -one.transfer_ns, one.op, one.call_site, one.algorithm))


def _added(
    key: tuple[str, str, str], members: Sequence[tuple[Span, CollectiveInfo]], covers: dict[int, Coverage]
) -> Operations:
    infos = [info for _, info in members]
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for span, _ in members:
        by_rank.setdefault(span.rank, []).append((span.start_ns, span.end_ns))
    return Operations(
        op=key[0],
        call_site=key[1],
        algorithm=key[2],
        ranks=max(len(info.ranks) for info in infos),
        count=len(infos),
        nbytes=sum(info.nbytes for info in infos),
        queued_ns=sum(info.queue_wait_ns for info in infos),
        waiting_ns=sum(info.last_rank_wait_ns for info in infos),
        transfer_ns=sum(info.transfer_ns for info in infos),
        exposed_ns=sum(length(intersect(merge(each), covers[rank].exposed)) for rank, each in by_rank.items()),
    )
