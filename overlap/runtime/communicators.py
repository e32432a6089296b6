"""All communicators of a world, the inbox of its messages, and reports that arrive from other processes."""

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
from .ending import WorldPhase
from .inbox import Inbox
from .interceptor import Interceptor
from .lane import Lane
from .match import CHANNEL_BITS, History, Key, RankCall
from .operation import CollectiveFuture

if TYPE_CHECKING:
    from ..processes.control import ControlPlane

Report: TypeAlias = "RankCall | Callable[[], BaseException]"
"""Report of another process on an operation: the call of a rank that waits there, or a function that makes the error
with which the operation has failed there."""

_MOST_EARLY = 100_000  # most operations with kept reports, at which no rank here has arrived
_MOST_CLOSED = 256  # most closed groups whose histories are kept
_LOOK_SHARE = 50  # looks at unmet messages take at most 1 / 50 of the time, even if there are many


class Communicators:
    """The communicators of a world, and their shared state.

    "Here" is this process, "elsewhere" are the other processes of the world.

    Args:
        engine: Engine of the world.
        local: World ranks of this process; None: all.

    Attributes:
        engine: Runs matched operations.
        inbox: Messages of the ranks here.
        finished_ranks: World ranks that have finished their program.
        closing_ranks: World ranks, here and elsewhere, that issue nothing more, and wait until their messages are
            received.
        broken_errors: Communicators, lanes and groups on which every operation fails: by the id of the key, a function
            that makes the error.
        unraised_errors: Errors that no operation was left to fail with, because all were over when the ranks turned
            out to differ: by the id of the communicator, a function that makes the error.
        call_later: Lets the loop's thread call a function soon, without a trace in virtual time; does nothing if the
            loop has ended. Any thread may call it.
        intercept: Decides when operations arrive; None: at once.
        has_lost_counts: Whether counts of operations and messages here are incomplete.
        local: World ranks of this process; None: all.
        control: Sends reports to the other processes; missing if there are none.
        spanning: Communicators that span processes, by id.
        early_reports: Reports on operations at which no rank here has arrived, by (id of the group, id of the
            communicator or lane, number of the operation).
    """

    call_later: Callable[[Callable[[], None]], None]
    control: ControlPlane

    def __init__(self, engine: BaseEngine, local: frozenset[int] | None = None) -> None:
        self.engine: BaseEngine = engine
        self.finished_ranks: set[int] = set()
        self.closing_ranks: set[int] = set()
        self.local: frozenset[int] | None = local
        self.spanning: dict[int, Communicator] = {}
        self.early_reports: OrderedDict[tuple[int, int, int], list[Report]] = OrderedDict()
        # Numbers of operations that finished ranks elsewhere have issued: by rank, then by id of communicator or lane.
        self._finished: dict[int, dict[int, int]] = {}
        self._uncounted: set[int] = set()  # finished ranks whose counts are incomplete
        # Histories of the last groups that were closed: by id of the group, then by id of the communicator.
        self._closed: OrderedDict[int, dict[int, History]] = OrderedDict()
        self._look_due_ns = 0
        self.has_lost_counts: bool = False
        self.intercept: Interceptor | None = None
        self.unraised_errors: dict[int, Callable[[], BaseException]] = {}
        # Open communicators: by (ranks, occurrence) of the group, then by key. To make the group's key takes longer.
        self._open: dict[tuple[object, ...], dict[Key, Communicator]] = {}
        self._unused: dict[Key, int] = {}  # by key of the group, the number of ranks here that no longer use it
        self.broken_errors: dict[int, Callable[[], BaseException]] = {}
        self.inbox: Inbox = self.make_inbox()

    def make_inbox(self) -> Inbox:
        """Return the inbox of the messages of the ranks here."""
        return Inbox(self)

    def use_interceptor(self, interceptor: Interceptor) -> None:
        """Let an interceptor decide when operations arrive. Must be called before any operation is issued."""
        self.intercept = interceptor
        self.inbox.arrive = partial(interceptor.arrive, self.inbox)

    def get_or_make(self, key: Key, name: str) -> Communicator:
        """Return the communicator of a key, the same for all ranks of this process. The first call makes it.

        Args:
            key: The key.
            name: Name of the group in messages.
        """
        communicator = self.find(key)
        if communicator is None:
            communicator = self.add(Communicator(self, key, name, key.ranks))
            if communicator.spans:
                self.spanning[communicator.history.id] = communicator
            if (
                self.broken_errors
                and (error := self.broken_errors.get(key.group.id) or self.broken_errors.get(key.id)) is not None
            ):
                communicator.fail_operations_from(error)
        return communicator

    def abort_group(self, group: Key, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all present and later operations of a group, here and in other processes.

        Args:
            group: Key of the group.
            error: Makes a new error for each operation.
        """
        self.fail_operations_of(group.id, error)
        if self.local is not None and not self.local.issuperset(group.ranks):
            self.control.send_operation_failed(History(group, "", group.ranks), 0, error(), onwards=True)

    def fail_operations_of(self, key_id: int, error: Callable[[], BaseException]) -> None:
        """Fail all present and later operations of a communicator, a lane or a group on the ranks of this process.

        Args:
            key_id: Id of the key of a communicator or a group, or of a lane.
            error: Makes a new error for each operation.
        """
        self.broken_errors.setdefault(key_id, error)
        for communicator in self:
            if key_id in (communicator.key.id, communicator.key.group.id):
                communicator.fail_operations_from(error)
        self.inbox.fail_messages_of(key_id, error)

    def find(self, key: Key) -> Communicator | None:
        """Return the communicator of a key, or None if it is not open."""
        return self._open.get(key[:2], {}).get(key)

    def add(self, communicator: Communicator) -> Communicator:
        """Add a communicator to the open ones."""
        self._open.setdefault(communicator.key[:2], {})[communicator.key] = communicator
        return communicator

    def __iter__(self) -> Iterator[Communicator]:
        """Yield the open communicators."""
        return chain.from_iterable([list(of_group.values()) for of_group in self._open.values()])

    # -- reports of other processes ------------------------------------------------------------------------------------

    def take_early_reports(self, of: History | Lane, seq: int) -> list[Report]:
        """Return and forget the reports on an operation that came before a rank here arrived at it.

        Args:
            of: History of the operation's communicator, or lane of a message.
            seq: Number of the operation.
        """
        return self.early_reports.pop((of.group_id, of.id, seq), [])

    def _keep_early_report(self, group_id: int, of_id: int, seq: int, report: Report) -> None:
        """Keep a report until a rank here arrives at the operation. If there are too many, drop the oldest.

        A report on a closed group is dropped: no rank here issues there any more. `of_id` is that of a communicator or
        lane.
        """
        if group_id not in self._closed:
            self.early_reports.setdefault((group_id, of_id, seq), []).append(report)
            if len(self.early_reports) > _MOST_EARLY:
                self.early_reports.popitem(last=False)

    def compare_remote_call(self, group_id: int, of_id: int, seq: int, theirs: RankCall) -> None:
        """Compare the call of a waiting rank elsewhere with the call of a rank here, now or when one arrives.

        Args:
            group_id: Id of the group.
            of_id: Id of the communicator.
            seq: Number of the operation.
            theirs: The waiting rank, its call and its line.
        """
        communicator, closed = self.spanning.get(of_id), self._closed.get(group_id, {}).get(of_id)
        if closed is not None:
            closed.compare_and_answer(seq, theirs, self.control)
        elif communicator is None or not communicator.compare_remote_call(seq, theirs):
            self._keep_early_report(group_id, of_id, seq, theirs)

    def fail_reported_operation(
        self, group_id: int, of_id: int, seq: int, error: Callable[[], BaseException], *, onwards: bool
    ) -> None:
        """Fail an operation here because it has failed in another process.

        If no rank here has arrived at the operation, the report is kept until one does.

        Args:
            group_id: Id of the group.
            of_id: Id of the communicator, of the lane of a message, or of the group itself.
            seq: Number of the operation.
            error: Makes a new error for each end of the operation.
            onwards: Whether all operations from `seq` on fail, too.
        """
        communicator = self.spanning.get(of_id)
        if onwards and communicator is not None and seq:
            communicator.fail_operations_from(error, seq, seen=False)
        elif onwards:  # the whole communicator, lane or group; a closed group has no operations any more
            if group_id not in self._closed:
                self.fail_operations_of(of_id, error)
        # without a communicator it is a message, and `of_id` that of its lane
        elif not (
            self.inbox.fail_message(of_id, seq, error)
            if communicator is None
            else communicator.fail_operation(seq, error)
        ):
            self._keep_early_report(group_id, of_id, seq, error)
            self.inbox.search_again()

    def ask_others(self, before_ns: int | None = None) -> bool:
        """Look for ranks that disagree, because operations wait: ask the other processes, and compare unmet messages.

        A rank that only sends waits for nobody and asks nobody: its messages alone show which call it has issued.

        Args:
            before_ns: Operations that began to wait before this instant are asked about. None: no operations, because a
                rank here has ended; messages are compared in any case.

        Returns:
            Whether there are such operations or messages.
        """
        assert self.local is not None
        now_ns, waits = perf_counter_ns(), False
        if before_ns is not None:
            # a list, not a generator, because every communicator must ask
            waits = bool([each for each in list(self.spanning.values()) if each.ask_about_waits(before_ns)])
            if now_ns < self._look_due_ns:
                return waits
        unmet = self.engine.unmet_signatures(self.local, list(self.spanning.values()))
        for tag, src, signature in unmet:  # tag: 40 bits id of the communicator, 16 number of the operation, 8 channel
            if (sender := self.spanning.get(tag >> 24)) is not None:
                sender.compare_unmet_call(tag >> CHANNEL_BITS & 0xFFFF, src, signature)
        self._look_due_ns = now_ns + _LOOK_SHARE * (perf_counter_ns() - now_ns)
        return waits or bool(unmet)

    # -- counts of finished ranks --------------------------------------------------------------------------------------

    def issued_counts(self, rank: int) -> dict[int, int]:
        """Return how many operations a rank here has issued on each communicator and lane that spans processes, by id.

        If `has_lost_counts` is set, some communicators or lanes are missing, because they were closed long ago.
        """
        counts = self.inbox.issued_counts(rank)
        closed = [history for histories in self._closed.values() for history in histories.values()]
        for history in (*closed, *(communicator.history for communicator in self.spanning.values())):
            if rank in history.issued:
                counts[history.id] = history.issued[rank]
        return counts

    def record_issued_counts(self, rank: int, counts: Iterable[tuple[int, int]], *, uncounted: bool) -> None:
        """Record how many operations a rank elsewhere has issued, because it is about to finish its program.

        Args:
            rank: World rank.
            counts: Pairs of the id of a communicator or lane and the number of the rank's operations there.
            uncounted: Whether some pairs are missing, so that a missing one does not mean that it has issued nothing.
        """
        self._finished.setdefault(rank, {}).update(counts)
        if uncounted:
            self._uncounted.add(rank)

    def issued_count(self, rank: int, history: History) -> int | None:
        """Return the number of operations that a finished rank has issued on a communicator, or None if unknown.

        Args:
            rank: World rank.
            history: History of the communicator, which has the counts of ranks here.
        """
        if self.local is None or rank in self.local:
            return history.issued.get(rank, 0)
        # without a count for this communicator the rank has issued nothing there, unless counts are missing
        return self._finished.get(rank, {}).get(history.id, None if rank in self._uncounted else 0)

    def has_issued_at_most(self, rank: int, lane_id: int, count: int) -> bool:
        """Whether a finished or closing rank is known to have issued at most `count` messages of a lane.

        True for every rank here.
        """
        if self.local is None or rank in self.local:
            return True  # all messages of a rank here are in their lanes, where the caller looks
        return rank not in self._uncounted and self._finished.get(rank, {}).get(lane_id, 0) <= count

    # -- ends of groups ------------------------------------------------------------------------------------------------

    def end_group_use(self, context: RankContext, key: Key) -> None:
        """Record that a rank no longer uses a group, once its operations there have ended.

        After the last rank here the group is closed in this process; other processes are not asked. On the loop's
        thread only.

        Args:
            context: Context of the rank.
            key: Key of the group.
        """
        if context.ending.phase is not WorldPhase.RUNS:  # abandoned operations may still move bytes
            return
        operations = context.outstanding.operations
        unfinished = [end for end in operations if isinstance(end, CollectiveFuture) and end.member.key == key]
        if (
            unfinished
        ):  # try again after the end of one, but by `call_later`: in its callback it is still in its communicator
            call_when_done(unfinished[-1], partial(self.call_later, partial(self.end_group_use, context, key)))
            return
        shared, here = self._ranks_here(key)
        count = self._unused.pop(shared, 0) + 1
        if count < here:
            self._unused[shared] = count
        else:
            self._close_group(shared)

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key of a group by which its communicators are known, and the number of its ranks here."""
        return key, len(key.ranks if self.local is None else self.local.intersection(key.ranks))

    def _close_group(self, group: Key) -> None:
        """Forget a group that no rank here uses any more, with its communicators and messages.

        Their histories are kept for a while: other processes may still compare their calls with those of ranks here.
        """
        closed: dict[int, History] = {}
        self.inbox.close_group(group.id)
        for key, communicator in self._open.pop(group[:2], {}).items():
            self.engine.close(communicator)
            if communicator.spans:
                closed[communicator.history.id] = self.spanning.pop(communicator.history.id).history
            if self.broken_errors:
                self.broken_errors.pop(key.id, None)
        if self.broken_errors:
            self.broken_errors.pop(group.id, None)
        if self.local is None or self.local.issuperset(group.ranks):
            return
        self._closed[group.id] = closed
        for early in [early for early in self.early_reports if early[0] == group.id]:
            del self.early_reports[early]
        if len(self._closed) > _MOST_CLOSED:
            _, oldest = self._closed.popitem(last=False)
            self.has_lost_counts = self.has_lost_counts or bool(oldest)

    def on_rank_left(self, rank: int) -> None:
        """Record that a rank has finished its program, and fail all operations that wait for it."""
        self.finished_ranks.add(rank)
        for communicator in self:
            if rank in communicator.members:
                communicator.on_rank_left(rank)
        self.inbox.on_rank_left(rank)

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))
