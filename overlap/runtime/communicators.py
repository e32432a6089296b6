"""Communicators of a world by their keys, and receives from any source, which choose among several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio

from transports import Envelope

from ..errors import GroupAbortedError, RankLeftError
from .communicator import BaseEngine, Communicator
from .context import RankContext
from .failure import Failure
from .match import Key
from .operation import CollectiveFuture, Operation, OperationPort, ReturnedMessage
from .outstanding import IssuedFuture
from .stream import MessageLane, Stream
from .waits import call_when_done

KEPT = 256
"""Ends of messages, by source or destination and tag, that are kept in real time while no message is in flight."""


class Communicators:
    """The communicators of a world, and their shared state.

    Attributes:
        engine: Runs matched operations.
        left: World ranks that have finished their program.
        closing: World ranks that receive no more messages, and wait until their own are read.
        unraised: Makers of errors that no operation is left to fail with, by id of the communicator: its operations
            were over on all ranks when ranks turned out to differ.
        later: Calls a function on the loop's thread at a time that programs cannot notice, unless the loop has ended;
            any thread, and at any point of a program.
        over: Whether the world has ended, and its transport with it.
    """

    engine: BaseEngine
    left: set[int]
    closing: set[int]
    later: Callable[[Callable[[], None]], None]
    over = False

    def __init__(self, engine: BaseEngine, *, keeps: int = 0) -> None:
        """Made by a backend.

        Args:
            engine: Engine of the world.
            keeps: Number of communicators of messages to keep while none of their messages is in flight: to make one
                takes longer than a small message.
        """
        self.engine, self.left, self.closing, self._keeps = engine, set[int](), set[int](), keeps
        self._resting: deque[Communicator] = deque()  # idle ones that are kept
        self._used: dict[Key, None] = {}  # idle ones that were closed last: a program may use a tag for each message
        self.unraised: dict[int, Callable[[], BaseException]] = {}
        self._open: dict[Key, Communicator] = {}
        # Keys of the communicators of each group, by its ranks and occurrence: to make the key of the group takes
        # longer.
        self._of_group: dict[tuple[object, ...], dict[Key, None]] = {}
        self._unused: dict[Key, int] = {}  # number of ranks here that no longer use a group
        self._any: dict[Key, AnySource] = {}  # receives from any source in flight
        # Errors of broken communicators and groups, by the id of their keys.
        self._off: dict[int, Callable[[], BaseException]] = {}

    def open(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Return the communicator of a key, the same for all ranks of this process."""
        communicator = self._open.get(key)
        if communicator is None:
            communicator = self.keep(self.make(key, name, members))
            if self._off and (broken := self.broken(key)) is not None:
                communicator.break_off(broken)
        return communicator

    def broken(self, key: Key) -> Callable[[], BaseException] | None:
        """Return the maker of errors of an aborted group; None if it was not aborted."""
        return (self._off.get(key.group.id) or self._off.get(key.id)) if self._off else None

    def abort(self, ranks: tuple[int, ...], occurrence: int, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all present and later operations of a group."""
        self.break_off(Key(ranks, occurrence, "").id, error)

    def break_off(self, key_id: int, error: Callable[[], BaseException]) -> None:
        """Fail all present and later operations of a communicator or a group on the ranks of this process.

        Args:
            key_id: Id of the key of a communicator or a group.
            error: Makes the errors.
        """
        self._off.setdefault(key_id, error)
        for communicator in list(self._open.values()):
            if key_id in (communicator.key.id, communicator.key.group.id):
                communicator.break_off(error)
        for waiting in list(self._any.values()):
            waiting.look_soon()

    def known(self, key: Key) -> Communicator | None:
        """Return the communicator of a key, if it is open."""
        return self._open.get(key)

    def keep(self, communicator: Communicator) -> Communicator:
        """Keep a communicator for later operations."""
        key = communicator.key
        self._open[key] = communicator
        self._of_group.setdefault(key[:2], {})[key] = None
        return communicator

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator. One of messages lasts if its tag is used again."""
        communicator = Communicator(self, key, name, members)
        communicator.lasts = key in self._used
        return communicator

    def rest(self, communicator: Communicator) -> None:
        """Keep communicators in repeated use, and forget all others that are idle."""
        if communicator.lasts:
            self._resting.append(communicator)
            if len(self._resting) <= self._keeps:
                return
            communicator = self._resting.popleft()
            communicator.resting = False
        elif self._keeps:
            self._used[communicator.key] = None
            if len(self._used) > self._keeps:
                del self._used[next(iter(self._used))]
        if communicator.at_rest:
            self.close(communicator)

    def close(self, communicator: Communicator) -> None:
        """Forget a communicator of messages that is idle."""
        if self._open.get(communicator.key) is communicator:
            del self._open[communicator.key]
            communicator.close()
            self._unlist(communicator.key)

    def _unlist(self, key: Key) -> None:
        """Remove a communicator from the list of its group."""
        keys = self._of_group.get(key[:2])
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self._of_group[key[:2]]

    # -- ends of groups ------------------------------------------------------------------------------------------------

    def end_use(self, context: RankContext, key: Key) -> None:
        """Note that a rank issues nothing more on a group, once its operations there have ended. On the loop's thread.

        The last rank closes the communicators of the group.

        Args:
            context: Context of the rank.
            key: Key of the group.
        """
        if self.over or context.ending.failure is not None:  # abandoned operations may still move bytes
            return
        unfinished = [operation for operation in context.outstanding.operations if _is_of(operation, key)]
        if unfinished:  # later: an operation that ends is still in its communicator
            call_when_done(unfinished[-1], partial(self.later, partial(self.end_use, context, key)))
            return
        shared, here = self._ranks_here(key)
        count = self._unused.pop(shared, 0) + 1
        if count < here:
            self._unused[shared] = count
        else:
            self._end_here(shared)

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key of a group's communicators, and the number of ranks here that use it."""
        return key, len(key.ranks)

    def _end_here(self, group: Key) -> None:
        """Close a group that no rank here uses any more."""
        self.close_group(group)

    def close_group(self, group: Key) -> None:
        """Forget a group that no rank uses any more, and its communicators."""
        for key in list(self._of_group.get(group[:2], ())):
            communicator = self._open.get(key)
            if communicator is not None:
                self.engine.close(communicator)
                del self._open[key]
                communicator.close()
            if self._off:
                self._off.pop(key.id, None)
        self._of_group.pop(group[:2], None)
        if self._off:
            self._off.pop(group.id, None)
        if self._resting:
            self._resting = deque(communicator for communicator in self._resting if not communicator.closed)
        for key in [key for key in self._used if key.group == group]:
            del self._used[key]

    def rank_left(self, rank: int) -> None:
        """Fail all operations that wait for a rank that has finished its program."""
        self.left.add(rank)
        for communicator in self.waiting():
            if rank in communicator.members:
                communicator.rank_left(rank)
        for waiting in list(self._any.values()):
            waiting.look_soon()

    def waiting(self) -> Iterable[Communicator]:
        """Return the communicators in which a rank waits for another."""
        return [communicator for communicator in self._open.values() if communicator.waits]

    # -- receives from any source ------------------------------------------------------------------------------------

    def any_port(
        self, context: RankContext, stream: Stream, keys: Sequence[Key], take: Callable[[Operation, int], None]
    ) -> OperationPort:
        """Return the receiver's end of the messages of one tag from any source.

        Args:
            context: Context of the receiving rank.
            stream: Stream that the receive is issued on.
            keys: Keys of the messages from each rank of the group, by group rank.
            take: Function that moves a receive to the messages from a group rank.
        """
        anyone = keys[0].from_any()
        waiting = self._any.get(anyone)
        if waiting is None:
            lane = MessageLane(context, stream)
            lane.on_idle = partial(self._forget_any, anyone)
            waiting = self._any[anyone] = AnySource(self, context, lane, keys, take)
        return waiting.port

    def _forget_any(self, anyone: Key) -> None:
        any_source = self._any.get(anyone)  # None if a receive within the end of another has forgotten it
        if any_source is not None and any_source.at_rest:
            del self._any[anyone]
            any_source.close()

    def announce(self, key: Key) -> None:
        """Offer a message that no receive has met to the receives from any source."""
        if self._any:
            waiting = self._any.get(key.from_any())
            if waiting is not None:
                waiting.look_soon()

    def offered_ns(self, key: Key) -> int | None:
        """Return the start time of a message here that no receive has met; None without one."""
        communicator = self._open.get(key)
        return communicator.offered_ns if communicator is not None else None

    def last_receive(self, key: Key) -> Operation | None:
        """Return the last receive here that has not ended; None without one."""
        communicator = self._open.get(key)
        port = communicator.ports.get(1) if communicator is not None else None
        return port.stream.last if port is not None else None

    def elsewhere(self, key: Key) -> bool:
        """Whether the sender of a key's messages is in another process."""
        return False

    def announced(self, rank: int, keys: Sequence[Key]) -> Envelope | None:
        """Return the message of some keys, with any call, that another process has announced first."""
        return None

    async def next_announced(self, rank: int, keys: Sequence[Key]) -> Envelope:
        """Wait for a message of some keys, with any call, that another process announces."""
        raise AssertionError("this is a bug in overlap: a world of one process has no other to wait for")

    def report_if_announced(self, key: Key, receive: Operation) -> None:
        """Report the call of a receive to another process that has announced a message with another call."""

    def sends_no_more(self, key: Key) -> bool:
        """Whether the sender has finished, and no message of it is in flight."""
        return key.ends[0] in self.left

    def __len__(self) -> int:
        return len(self._open)


def _is_of(operation: IssuedFuture[object], group: Key) -> bool:
    return isinstance(operation, CollectiveFuture) and operation.member.key == group


class AnySource:
    """Matching of the receives of one rank that accept one tag from any source, one after the other.

    The lane of the port starts one receive at a time, so no two of them choose the same message. A receive chooses the
    oldest message, and moves to the port of its sender. Sends of this process are in their communicators; the transport
    announces sends of other processes. A message that a receive with its source waits for is left to that receive.

    A message of another process may have another call than the receive that chooses it. The receive fails then, like a
    receive with a source, and the message is dropped; the next receive chooses after that.

    Attributes:
        port: Port of the receives, until each has chosen a message.
        members: Empty: no other rank has a number for such a receive.
    """

    members: tuple[int, ...] = ()
    closed: bool = False
    identity: str = ""

    def __init__(
        self,
        communicators: Communicators,
        context: RankContext,
        lane: Stream,
        keys: Sequence[Key],
        take: Callable[[Operation, int], None],
    ) -> None:
        tag = keys[0].tag
        towards = f" from any rank{f' with tag {tag}' if tag else ''}"
        self._lane = lane
        self.port: OperationPort = OperationPort(self, lane, position=1, place=0, towards=towards)
        self.port.group = "", ()
        self._communicators, self._context, self._keys, self._take = communicators, context, keys, take
        self._others = [key for key in keys if key.src != key.dst]
        self._elsewhere = [key for key in keys if communicators.elsewhere(key)]
        self._receive: Operation | None = None  # receive that may choose now
        self._scope: trio.CancelScope | None = None  # scope of the task that waits for other processes

    def close(self) -> None:
        """Drop the port, which refers back to this object, and the group, which may end."""
        del self.port, self._take

    def arrive(self, operation: Operation) -> None:
        """Choose a message for a receive, now or when the first one is sent."""
        operation.lock()
        self._receive = operation
        self.look_soon()

    def at_once(self, operation: Operation) -> bool:
        """Return False: a receive may start a task."""
        return False

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail a receive."""
        self.forget(operation.seq)
        operation.fail(failure)

    give_up = withdraw

    def withdraw_receive(self, operation: Operation, later: Callable[[], None]) -> bool:
        """Stop a receive from choosing; False if it is about to fail."""
        if operation is not self._receive:
            return False
        self.forget(operation.seq)
        return True

    def forget_receive(self, operation: Operation) -> None:
        """Never called: no transport has the receive."""
        raise AssertionError("this is a bug in overlap: a receive from any source is with no transport")

    def put_back(self, port: OperationPort, message: ReturnedMessage, giver: Operation) -> None:
        """Never called: a receive that has met a message belongs to its sender's port."""
        raise AssertionError("this is a bug in overlap: a message was put back to no sender")

    def offer_again(self) -> None:
        """Do nothing: the next receive chooses when its turn comes."""

    def has_message(self, port: OperationPort) -> bool:
        """Whether a receive would meet a message at once, if that is known."""
        here = self._communicators
        offered = any(here.offered_ns(key) is not None for key in self._keys)
        return offered or bool(self._elsewhere and here.announced(self._context.rank, self._elsewhere))

    def forget(self, seq: int) -> None:
        """Stop the search for a message."""
        self._receive = None
        self._stop_waiting()

    def missing(self, seq: int) -> list[int]:
        """World ranks that may send."""
        return [key.ends[0] for key in self._others]

    @property
    def at_rest(self) -> bool:
        """Whether no receive searches for a message."""
        return self._lane.idle

    def look_soon(self) -> None:
        """Search for a message when it is time to choose."""
        self._communicators.engine.choose_soon(self._context, self._look)

    def _look(self, arrived: Envelope | None = None) -> None:
        """Take the oldest message; of messages of one time, the one of the lowest rank.

        Args:
            arrived: Message of another process, for transports that do not know announced messages.
        """
        receive, here = self._receive, self._communicators
        if receive is None:
            return
        self._stop_waiting()
        broken = here.broken(self._keys[0])
        if broken is not None:
            self.give_up(receive, Failure(broken(), seen=True))
            return
        offered = [(here.offered_ns(key), key.src) for key in self._keys]
        oldest = min([(since_ns, src) for since_ns, src in offered if since_ns is not None], default=None)
        message, free = self._announced(arrived)
        if message is not None and (oldest is None or message.since_ns < oldest[0]):
            key = self._key_of(message)
            self._choose(receive, key.src)
            here.report_if_announced(key, receive)
        elif oldest is not None:
            self._choose(receive, oldest[1])
        elif self._others and all(here.sends_no_more(key) for key in self._others):
            rank = self._context.rank
            text = f"all other ranks finished their programs while rank {rank} waits in {receive.label}"
            self.give_up(receive, Failure(RankLeftError(f"{text} ({receive.call_site})", culprit=rank)))
        elif free:
            self._scope = trio.CancelScope()
            self._context.spawn(self._wait_announced, receive, free, self._scope)

    def _announced(self, arrived: Envelope | None) -> tuple[Envelope | None, Sequence[Key]]:
        """Return the oldest message of other processes, and the keys without another receive that waits."""
        here, rank, free = self._communicators, self._context.rank, self._elsewhere
        while free and (message := here.announced(rank, free) or arrived) is not None:
            key = self._key_of(message)
            if here.last_receive(key) is None:
                return message, free
            free, arrived = [other for other in free if other is not key], None
        return None, free

    def _key_of(self, message: Envelope) -> Key:
        return next(key for key in self._elsewhere if key.ends[0] == message.src)

    def _stop_waiting(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    async def _wait_announced(self, receive: Operation, keys: Sequence[Key], scope: trio.CancelScope) -> None:
        with scope:
            try:
                message = await self._communicators.next_announced(self._context.rank, keys)
            except Exception as error:  # the wire to a sender is lost
                if receive is self._receive:
                    self.give_up(receive, Failure(error))
                return
            # like `_look`, so that the next receive chooses only after this one has begun to take the message
            self._communicators.engine.choose_soon(self._context, partial(self._look, message))

    def _choose(self, receive: Operation, src: int) -> None:
        """Continue a receive as one from a group rank."""
        self.forget(receive.seq)
        self._take(receive, src)
