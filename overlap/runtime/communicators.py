"""Communicators of a world by their keys, the inbox of its messages, and reports of other processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

from ..errors import GroupAbortedError
from .callbacks import call_when_done
from .communicator import BaseEngine, Communicator
from .context import RankContext
from .inbox import Inbox
from .interceptor import Interceptor
from .lane import Lane
from .match import CHANNEL_BITS, History, Key, RankCall
from .operation import CollectiveFuture
from .outstanding import IssuedFuture

if TYPE_CHECKING:
    from ..processes.control import ControlPlane

Report: TypeAlias = "RankCall | Callable[[], BaseException]"
"""Report of another process on an operation: the call of a rank that waits, or the maker of the error that it fails
with."""

_MOST_EARLY = 100_000  # reported operations in memory at which no rank here has arrived
_MOST_CLOSED = 256  # closed groups with known histories
_LOOK_SHARE = 50  # looks at unmet messages take at most this part of the time, even if there are many


class Communicators:
    """The communicators of a world, and their shared state.

    Args:
        engine: Engine of the world.
        local: World ranks of this process, if there are others.

    Attributes:
        engine: Runs matched operations.
        inbox: Messages of the ranks here.
        left: World ranks that have finished their program.
        closing: World ranks, here and elsewhere, that receive no more messages, and wait until their own are received.
        broken: Makers of errors of communicators, lanes and groups that fail all operations, by the id of their keys.
        unraised: Makers of errors that no operation is left to fail with, by id of the communicator: its operations
            were over on all ranks when ranks turned out to differ.
        later: Calls a function on the loop's thread at a time that programs cannot notice, unless the loop has ended;
            any thread, and at any point of a program.
        intercept: Decides when operations arrive; None: at once.
        lost_count: Whether counts of operations and messages here are incomplete.
        over: Whether the world has ended, and its transport with it.
        local: World ranks of this process; None: all.
        far: Reports to other processes; only if there are any.
        spanning: Communicators that span processes, by id.
        early: Reports on operations at which no rank here has arrived, by ids of the group and of the communicator or
            lane, and by number.
    """

    later: Callable[[Callable[[], None]], None]
    over = False
    far: ControlPlane

    def __init__(self, engine: BaseEngine, local: frozenset[int] | None = None) -> None:
        self.engine: BaseEngine = engine
        self.left: set[int] = set()
        self.closing: set[int] = set()
        self.local: frozenset[int] | None = local
        self.spanning: dict[int, Communicator] = {}
        self.early: OrderedDict[tuple[int, int, int], list[Report]] = OrderedDict()
        self._finished: dict[int, dict[int, int]] = {}  # operations of finished ranks elsewhere
        self._uncounted: set[int] = set()  # finished ranks whose counts are incomplete
        # Histories of the last groups that were closed, by id of the group, then by their own.
        self._closed: OrderedDict[int, dict[int, History]] = OrderedDict()
        self._look_due_ns = 0
        self.lost_count: bool = False
        self.intercept: Interceptor | None = None
        self.unraised: dict[int, Callable[[], BaseException]] = {}
        # by the ranks and the occurrence of their group: to make its key takes longer
        self._open: dict[tuple[object, ...], dict[Key, Communicator]] = {}
        self._unused: dict[Key, int] = {}  # number of ranks here that no longer use a group
        self.broken: dict[int, Callable[[], BaseException]] = {}
        self.inbox: Inbox = self.make_inbox()

    def make_inbox(self) -> Inbox:
        """Return the inbox of the messages of the ranks here."""
        return Inbox(self)

    def use(self, interceptor: Interceptor) -> None:
        """Let an interceptor decide when operations arrive; before any is issued."""
        self.intercept = interceptor
        self.inbox.arrive = partial(interceptor.arrive, self.inbox)

    def get_or_make(self, key: Key, name: str) -> Communicator:
        """Return the communicator of a key, the same for all ranks of this process; make it at the first call."""
        communicator = self.find(key)
        if communicator is None:
            communicator = self.keep(Communicator(self, key, name, key.ranks))
            if communicator.spans:
                self.spanning[communicator.history.id] = communicator
            if self.broken and (error := self.broken.get(key.group.id) or self.broken.get(key.id)) is not None:
                communicator.break_off(error)
        return communicator

    def abort(self, group: Key, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all present and later operations of a group, here and in other processes."""
        self.break_off(group.id, error)
        if self.local is not None and not self.local.issuperset(group.ranks):
            self.far.send_operation_failed(History(group, "", group.ranks), 0, error(), onwards=True)

    def break_off(self, key_id: int, error: Callable[[], BaseException]) -> None:
        """Fail all present and later operations of a communicator, a lane or a group on the ranks of this process.

        Args:
            key_id: Id of the key of a communicator or a group, or of a lane.
            error: Makes the errors.
        """
        self.broken.setdefault(key_id, error)
        for communicator in self:
            if key_id in (communicator.key.id, communicator.key.group.id):
                communicator.break_off(error)
        self.inbox.break_off(key_id, error)

    def find(self, key: Key) -> Communicator | None:
        """Return the communicator of a key; None if it is not open."""
        return self._open.get(key[:2], {}).get(key)

    def keep(self, communicator: Communicator) -> Communicator:
        """Add a communicator to the open ones."""
        self._open.setdefault(communicator.key[:2], {})[communicator.key] = communicator
        return communicator

    def __iter__(self) -> Iterator[Communicator]:
        """Yield the open communicators."""
        return chain.from_iterable([list(of_group.values()) for of_group in self._open.values()])

    # -- reports of other processes ------------------------------------------------------------------------------------

    def take_early(self, of: History | Lane, seq: int) -> list[Report]:
        """Return and remove the reports on an operation that came before a rank here arrived at it."""
        return self.early.pop((of.group_id, of.id, seq), [])

    def _keep_early(self, group_id: int, of_id: int, seq: int, report: Report) -> None:
        """Keep a report until a rank here arrives at the operation; of too many, the oldest are dropped."""
        if group_id not in self._closed:
            self.early.setdefault((group_id, of_id, seq), []).append(report)
            if len(self.early) > _MOST_EARLY:
                self.early.popitem(last=False)

    def compare_wait(self, group_id: int, of_id: int, seq: int, theirs: RankCall) -> None:
        """Compare the call of a rank elsewhere that waits with that of a rank here, now or when it arrives."""
        communicator, closed = self.spanning.get(of_id), self._closed.get(group_id, {}).get(of_id)
        if closed is not None:
            closed.compare(seq, theirs, self.far)
        elif communicator is None or not communicator.compare_wait(seq, theirs):
            self._keep_early(group_id, of_id, seq, theirs)

    def fail_here(
        self, group_id: int, of_id: int, seq: int, error: Callable[[], BaseException], *, onwards: bool
    ) -> None:
        """Fail an operation, or with `onwards` all from its number on, because of another process."""
        communicator = self.spanning.get(of_id)
        if onwards and communicator is not None and seq:
            communicator.break_off(error, seq, seen=False)
        elif onwards:
            if group_id not in self._closed:
                self.break_off(of_id, error)
        elif not (self.inbox.fail_at(of_id, seq, error) if communicator is None else communicator.fail_at(seq, error)):
            self._keep_early(group_id, of_id, seq, error)

    def look(self, before_ns: int | None = None) -> None:
        """Ask the other processes about operations that wait since an instant; compare messages that nobody has met.

        A rank that receives nothing waits for nobody: only its messages show what it has called.

        Args:
            before_ns: The instant. None: a rank here has ended, and asks nobody; its messages are compared in any case.
        """
        assert self.local is not None
        now_ns = perf_counter_ns()
        if before_ns is not None:
            for communicator in list(self.spanning.values()):
                communicator.ask(before_ns)
            if now_ns < self._look_due_ns:
                return
        for tag, src, signature in self.engine.unmet(self.local, list(self.spanning.values())):
            if (sender := self.spanning.get(tag >> 24)) is not None:
                sender.compare_unmet(tag >> CHANNEL_BITS & 0xFFFF, src, signature)
        self._look_due_ns = now_ns + _LOOK_SHARE * (perf_counter_ns() - now_ns)

    # -- counts of finished ranks --------------------------------------------------------------------------------------

    def issued_counts(self, rank: int) -> tuple[dict[int, int], bool]:
        """Return the number of operations of a rank here on each communicator and lane between processes.

        Also whether some are missing.
        """
        counts = self.inbox.issued_counts(rank)
        closed = [history for histories in self._closed.values() for history in histories.values()]
        for history in (*closed, *(communicator.history for communicator in self.spanning.values())):
            if rank in history.issued:
                counts[history.id] = history.issued[rank]
        return counts, self.lost_count

    def count(self, rank: int, counts: Iterable[tuple[int, int]], *, uncounted: bool) -> None:
        """Record how many operations a rank elsewhere has issued, which is about to finish."""
        self._finished.setdefault(rank, {}).update(counts)
        if uncounted:
            self._uncounted.add(rank)

    def issued_by(self, rank: int, history: History) -> int | None:
        """Return the number of operations that a finished rank has issued on a communicator; None: unknown."""
        if self.local is None or rank in self.local:
            return history.issued.get(rank, 0)
        return self._finished.get(rank, {}).get(history.id, None if rank in self._uncounted else 0)

    def sent_no_more(self, rank: int, lane_id: int, count: int) -> bool:
        """Whether a finished rank is known to have had at most `count` messages of a lane."""
        if self.local is None or rank in self.local:
            return True
        return rank not in self._uncounted and self._finished.get(rank, {}).get(lane_id, 0) <= count

    # -- ends of groups ------------------------------------------------------------------------------------------------

    def end_use(self, context: RankContext, key: Key) -> None:
        """Record that a rank has ended its use of a group, once its operations there are over. On the loop's thread.

        The last rank here closes the group in this process, whatever other processes do: nothing travels for it.

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
            self._close_group(shared)

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key that the communicators of a group have, and the number of ranks here that use it."""
        return key, len(key.ranks if self.local is None else self.local.intersection(key.ranks))

    def _close_group(self, group: Key) -> None:
        """Forget a group that no rank here uses any more, its communicators and its messages.

        Other processes may still need the calls of ranks here, and their number: those are known for a while.
        """
        closed: dict[int, History] = {}
        self.inbox.close_group(group.id)
        for key, communicator in self._open.pop(group[:2], {}).items():
            self.engine.close(communicator)
            if communicator.spans:
                closed[communicator.history.id] = self.spanning.pop(communicator.history.id).history
            if self.broken:
                self.broken.pop(key.id, None)
        if self.broken:
            self.broken.pop(group.id, None)
        if self.local is None or self.local.issuperset(group.ranks):
            return
        self._closed[group.id] = closed
        for early in [early for early in self.early if early[0] == group.id]:
            del self.early[early]
        if len(self._closed) > _MOST_CLOSED:
            _, oldest = self._closed.popitem(last=False)
            self.lost_count = self.lost_count or bool(oldest)

    def rank_left(self, rank: int) -> None:
        """Fail all operations that wait for a rank that has finished its program."""
        self.left.add(rank)
        for communicator in self:
            if rank in communicator.members:
                communicator.rank_left(rank)
        self.inbox.rank_left(rank)

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))


def _is_on_group(operation: IssuedFuture[object], group: Key) -> bool:
    """Whether an operation was issued on a group."""
    return isinstance(operation, CollectiveFuture) and operation.member.key == group
