"""Messages that are here before their receives, and the queues of lanes in which either waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from transports.matching.ends import Lane, Receive

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A message that is here before its receive: its bytes, where they are coming to, or (neither) an offer of them."""

    number: int
    nbytes: int
    payload: bytes | None = None
    pushed: Receive | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        return self.payload is not None if self.pushed is None else not self.pushed.missing_bytes

    @property
    def held_bytes(self) -> int:
        """How much memory it takes."""
        return len(self.payload or b"") if self.pushed is None else self.nbytes


def pop(queues: dict[Lane, deque[_T]], lane: Lane) -> _T:
    """Take the first of a lane's queue, and forget the queue if that was all."""
    queue = queues[lane]
    one = queue.popleft()
    if not queue:
        del queues[lane]
    return one
