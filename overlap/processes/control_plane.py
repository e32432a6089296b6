"""Control plane: events of the ranks of a process, reported to all other processes of the world.

The bytes of collectives travel over the transport. Events are the rest: a rank failed or finished, an operation waits
for long, a broadcast has this dtype and shape. They travel as notices of the `Membership`; each field of an event is
checked before the event has an effect.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter_ns

import trio

from transports import Transport

from ..errors import (
    CollectiveMismatchError,
    GroupAbortedError,
    OverlapError,
    PeerFailedError,
    PeerLostError,
    in_one_line,
    text_of,
)
from ..notice import notify
from ..runtime.communicator import BaseEngine
from ..runtime.match import RankCall
from ..runtime.spanning import ANNOUNCED
from ..runtime.spanning_messages import SpanningCommunicators
from ..runtime.world import World
from ..waits.ends import RankView
from ..waits.signs import Evidence
from . import codec
from .join import Membership
from .members import MemberLostError
from .messages import (
    Broken,
    Busy,
    Called,
    Closing,
    Disagreed,
    EndFailed,
    Failed,
    Finished,
    Issued,
    MemberLost,
    MemberNotice,
    Quiet,
    RankEvent,
    Stopped,
    Unused,
    UnusedGroup,
    decode_event,
    encode_event,
)
from .remote_views import RemoteViews

# Period of the search for waiting operations, and the wait after which one is reported. Only programs that disagree,
# and stragglers, ever wait that long for a small message; a large one costs one message more.
_WATCH_S = 0.025
_LONG_NS = 50_000_000
_MOST_EARLY = 100_000  # reported operations in memory at which no rank here has arrived
# Limits of one event: operations of one call, and communicators with counts.
_MOST_ALIKE, _MOST_COUNTS = 4096, 1000


class ControlPlane:
    """Reports of the ranks of this process to other processes, and of theirs to the world here.

    Args:
        membership: This process among the others.
        placement: World ranks of each process.
        stopping: Called when this process, or another, is stopped from outside.
        on_loss: Called with each loss of a process, after its operations have been reported as waits.

    Attributes:
        speaks: Whether this process prints messages for the user that concern all processes.
    """

    def __init__(
        self,
        membership: Membership,
        placement: Sequence[Sequence[int]],
        *,
        stopping: Callable[[], None] = lambda: None,
        on_loss: Callable[[MemberLost], None] = lambda lost: None,
    ) -> None:
        self._membership, self._placement, self._stopping, self._on_loss = membership, placement, stopping, on_loss
        self.speaks: bool = membership.member == 0
        self._world: World
        self._communicators: SpanningCommunicators
        self._announced: dict[tuple[int, RankCall], list[int]] = {}  # operations that wait to be reported
        self._reported: set[int] = set()  # communicators and groups that other processes know from a report
        self._unused: list[UnusedGroup] = []  # groups that wait to be reported
        self._broken_ends: deque[tuple[float, Callable[[], None]]] = deque()  # failures that are due at a later instant
        # reports of other processes
        self._asked: set[int] = set()  # communicators whose calls another process asks for
        # reports of operations at which no rank here has arrived, by id of the communicator and number
        self.early: OrderedDict[tuple[int, int], list[RankCall | EndFailed]] = OrderedDict()
        self._issued: dict[int, dict[int, int]] = {}
        self._uncounted: set[int] = set()  # ranks without a count of the messages that they had sent
        self._views = RemoteViews(membership.member, placement)
        self._news = trio.Event()

    def communicators(self, engine: BaseEngine, transport: Transport) -> SpanningCommunicators:
        """Return the communicators of all processes."""
        self._communicators = SpanningCommunicators(engine, transport, self)
        return self._communicators

    @asynccontextmanager
    async def attach(self, world: World) -> AsyncIterator[None]:
        """Exchange reports with the other processes for the length of an ``async with``."""
        self._world = world
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._handle_messages)
            nursery.start_soon(self._send_periodically)
            yield
            nursery.cancel_scope.cancel(reason="the world has ended")

    async def wait_all_finished(self) -> None:
        """Wait until the ranks of all processes have finished, and their reports have been read."""
        try:
            await self._membership.barrier("end")
            while self._membership.unread:
                await trio.lowlevel.checkpoint()
        except MemberLostError:  # a report of another process will name the cause
            await trio.sleep_forever()

    async def wait_for_culprit(self) -> None:
        """Give the other processes a moment to name the culprit."""
        with trio.move_on_after(Evidence.REPORTED.patience_s, shield=True):
            while self._world.ending.failure is None:
                await self._wait_for_report()

    async def views(self, views_here: Sequence[RankView]) -> list[RankView]:
        """Give the other processes a moment to report their stopped ranks; return the views of all ranks."""
        with trio.move_on_after(Evidence.REPORTED.patience_s, shield=True):
            while not self._views.all_stopped:
                await self._wait_for_report()
        return self._views.at_stop(views_here, self._communicators.left)

    def quiet(self) -> dict[int, RankView]:
        """Return the views of ranks elsewhere that make no progress."""
        return self._views.without_progress(self._communicators.left)

    async def _wait_for_report(self) -> None:
        """Wait until a report or a loss of another process was handled."""
        self._news = trio.Event()
        await self._news.wait()

    # -- reports of the ranks here ------------------------------------------------------------------------------------

    def _send(self, event: RankEvent) -> None:
        """Send an event to all other processes; one that cannot be sent is printed, and fails nothing."""
        try:
            self._membership.send_notice(encode_event(event))
        except Exception as error:
            reason = in_one_line(error)[: codec.LINE_BYTES]
            notify(f"{event!r:.40}... was not sent to other processes: {reason}; please report this bug in overlap")

    def send_failure(self, rank: int, error: BaseException, doing: list[str]) -> None:
        """Report that a rank here has ended the world."""
        self._send(Failed(culprit=rank, doing=codec.cut_lines(doing), **codec.pack_error(error)))

    def send_call(self, communicator_id: int, seqs: Sequence[int], report: RankCall) -> None:
        """Report the call of a rank here for some operations. A call without a dtype asks for the root's."""
        call = codec.pack_call(report.call)
        self._reported.add(communicator_id)
        self._send(Called(channel=communicator_id, seqs=list(seqs), rank=report.rank, call=call, site=report.call_site))

    def announce_call(self, communicator_id: int, seq: int, report: RankCall) -> None:
        """Report the call of a rank here, within `_WATCH_S`, or at once where another process has asked.

        Most ranks know what they receive. A message for each operation, and the threads that it wakes, would take
        longer than a broadcast of a gradient bucket.
        """
        if communicator_id in self._asked:
            self.send_call(communicator_id, (seq,), report)
        else:
            self._announced.setdefault((communicator_id, report), []).append(seq)

    def _send_announced(self) -> None:
        """Send the calls that `announce_call` has stored, with operations of equal calls in one message."""
        announced, self._announced = self._announced, {}
        for (communicator_id, report), seqs in announced.items():
            for first in range(0, len(seqs), _MOST_ALIKE):
                self.send_call(communicator_id, seqs[first : first + _MOST_ALIKE], report)

    def send_mismatch(self, communicator_id: int, seq: int, error: CollectiveMismatchError) -> None:
        """Report that two ranks issued different operations."""
        self._send(codec.pack_mismatch(communicator_id, seq, error))

    def send_failed_end(self, communicator_id: int, seq: int, rank: int, error: BaseException) -> None:
        """Report that a rank here cannot take part in an operation."""
        message, cause = codec.cut(text_of(error)), codec.pack_error(error.__cause__ or error)
        self._send(EndFailed(channel=communicator_id, seq=seq, rank=rank, message=message, **cause))

    def send_broken(self, communicator_id: int, culprit: int, error: BaseException) -> None:
        """Report that no operation of a communicator, or of a group, goes on because of a rank here."""
        aborted = isinstance(error, GroupAbortedError)
        self._reported.add(communicator_id)
        self._send(Broken(channel=communicator_id, rank=culprit, text=codec.cut(text_of(error)), aborted=aborted))

    def send_unused(self, group_id: int, ranks: int, size: int, communicator_ids: Sequence[int]) -> None:
        """Report within `_WATCH_S` that the ranks here use a group no more."""
        self._send_announced()
        ids = [communicator_id for communicator_id in communicator_ids if communicator_id in self._reported]
        if ranks < size or ids:  # otherwise no other process knows of the group
            self._unused.append((group_id, ranks, size, ids))

    def forget(self, ids: Collection[int]) -> None:
        """Drop the stored reports of a group that no rank uses any more, and of its communicators."""
        self._asked.difference_update(ids)
        self._reported.difference_update(ids)
        for key in [key for key in self.early if key[0] in ids]:
            del self.early[key]

    def send_quiet(self, views: Sequence[RankView]) -> None:
        """Report the ranks here that make no progress."""
        self._send(Quiet(views=codec.cut_views(views)))

    def send_busy(self, rank: int, place: str) -> None:
        """Report the line at which a rank here keeps the event loop; "": it no longer does. Any thread."""
        self._send(Busy(rank=rank, place=codec.cut(place, codec.LINE_BYTES)))

    def send_closing(self, rank: int) -> None:
        """Report that a rank here receives no more messages."""
        self._send(Closing(rank=rank))

    def send_left(self, rank: int) -> None:
        """Report that a rank here has finished, and the number of operations that it issued on each communicator."""
        self._send_announced()
        counts = list(self._communicators.issued_counts(rank).items())
        for start in range(0, len(counts), _MOST_COUNTS):
            self._send(Issued(rank=rank, counts=counts[start : start + _MOST_COUNTS]))
        self._send(Finished(rank=rank, uncounted=self._communicators.inbox.lost_count))

    def hold_broken_end(self, fail: Callable[[], None]) -> None:
        """Fail an end with a broken wire a moment later, unless a report names the culprit before."""
        self._broken_ends.append((trio.current_time() + Evidence.WIRE_BROKEN.patience_s, fail))

    def send_views(self, views: Sequence[RankView], reason: str) -> None:
        """Report the views of the ranks here at their stop; a reason ends the other processes as well."""
        self._stopping()
        self._send(Stopped(views=codec.cut_views(views), reason=codec.cut(reason, codec.LINE_BYTES)))

    # -- reports of other ranks ----------------------------------------------------------------------------------------

    def take_early(self, communicator_id: int, seq: int) -> list[RankCall]:
        """Return and remove the calls of an operation that were reported before a rank here arrived at it.

        It fails now if another rank has failed before it arrived.
        """
        calls = []
        for report in self.early.pop((communicator_id, seq), ()):
            if isinstance(report, EndFailed):
                self._apply_failed_end(report)
            else:
                calls.append(report)
        return calls

    def _keep_early(self, communicator_id: int, seq: int, report: RankCall | EndFailed) -> None:
        """Keep a report until a rank here arrives at the operation; of too many, the oldest are dropped."""
        self.early.setdefault((communicator_id, seq), []).append(report)
        if len(self.early) > _MOST_EARLY:
            self.early.popitem(last=False)

    def issued_by(self, rank: int, communicator_id: int) -> int:
        """Return the number of operations that a finished rank of another process issued on a communicator."""
        return self._issued.get(rank, {}).get(communicator_id, 0)

    def sent_no_more(self, rank: int, communicator_id: int, count: int) -> bool:
        """Whether a finished rank of another process is known to have sent at most `count` messages."""
        return rank not in self._uncounted and self.issued_by(rank, communicator_id) <= count

    # -- tasks -----------------------------------------------------------------------------------------------------

    async def _send_periodically(self) -> None:
        """Send the stored reports every `_WATCH_S`, and fail ends with a broken wire whose delay is over."""
        while True:
            await trio.sleep(_WATCH_S)
            self._send_announced()
            unused, self._unused = self._unused, []
            for event in codec.unused_events(unused):
                self._send(event)
            while self._broken_ends and self._broken_ends[0][0] <= trio.current_time():
                self._broken_ends.popleft()[1]()
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Report operations that wait for long; a method of its own, or the caller would keep these variables."""
        before_ns = perf_counter_ns() - _LONG_NS
        for communicator in self._communicators.spanning.values():
            for seq, report in communicator.unreported_calls(before_ns):
                self.send_call(communicator.id, (seq,), report)

    async def _handle_messages(self) -> None:
        """Act on the notices and losses of other processes, in their order."""
        async for message in self._membership.messages():
            if isinstance(message, MemberLost):
                self._lose(message)
            else:
                self._handle(message)
            self._news.set()

    def _lose(self, lost: MemberLost) -> None:
        """End the world because a process is lost: `await` raises `PeerFailedError`, `run` raises `RankFailedError`."""
        ranks = self._placement[lost.member]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        # waits for it, before any operation fails
        waited = self._world.reports.waiting_for(ranks)
        text = f"process {lost.member} ({who}) is lost: {lost.reason}{'; ' if waited else ''}{waited}"
        # the first culprit ends the world, with all operations under way
        self._world.fail_elsewhere(ranks[0], PeerLostError(text, culprit=ranks[0]), [])
        # its wires: operations that break with them have failed already, and are not reported again
        self._on_loss(lost)

    def _handle(self, notice: MemberNotice) -> None:
        """Act on an event of another process; if it is invalid, that process has failed."""
        member = notice.member
        try:
            self._apply_event(member, decode_event(notice.body))
        except OverlapError as error:
            failure = OverlapError(
                f"process {member} sent an invalid event: {error}; this is a bug in overlap, please report it"
            )
            self._world.fail_elsewhere(self._placement[member][0], failure, [])

    def _apply_event(self, member: int, event: RankEvent) -> None:
        """Act on an event of the ranks of a process.

        Raises:
            OverlapError: The event is invalid.
        """
        member_ranks, communicators = self._placement[member], self._communicators
        if getattr(event, "rank", member_ranks[0]) not in member_ranks:
            raise OverlapError(f"it is about rank {getattr(event, 'rank', None)}, which belongs to another process")
        match event:
            # the end of a rank
            case Failed():
                self._views.check_ranks([event.culprit])
                self._world.fail_elsewhere(event.culprit, codec.unpack_error(event), event.doing)
            case Issued():
                self._issued.setdefault(event.rank, {}).update(event.counts)
            case Closing():
                communicators.closing.add(event.rank)
            case Finished():
                if event.uncounted:
                    self._uncounted.add(event.rank)
                communicators.rank_left(event.rank)
            # operations
            case Called():
                self._apply_call(event)
            case Disagreed():
                self._views.check_ranks(event.ranks)
                if (communicator := communicators.spanning.get(event.channel)) is not None:
                    communicator.fail_here(event.seq, codec.unpack_mismatch(event))
            case EndFailed():
                self._apply_failed_end(event)
            # groups
            case Broken():
                kind = GroupAbortedError if event.aborted else PeerFailedError
                communicators.break_off(event.channel, partial(kind, event.text, culprit=event.rank))
            case Unused():
                for group_id, count, size, ids in event.groups:
                    is_valid = 0 <= count <= len(member_ranks)
                    if not is_valid or not communicators.end_elsewhere(group_id, count, size, ids):
                        raise OverlapError(f"it claims {count} ranks in a group of {size}, and has {len(member_ranks)}")
            # stalls
            case Busy() | Quiet() | Stopped():
                self._views.apply(member, event)
                if isinstance(event, Stopped):
                    self._stopping()
                    if event.reason:
                        self._world.stopped_elsewhere(event.reason)

    def _apply_call(self, event: Called) -> None:
        """Compare the call of a rank elsewhere with calls here, or store it until a rank here arrives."""
        if not 0 < len(event.seqs) <= _MOST_ALIKE:
            raise OverlapError(f"it lists {len(event.seqs)} operations, the limit is {_MOST_ALIKE}")
        report = RankCall(rank=event.rank, call=codec.unpack_call(event.call), call_site=event.site)
        for seq in event.seqs:
            if not self._communicators.compare_call(event.channel, seq, report):
                self._keep_early(event.channel, seq, report)
        if report.call.kind in ANNOUNCED and report.call.dtype is None:
            self._asked.add(event.channel)  # calls of this communicator are reported at once from now on
            self._send_announced()

    def _apply_failed_end(self, event: EndFailed) -> None:
        """Fail the ends here of an operation without a rank elsewhere, or store it until a rank here arrives."""
        communicator, cause = self._communicators.spanning.get(event.channel), codec.unpack_error(event)
        if communicator is not None:
            failed = communicator.fail_remote_end(event.seq, event.rank, event.message, cause)
        else:
            failed = self._communicators.inbox.fail_remote_end(
                event.channel, event.seq, event.rank, event.message, cause
            )
        if not failed:
            self._keep_early(event.channel, event.seq, event)
