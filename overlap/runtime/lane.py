"""Lanes: messages of one sender for one receiver and tag; and queues of receives from any source."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import trio

from .match import Key
from .state import ADMITTED

if TYPE_CHECKING:
    from .message import Message, Returned

QueueName: TypeAlias = tuple[int, int, int]
"""Id of the group, group rank of the receiver, and tag."""

LaneName: TypeAlias = tuple[int, int, int, int]
"""Name of the queue, and group rank of the sender."""

RETURNED_NS = -1
"""Start time of a message that was received before, and returned."""

TAG_BITS = 24


class Queue:
    """Receives of one rank from any source, with one tag on one group, that have chosen no sender.

    Attributes:
        name: Name among the queues of the process.
        group: Key of the group.
        receives: The receives, in the order of their calls.
        searching: The first of them, once it has arrived.
        scope: Scope of the task in which it waits for other processes.
    """

    __slots__ = ("group", "name", "receives", "scope", "searching")

    identity: str = ""
    name: QueueName
    group: Key
    receives: deque[Message[object]]
    searching: Message[object] | None
    scope: trio.CancelScope | None

    def __init__(self, name: QueueName, group: Key) -> None:
        self.name, self.group = name, group
        self.receives, self.searching, self.scope = deque(), None, None

    def missing(self, message: Message[object]) -> list[int]:
        """Return the world ranks that may send."""
        return [rank for src, rank in enumerate(self.group.ranks) if src != self.name[1]]


class Lane:
    """Messages of one sender for one receiver, with one tag on one group.

    Attributes:
        name: Name among the lanes of the process; the first three parts name the queue of receives from any source
            that may take its messages.
        group: Key of the group.
        members: World ranks of the sender and the receiver.
        by_wire: Whether its messages go over a wire; else they match here.
        lines: Sends, and receives that name the sender, in the order of their calls.
        arrived: The first of each, from its arrival to its match here.
        numbers: Number of the next send and of the next receive; see `Inbox.numbers`.
        returned: Messages without a send, the oldest first.
    """

    __slots__ = ("arrived", "by_wire", "group", "lines", "members", "name", "numbers", "returned")

    name: LaneName
    group: Key
    by_wire: bool
    members: tuple[int, ...]
    lines: tuple[deque[Message[object]], deque[Message[object]]]
    arrived: list[Message[object] | None]
    numbers: list[int]
    returned: list[Returned]

    @property
    def key(self) -> Key:
        """Name with all that it follows from."""
        (ranks, occurrence, *_), (_, dst, tag, src) = self.group, self.name
        return Key(ranks, occurrence, "", src, dst, tag)

    @property
    def id(self) -> int:
        """Id of 40 bits, the same on every rank."""
        return lane_id(*self.name)

    @property
    def group_id(self) -> int:
        """Id of the group."""
        return self.name[0]

    @property
    def identity(self) -> str:
        """Name in few characters, the same on every rank."""
        return f"{self.id:x}"

    def missing(self, message: Message[object]) -> list[int]:
        """Return the world ranks that have not arrived at a message."""
        end = message.receives
        return [self.members[not end]] if self.by_wire or self.arrived[end] is message else []

    @property
    def offered_ns(self) -> int | None:
        """Start time of the oldest message here without a receive; None if there is none.

        Returned messages are older than all others: see `RETURNED_NS`.
        """
        receives = self.lines[1]
        met = bool(receives) and receives[0] is not self.arrived[1] and receives[0].state > ADMITTED
        started, unmatched = [RETURNED_NS for _ in self.returned], len(receives) - met
        if self.arrived[0] is not None:
            started.append(self.arrived[0].started_ns)
        return started[unmatched] if unmatched < len(started) else None


def lane_id(*values: int) -> int:
    """Return 40 bits of a hash of numbers, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=5).digest(), "big")


def wire_tag(name: LaneName) -> int:
    """Return the tag on a wire of the messages of a lane: the same for all senders."""
    group, _, tag, _ = name
    high = tag >> TAG_BITS
    return (lane_id(group, high) if high else group) << TAG_BITS | tag & ((1 << TAG_BITS) - 1)
