"""Announced messages without a receive, and their budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from transports.matching.ends import Lane, Receive
from transports.matching.protocol import Limits, MessageKind, ProtocolError
from transports.signature import OPEN_SIGNATURE, PlainSignature

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A message without a receive: its bytes, the placeholder receive that collects them, or (neither) an offer."""

    number: int
    nbytes: int
    payload: bytes | None = None
    pushed: Receive | None = None
    signature: PlainSignature = OPEN_SIGNATURE
    place: int = 0  # Of its signature in the table of the sender
    since_ns: int = 0  # Time of the announcement, which orders messages of all processes without a receive

    @property
    def whole(self) -> bool:
        """Whether the whole message has arrived."""
        return self.payload is not None if self.pushed is None else not self.pushed.missing_bytes


def pop_first(queues: dict[Lane, deque[_T]], lane: Lane) -> _T:
    """Return the first entry of a lane's queue, and remove it; an empty queue is dropped."""
    queue = queues[lane]
    first = queue.popleft()
    if not queue:
        del queues[lane]
    return first


class Budget:
    """The credit of the other process: bytes that it sent unasked, and bytes that ranks have received since.

    Args:
        limits: The limits of both sides.
        answer: Sends an answer to the other process.
    """

    def __init__(self, limits: Limits, answer: Callable[..., None]) -> None:
        self._answer = answer
        self._budget_bytes, self._overhead_bytes = limits.budget_bytes, limits.overhead_bytes
        self._used_bytes = 0  # as the other side sees it
        self._free_bytes = 0  # received by ranks, and not yet returned to the sender as credit
        self._report_bytes = limits.budget_bytes // 4

    def spend(self, nbytes: int) -> None:
        """Count a message that arrived and waits for its receive.

        Raises:
            ProtocolError: The budget is exceeded.
        """
        self._used_bytes += nbytes + self._overhead_bytes
        if self._used_bytes > self._budget_bytes:
            raise ProtocolError(f"peer sent more eager data than the agreed {self._budget_bytes} bytes")

    def free(self, nbytes: int) -> None:
        """Count a waiting message that a rank has received; send credit from a quarter of the budget on."""
        self._free_bytes += nbytes + self._overhead_bytes
        if self._free_bytes >= self._report_bytes:
            self._used_bytes -= self._free_bytes
            self._answer(MessageKind.CREDIT, self._free_bytes)
            self._free_bytes = 0
