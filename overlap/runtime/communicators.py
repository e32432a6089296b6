"""Communicators of a world by their keys, and receives from any source, which choose among several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio

from transports import Envelope

from ..errors import GroupAbortedError, RankLeftError
from .callbacks import call_when_done
from .communicator import BaseEngine, Communicator
from .context import RankContext
from .failure import Failure
from .interceptor import Interceptor
from .match import Key
from .operation import CollectiveFuture, Operation, OperationPort, ReturnedMessage
from .outstanding import IssuedFuture
from .stream import MessageLane, Stream

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
        intercept: Decides when the collectives of a port arrive; None: at once.
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
        self.intercept: Interceptor | None = None
        self.unraised: dict[int, Callable[[], BaseException]] = {}
        self._open: dict[Key, Communicator] = {}
        # Keys of the communicators of each group, by its ranks and occurrence: to make the key of the group takes
        # longer.
        self._keys_by_group: dict[tuple[object, ...], dict[Key, None]] = {}
        self._unused: dict[Key, int] = {}  # number of ranks here that no longer use a group
        self._any: dict[Key, AnySource] = {}  # receives from any source in flight
        # Errors of broken communicators and groups, by the id of their keys.
        self._off: dict[int, Callable[[], BaseException]] = {}

    def get_or_make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Return the communicator of a key, the same for all ranks of this process; make it at the first call."""
        communicator = self._open.get(key)
        if communicator is None:
            communicator = self.keep(self.make(key, name, members))
            if self._off and (broken := self.find_abort(key)) is not None:
                communicator.break_off(broken)
        return communicator

    def find_abort(self, key: Key) -> Callable[[], BaseException] | None:
        """Return the maker of errors of an aborted group or communicator; None if the key is not aborted."""
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
        for any_source in list(self._any.values()):
            any_source.search_soon()

    def find(self, key: Key) -> Communicator | None:
        """Return the communicator of a key; None if it is not open."""
        return self._open.get(key)

    def keep(self, communicator: Communicator) -> Communicator:
        """Add a communicator to the open ones, and to the list of its group."""
        key = communicator.key
        self._open[key] = communicator
        self._keys_by_group.setdefault(key[:2], {})[key] = None
        return communicator

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator. One of messages lasts if its tag is used again."""
        communicator = Communicator(self, key, name, members)
        communicator.lasts = key in self._used
        return communicator

    def rest(self, communicator: Communicator) -> None:
        """Keep an idle communicator of messages whose tag is used repeatedly, up to a number; close all others."""
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
        """Close a communicator of messages that is idle."""
        if self._open.get(communicator.key) is communicator:
            del self._open[communicator.key]
            communicator.close()
            self._unlist(communicator.key)

    def _unlist(self, key: Key) -> None:
        """Remove a communicator from the list of its group."""
        keys = self._keys_by_group.get(key[:2])
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self._keys_by_group[key[:2]]

    # -- ends of groups ------------------------------------------------------------------------------------------------

    def end_use(self, context: RankContext, key: Key) -> None:
        """Record that a rank has ended its use of a group, once its operations there are over. On the loop's thread.

        The last rank closes the communicators of the group.

        Args:
            context: Context of the rank.
            key: Key of the group.
        """
        if self.over or context.ending.failure is not None:  # abandoned operations may still move bytes
            return
        unfinished = [operation for operation in context.outstanding.operations if _is_on_group(operation, key)]
        if unfinished:  # later: an operation that ends is still in its communicator
            call_when_done(unfinished[-1], partial(self.later, partial(self.end_use, context, key)))
            return
        shared, here = self._ranks_here(key)
        count = self._unused.pop(shared, 0) + 1
        if count < here:
            self._unused[shared] = count
        else:
            self._end_group_here(shared)

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key that the communicators of a group have, and the number of ranks here that use it."""
        return key, len(key.ranks)

    def _end_group_here(self, group: Key) -> None:
        """Close a group that no rank here uses any more."""
        self.close_group(group)

    def close_group(self, group: Key) -> None:
        """Forget a group that no rank uses any more, and its communicators."""
        for key in list(self._keys_by_group.get(group[:2], ())):
            communicator = self._open.get(key)
            if communicator is not None:
                self.engine.close(communicator)
                del self._open[key]
                communicator.close()
            if self._off:
                self._off.pop(key.id, None)
        self._keys_by_group.pop(group[:2], None)
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
        for any_source in list(self._any.values()):
            any_source.search_soon()

    def waiting(self) -> Iterable[Communicator]:
        """Return the communicators in which the operation of a rank waits for another rank."""
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
        any_key = keys[0].with_any_source()
        any_source = self._any.get(any_key)
        if any_source is None:
            lane = MessageLane(context, stream)
            lane.on_idle = partial(self._close_any_source, any_key)
            any_source = self._any[any_key] = AnySource(self, context, lane, keys, take)
        return any_source.port

    def _close_any_source(self, any_key: Key) -> None:
        """Close the receives from any source of a key, unless one searches for a message."""
        any_source = self._any.get(any_key)  # None if a receive within the end of another has forgotten it
        if any_source is not None and any_source.at_rest:
            del self._any[any_key]
            any_source.close()

    def announce(self, key: Key) -> None:
        """Let receives from any source search again, because a message without a receive was sent here."""
        if self._any:
            any_source = self._any.get(key.with_any_source())
            if any_source is not None:
                any_source.search_soon()

    def offered_ns(self, key: Key) -> int | None:
        """Return the start time of a message here that no receive has met; None without one."""
        communicator = self._open.get(key)
        return communicator.offered_ns if communicator is not None else None

    def last_receive(self, key: Key) -> Operation | None:
        """Return the last unfinished receive of a key here; None without one."""
        communicator = self._open.get(key)
        port = communicator.ports.get(1) if communicator is not None else None
        return port.stream.last if port is not None else None

    def is_sender_elsewhere(self, key: Key) -> bool:
        """Whether the sender of a key's messages is in another process."""
        return False

    def oldest_announced(self, rank: int, keys: Sequence[Key]) -> Envelope | None:
        """Return the oldest message of some keys, with any call, that other processes have announced; or None."""
        return None

    async def wait_announced(self, rank: int, keys: Sequence[Key]) -> Envelope:
        """Wait until another process announces a message of some keys, with any call; return that message."""
        raise AssertionError("this is a bug in overlap: a world of one process has no other to wait for")

    def report_if_different(self, key: Key, receive: Operation, message: Envelope) -> None:
        """Report the call of a receive to another process that has announced a message with another call."""

    def has_sent_all(self, key: Key) -> bool:
        """Whether the sender of a key has finished its program, and no message of it is in flight."""
        return key.ends[0] in self.left

    def __len__(self) -> int:
        return len(self._open)


def _is_on_group(operation: IssuedFuture[object], group: Key) -> bool:
    """Whether an operation was issued on a group."""
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
        self._communicators, self._context, self._keys, self._move_receive = communicators, context, keys, take
        self._sender_keys = [key for key in keys if key.src != key.dst]
        self._remote_keys = [key for key in keys if communicators.is_sender_elsewhere(key)]
        self._receive: Operation | None = None  # receive that may choose now
        self._scope: trio.CancelScope | None = None  # scope of the task that waits for other processes

    def close(self) -> None:
        """Drop the port, which refers back to this object, and the group, which may end."""
        del self.port, self._move_receive

    def arrive(self, operation: Operation) -> None:
        """Choose a message for a receive, now or when the first one is sent."""
        operation.lock()
        self._receive = operation
        self.search_soon()

    def needs_no_task(self, operation: Operation) -> bool:
        """Return False: a receive may start a task."""
        return False

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail a receive, and stop its search."""
        self.forget(operation.seq)
        operation.fail(failure)

    give_up = withdraw

    def withdraw_receive(self, operation: Operation, later: Callable[[], None]) -> bool:
        """Stop the search of a receive; False if another receive searches, so that this one is about to fail."""
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
        return offered or bool(self._remote_keys and here.oldest_announced(self._context.rank, self._remote_keys))

    def forget(self, seq: int) -> None:
        """Forget the receive that searches for a message, and stop the search."""
        self._receive = None
        self._stop_waiting()

    def missing(self, seq: int) -> list[int]:
        """Return the world ranks that may send."""
        return [key.ends[0] for key in self._sender_keys]

    @property
    def at_rest(self) -> bool:
        """Whether no receive searches for a message."""
        return self._lane.idle

    def search_soon(self) -> None:
        """Let the engine search for a message at a time when it may choose one."""
        self._communicators.engine.choose_soon(self._context, self._search)

    def _search(self, arrived: Envelope | None = None) -> None:
        """Take the oldest message; of messages of one time, the one of the lowest rank. Fail if none can come.

        Args:
            arrived: Message that another process has announced just now.
        """
        receive, communicators = self._receive, self._communicators
        if receive is None:
            return
        self._stop_waiting()
        make_abort_error = communicators.find_abort(self._keys[0])
        if make_abort_error is not None:
            self.give_up(receive, Failure(make_abort_error(), seen=True))
            return
        offered = [(communicators.offered_ns(key), key.src) for key in self._keys]
        oldest = min([(since_ns, src) for since_ns, src in offered if since_ns is not None], default=None)
        message, free_keys = self._find_announced(arrived)
        if message is not None and (oldest is None or message.since_ns < oldest[0]):
            key = self._find_key(message)
            self._choose(receive, key.src)
            communicators.report_if_different(key, receive, message)
        elif oldest is not None:
            self._choose(receive, oldest[1])
        elif self._sender_keys and all(communicators.has_sent_all(key) for key in self._sender_keys):
            rank = self._context.rank
            cause = f"all other ranks finished their programs while rank {rank} waits in {receive.label}"
            self.give_up(receive, Failure(RankLeftError(f"{cause} ({receive.call_site})", culprit=rank)))
        elif free_keys:
            self._scope = trio.CancelScope()
            self._context.spawn(self._wait_for_message, receive, free_keys, self._scope)

    def _find_announced(self, arrived: Envelope | None) -> tuple[Envelope | None, Sequence[Key]]:
        """Return the oldest announced message that no other receive waits for, and the keys without such receives."""
        communicators, rank, free_keys = self._communicators, self._context.rank, self._remote_keys
        while free_keys and (message := arrived or communicators.oldest_announced(rank, free_keys)) is not None:
            key = self._find_key(message)
            if communicators.last_receive(key) is None:
                return message, free_keys
            free_keys, arrived = [other for other in free_keys if other is not key], None
        return None, free_keys

    def _find_key(self, message: Envelope) -> Key:
        """Return the key of an announced message."""
        return next(key for key in self._remote_keys if key.ends[0] == message.src)

    def _stop_waiting(self) -> None:
        """Cancel the task that waits for announcements of other processes, if there is one."""
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    async def _wait_for_message(self, receive: Operation, keys: Sequence[Key], scope: trio.CancelScope) -> None:
        """Wait for an announcement of another process, then search again; a lost wire fails the receive."""
        with scope:
            try:
                message = await self._communicators.wait_announced(self._context.rank, keys)
            except Exception as error:  # the wire to a sender is lost
                if receive is self._receive:
                    self.give_up(receive, Failure(error))
                return
            # like `_search`, so that the next receive chooses only after this one has begun to take the message
            self._communicators.engine.choose_soon(self._context, partial(self._search, message))

    def _choose(self, receive: Operation, src: int) -> None:
        """Continue a receive as one with a source: the group rank whose message was chosen."""
        self.forget(receive.seq)
        self._move_receive(receive, src)
