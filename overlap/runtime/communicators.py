"""The communicators of a world by their keys, and the receives that wait for a message in any of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..collectives.call import Call
from ..errors import GroupAbortedError
from .communicator import BaseEngine, Communicator
from .context import RankContext
from .match import Key


class Communicators:
    """The communicators of a world, and their shared state.

    Attributes:
        engine: Runs what has matched.
        left: World ranks that have finished their program.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine, self.left = engine, set[int]()
        self._open: dict[Key, Communicator] = {}
        self._looking: dict[Key, deque[Callable[[], None]]] = {}  # receives from any source, oldest first
        # Groups and communicators of which nothing goes on, by the id of their keys.
        self._off: dict[int, Callable[[], BaseException]] = {}

    def open(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Return the communicator of that key, the same for all ranks of this process."""
        found = self._open.get(key)
        if found is None:
            found = self.keep(self.make(key, name, members))
            if self._off and (broken := self.broken(key)) is not None:
                found.break_off(broken)
        return found

    def broken(self, key: Key) -> Callable[[], BaseException] | None:
        """Return the maker of errors of an aborted group; None if it was not aborted."""
        return (self._off.get(key.group.id) or self._off.get(key.id)) if self._off else None

    def abort(self, ranks: tuple[int, ...], occurrence: int, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all present and later operations of a group."""
        self.break_off(Key(ranks, occurrence, "").id, error)

    def break_off(self, key_id: int, error: Callable[[], BaseException]) -> None:
        """Fail all present and later operations of a communicator or a group on the ranks of this process.

        Args:
            key_id: Of a communicator's key, or of the key of a group.
            error: Makes the errors.
        """
        self._off.setdefault(key_id, error)
        for communicator in list(self._open.values()):
            if key_id in (communicator.key.id, communicator.key.group.id):
                communicator.break_off(error)
        for waiting in list(self._looking.values()):
            for look in list(waiting):
                look()

    def known(self, key: Key) -> Communicator | None:
        """Return the communicator of that key, if it is open."""
        return self._open.get(key)

    def keep(self, communicator: Communicator) -> Communicator:
        """Keep a communicator for later operations."""
        self._open[communicator.key] = communicator
        return communicator

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator."""
        return Communicator(self, key, name, members)

    def close(self, communicator: Communicator) -> None:
        """Forget a communicator of messages that is idle."""
        if self._open.get(communicator.key) is communicator:
            del self._open[communicator.key]
            communicator.closed = True

    def rank_left(self, rank: int) -> None:
        """Fail all operations that wait for a rank that has finished its program."""
        self.left.add(rank)
        for communicator in self.waiting():
            if rank in communicator.members:
                communicator.rank_left(rank)
        for waiting in list(self._looking.values()):
            waiting[0]()

    def waiting(self) -> Iterable[Communicator]:
        """Return the communicators in which some rank waits for another."""
        return [communicator for communicator in self._open.values() if communicator.waits]

    # -- receives from any source ------------------------------------------------------------------------------------

    def check_any_source(self) -> None:
        """Raise `UsageError` if senders cannot be told apart."""

    def queue(self, key: Key, look: Callable[[], None]) -> Callable[[], None]:
        """Call `look` whenever a rank sends or ends while it is the turn of a receive; return what ends that.

        Receives of one tag take turns, so that no two of them go for one message.
        """
        anyone = key.from_any()
        waiting = self._looking.setdefault(anyone, deque())
        waiting.append(look)
        return partial(self._leave, anyone, waiting, look)

    def _leave(self, anyone: Key, waiting: deque[Callable[[], None]], look: Callable[[], None]) -> None:
        its_turn = waiting[0] is look
        waiting.remove(look)
        if not waiting:
            self._looking.pop(anyone, None)
        elif its_turn:
            waiting[0]()

    def announce(self, key: Key) -> None:
        """Offer a message that no rank has begun to receive to the first receive from any source."""
        if self._looking:
            waiting = self._looking.get(key.from_any())
            if waiting:
                waiting[0]()

    def choose_soon(self, context: RankContext, look: Callable[[], None]) -> None:
        """Call `look` when it is time to choose among messages."""
        context.soon(look)

    def offered_ns(self, key: Key) -> int | None:
        """Return when a rank here has begun to send a message that nobody has begun to receive."""
        known = self._open.get(key)
        return known.offered_ns if known is not None else None

    def elsewhere(self, key: Key) -> bool:
        """Whether the messages come from another process."""
        return False

    async def announced(self, rank: int, keys: Sequence[Key], call: Call) -> int:
        """Wait until another process has announced one of some messages; return the index of its key."""
        raise AssertionError("a world of one process hears of no others")

    def sends_no_more(self, key: Key) -> bool:
        """Whether the sender has finished, and there is no message of it under way."""
        return key.ends[0] in self.left

    def __len__(self) -> int:
        return len(self._open)
