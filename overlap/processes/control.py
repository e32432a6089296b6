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

from ..errors import OverlapError, PeerLostError, in_one_line
from ..notice import notify
from ..ranklist import listed, parse_rank_list
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
from .wire import (
    Busy,
    Closing,
    Difference,
    Failed,
    Finished,
    MemberLost,
    MemberNotice,
    Message,
    OperationFailed,
    Quiet,
    RankEvent,
    Stopped,
    Waits,
    decode,
    encode_body,
)

if TYPE_CHECKING:
    from ..runtime.lane import Lane
    from ..runtime.match import History
    from ..runtime.operation import Operation

# Period of the search for waiting operations, and the wait after which one is reported. Only programs that disagree,
# and stragglers, ever wait that long for a small message; a large one costs one message more.
_WATCH_S = 0.025
_LONG_NS = 50_000_000
_MOST_COUNTS = 1000  # communicators with counts in one event


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
        self._communicators: Communicators
        # operations with a broken wire, and functions that fail them, by the time at which that is due
        self._broken_ends: deque[tuple[float, Operation, LinkLostError, Callable[[], None]]] = deque()
        self._views = RemoteViews(membership.member, placement)
        self._news = trio.Event()

    def communicators(self, engine: BaseEngine, transport: Transport) -> Communicators:
        """Return the communicators of all processes."""
        self._communicators = Communicators(engine, frozenset(transport.ranks))
        self._communicators.far = self
        return self._communicators

    @asynccontextmanager
    async def attach(self, world: World) -> AsyncIterator[None]:
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
            self._communicators.look()  # messages that came after the ends of the ranks here
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
        return self._views.views_at_stop(views_here, self._communicators.left)

    def quiet(self) -> dict[int, RankView]:
        """Return the views of ranks elsewhere that make no progress."""
        return self._views.views_without_progress(self._communicators.left)

    async def _wait_for_report(self) -> None:
        """Wait until a report or a loss of another process was handled."""
        self._news = trio.Event()
        await self._news.wait()

    # -- reports of the ranks here ------------------------------------------------------------------------------------

    def _send(self, event: RankEvent) -> None:
        """Send an event to all other processes; one that cannot be sent is printed, and fails nothing."""
        try:
            self._membership.send_notice(encode_body(event))
        except Exception as error:
            reason = in_one_line(error)[: wire.LINE_BYTES]
            notify(f"{event!r:.40}... was not sent to other processes: {reason}; please report this bug in overlap")

    def send_failure(self, rank: int, error: BaseException, doing: list[str]) -> None:
        """Report that a rank here has ended the world."""
        self._send(Failed(culprit=rank, error=wire.pack_error(error), doing=wire.cut_lines(doing)))

    def send_wait(self, of: History, seq: int, call: RankCall) -> None:
        """Report the call of a rank here that waits. A call without a dtype asks for that; others may answer it."""
        key = call.call.key
        self._send(
            Waits(group=of.group_id, channel=of.id, members=listed(of.members), seq=seq, rank=call.rank,
                  call=key._replace(form=""), form=pack_form(key.form), site=call.call_site)
        )  # fmt: skip

    def send_operation_failed(
        self, of: History | Lane, seq: int, error: BaseException, *, onwards: bool = False
    ) -> None:
        """Report that an operation, or with `onwards` all from its number on, fails on all ranks."""
        cause = wire.pack_cause(error, with_error=not onwards)
        self._send(
            OperationFailed(group=of.group_id, channel=of.id, members=listed(of.members), seq=seq, onwards=onwards,
                            cause=cause)
        )  # fmt: skip

    def send_quiet(self, views: Sequence[RankView]) -> None:
        """Report the ranks here that make no progress."""
        self._send(Quiet(views=wire.cut_views(views, time_ns())))

    def send_busy(self, rank: int, place: str) -> None:
        """Report the line at which a rank here keeps the event loop; "": it no longer does. Any thread."""
        self._send(Busy(rank=rank, place=wire.cut(place, wire.LINE_BYTES)))

    def send_closing(self, rank: int) -> None:
        """Report that a rank here receives no more messages."""
        self._send(Closing(rank=rank))

    def send_left(self, rank: int) -> None:
        """Report that a rank here has finished, and the number of operations that it issued on each communicator."""
        self._communicators.look()
        counts, uncounted = self._communicators.issued_counts(rank)
        listed_counts = list(counts.items())
        for start in range(0, max(1, len(listed_counts)), _MOST_COUNTS):
            stop = start + _MOST_COUNTS
            more = stop < len(listed_counts)
            self._send(Finished(rank=rank, counts=listed_counts[start:stop], uncounted=uncounted, more=more))

    def hold_broken_end(self, operation: Operation, error: LinkLostError, fail: Callable[[], None]) -> None:
        """Fail an operation whose wire broke a moment later, unless a report names the culprit before."""
        due_s = trio.current_time() + Evidence.WIRE_BROKEN.patience_s
        self._broken_ends.append((due_s, operation, error, fail))

    def send_views(self, views: Sequence[RankView], reason: str) -> None:
        """Report the views of the ranks here at their stop; a reason ends the other processes as well."""
        self._stopping()
        self._send(Stopped(views=wire.cut_views(views, time_ns()), reason=wire.cut(reason, wire.LINE_BYTES)))

    # -- tasks -----------------------------------------------------------------------------------------------------

    async def _report_periodically(self) -> None:
        """Look every `_WATCH_S` for operations that wait for long, and fail ends with a broken wire that are due."""
        while True:
            await trio.sleep(_WATCH_S)
            while self._broken_ends and self._broken_ends[0][0] <= trio.current_time():
                _, operation, error, fail = self._broken_ends.popleft()
                if not operation.done:
                    error.evident = True
                    fail()
            self._communicators.look(perf_counter_ns() - _LONG_NS)

    async def _handle_messages(self) -> None:
        """Act on the notices and losses of other processes, in their order."""
        async for message in self._membership:
            if isinstance(message, MemberLost):
                self._handle_lost_member(message)
            else:
                self._handle_message(message)
            self._news.set()

    def _handle_lost_member(self, lost: MemberLost) -> None:
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

    def _handle_message(self, notice: MemberNotice) -> None:
        """Act on an event of another process; if it is invalid, that process has failed."""
        member = notice.member
        try:
            self._apply_event(member, decode(notice.body))
        except OverlapError as error:
            failure = OverlapError(
                f"process {member} sent an invalid event: {error}; this is a bug in overlap, please report it"
            )
            self._world.fail_elsewhere(self._placement[member][0], failure, [])

    def _apply_event(self, member: int, event: Message) -> None:
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
                self._world.fail_elsewhere(event.culprit, wire.unpack_error(event.error), event.doing)
            case Closing():
                communicators.closing.add(event.rank)
            case Finished():
                communicators.count(event.rank, event.counts, uncounted=event.uncounted)
                if not event.more:
                    communicators.rank_left(event.rank)
            # operations
            case Waits():
                call = RankCall(event.rank, wire.unpack_call(event.call, event.form), event.site)
                if self._concerns(event):
                    communicators.compare_wait(event.group, event.channel, event.seq, call)
            case OperationFailed():
                ranks = event.cause.ranks if isinstance(event.cause, Difference) else [event.cause.rank]
                self._views.check_ranks(ranks)
                if self._concerns(event):
                    error = wire.unpack_cause(event.cause)
                    communicators.fail_here(event.group, event.channel, event.seq, error, onwards=event.onwards)
            # stalls
            case Busy() | Quiet() | Stopped():
                self._views.apply(member, event)
                if isinstance(event, Stopped):
                    self._stopping()
                    if event.reason:
                        self._world.stopped_elsewhere(event.reason)
            case _:
                raise OverlapError(f"a {type(event).__name__} is none")

    def _concerns(self, event: Waits | OperationFailed) -> bool:
        """Whether a rank here is a member of the group of an event."""
        try:
            return not set(parse_rank_list(event.members)).isdisjoint(self._placement[self._membership.member])
        except ValueError as error:
            raise OverlapError(f"invalid ranks: {error}") from error


class RemoteViews:
    """The last reported views of the ranks of each other process.

    Args:
        member: This process.
        placement: World ranks of each process.
    """

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        self._member, self._placement = member, placement
        self._ranks = {rank for ranks in placement for rank in ranks}
        # by process
        self._quiet: dict[int, list[RankView]] = {}  # its ranks without progress
        self._busy: dict[int, Busy] = {}  # the rank that keeps its event loop
        self._stopped: dict[int, list[RankView]] = {}  # its ranks when it was stopped

    def apply(self, member: int, event: Busy | Quiet | Stopped) -> None:
        """Store the report of a process.

        Raises:
            OverlapError: It is about ranks of another process, or that do not exist.
        """
        match event:
            case Busy(place=""):
                self._busy.pop(member, None)
            case Busy():
                self._busy[member] = event
            case Quiet():
                self._quiet[member] = self._check_views(member, event.views)
            case Stopped():
                self._stopped[member] = self._check_views(member, event.views)

    def _check_views(self, member: int, views: list[RankView]) -> list[RankView]:
        """Return the views on this host's clock, unless a rank in them belongs to another process or does not exist."""
        ranks = {rank for view in views for rank in (view.rank, *(end.rank for end in view.ends))}
        if not ranks <= set(self._placement[member]):
            raise OverlapError("it has the view of a rank that belongs to another process")
        ends = [end for view in views for end in view.ends]
        self.check_ranks(view.kept_by for view in views if view.kept_by is not None)
        self.check_ranks(rank for end in ends for rank in (*end.call.members, *(end.lacks or ())))
        return wire.shift_views(views, time_ns())

    def check_ranks(self, ranks: Iterable[int]) -> None:
        """Refuse ranks that do not exist.

        Raises:
            OverlapError: One of them does not.
        """
        if unknown := [rank for rank in ranks if rank not in self._ranks]:
            raise OverlapError(f"it is about rank {unknown[0]}, and there are {len(self._ranks)} ranks")

    @property
    def all_stopped(self) -> bool:
        """Whether all other processes have reported their stop."""
        return len(self._stopped) >= len(self._placement) - 1

    def views_at_stop(self, views_here: Sequence[RankView], finished: Collection[int]) -> list[RankView]:
        """Return the views of all ranks when the world was stopped, by process.

        Args:
            views_here: Those of the ranks of this process.
            finished: Ranks that have finished.
        """
        known = {self._member: list(views_here), **self._stopped}
        members = range(len(self._placement))
        return [view for member in members for view in known.get(member) or self._assume_views(member, finished)]

    def views_without_progress(self, finished: Collection[int]) -> dict[int, RankView]:
        """Return the views of ranks without progress; `finished` are ranks that have finished."""
        known = {**self._quiet, **{member: self._assume_views(member, finished) for member in self._busy}}
        return {view.rank: view for views in known.values() for view in views}

    def _assume_views(self, member: int, finished: Collection[int]) -> list[RankView]:
        """Return the views of a process that has not reported them, as other reports suggest."""
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
