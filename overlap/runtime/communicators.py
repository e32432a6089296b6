"""Communicators of a world by their keys, and the inbox of its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ..errors import GroupAbortedError
from .callbacks import call_when_done
from .communicator import BaseEngine, Communicator
from .context import RankContext
from .inbox import Inbox
from .interceptor import Interceptor
from .match import Key
from .operation import CollectiveFuture
from .outstanding import IssuedFuture


class Communicators:
    """The communicators of a world, and their shared state.

    Attributes:
        engine: Runs matched operations.
        inbox: Messages of the ranks here.
        left: World ranks that have finished their program.
        closing: World ranks that receive no more messages, and wait until their own are received.
        unraised: Makers of errors that no operation is left to fail with, by id of the communicator: its operations
            were over on all ranks when ranks turned out to differ.
        later: Calls a function on the loop's thread at a time that programs cannot notice, unless the loop has ended;
            any thread, and at any point of a program.
        intercept: Decides when operations arrive; None: at once.
        over: Whether the world has ended, and its transport with it.
    """

    engine: BaseEngine
    left: set[int]
    closing: set[int]
    later: Callable[[Callable[[], None]], None]
    over = False

    def __init__(self, engine: BaseEngine) -> None:
        """Made by a backend.

        Args:
            engine: Engine of the world.
        """
        self.engine, self.left, self.closing = engine, set[int](), set[int]()
        self.intercept: Interceptor | None = None
        self.unraised: dict[int, Callable[[], BaseException]] = {}
        self._open: dict[Key, Communicator] = {}
        # Keys of the communicators of each group, by its ranks and occurrence: to make the key of the group takes
        # longer.
        self._keys_by_group: dict[tuple[object, ...], dict[Key, None]] = {}
        self._unused: dict[Key, int] = {}  # number of ranks here that no longer use a group
        # Errors of broken communicators and groups, by the id of their keys.
        self._off: dict[int, Callable[[], BaseException]] = {}
        self.broken: dict[int, Callable[[], BaseException]] = self._off
        self.inbox: Inbox = self.make_inbox()

    def make_inbox(self) -> Inbox:
        """Return the inbox of the messages of the ranks here."""
        return Inbox(self, self.engine)

    def use(self, interceptor: Interceptor) -> None:
        """Let an interceptor decide when operations arrive; before any is issued."""
        self.intercept = self.inbox.intercept = interceptor
        self.inbox.arrive = partial(interceptor.arrive, self.inbox)

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
        self.inbox.break_off(key_id, error)

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
        """Make a communicator."""
        return Communicator(self, key, name, members)

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
        """Forget a group that no rank uses any more, its communicators and its messages."""
        self.inbox.close_group(group)
        for key in list(self._keys_by_group.get(group[:2], ())):
            communicator = self._open.get(key)
            if communicator is not None:
                self.engine.close(communicator)
                del self._open[key]
            if self._off:
                self._off.pop(key.id, None)
        self._keys_by_group.pop(group[:2], None)
        if self._off:
            self._off.pop(group.id, None)

    def rank_left(self, rank: int) -> None:
        """Fail all operations that wait for a rank that has finished its program."""
        self.left.add(rank)
        for communicator in self.waiting():
            if rank in communicator.members:
                communicator.rank_left(rank)
        self.inbox.rank_left(rank)

    def waiting(self) -> Iterable[Communicator]:
        """Return the communicators in which the operation of a rank waits for another rank."""
        return [communicator for communicator in self._open.values() if communicator.waits]

    def __len__(self) -> int:
        return len(self._open)


def _is_on_group(operation: IssuedFuture[object], group: Key) -> bool:
    """Whether an operation was issued on a group."""
    return isinstance(operation, CollectiveFuture) and operation.member.key == group
