"""Coordinator: it acts on each control message, in the process of member 0. Plain functions, no waiting.

Every member has one connection, to the coordinator. Its messages to one member arrive in the order in which they were
sent: the results that were complete before a loss arrive before the report of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns

import trio

from ..errors import OverlapError
from .messages import (
    BLOB_LIMIT_BYTES,
    Bye,
    Contribution,
    Contributions,
    Goodbye,
    Join,
    MemberLeft,
    MemberLost,
    MemberNotice,
    Message,
    MessageError,
    Notice,
    Ping,
    Pong,
    Ready,
    Refused,
    Waiting,
)

#: Exchanges with parts of some members only.
_UNFINISHED_LIMIT = 4096
#: Up to this number of missing members, those that wait get each change: a member that gives up names them correctly.
_FEW_MISSING = 16
#: Size of one part of an exchange in a frame, without its bytes.
_PART_OVERHEAD_BYTES = 16


class RefusedError(OverlapError):
    """A process with the right secret cannot become a member; `str()` is the reason that it gets."""


class Coordinator:
    """Members of a world, and the parts of unfinished exchanges.

    Attributes:
        members: Number of members.
        detail: Text that must be the same on all members.
        process: Name of the process in which the coordinator lives.
        joined: Members that have joined, including members that left or were lost later.
        gone: Members that joined, and left or were lost.
        complete: Whether no further member can join.
        departed: Members that had joined, and went away before all had; they may join again.
        changed: Set, and replaced, whenever a member joins or goes.
    """

    members: int
    detail: str
    process: str

    def __init__(self, *, members: int, detail: str, report: Callable[[str], None], process: str = "") -> None:
        self.members, self.detail, self.process = members, detail, process
        self.joined: set[int] = set()
        self.gone: set[int] = set()
        self.departed: set[int] = set()
        self.changed: trio.Event = trio.Event()
        self.complete: bool = False
        self._report = report
        self._senders: dict[int, Callable[[Message], None]] = {}
        self._exchanges: dict[tuple[str, int], dict[int, bytes]] = {}

    @property
    def missing(self) -> list[int]:
        """Members that have not joined."""
        return [member for member in range(self.members) if member not in self.joined]

    def start(self) -> None:
        """Start the world with the members that have joined."""
        self.complete = True
        ready = Ready(process=self.process)
        for member in sorted(self.joined):
            self._send(member, ready)

    def attach(self, member: int, send: Callable[[Message], None]) -> None:
        """Add the connection of a member that has not joined yet.

        Raises:
            RefusedError: The member is connected already.
        """
        if member in self._senders or member in self.gone:
            raise RefusedError(f"process {member} has already joined; give each process a number of its own")
        self._senders[member] = send

    def detach(self, member: int, reason: str) -> None:
        """Remove the connection of a member. Before the world is complete, another may take its place."""
        del self._senders[member]
        if self.complete and member in self.joined:
            if member not in self.gone:
                self._mark_gone(member)
                self._send_others(member, MemberLost(member=member, reason=reason))
            self._check_last()
        elif member in self.joined:
            self.joined.discard(member)
            self.departed.add(member)
            self._report(f"process {member} went away before all had joined: {reason}")
            self._send_missing_if_few()
            self._notify_waiters()

    def refuse_all(self, reason: str) -> None:
        """Send all other members the reason why the world does not start."""
        self._send_others(0, Refused(reason=reason))

    def send_missing(self) -> None:
        """Send the missing members to the members that wait."""
        self._send_others(0, self._waiting())

    def _waiting(self) -> Waiting:
        return Waiting(missing=self.missing, departed=sorted(self.departed))

    def handle(self, member: int, message: Message) -> None:
        """Act on a message of a member.

        Raises:
            MessageError: The member must not send that now.
            RefusedError: The member cannot join.
        """
        if member in self.gone:
            return
        match message:
            case Ping():
                self._send(member, Pong(sent_ns=message.sent_ns, server_ns=perf_counter_ns()))
            case Join() if member not in self.joined:
                self._join(member, message.detail)
            case Notice() if self.complete:
                self._send_others(member, MemberNotice(member=member, body=message.body))
            case Contribution() if self.complete:
                self._contribute(member, message)
            case Bye() if self.complete:
                self._leave(member)
            case _:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")

    def _join(self, member: int, detail: str) -> None:
        """Add a member, and start the world if it is the last one; raise `RefusedError` if it does not fit."""
        if detail != self.detail:
            raise RefusedError(f"process {member} has '{detail}', process 0 has '{self.detail}'; they must be the same")
        self.joined.add(member)
        self.departed.discard(member)
        if not self.missing:
            self.start()
        else:
            self._send(member, self._waiting())
            self._send_missing_if_few()
        self._notify_waiters()

    def _send_missing_if_few(self) -> None:
        """Send the missing members at once if few are missing; else they are sent every few seconds."""
        if len(self.missing) <= _FEW_MISSING:
            self.send_missing()

    def _contribute(self, member: int, part: Contribution) -> None:
        """Store a member's part of an exchange; once all parts are there, send them."""
        key = part.name, part.turn
        if key not in self._exchanges and len(self._exchanges) >= _UNFINISHED_LIMIT:
            raise MessageError(f"the beginning of '{part.name}', while {len(self._exchanges)} others are unfinished")
        parts = self._exchanges.setdefault(key, {})
        if member in parts or len(part.blob) > BLOB_LIMIT_BYTES:
            raise MessageError(f"a part of exchange '{part.name}' which is too long, or its second one")
        parts[member] = part.blob
        if len(parts) == len(self.joined):
            del self._exchanges[key]
            for batch in _batches(parts):
                self._send_all(Contributions(name=part.name, turn=part.turn, parts=batch))

    def _leave(self, member: int) -> None:
        """Let a member leave with a goodbye, and notify the others."""
        self._mark_gone(member)
        self._send_others(member, MemberLeft(member=member))
        if member != 0:
            self._send(member, Goodbye())
        self._check_last()

    def _mark_gone(self, member: int) -> None:
        """Count a member as gone: it gets no more messages."""
        self.gone.add(member)
        self._notify_waiters()

    def _check_last(self) -> None:
        """Release member 0 when all others have left and hung up: until then it carries their messages."""
        if len(self.gone) == len(self.joined) and len(self._senders) == 1:
            self._send(0, Goodbye())

    def _notify_waiters(self) -> None:
        """Wake the tasks that wait for a change of the members."""
        self.changed.set()
        self.changed = trio.Event()

    def _send(self, member: int, message: Message) -> None:
        self._senders[member](message)

    def _send_all(self, message: Message) -> None:
        self._send_others(None, message)

    def _send_others(self, member: int | None, message: Message) -> None:
        """Send a message to all members that have not left, except one; None: to all."""
        for receiver in list(self._senders):
            if receiver != member and receiver not in self.gone:
                self._send(receiver, message)


def _batches(parts: Mapping[int, bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Divide the parts of an exchange, by member, into lists that each fit into a frame."""
    batch: list[tuple[int, bytes]] = []
    used_bytes = 0
    for part in sorted(parts.items()):
        part_bytes = len(part[1]) + _PART_OVERHEAD_BYTES
        if batch and used_bytes + part_bytes > BLOB_LIMIT_BYTES + _PART_OVERHEAD_BYTES:
            yield batch
            batch, used_bytes = [], 0
        batch.append(part)
        used_bytes += part_bytes
    yield batch
