"""Membership of a process in its world: exchanges and notices among the processes.

Messages go through the coordinator, in the process of member 0. The connection to it lives in an event loop in a
thread of its own (`join`), which answers pings while the program is busy. Every other message is passed to the
program's loop, in the order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import TypeAlias

import trio
from trio.lowlevel import TrioToken

from ..errors import UsageError
from .clock import ClockOffset, ClockSample, CoordinatorClock
from .inbox import Inbox, MemberLostError, News, PendingAnswer
from .messages import (
    BLOB_LIMIT_BYTES,
    BODY_LIMIT_BYTES,
    Bye,
    Contribution,
    Contributions,
    Goodbye,
    MemberLeft,
    MemberLost,
    MemberNotice,
    Message,
    MessageError,
    Notice,
    Pong,
    Ready,
    Waiting,
)

#: Messages of the coordinator for the program's loop.
Event: TypeAlias = News | Contributions | MemberLeft | Goodbye


class Membership:
    """One of the `members` processes of a world; made by `join`. Use it in the loop that has joined.

    Control messages only: small, in order, through member 0. Arrays travel over a transport.

    Attributes:
        member: Index of this process.
        members: Number of processes.
        on_loss: Called with each loss of a member at once, before `messages` has it.
    """

    member: int
    members: int

    def __init__(
        self,
        *,
        member: int,
        members: int,
        home: TrioToken,
        send: Callable[[Message], None],
        clock: CoordinatorClock | None = None,
    ) -> None:
        """Made by `join`, in the loop of the connection.

        Args:
            member: As the attribute.
            members: As the attribute.
            home: Token of the program's loop.
            send: Sends a message to the coordinator; called in the loop of the connection.
            clock: Samples of the coordinator's clock; None on member 0.
        """
        self.member, self.members = member, members
        self.on_loss: Callable[[MemberLost], object] = lambda lost: None
        self._home, self._connection_loop = home, trio.lowlevel.current_trio_token()
        self._send, self._clock = send, clock
        self._turns: Counter[str] = Counter()  # exchanges so far, by name
        self._answers: dict[tuple[str, int], PendingAnswer] = {}
        self._inbox = Inbox()
        self._gone: dict[int, str] = {}  # by member that left or was lost: how, for errors
        self._ended = trio.Event()  # left, or the coordinator is lost

    def __repr__(self) -> str:
        gone = f", {len(self._gone)} gone" if self._gone else ""
        return f"<Membership: {self.member} of {self.members}{gone}>"

    @property
    def clock(self) -> ClockOffset:
        """Offset of member 0's ``time.perf_counter_ns`` from this process's, by the best estimate so far."""
        return ClockOffset(offset_ns=0, error_ns=0) if self._clock is None else self._clock.offset(perf_counter_ns())

    async def exchange(self, name: str, part: bytes) -> list[bytes]:
        """Send a part to all members, and return the parts of all, in member order.

        The k-th exchange of a name on one member is the k-th of that name on the others. If this is cancelled, the
        others get their result nevertheless.

        Args:
            name: The same on all members.
            part: At most 48 KiB.

        Raises:
            UsageError: At once: the part is too long.
            MemberLostError: A member is lost or has left, before it had sent its part.
        """
        if len(part) > BLOB_LIMIT_BYTES:
            raise UsageError(
                f"exchange '{name}': the part has {len(part)} bytes, the limit is {BLOB_LIMIT_BYTES}; "
                "this is a bug in overlap, please report it"
            )
        return await self._exchange(name, bytes(part), f"exchange '{name}'")

    async def barrier(self, name: str) -> None:
        """Return when all members have arrived at the barrier of this name.

        Raises:
            MemberLostError: A member is lost or has left.
        """
        await self._exchange(f"barrier {name}", b"", f"barrier '{name}'")

    def send_notice(self, body: bytes) -> None:
        """Send bytes to all other members, which get them from `messages`, in the order of the calls.

        Returns at once; any thread. After this member has left, or member 0 is lost, it has no effect.

        Args:
            body: At most 60 KiB.

        Raises:
            UsageError: The body is longer.
        """
        if len(body) > BODY_LIMIT_BYTES:
            raise UsageError(
                f"notice: has {len(body)} bytes, the limit is {BODY_LIMIT_BYTES}; "
                "this is a bug in overlap, please report it"
            )
        self._send_to_coordinator(Notice(body=body))

    def messages(self) -> AsyncIterator[News]:
        """Iterate over the notices of other members, and each loss of a member, once.

        For one task. It ends when this member has left, and after the loss of member 0; while iterating it raises
        `InboxFullError` if messages were dropped because too many waited.
        """
        return self._inbox

    @property
    def unread(self) -> bool:
        """Whether a notice or a loss waits in `messages`."""
        return bool(self._inbox)

    async def leave(self) -> None:
        """Leave the world: for the others, the end of this process is no loss then.

        On member 0 this returns when all others have left or are lost, because it carries their messages.
        """
        if not self._ended.is_set():
            self._send_to_coordinator(Bye())
        await self._ended.wait()

    # -- in the loop of the connection ---------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Act on a message of the coordinator.

        Raises:
            MessageError: The coordinator must not send that now.
        """
        match message:
            case Pong() if self._clock is not None:
                sent_ns, server_ns = message.sent_ns, message.server_ns
                self._clock.add(ClockSample(sent_ns=sent_ns, server_ns=server_ns, back_ns=perf_counter_ns()))
            case MemberNotice() | Contributions() | MemberLost() | MemberLeft() | Goodbye():
                with suppress(trio.RunFinishedError):
                    self._home.run_sync_soon(self._receive, message)
            case Ready() | Waiting():
                pass  # only member 0 gets these here, and it has joined; on other members `join` handles them
            case _:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")

    async def flush(self) -> None:
        """Wait until all messages of this member have been passed to the connection."""
        done = trio.Event()
        self._connection_loop.run_sync_soon(done.set)
        await done.wait()

    # -- in the program's loop -----------------------------------------------------------------------------------------

    def _send_to_coordinator(self, message: Message) -> None:
        """Send a message to the coordinator, in the order of the calls; any thread."""
        with suppress(trio.RunFinishedError):
            self._connection_loop.run_sync_soon(self._send, message)

    def _receive(self, event: Event) -> None:
        """Act on an event, in the order in which the coordinator has sent them."""
        if self._ended.is_set():
            return
        match event:
            case MemberNotice():
                self._inbox.put(event)
            case Contributions():
                if (answer := self._answers.get((event.name, event.turn))) is not None:
                    answer.put(event)
            case MemberLost(member=member) if member not in self._gone or member == 0:
                self.on_loss(event)  # at once
                self._inbox.put(event)  # behind the notices of that member, which may have the cause
                self._fail_waits(member, f"is lost: {event.reason}")
                if member == 0:  # no further message can arrive
                    self._mark_ended()
            case MemberLeft():
                self._fail_waits(event.member, "has left")
            case Goodbye():
                self._mark_ended()

    def _fail_waits(self, member: int, how: str) -> None:
        """Fail the exchanges that wait for a member which is lost or has left."""
        self._gone[member] = how
        for answer in self._answers.values():
            answer.fail(MemberLostError(member=member, how=how, doing=answer.doing))

    def _mark_ended(self) -> None:
        """End `messages` and release `leave`: no further message arrives."""
        self._inbox.close()
        self._ended.set()

    async def _exchange(self, name: str, part: bytes, doing: str) -> list[bytes]:
        """Return the parts of all members."""
        with self._pending(name, doing) as (turn, answer):
            self._send_to_coordinator(Contribution(name=name, turn=turn, blob=part))
            parts: dict[int, bytes] = {}
            while len(parts) < self.members:
                parts.update((await answer.next()).parts)
        return [parts[member] for member in range(self.members)]

    @contextmanager
    def _pending(self, name: str, doing: str) -> Iterator[tuple[int, PendingAnswer]]:
        """Register an answer for the length of the block; yield the number of the exchange, and the answer."""
        for member, how in self._gone.items():
            raise MemberLostError(member=member, how=how, doing=doing)
        if self._ended.is_set():
            raise UsageError(f"{doing}: this process has left the world; call it before")
        turn = self._turns[name]
        self._turns[name] += 1
        answer = self._answers[name, turn] = PendingAnswer(doing)
        try:
            yield turn, answer
        finally:
            del self._answers[name, turn]
