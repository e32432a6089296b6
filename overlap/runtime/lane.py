"""Lanes: messages of one sender for one receiver and tag; and queues of receives from any source."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import trio

from .match import Key
from .state import ADMITTED

if TYPE_CHECKING:
    from .message import Message, Returned

LaneName: TypeAlias = tuple[int, int, int, int]
"""Id of the group, group rank of the receiver, tag, group rank of the sender. A plain tuple is quickest to make."""


class QueueName(NamedTuple):
    """Name of a queue of receives from any source."""

    group_id: int  # Id of the group
    receiver: int  # Group rank of the receiver
    tag: int


RETURNED_NS = -1
"""Start time of a returned message (see `Returned`): before that of any other message."""

TAG_BITS = 24

SEND, RECEIVE = 0, 1
"""Index of the sender's and of the receiver's end in the pairs of a lane."""


class Queue:
    """Receives of one rank from any source, with one tag on one group, that have chosen no sender yet.

    Attributes:
        name: Name among the queues of the process.
        group: Key of the group.
        receives: The receives, in the order of their calls.
        searching: The first receive, once it may choose a message; None before.
        scope: Cancels the task that waits for messages of other processes; None: there is no such task.
    """

    __slots__ = ("group", "name", "receives", "scope", "searching")

    identity: str = ""  # a lane has one; a queue has no name that other ranks know

    def __init__(self, name: QueueName, group: Key) -> None:
        self.name: QueueName = name
        self.group: Key = group
        self.receives: deque[Message[object]] = deque()
        self.searching: Message[object] | None = None
        self.scope: trio.CancelScope | None = None

    def missing_ranks(self, message: Message[object]) -> list[int]:
        """Return the world ranks that may send to a receive of the queue: all of the group but its own."""
        return [rank for src, rank in enumerate(self.group.ranks) if src != self.name.receiver]


class Lane:
    """Messages of one sender for one receiver, with one tag on one group.

    In `messages`, `arrived` and `numbers`, item `SEND` is for the sends, and item `RECEIVE` for the receives. As an
    index, `Message.receives` (False or True) is the same.

    Attributes:
        name: Name among the lanes of the process.
        queue: Name of the queue of receives from any source that may take messages of this lane.
        src: Group rank of the sender.
        group: Key of the group.
        members: World ranks of the sender and the receiver.
        by_wire: Whether the messages go over a wire; else they match in this process.
        messages: The sends, and the receives that name the sender, in the order of their calls.
        arrived: The first send and the first receive, while they wait for their match in this process; else None.
        numbers: Number of the next send and of the next receive; see `Inbox.numbers`.
        returned: Messages that no send waits with (see `Returned`), the oldest first.
    """

    __slots__ = ("arrived", "by_wire", "group", "members", "messages", "name", "numbers", "queue", "returned", "src")

    name: LaneName
    queue: QueueName
    src: int
    group: Key
    by_wire: bool
    members: tuple[int, ...]
    messages: tuple[deque[Message[object]], deque[Message[object]]]
    arrived: list[Message[object] | None]
    numbers: list[int]
    returned: list[Returned]

    @property
    def key(self) -> Key:
        """Key of this lane in the form of a communicator's key, for simulations."""
        (ranks, occurrence, *_), (_, dst, tag, src) = self.group, self.name  # see `LaneName`
        return Key(ranks, occurrence, "", src, dst, tag)

    @property
    def id(self) -> int:
        """Hash of the name in 40 bits, the same on every rank."""
        return lane_id(*self.name)

    @property
    def group_id(self) -> int:
        """Id of the group."""
        return self.name[0]

    @property
    def identity(self) -> str:
        """The id in hexadecimal, for messages to people."""
        return f"{self.id:x}"

    def missing_ranks(self, message: Message[object]) -> list[int]:
        """Return the world rank at the other end of a message, in a list, or [] if it is known to have arrived.

        Over a wire that is not known, and the peer is returned. Here, a message that waits has no other end yet.
        """
        return [message.peer_rank] if self.by_wire or self.arrived[message.receives] is message else []

    @property
    def oldest_available_ns(self) -> int | None:
        """Start time in ns of the oldest message in this process that a receive from any source may take, or None.

        Receives that name the sender come first. With messages that began at -1 (returned), 20 and one receive that
        waits, the result is 20; with two such receives it is None.
        """
        receives, send = self.messages[RECEIVE], self.arrived[SEND]
        # every receive that names the sender needs one of the messages, but the first one may have met its own already
        has_met = bool(receives) and receives[0] is not self.arrived[RECEIVE] and receives[0].state > ADMITTED
        started_ns, needed = [RETURNED_NS for _ in self.returned], len(receives) - has_met
        if send is not None:
            started_ns.append(send.started_ns)
        return started_ns[needed] if needed < len(started_ns) else None


def lane_id(*values: int) -> int:
    """Return a hash of numbers in 40 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=5).digest(), "big")


def wire_tag(name: LaneName) -> int:
    """Return the tag that the messages of a lane have on a wire: the same for all senders.

    The lower 24 bits (`TAG_BITS`) are the tag of the program, the bits above are the id of the group. Of a longer tag,
    as PyTorch uses, the upper bits are hashed into that id.
    """
    group, _, tag, _ = name
    upper, lower = tag >> TAG_BITS, tag & ((1 << TAG_BITS) - 1)
    return (lane_id(group, upper) if upper else group) << TAG_BITS | lower
