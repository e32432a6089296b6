"""One member's view of the world of processes: what it can ask of the others, and what it hears of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import TypeAlias

import trio

from ..errors import OverlapError, UsageError
from .clock import ClockOffset, ClockSample, CoordinatorClock
from .frames import check_body
from .gathering import Gathering, Take
from .inbox import Inbox, Lost, News
from .messages import (
    BLOB_LIMIT_BYTES,
    Brought,
    Bye,
    Gathered,
    Give,
    Given,
    Glance,
    Glimpse,
    Goodbye,
    MemberLeft,
    MemberLost,
    Message,
    MessageError,
    Offered,
    Pong,
    Pull,
    Ready,
    Tell,
    Told,
    Waiting,
)

_Key: TypeAlias = tuple[str, str, int]  # what is asked, its name, and how many there were of that name


class MemberLostError(OverlapError):
    """What was asked of all members cannot be had any more.

    Attributes:
        member: The one that is gone.
        how: How it went, as the end of a sentence about it.
    """

    def __init__(self, *, member: int, how: str, doing: str) -> None:
        self.member, self.how = member, how
        super().__init__(f"{doing}: process {member} {how}")


@dataclass(slots=True)
class _Answer:
    """What one task of this member waits for."""

    doing: str
    parts: dict[int, bytes] = field(default_factory=dict)
    error: OverlapError | None = None
    done: trio.Event = field(default_factory=trio.Event)

    async def wait(self) -> None:
        await self.done.wait()
        if self.error is not None:
            raise self.error


class Membership:
    """What `join` gives: this process is one of `members`, and can talk to the others.

    Control messages only: small, in order, through member 0. Arrays travel over a transport.

    Attributes:
        member: Index of this process.
        members: How many there are.
        glimpse: Says what the ranks of this process do, for those who look on, in so many bytes at most.
    """

    def __init__(
        self,
        *,
        member: int,
        members: int,
        clock: CoordinatorClock | None,
        post: Callable[[Message], None],
        room: Callable[[], Awaitable[None]],
        hang_up: Callable[[], Awaitable[None]],
    ) -> None:
        """Made by `join`.

        Args:
            member: As the attribute.
            members: As the attribute.
            clock: Samples of the coordinator's clock; None where the coordinator is.
            post: Sends a message to the coordinator.
            room: Waits until bulk may be posted.
            hang_up: Waits until everything posted has arrived, and ends the connections.
        """
        self.member, self.members = member, members
        self.glimpse: Callable[[int], bytes] = lambda room_bytes: b""
        self._clock, self._post, self._room = clock, post, room
        self._hang_up = hang_up
        self._turns: Counter[tuple[str, str]] = Counter()
        self._answers: dict[_Key, _Answer] = {}
        self._gathers: dict[tuple[str, int], Gathering] = {}
        self._inbox = Inbox()
        self._gone: dict[int, str] = {}  # how, by member
        self._over = trio.Event()  # left, or the coordinator is lost

    def __repr__(self) -> str:
        gone = f", {len(self._gone)} gone" if self._gone else ""
        return f"<Membership: {self.member} of {self.members}{gone}>"

    @property
    def clock(self) -> ClockOffset:
        """How far this process's ``time.perf_counter_ns`` is from member 0's, as well as is known now."""
        return ClockOffset(offset_ns=0, error_ns=0) if self._clock is None else self._clock.offset(perf_counter_ns())

    async def exchange(self, name: str, mine: bytes) -> list[bytes]:
        """Give `mine` to all members, and return what each of them gave, in member order.

        The k-th exchange of a name on one member is the k-th of that name on the others. If this is cancelled, the
        others get their result nevertheless.

        Args:
            name: The same on all members.
            mine: At most 48 KiB.

        Raises:
            UsageError: At once: `mine` is too long.
            MemberLostError: A member is lost or has left, before it came to this exchange.
        """
        if len(mine) > BLOB_LIMIT_BYTES:
            raise UsageError(f"exchange '{name}': mine has {len(mine)} bytes, the limit is {BLOB_LIMIT_BYTES}")
        return await self._exchange(name, bytes(mine), f"exchange '{name}'")

    async def barrier(self, name: str) -> None:
        """Return when all members have come to the barrier of this name.

        Raises:
            MemberLostError: One of them will not.
        """
        await self._exchange(f"barrier {name}", b"", f"barrier '{name}'")

    async def gather(self, name: str, mine: bytes, take: Take) -> None:
        """Bring bytes of any size to member 0, a piece at a time.

        Returns when member 0 has taken everything, or wants no more. A member that cancels it half-way keeps the
        others waiting.

        Args:
            name: The same on all members.
            mine: Must not change until this returns.
            take: On member 0, takes what each member gave, in member order. What it raises ends the gather: the
                others return.

        Raises:
            MemberLostError: A member is lost or has left, before it came to this gather or was done with it.
        """
        with self._gathering(name) as gathering:
            if self.member == 0:
                await gathering.collect(mine, self.members, take)
            else:
                await gathering.send(mine, self._room)

    def tell(self, message: Mapping[str, object]) -> None:
        """Let all other members know something; they find it in `messages`, in the order in which it was told.

        Returns at once. After this member has left, or member 0 is lost, it goes nowhere.

        Args:
            message: None, bools, numbers, text, bytes, and lists and dicts of these, at most 60 KiB when packed.

        Raises:
            UsageError: It cannot be sent.
            OutboxFullError: Too much waits to be sent.
        """
        if self._over.is_set():
            return
        body = dict(message)
        try:
            check_body(body)
        except MessageError as error:
            raise UsageError(f"message: {error}") from error
        self._post(Tell(body=body))

    def messages(self) -> AsyncIterator[News]:
        """Iterate over what others tell, as (member, message), and each loss of a member, once, as `Lost`.

        For one task. It ends when this member has left, and after the loss of member 0; while iterating it raises
        `InboxFullError` if nobody did for so long that messages were dropped.
        """
        return self._inbox

    async def leave(self) -> None:
        """Say goodbye: the others do not take the end of this process for a loss.

        On member 0 this returns when all others have left or are lost, because it carries their messages.
        """
        if not self._over.is_set():
            self._post(Bye())
        await self._over.wait()

    async def hang_up(self) -> None:
        """Return when all that was told has arrived, if it can; nothing can be told afterwards. Called by `join`."""
        await self._hang_up()

    def receive(self, message: Message) -> None:
        """Take in what the coordinator sends.

        Raises:
            MessageError: The coordinator has no business to send that now.
        """
        match message:
            case Pong() if self._clock is not None:
                sent_ns, server_ns = message.sent_ns, message.server_ns
                self._clock.add(ClockSample(sent_ns=sent_ns, server_ns=server_ns, back_ns=perf_counter_ns()))
            case Glance():
                self._post(self._glimpsed(message))
            case Told():
                self._inbox.put((message.member, message.body))
            case Given():
                self._given(message)
            case Pull() | Offered() | Brought():
                self._gather(message.name, message.turn).hear(message)
            case Gathered():
                if message.turn >= self._turns["gather", message.name] or (message.name, message.turn) in self._gathers:
                    self._gather(message.name, message.turn).end()  # perhaps before it has begun here
            case MemberLost():
                self.lose(message.member, message.reason)
            case MemberLeft():
                self._go(message.member, "has left")
            case Goodbye():
                self._end()
            case Ready() | Waiting():
                pass  # to member 0, which is there already
            case _:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")

    def _glimpsed(self, asked: Glance) -> Glimpse:
        begun_ns = thread_time_ns()
        blob = self.glimpse(min(max(asked.room_bytes, 0), BLOB_LIMIT_BYTES))
        return Glimpse(turn=asked.turn, took_ns=thread_time_ns() - begun_ns, blob=blob)

    def lose(self, member: int, reason: str) -> None:
        """Take note that a member is lost: what waits for it fails. Without member 0, nothing more can come."""
        if self._over.is_set() or (member in self._gone and member != 0):
            return
        self._inbox.put(Lost(member=member, reason=reason))
        self._go(member, f"is lost: {reason}")
        if member == 0:
            self._end()

    def _go(self, member: int, how: str) -> None:
        self._gone[member] = how
        for key, answer in self._answers.items():
            self._settle(key, MemberLostError(member=member, how=how, doing=answer.doing))
        for (name, _), gathering in self._gathers.items():
            gathering.end(MemberLostError(member=member, how=how, doing=f"gather '{name}'"))

    def _end(self) -> None:
        self._inbox.close()
        self._over.set()

    async def _exchange(self, name: str, mine: bytes, doing: str) -> list[bytes]:
        with self._ask("exchange", name, doing) as (turn, answer):
            self._post(Give(name=name, turn=turn, blob=mine))
            await answer.wait()
        return [answer.parts[member] for member in range(self.members)]

    @contextmanager
    def _ask(self, what: str, name: str, doing: str) -> Iterator[tuple[int, _Answer]]:
        """Expect an answer while the caller asks for it and waits; gives the turn and where it will be."""
        for member, how in self._gone.items():
            raise MemberLostError(member=member, how=how, doing=doing)
        if self._over.is_set():
            raise UsageError(f"{doing}: this process has left the world")
        turn = self._turns[what, name]
        self._turns[what, name] += 1
        answer = self._answers[what, name, turn] = _Answer(doing)
        try:
            yield turn, answer
        finally:
            del self._answers[what, name, turn]

    def _given(self, message: Given) -> None:
        key = "exchange", message.name, message.turn
        answer = self._answers.get(key)  # None: whoever asked was cancelled
        if answer is not None:
            answer.parts.update(message.parts)
            if len(answer.parts) == self.members:
                self._settle(key)

    @contextmanager
    def _gathering(self, name: str) -> Iterator[Gathering]:
        with self._ask("gather", name, f"gather '{name}'") as (turn, _):
            try:
                yield self._gather(name, turn)
            finally:
                del self._gathers[name, turn]

    def _gather(self, name: str, turn: int) -> Gathering:
        """Return the gather, which may not have begun here."""
        key = name, turn
        if key not in self._gathers:
            self._gathers[key] = Gathering(name, turn, self._post)
        return self._gathers[key]

    def _settle(self, key: _Key, error: OverlapError | None = None) -> None:
        answer = self._answers.get(key)
        if answer is not None and not answer.done.is_set():
            answer.error = error
            answer.done.set()
