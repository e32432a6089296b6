"""Coordinator: it acts on each control message, in the process of member 0. Plain functions, no waiting.

Every member has one connection, to the coordinator. Its messages to one member arrive in the order in which they were
sent, so a member that hears of a loss will hear no result that was complete before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns

import trio

from ..errors import OverlapError
from .messages import (
    BLOB_LIMIT_BYTES,
    Bye,
    Fetch,
    Give,
    Given,
    Goodbye,
    Join,
    MemberLeft,
    MemberLost,
    Message,
    MessageError,
    Piece,
    Ping,
    Pong,
    Ready,
    Refused,
    Tell,
    Told,
    Waiting,
)

#: Exchanges that have begun and to which not all have come.
_UNFINISHED_LIMIT = 4096
#: As long as no more are missing, each that waits hears of each that comes: one that gives up names them correctly.
_ALWAYS_TOLD = 16
#: What one part of an exchange takes in a frame besides its bytes.
_PART_OVERHEAD_BYTES = 16


class RefusedError(OverlapError):
    """A process that knows the secret cannot become a member; `str()` is what it is told."""


class Coordinator:
    """The members that are there, and the parts of exchanges that have begun.

    Attributes:
        members: How many there are to be.
        detail: What must be the same on all of them.
        process: Names the process in which it lives.
        joined: Members that have, those that left or were lost afterwards included.
        gone: Of these, members that left or were lost.
        went: Members that had joined and went away before all had; they may come again.
        changed: Set, and made anew, whenever a member comes or goes.
    """

    members: int
    detail: str
    process: str

    def __init__(self, *, members: int, detail: str, report: Callable[[str], None], process: str = "") -> None:
        self.members, self.detail, self.process = members, detail, process
        self.joined: set[int] = set()
        self.gone: set[int] = set()
        self.went: set[int] = set()
        self.changed: trio.Event = trio.Event()
        self._report = report
        self._senders: dict[int, Callable[[Message], None]] = {}
        self._exchanges: dict[tuple[str, int], dict[int, bytes]] = {}
        self._fetched: Counter[int] = Counter()  # pieces under way, by member

    @property
    def missing(self) -> list[int]:
        """Members that have not joined."""
        return [member for member in range(self.members) if member not in self.joined]

    @property
    def complete(self) -> bool:
        """Whether all have joined."""
        return len(self.joined) == self.members

    def attach(self, member: int, send: Callable[[Message], None]) -> None:
        """Add the connection of a member. It may ask for the time, and has yet to join.

        Raises:
            RefusedError: There is one already.
        """
        if member in self._senders or member in self.gone:
            raise RefusedError(f"process {member} has already joined")
        self._senders[member] = send

    def detach(self, member: int, reason: str) -> None:
        """Remove the connection of a member. Before the world is complete, another may take its place."""
        del self._senders[member]
        if self.complete and member in self.joined:
            if member not in self.gone:
                self._go(member)
                self._send_others(member, MemberLost(member=member, reason=reason))
            self._check_last()
        elif member in self.joined:
            self.joined.discard(member)
            self.went.add(member)
            self._report(f"process {member} went away before all had joined: {reason}")
            self._tell_if_few()
            self._wake()

    def refuse_all(self, reason: str) -> None:
        """Tell all other members that the world does not come together."""
        self._send_others(0, Refused(reason=reason))

    def tell_who_is_missing(self) -> None:
        """Tell the members that wait which ones are missing."""
        self._send_others(0, self._waiting())

    def _waiting(self) -> Waiting:
        return Waiting(missing=self.missing, went=sorted(self.went))

    def handle(self, member: int, message: Message) -> None:
        """Act on a message of a member.

        Raises:
            MessageError: The member has no business to send that now.
            RefusedError: It cannot join.
        """
        if member in self.gone:
            return
        match message:
            case Ping():
                self._send(member, Pong(sent_ns=message.sent_ns, server_ns=perf_counter_ns()))
            case Join() if member not in self.joined:
                self._join(member, message.detail)
            case Tell() if self.complete:
                self._send_others(member, Told(member=member, body=message.body))
            case Give() if self.complete:
                self._give(member, message)
            case Fetch() if member == 0:
                self._fetch(message)
            case Piece() if self._fetched[member]:
                self._bring(member, message)
            case Bye() if self.complete:
                self._leave(member)
            case _:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")

    def _join(self, member: int, detail: str) -> None:
        if detail != self.detail:
            raise RefusedError(f"process {member} has '{detail}', process 0 has '{self.detail}'; they must be the same")
        self.joined.add(member)
        self.went.discard(member)
        if self.complete:
            self._send_all(Ready(process=self.process))
        else:
            self._send(member, self._waiting())
            self._tell_if_few()
        self._wake()

    def _tell_if_few(self) -> None:
        if len(self.missing) <= _ALWAYS_TOLD:
            self.tell_who_is_missing()

    def _give(self, member: int, part: Give) -> None:
        key = part.name, part.turn
        if key not in self._exchanges and len(self._exchanges) >= _UNFINISHED_LIMIT:
            raise MessageError(f"the beginning of '{part.name}', while {len(self._exchanges)} others are unfinished")
        parts = self._exchanges.setdefault(key, {})
        if member in parts or len(part.blob) > BLOB_LIMIT_BYTES:
            raise MessageError(f"a part of exchange '{part.name}' which is too long, or its second one")
        parts[member] = part.blob
        if len(parts) == self.members:
            del self._exchanges[key]
            for some in _fitting(parts):
                self._send_all(Given(name=part.name, turn=part.turn, parts=some))

    def _fetch(self, fetch: Fetch) -> None:
        if fetch.member not in self.gone:
            self._fetched[fetch.member] += 1
            self._send(fetch.member, fetch)

    def _bring(self, member: int, piece: Piece) -> None:
        if piece.member != member or len(piece.blob) > BLOB_LIMIT_BYTES:
            raise MessageError(f"a piece of '{piece.name}' which is too long, or another member's")
        self._fetched[member] -= 1
        self._send(0, piece)

    def _leave(self, member: int) -> None:
        self._go(member)
        self._send_others(member, MemberLeft(member=member))
        if member != 0:
            self._send(member, Goodbye())
        self._check_last()

    def _go(self, member: int) -> None:
        self.gone.add(member)
        self._wake()

    def _check_last(self) -> None:
        """Let member 0 go when all have gone and hung up: until then it carries their messages."""
        if len(self.gone) == self.members and len(self._senders) == 1:
            self._send(0, Goodbye())

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def _send(self, member: int, message: Message) -> None:
        self._senders[member](message)

    def _send_all(self, message: Message) -> None:
        self._send_others(None, message)

    def _send_others(self, member: int | None, message: Message) -> None:
        for other in list(self._senders):
            if other != member and other not in self.gone:
                self._send(other, message)


def _fitting(parts: Mapping[int, bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Cut the parts of an exchange into lists that fit into a frame each."""
    some: list[tuple[int, bytes]] = []
    used_bytes = 0
    for part in sorted(parts.items()):
        part_bytes = len(part[1]) + _PART_OVERHEAD_BYTES
        if some and used_bytes + part_bytes > BLOB_LIMIT_BYTES + _PART_OVERHEAD_BYTES:
            yield some
            some, used_bytes = [], 0
        some.append(part)
        used_bytes += part_bytes
    yield some
