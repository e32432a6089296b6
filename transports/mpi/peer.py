"""What a process keeps of another one, or of itself: its messages under way, its credit, and whether it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count

from transports.base import describe_ranks
from transports.mpi.parcels import Inbound, Outbox
from transports.mpi.waiting import Arrival, Receive, Sending
from transports.mpi.wire import SLOTS, Wire

__all__ = ["Peer"]


class Peer:
    """Another process, or this one, as seen from here.

    Attributes:
        gone: Why nothing comes from there any more; None while it may.
        lost: It went without a goodbye, and gets none.
        credit_bytes: What may still be sent eagerly.
        owed_bytes: What it has sent eagerly, has been consumed, and it has not been told so.
        slots: Free slots for what it sends.
        line: Receives whose message was announced, and that wait for a slot.
        leaving: What it has asked for and has not been sent completely.
        granted: Receives that wait for bytes, by number of the announcement.
        asked: Announcements that it has not answered.
    """

    def __init__(self, member: int, ranks: Sequence[int], wire: Wire, credit_bytes: int) -> None:
        self.member = member
        self.ranks = frozenset(ranks)
        self.gone: str | None = None
        self.lost = False
        self.credit_bytes = credit_bytes
        self.owed_bytes = 0
        self.numbers = count()
        self.slots = list(range(SLOTS))
        self.line: deque[tuple[Receive, Arrival]] = deque()
        self.outbox = Outbox(wire, member)
        self.leaving: set[Sending] = set()
        self.granted: dict[int, tuple[Receive, Inbound]] = {}
        self.asked: dict[int, Sending] = {}

    def __str__(self) -> str:
        return f"process {self.member} ({describe_ranks(tuple(sorted(self.ranks)))})"
