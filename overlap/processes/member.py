"""Membership of a process in its world: exchanges, gathers and news among the processes.

Messages go through the coordinator, in the process of member 0. The connection to it lives in an event loop in a
thread of its own (`join`), where signs of life and the time are answered whatever keeps the program busy.
Every other message is handed over to the program's loop, in the order in which it came.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Self, TypeAlias

import trio
from trio.lowlevel import TrioToken

from ..errors import OverlapError, UsageError
from .clock import ClockOffset, ClockSample, CoordinatorClock
from .messages import (
    BLOB_LIMIT_BYTES,
    BODY_LIMIT_BYTES,
    Bye,
    Fetch,
    Give,
    Given,
    Goodbye,
    MemberLeft,
    MemberLost,
    Message,
    MessageError,
    Piece,
    Pong,
    Ready,
    Tell,
    Told,
    Waiting,
)

#: Messages that may wait. A world that hears a hundred in a second has ten minutes to read them.
INBOX_LIMIT = 65536
#: Of the pieces of a gather that may be under way to member 0 at once.
_WINDOW_BYTES = 4 * BLOB_LIMIT_BYTES

#: A message of another member, or the loss of one.
News: TypeAlias = Told | MemberLost
#: Whatever concerns this process and has come over its connection.
Event: TypeAlias = News | Given | Fetch | Piece | MemberLeft | Goodbye
#: Takes the next bytes of a member; the ones after these are not asked for before it returns.
Take: TypeAlias = Callable[[int, bytes], Awaitable[None]]


class MemberLostError(OverlapError):
    """An answer of all members cannot be had any more.

    Attributes:
        member: The one that is gone.
        how: How it went, as the end of a sentence about it.
    """

    member: int
    how: str

    def __init__(self, *, member: int, how: str, doing: str) -> None:
        self.member, self.how = member, how
        super().__init__(f"{doing}: process {member} {how}")


class InboxFullError(OverlapError):
    """More messages came than the program read; those after the limit are gone."""


class Membership:
    """One of the `members` processes of a world; `join` gives it. Use it in the loop that has joined.

    Control messages only: small, in order, through member 0. Arrays travel over a transport.

    Attributes:
        member: Index of this process.
        members: How many there are.
        on_loss: Called with each loss of a member at once, before it is read among the messages.
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
            home: Of the program's loop.
            send: Sends a message to the coordinator; called in the loop of the connection.
            clock: Samples of the coordinator's clock; None where the coordinator is.
        """
        self.member, self.members = member, members
        self.on_loss: Callable[[MemberLost], object] = lambda lost: None
        self._home, self._there = home, trio.lowlevel.current_trio_token()
        self._send, self._clock = send, clock
        self._turns: Counter[str] = Counter()  # exchanges so far, by name
        self._answers: dict[tuple[str, int], _Answer] = {}
        self._parts: dict[tuple[str, int], bytes] = {}  # of gathers under way here
        self._fetches: dict[tuple[str, int], Fetch] = {}  # first ones, of gathers that have not begun here
        self._inbox = _Inbox()
        self._gone: dict[int, str] = {}  # how, by member
        self._over = trio.Event()  # left, or the coordinator is lost

    def __repr__(self) -> str:
        gone = f", {len(self._gone)} gone" if self._gone else ""
        return f"<Membership: {self.member} of {self.members}{gone}>"

    @property
    def clock(self) -> ClockOffset:
        """Offset of member 0's ``time.perf_counter_ns`` from this process's, as well as it is known now."""
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
        doing, end = f"gather '{name}'", f"gather {name}"
        if self.member == 0:
            await self._collect(end, mine, take, doing)
            return
        key = end, self._turns[end]
        self._parts[key] = mine
        if (early := self._fetches.pop(key, None)) is not None:
            self._send_piece(early)
        try:
            await self._exchange(end, b"", doing)  # member 0 comes to it at the end
        finally:
            del self._parts[key]

    def tell(self, body: bytes) -> None:
        """Let all other members know something; they find it in `messages`, in the order in which it was told.

        Returns at once; any thread. After this member has left, or member 0 is lost, it goes nowhere.

        Args:
            body: At most 60 KiB.

        Raises:
            UsageError: It is longer.
        """
        if len(body) > BODY_LIMIT_BYTES:
            raise UsageError(f"message: has {len(body)} bytes, the limit is {BODY_LIMIT_BYTES}")
        self._post(Tell(body=body))

    def messages(self) -> AsyncIterator[News]:
        """Iterate over what others tell, and each loss of a member, once.

        For one task. It ends when this member has left, and after the loss of member 0; while iterating it raises
        `InboxFullError` if messages were dropped because too many waited.
        """
        return self._inbox

    @property
    def unread(self) -> bool:
        """Whether something waits that others have told."""
        return bool(self._inbox)

    async def leave(self) -> None:
        """Say goodbye: the others do not take the end of this process for a loss.

        On member 0 this returns when all others have left or are lost, because it carries their messages.
        """
        if not self._over.is_set():
            self._post(Bye())
        await self._over.wait()

    # -- in the loop of the connection ---------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Take a message of the coordinator.

        Raises:
            MessageError: The coordinator has no business to send that now.
        """
        match message:
            case Pong() if self._clock is not None:
                sent_ns, server_ns = message.sent_ns, message.server_ns
                self._clock.add(ClockSample(sent_ns=sent_ns, server_ns=server_ns, back_ns=perf_counter_ns()))
            case Told() | Given() | Fetch() | Piece() | MemberLost() | MemberLeft() | Goodbye():
                with suppress(trio.RunFinishedError):
                    self._home.run_sync_soon(self._receive, message)
            case Ready() | Waiting():
                pass  # only member 0 receives these here, and it has joined; on other members `join` handles them
            case _:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")

    async def posted(self) -> None:
        """Wait until everything that was told has been handed to the connection."""
        done = trio.Event()
        self._there.run_sync_soon(done.set)
        await done.wait()

    # -- in the program's loop -----------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        """Send a message to the coordinator, in the order of the calls; any thread."""
        with suppress(trio.RunFinishedError):
            self._there.run_sync_soon(self._send, message)

    def _receive(self, event: Event) -> None:
        """Act on an event, in the order in which the coordinator has sent them."""
        if self._over.is_set():
            return
        match event:
            case Told():
                self._inbox.put(event)
            case Given() | Piece():
                if (answer := self._answers.get((event.name, event.turn))) is not None:
                    answer.take(event)
            case Fetch():
                self._send_piece(event)
            case MemberLost(member=member) if member not in self._gone or member == 0:
                self.on_loss(event)  # at once
                self._inbox.put(event)  # behind all that the member has told, which may say why
                self._go(member, f"is lost: {event.reason}")
                if member == 0:  # nothing more can come
                    self._end()
            case MemberLeft():
                self._go(event.member, "has left")
            case Goodbye():
                self._end()

    def _go(self, member: int, how: str) -> None:
        """Let fail what waits for a member."""
        self._gone[member] = how
        for answer in self._answers.values():
            answer.fail(MemberLostError(member=member, how=how, doing=answer.doing))

    def _end(self) -> None:
        self._inbox.close()
        self._over.set()

    async def _exchange(self, name: str, mine: bytes, doing: str) -> list[bytes]:
        with self._asking(name, doing) as (turn, answer):
            self._post(Give(name=name, turn=turn, blob=mine))
            given: dict[int, bytes] = {}
            while len(given) < self.members:
                message = await answer.next()
                assert isinstance(message, Given)
                given.update(message.parts)
        return [given[member] for member in range(self.members)]

    @contextmanager
    def _asking(self, name: str, doing: str) -> Iterator[tuple[int, _Answer]]:
        """Expect an answer while the caller asks for it and waits; gives the turn and where it will be."""
        for member, how in self._gone.items():
            raise MemberLostError(member=member, how=how, doing=doing)
        if self._over.is_set():
            raise UsageError(f"{doing}: this process has left the world")
        turn = self._turns[name]
        self._turns[name] += 1
        answer = self._answers[name, turn] = _Answer(doing)
        try:
            yield turn, answer
        finally:
            del self._answers[name, turn]

    # -- gathers -------------------------------------------------------------------------------------------------------

    async def _collect(self, name: str, mine: bytes, take: Take, doing: str) -> None:
        """Fetch from one member after the other, and come to the exchange for which the others wait."""
        with self._asking(name, doing) as (turn, answer):
            try:
                await take(0, mine)
                for member in range(1, self.members):
                    await self._fetch(member, name, turn, take, answer)
            finally:
                self._post(Give(name=name, turn=turn, blob=b""))

    async def _fetch(self, member: int, name: str, turn: int, take: Take, answer: _Answer) -> None:
        """Fetch the part of a member; its first piece tells how large that is."""
        nbytes, asked, taken = 1, 0, 0
        while taken < nbytes:
            while asked < min(nbytes, taken + _WINDOW_BYTES):
                self._post(Fetch(member=member, name=name, turn=turn, start=asked))
                asked += BLOB_LIMIT_BYTES
            piece = await answer.next()
            assert isinstance(piece, Piece), "an exchange is over only after member 0 has come to it"
            nbytes = nbytes if taken else piece.nbytes
            if len(piece.blob) != min(nbytes - taken, BLOB_LIMIT_BYTES):
                raise OverlapError(f"{answer.doing}: process {member} sent {len(piece.blob)} bytes at {taken}")
            taken += len(piece.blob)
            if piece.blob:
                await take(member, piece.blob)

    def _send_piece(self, asked: Fetch) -> None:
        """Send a piece of this member's part; if it has not come to the gather yet, as soon as it does."""
        key = asked.name, asked.turn
        part = self._parts.get(key)
        if part is not None:
            blob = part[asked.start : asked.start + BLOB_LIMIT_BYTES]
            self._post(Piece(member=self.member, name=asked.name, turn=asked.turn, nbytes=len(part), blob=bytes(blob)))
        elif asked.turn >= self._turns[asked.name]:
            self._fetches[key] = asked


class _Answer:
    """Messages for which one task waits."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._arrived: deque[Given | Piece] = deque()
        self._error: OverlapError | None = None
        self._news = trio.Event()

    def take(self, message: Given | Piece) -> None:
        """Add a message."""
        self._arrived.append(message)
        self._news.set()

    def fail(self, error: OverlapError) -> None:
        """Raise an error from the next wait, unless there is one already."""
        self._error = self._error or error
        self._news.set()

    async def next(self) -> Given | Piece:
        """Return the next message."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._news = trio.Event()
            await self._news.wait()
        return self._arrived.popleft()


class _Inbox:
    """News in the order in which they came; iterate over it in one task."""

    def __init__(self) -> None:
        self._waiting: deque[News] = deque()
        self._arrived = trio.Event()
        self._closed = False
        self._dropped = 0

    def put(self, news: News) -> None:
        """Add something, unless it is full; losses always find room, there are few."""
        if len(self._waiting) >= INBOX_LIMIT and isinstance(news, Told):
            self._dropped += 1
        else:
            self._waiting.append(news)
        self._arrived.set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        """Let the iteration end after what is waiting now."""
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> News:
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                raise InboxFullError(f"{dropped} messages were dropped: {INBOX_LIMIT} were waiting to be read")
            if self._closed:
                raise StopAsyncIteration
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self._waiting.popleft()
