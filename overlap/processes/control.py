"""Control plane: events of the ranks of a process, reported to all other processes of the world.

The bytes of collectives travel over the transport. Events are the rest: a rank failed or finished, an operation waits
for long, a broadcast has this dtype and shape. They travel as notices of the `Membership`; each field of an event is
checked before the event has an effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING

import trio

from transports import LinkLostError, Transport
from transports.failures import REPORT_BUG

from ..errors import OverlapError, PeerLostError, one_line_text
from ..notice import notify
from ..ranklist import format_rank_list, named_ranks, parse_rank_list
from ..runtime.communicator import BaseEngine
from ..runtime.communicators import Communicators
from ..runtime.forms import pack_form
from ..runtime.match import RankCall
from ..runtime.world import World
from ..waits.ends import RankView, Seen
from ..waits.signs import Evidence
from . import wire
from .join import Membership
from .members import MemberLostError

if TYPE_CHECKING:
    from ..runtime.lane import Lane
    from ..runtime.match import History
    from ..runtime.operation import Operation

# Period of the search for operations that wait. It doubles up to `_REST_S` while nothing waits, because 40 turns of an
# idle loop take 1 % of a processor from the program.
_WATCH_S = 0.025
_REST_S = 0.2
# An operation that waits for this long is reported to other processes. Small messages wait that long only in programs
# whose ranks disagree, or for a late rank; for a large message, the report costs one message more.
_LONG_NS = 50_000_000
_MOST_COUNTS = 1000  # communicators with counts in one event


class ControlPlane:
    """Sends events of the ranks of this process to other processes, and applies their events to the world here.

    Args:
        membership: This process among the others.
        placement: World ranks of each process.
        stopping: Called when this process, or another one, stops its ranks and reports their views.
        on_loss: Called with each loss of a process, after the world has failed because of it.

    Attributes:
        reports_for_all: Whether this process prints messages for the user that concern all processes.
    """

    def __init__(
        self,
        membership: Membership,
        placement: Sequence[Sequence[int]],
        *,
        stopping: Callable[[], None] = lambda: None,
        on_loss: Callable[[wire.MemberLost], None] = lambda lost: None,
    ) -> None:
        self._membership, self._placement, self._stopping, self._on_loss = membership, placement, stopping, on_loss
        self.reports_for_all: bool = membership.member == 0
        self._world: World
        self._communicators: Communicators
        # functions that fail operations with a broken wire, each with the time at which it is due
        self._delayed_failures: deque[tuple[float, Callable[[], None]]] = deque()
        self._views = RemoteViews(membership.member, placement)
        self._news = trio.Event()
        self._must_look = trio.Event()

    def communicators(self, engine: BaseEngine, transport: Transport) -> Communicators:
        """Return the communicators of this world, which report to other processes by this control plane.

        Args:
            engine: Engine of the communicators.
            transport: Transport of this process.
        """
        self._communicators = Communicators(engine, frozenset(transport.ranks))
        self._communicators.control = self
        return self._communicators

    @asynccontextmanager
    async def exchange_reports(self, world: World) -> AsyncIterator[None]:
        """Exchange reports with the other processes for the length of an ``async with``."""
        self._world = world
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._handle_messages)
            nursery.start_soon(self._report_periodically)
            yield
            nursery.cancel_scope.cancel(reason="the world has ended")

    async def wait_all_finished(self) -> None:
        """Wait until the ranks of all processes have finished, and their reports have been read."""
        try:
            await self._membership.barrier("end")
            while self._membership.unread:
                await trio.lowlevel.checkpoint()
            self._communicators.ask_others()  # messages that came after the ends of the ranks here
        except MemberLostError:
            # a report of the loss will end the world with its cause, and cancel this task
            await trio.sleep_forever()

    async def wait_for_culprit(self) -> None:
        """Wait a short time for a report of another process that names the culprit."""
        with trio.move_on_after(Evidence.REPORTED.patience_s, shield=True):
            while self._world.ending.failure is None:
                await self._wait_for_report()

    async def wait_for_views(self, views_here: Sequence[RankView]) -> list[RankView]:
        """Wait a short time for the reports of other processes on their stopped ranks; return the views of all ranks.

        Args:
            views_here: Views of the ranks of this process.
        """
        with trio.move_on_after(Evidence.REPORTED.patience_s, shield=True):
            while not self._views.all_stopped:
                await self._wait_for_report()
        return self._views.views_at_stop(views_here, self._communicators.finished_ranks)

    def quiet_views(self) -> dict[int, RankView]:
        """Return the views of ranks in other processes that make no progress, by rank."""
        return self._views.views_without_progress(self._communicators.finished_ranks)

    async def _wait_for_report(self) -> None:
        """Wait until a report or a loss of another process was handled."""
        self._news = trio.Event()
        await self._news.wait()

    # -- reports of the ranks here ------------------------------------------------------------------------------------

    def _send_event(self, event: wire.RankEvent) -> None:
        """Send an event to all other processes. If that is impossible, print it; no error is raised."""
        try:
            self._membership.send_notice(wire.encode_message(event))
        except Exception as error:
            reason = one_line_text(error)[: wire.LINE_BYTES]
            notify(f"{event!r:.40}... was not sent to other processes: {reason}; please report this bug in overlap")

    def send_failure(self, rank: int, error: BaseException, doing: list[str]) -> None:
        """Report that a rank here has ended the world.

        Args:
            rank: The rank.
            error: Its error.
            doing: Lines about the operations of the rank under way.
        """
        self._send_event(wire.Failed(culprit=rank, error=wire.pack_error(error), doing=wire.cut_lines(doing)))

    def send_waiting_call(self, of: History, seq: int, call: RankCall) -> None:
        """Report the call of a rank here that waits, so that others compare it with theirs.

        If the call has no dtype, it asks for the dtype, and a rank that has one answers with a report of its own.

        Args:
            of: History of the communicator.
            seq: Number of the operation.
            call: The rank and its call.
        """
        key = call.call.key
        self._send_event(
            wire.Waits(group=of.group_id, channel=of.id, members=format_rank_list(of.members), seq=seq, rank=call.rank,
                  call=key._replace(form=""), form=pack_form(key.form), site=call.call_site)
        )  # fmt: skip

    def send_operation_failed(
        self, of: History | Lane, seq: int, error: BaseException, *, onwards: bool = False
    ) -> None:
        """Report that an operation, or with `onwards` all from its number on, fails on all ranks.

        Args:
            of: History of the communicator, or lane of the message.
            seq: Number of the operation.
            error: Why it fails.
            onwards: Whether all later operations fail, too; then only the text of the error is sent.
        """
        cause = wire.pack_cause(error, with_error=not onwards)
        self._send_event(
            wire.OperationFailed(group=of.group_id, channel=of.id, members=format_rank_list(of.members), seq=seq,
                            onwards=onwards, cause=cause)
        )  # fmt: skip

    def send_quiet(self, views: Sequence[RankView]) -> None:
        """Report the ranks here that make no progress."""
        self._send_event(wire.Quiet(views=wire.cut_views(views, time_ns())))

    def send_busy(self, rank: int, place: str) -> None:
        """Report the line at which a rank here keeps the event loop, or "" when it no longer does; from any thread."""
        self._send_event(wire.Busy(rank=rank, place=wire.cut_text(place, wire.LINE_BYTES)))

    def send_closing(self, rank: int) -> None:
        """Report that a rank here issues no more operations, and how many it has issued; it still receives messages."""
        self._send_operation_counts(rank, goes_on=True)
        self._send_event(wire.Closing(rank=rank))

    def send_finished(self, rank: int) -> None:
        """Report that a rank here has finished, and how many operations it has issued on each communicator."""
        self._communicators.ask_others()
        self._send_operation_counts(rank, goes_on=False)

    def _send_operation_counts(self, rank: int, *, goes_on: bool) -> None:
        """Report how many operations a rank has issued, in one event or several; it has finished unless `goes_on`."""
        uncounted = self._communicators.has_lost_counts
        listed_counts = list(self._communicators.issued_counts(rank).items())
        for start in range(0, max(1, len(listed_counts)), _MOST_COUNTS):
            stop = start + _MOST_COUNTS
            more = goes_on or stop < len(listed_counts)
            self._send_event(wire.Finished(rank=rank, counts=listed_counts[start:stop], uncounted=uncounted, more=more))

    def delay_wire_failure(self, operation: Operation, error: LinkLostError, fail: Callable[[], None]) -> None:
        """Fail an operation whose wire has broken after a short wait, `Evidence.WIRE_BROKEN.patience_s`.

        If a report that names the culprit arrives during the wait, the operation fails with that report instead.

        Args:
            operation: The operation.
            error: The error of the wire. After the wait it counts as evident, see `LinkLostError`.
            fail: Fails the operation with `error`.
        """

        def fail_if_unfinished() -> None:
            """A report may have ended the operation already."""
            if not operation.done:
                error.evident = True
                fail()

        self._delayed_failures.append((trio.current_time() + Evidence.WIRE_BROKEN.patience_s, fail_if_unfinished))
        self.look_soon()

    def look_soon(self) -> None:
        """Let the next search for waiting operations come after `_WATCH_S`. To be called in the loop's thread only."""
        self._must_look.set()

    def send_views(self, views: Sequence[RankView], reason: str) -> None:
        """Report the views of the ranks here, which were stopped.

        Args:
            views: The views.
            reason: Why; the other processes stop their ranks for it, too. "": they do not.
        """
        self._stopping()
        self._send_event(
            wire.Stopped(views=wire.cut_views(views, time_ns()), reason=wire.cut_text(reason, wire.LINE_BYTES))
        )

    # -- tasks -----------------------------------------------------------------------------------------------------

    async def _report_periodically(self) -> None:
        """Report operations that wait for long, and fail those with a broken wire that are due; until cancelled."""
        pause_s = _WATCH_S
        while True:
            with trio.move_on_after(pause_s) as pause:
                await self._must_look.wait()
                pause_s, pause.deadline = _WATCH_S, min(pause.deadline, trio.current_time() + _WATCH_S)
                await trio.sleep_forever()
            self._must_look = trio.Event()
            while self._delayed_failures and self._delayed_failures[0][0] <= trio.current_time():
                _, fail_if_unfinished = self._delayed_failures.popleft()
                fail_if_unfinished()
            waits = self._communicators.ask_others(perf_counter_ns() - _LONG_NS)
            pause_s = _WATCH_S if waits or self._delayed_failures else min(2 * pause_s, _REST_S)

    async def _handle_messages(self) -> None:
        """Act on the notices and losses of other processes, in their order, until cancelled."""
        async for message in self._membership:
            if isinstance(message, wire.MemberLost):
                self._handle_lost_member(message)
            else:
                self._handle_notice(message)
            self._news.set()

    def _handle_lost_member(self, lost: wire.MemberLost) -> None:
        """End the world: `await` raises `PeerFailedError`, `run` raises `RankFailedError`."""
        ranks = self._placement[lost.member]
        # looked up before any operation fails: an operation here that waits for the lost ranks, as text
        waited = self._world.reports.waiting_operation(ranks)
        text = f"process {lost.member} ({named_ranks(ranks)}) is lost: {lost.reason}{'; ' if waited else ''}{waited}"
        # the world ends with its first culprit, and all operations under way fail
        self._world.end_by_culprit(ranks[0], PeerLostError(text, culprit=ranks[0]), [])
        # this ends the wires to the process; their operations have failed already, and are not reported again
        self._on_loss(lost)

    def _handle_notice(self, notice: wire.MemberNotice) -> None:
        """Act on an event of another process; if the event is invalid, the world fails with that process as culprit."""
        member = notice.member
        try:
            self._apply_event(member, wire.decode_message(notice.body))
        except OverlapError as error:
            failure = OverlapError(f"process {member} sent an invalid event: {error}; {REPORT_BUG}")
            self._world.end_by_culprit(self._placement[member][0], failure, [])

    def _apply_event(self, member: int, event: wire.Message) -> None:
        """Act on an event of the ranks of a process; raise `OverlapError` if it is invalid."""
        member_ranks, communicators = self._placement[member], self._communicators
        # an event has a field `rank`, or the cases below check the ranks in its other fields
        if getattr(event, "rank", member_ranks[0]) not in member_ranks:
            raise OverlapError(f"it is about rank {getattr(event, 'rank', None)}, which belongs to another process")
        match event:
            # the end of a rank
            case wire.Failed():
                self._views.check_ranks_exist([event.culprit])
                self._world.end_by_culprit(event.culprit, wire.unpack_error(event.error), event.doing)
            case wire.Closing():
                communicators.closing_ranks.add(event.rank)
            case wire.Finished():
                communicators.record_issued_counts(event.rank, event.counts, uncounted=event.uncounted)
                if not event.more:
                    communicators.on_rank_left(event.rank)
            # operations
            case wire.Waits():
                call = RankCall(event.rank, wire.unpack_call(event.call, event.form), event.site)
                if self._concerns_rank_here(event):
                    communicators.compare_remote_call(event.group, event.channel, event.seq, call)
            case wire.OperationFailed():
                ranks = event.cause.ranks if isinstance(event.cause, wire.Difference) else [event.cause.rank]
                self._views.check_ranks_exist(ranks)
                if self._concerns_rank_here(event):
                    error = wire.unpack_cause(event.cause)
                    communicators.fail_reported_operation(
                        event.group, event.channel, event.seq, error, onwards=event.onwards
                    )
            # stalls
            case wire.Busy() | wire.Quiet() | wire.Stopped():
                self._views.store_report(member, event)
                if isinstance(event, wire.Stopped):
                    self._stopping()
                    if event.reason:
                        self._world.stop(event.reason)
            case _:
                raise OverlapError(f"a {type(event).__name__} is none")

    def _concerns_rank_here(self, event: wire.Waits | wire.OperationFailed) -> bool:
        """Whether a rank here is in the group of an event; raise `OverlapError` if its ranks are invalid."""
        try:
            return not set(parse_rank_list(event.members)).isdisjoint(self._placement[self._membership.member])
        except ValueError as error:
            raise OverlapError(f"invalid ranks: {error}") from error


class RemoteViews:
    """The last views that each other process has reported of its ranks.

    Args:
        member: Index of this process.
        placement: World ranks of each process.
    """

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        self._member, self._placement = member, placement
        self._ranks = {rank for ranks in placement for rank in ranks}
        # for each process:
        self._quiet: dict[int, list[RankView]] = {}  # views of the ranks without progress
        self._busy: dict[int, wire.Busy] = {}  # the rank that keeps the event loop
        self._stopped: dict[int, list[RankView]] = {}  # views of the ranks when the process stopped them

    def store_report(self, member: int, event: wire.Busy | wire.Quiet | wire.Stopped) -> None:
        """Store the report of a process.

        Raises:
            OverlapError: The report says that ranks of another process, or that do not exist, are quiet or stopped.
        """
        match event:
            case wire.Busy(place=""):
                self._busy.pop(member, None)
            case wire.Busy():
                self._busy[member] = event
            case wire.Quiet():
                self._quiet[member] = self._views_on_own_clock(member, event.views)
            case wire.Stopped():
                self._stopped[member] = self._views_on_own_clock(member, event.views)

    def _views_on_own_clock(self, member: int, views: list[RankView]) -> list[RankView]:
        """Return views with times of this host's clock.

        Raise `OverlapError` if one is of a rank of another process, or names a rank that does not exist.
        """
        # an `End` is one rank's side of an operation in which it waits
        ends = [end for view in views for end in view.ends]
        viewed = {view.rank for view in views} | {end.rank for end in ends}
        self.check_ranks_exist(viewed)
        if foreign := sorted(viewed.difference(self._placement[member])):
            owner = next(process for process, ranks in enumerate(self._placement) if foreign[0] in ranks)
            raise OverlapError(f"it has the view of rank {foreign[0]}, which belongs to process {owner}")
        # the rank whose code keeps the event loop of a viewed rank
        self.check_ranks_exist(view.kept_by for view in views if view.kept_by is not None)
        for end in ends:
            # members of the group, and members that have not arrived
            self.check_ranks_exist((*end.call.members, *(end.lacks or ())))
        return wire.shift_views(views, time_ns())

    def check_ranks_exist(self, ranks: Iterable[int]) -> None:
        """Raise `OverlapError` if one of some ranks does not exist."""
        if unknown := [rank for rank in ranks if rank not in self._ranks]:
            raise OverlapError(f"it is about rank {unknown[0]}, and there are {len(self._ranks)} ranks")

    @property
    def all_stopped(self) -> bool:
        """Whether all other processes have reported their stop."""
        return len(self._stopped) >= len(self._placement) - 1

    def views_at_stop(self, views_here: Sequence[RankView], finished: Collection[int]) -> list[RankView]:
        """Return the views of all ranks when the world was stopped, in the order of their processes.

        Args:
            views_here: Views of the ranks of this process.
            finished: Ranks that have finished.
        """
        known, views = {self._member: list(views_here), **self._stopped}, list[RankView]()
        for member in range(len(self._placement)):
            views += known.get(member) or self._assume_views(member, finished)
        return views

    def views_without_progress(self, finished: Collection[int]) -> dict[int, RankView]:
        """Return the views of ranks in other processes without progress, by rank.

        Args:
            finished: Ranks that have finished.
        """
        known = {**self._quiet, **{member: self._assume_views(member, finished) for member in self._busy}}
        return {view.rank: view for views in known.values() for view in views}

    def _assume_views(self, member: int, finished: Collection[int]) -> list[RankView]:
        """Return views of the ranks of a process that has not reported any, from other reports on them."""
        busy = self._busy.get(member)
        views = []
        for rank in self._placement[member]:
            if rank in finished:
                views.append(RankView(rank=rank, seen=Seen.LEFT))
            elif busy is not None:
                views.append(RankView(rank=rank, seen=Seen.ELSEWHERE, site=busy.place, kept_by=busy.rank))
            else:
                views.append(RankView(rank=rank, seen=Seen.NO_RECORD))
        return views
