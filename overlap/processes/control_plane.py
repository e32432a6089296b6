"""Control plane: news between the worlds of several processes, beside the data.

The bytes of collectives travel over the transport. This is the rest: which rank failed or has finished, which
operations wait for long, what a broadcast carries. Each process tells all others through its `Membership`; a message
is checked field by field before it is believed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter_ns
from traceback import format_exception, format_tb

import trio

from transports import Transport

from ..diagnostics import where
from ..errors import (
    CollectiveMismatchError,
    GroupAbortedError,
    OverlapError,
    PeerFailedError,
    PeerLostError,
    RemoteError,
    in_one_line,
    text_of,
    type_name,
)
from ..notice import notify
from ..runtime.blame.standing import Standing
from ..runtime.communicator import BaseEngine
from ..runtime.match import RankCall
from ..runtime.spanning import ANNOUNCED
from ..runtime.spanning_messages import SpanningCommunicators
from ..runtime.world import World
from .codec import cut, cut_lines, cut_standings, pack_call, unpack_call
from .member import MemberLostError, Membership
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
    Quiet,
    Saying,
    Stopped,
    Told,
    Unused,
    decode_saying,
    encode_saying,
)

# How often to look for operations that wait, and from when on one waits long enough to be told. Only programs that
# disagree, and stragglers, ever wait that long for a small message; a large one costs one message more.
_WATCH_S = 0.025
_LONG_NS = 50_000_000
# How long a broken wire waits for the name of the rank that broke it, and a stalled world for the others' reports.
_VERDICT_S = 0.5
_MOST_SAID = 100_000  # calls that are kept for operations to which no rank here has come yet
# Operations that one message speaks of, communicators, and groups with their communicators.
_MOST_ALIKE, _MOST_COUNTS, _MOST_IDS = 4096, 1000, 1000
LINE_BYTES = 500  # of a line that is told, at most, in UTF-8


class ControlPlane:
    """Speaks for the ranks of this process, and listens.

    Args:
        membership: Among the processes.
        placement: World ranks of each process.
        stopping: Called when this process, or another, is stopped from outside.
        on_loss: Called with each loss of a process, after its operations have been told as those that waited.

    Attributes:
        speaks: Whether this process is the one that tells the user what concerns all.
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
        self._announced: dict[tuple[int, RankCall], list[int]] = {}  # operations that are not told yet
        self._asked: set[int] = set()  # communicators in which a rank here asks for calls
        self._spoken: set[int] = set()  # communicators and groups of which the others have been told something
        self._unused: list[tuple[int, int, int, list[int]]] = []  # groups of which the others must be told
        self._said: OrderedDict[tuple[int, int], list[RankCall]] = OrderedDict()
        self._failed: OrderedDict[tuple[int, int], EndFailed] = OrderedDict()  # ends on communicators unknown here
        self._issued: dict[int, dict[int, int]] = {}
        self._uncounted: set[int] = set()  # ranks that no longer knew how many messages they had sent
        self._quiet: dict[int, list[Standing]] = {}  # by process: its ranks without progress
        self._busy: dict[int, tuple[int, str]] = {}  # by process: the rank that keeps the event loop, and at which line
        self._stood: dict[int, list[Standing]] = {}  # by process: the state of its ranks when it was stopped
        self._broken_ends: deque[tuple[float, Callable[[], None]]] = deque()  # failures that are due at a later instant
        self._news = trio.Event()

    def communicators(self, engine: BaseEngine, transport: Transport) -> SpanningCommunicators:
        """Return where the ranks of all processes meet."""
        self._communicators = SpanningCommunicators(engine, transport, self)
        return self._communicators

    @asynccontextmanager
    async def attached(self, world: World) -> AsyncIterator[None]:
        """Listen and watch for the length of an ``async with``."""
        self._world = world
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._watch)
            yield
            nursery.cancel_scope.cancel(reason="the world has ended")

    async def part(self) -> None:
        """Wait until the ranks of all processes have finished, and what they have told is heard."""
        try:
            await self._membership.barrier("end")
            while self._membership.unread:
                await trio.lowlevel.checkpoint()
        except MemberLostError:  # the messages of the other processes tell more
            await trio.sleep_forever()

    async def verdict(self) -> None:
        """Give the other processes a moment to name the culprit."""
        with trio.move_on_after(_VERDICT_S, shield=True):
            while self._world.ending.failure is None:
                await self._next_news()

    async def standings(self, mine: Sequence[Standing]) -> list[Standing]:
        """Give the other processes a moment to tell where their ranks stood; return all standings that are known."""
        with trio.move_on_after(_VERDICT_S, shield=True):
            while len(self._stood) < len(self._placement) - 1:
                await self._next_news()
        told = {self._membership.member: list(mine), **self._stood}
        members = range(len(self._placement))
        return [standing for member in members for standing in told.get(member) or self._unheard(member)]

    def quiet(self) -> dict[int, Standing]:
        """Return the standings of ranks elsewhere that make no progress."""
        known = {**self._quiet, **{member: self._unheard(member) for member in self._busy}}
        return {standing.rank: standing for standings in known.values() for standing in standings}

    def _unheard(self, member: int) -> list[Standing]:
        """Return standings for the ranks of a process that has not told them."""
        left = self._communicators.left
        keeper, place = self._busy.get(member, (None, ""))
        found = []
        for rank in self._placement[member]:
            told, busy = "its process does not answer", "whose process does not answer"
            if rank in left:
                told, busy = "has finished", "which has finished"
            elif rank == keeper:
                told, busy = f"keeps its event loop busy at {place}", f"which keeps its event loop busy at {place}"
            elif keeper is not None:
                told = f"its event loop is kept busy by rank {keeper} at {place}"
                busy = f"whose event loop is kept busy by rank {keeper} at {place}"
            found.append(Standing(rank=rank, lines=(told,), busy=busy))
        return found

    async def _next_news(self) -> None:
        self._news = trio.Event()
        await self._news.wait()

    # -- what is said of the ranks here -------------------------------------------------------------------------------

    def _tell(self, saying: Saying) -> None:
        """Tell all other processes; a message that cannot be sent is reported, and fails nothing."""
        try:
            self._membership.tell(encode_saying(saying))
        except Exception as error:
            notify(f"the other processes cannot be told of {saying!r:.40}...: {in_one_line(error)[:LINE_BYTES]}")

    def send_failure(self, rank: int, error: BaseException, doing: list[str]) -> None:
        """Say that a rank here has ended the world."""
        self._tell(Failed(culprit=rank, doing=cut_lines(doing), **_told(error)))

    def send_call(self, communicator_id: int, seqs: Sequence[int], said: RankCall) -> None:
        """Tell the call of a rank here in some operations. A call without a dtype asks for the root's."""
        call = pack_call(said.call)
        self._spoken.add(communicator_id)
        self._tell(Called(channel=communicator_id, seqs=list(seqs), rank=said.rank, call=call, site=said.call_site))

    def announce_call(self, communicator_id: int, seq: int, said: RankCall) -> None:
        """Tell the call of a rank here, within `_WATCH_S`, or at once where a rank elsewhere has asked.

        Most ranks know what they receive. A message for each operation, and the threads that it wakes, would take
        longer than a broadcast of a gradient bucket.
        """
        if communicator_id in self._asked:
            self.send_call(communicator_id, (seq,), said)
        else:
            self._announced.setdefault((communicator_id, said), []).append(seq)

    def _tell_announced(self) -> None:
        announced, self._announced = self._announced, {}
        for (communicator_id, said), seqs in announced.items():
            for first in range(0, len(seqs), _MOST_ALIKE):
                self.send_call(communicator_id, seqs[first : first + _MOST_ALIKE], said)

    def send_mismatch(self, communicator_id: int, seq: int, error: CollectiveMismatchError) -> None:
        """Say that two ranks mean different operations."""
        self._tell(
            Disagreed(
                channel=communicator_id,
                seq=seq,
                group=cut(error.group, LINE_BYTES),
                ranks=error.ranks,
                calls=_cut_pair(error.calls),
                sites=_cut_pair(error.call_sites),
            )
        )

    def send_failed_end(self, communicator_id: int, seq: int, rank: int, error: BaseException) -> None:
        """Say that a rank here cannot take part in an operation."""
        message, cause = cut(text_of(error)), _told(error.__cause__ or error)
        self._tell(EndFailed(channel=communicator_id, seq=seq, rank=rank, message=message, **cause))

    def send_broken(self, communicator_id: int, culprit: int, error: BaseException) -> None:
        """Say that nothing of a communicator, or of a group, goes on because of a rank here."""
        aborted = isinstance(error, GroupAbortedError)
        self._spoken.add(communicator_id)
        self._tell(Broken(channel=communicator_id, rank=culprit, text=cut(text_of(error)), aborted=aborted))

    def send_unused(self, group_id: int, ranks: int, size: int, communicator_ids: Sequence[int]) -> None:
        """Say within `_WATCH_S` that the ranks here use a group no more."""
        self._tell_announced()
        spoken = [each for each in communicator_ids if each in self._spoken]
        while len(spoken) > _MOST_IDS:
            self._unused.append((group_id, 0, size, spoken[-_MOST_IDS:]))
            del spoken[-_MOST_IDS:]
        if ranks < size or spoken:  # otherwise no other process knows of the group
            self._unused.append((group_id, ranks, size, spoken))

    def _send_unused(self) -> None:
        unused, self._unused = self._unused, []
        part: list[tuple[int, int, int, list[int]]] = []
        ids = 0
        for group in unused:
            ids += 1 + len(group[3])
            if part and ids > _MOST_IDS:
                self._tell(Unused(groups=part))
                part, ids = [], 1 + len(group[3])
            part.append(group)
        if part:
            self._tell(Unused(groups=part))

    def forget(self, ids: Collection[int]) -> None:
        """Forget what was said of a group that no rank uses any more, and of its communicators."""
        self._asked.difference_update(ids)
        self._spoken.difference_update(ids)
        for early in (self._said, self._failed):
            for each in [each for each in early if each[0] in ids]:
                del early[each]

    def send_quiet(self, standings: Sequence[Standing]) -> None:
        """Let the others know which ranks here make no progress."""
        self._tell(Quiet(standings=cut_standings(standings)))

    def send_busy(self, rank: int, place: str) -> None:
        """Say that a rank here keeps the loop of this process, and where, or that it does no more; any thread."""
        self._tell(Busy(rank=rank, place=cut(place, LINE_BYTES)))

    def send_closing(self, rank: int) -> None:
        """Say that a rank here receives no more messages."""
        self._tell(Closing(rank=rank))

    def send_left(self, rank: int) -> None:
        """Say that a rank here has finished its program, and how many operations it issued on each communicator."""
        self._tell_announced()
        counts = list(self._communicators.issued(rank).items())
        for start in range(0, len(counts), _MOST_COUNTS):
            self._tell(Issued(rank=rank, counts=counts[start : start + _MOST_COUNTS]))
        self._tell(Finished(rank=rank, uncounted=self._communicators.lost_count))

    def hold_broken_end(self, fail: Callable[[], None]) -> None:
        """Fail an end whose wire broke a moment later, unless the culprit becomes known meanwhile."""
        self._broken_ends.append((trio.current_time() + _VERDICT_S, fail))

    def send_standings(self, standings: Sequence[Standing], reason: str) -> None:
        """Say where the ranks here stood when they were stopped; with a reason, it ends the others as well."""
        self._stopping()
        self._tell(Stopped(standings=cut_standings(standings), reason=cut(reason, LINE_BYTES)))

    # -- known of the others -------------------------------------------------------------------------------------------

    @property
    def silent(self) -> bool:
        """Whether nobody has said anything of an operation that no rank here has come to."""
        return not (self._said or self._failed)

    def early_calls(self, communicator_id: int, seq: int) -> list[RankCall]:
        """Return, once, what the others called in an operation before any rank here came to it."""
        if self._failed and (failed := self._failed.pop((communicator_id, seq), None)) is not None:
            self._hear_end_failed(failed)
        return self._said.pop((communicator_id, seq), []) if self._said else []

    def issued_by(self, rank: int, communicator_id: int) -> int:
        """Return how many operations a rank elsewhere, which has finished, issued on a communicator."""
        return self._issued.get(rank, {}).get(communicator_id, 0)

    def sent_no_more(self, rank: int, communicator_id: int, count: int) -> bool:
        """Whether a rank elsewhere, which has finished, is known to have sent no more than so many messages."""
        return rank not in self._uncounted and self.issued_by(rank, communicator_id) <= count

    # -- tasks -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await trio.sleep(_WATCH_S)
            self._tell_announced()
            self._send_unused()
            while self._broken_ends and self._broken_ends[0][0] <= trio.current_time():
                self._broken_ends.popleft()[1]()
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Tell the operations that wait for long; `_watch` would keep the last communicator while it sleeps."""
        before_ns = perf_counter_ns() - _LONG_NS
        for communicator in self._communicators.spanning.values():
            for seq, said in communicator.waiting(before_ns):
                self.send_call(communicator.id, (seq,), said)

    async def _listen(self) -> None:
        """Act on the events of the other processes, in their order."""
        async for event in self._membership.messages():
            if isinstance(event, MemberLost):
                self._lose(event)
            else:
                self._hear(event)
            self._news.set()

    def _lose(self, lost: MemberLost) -> None:
        """End the world because a process is lost: `await` raises `PeerFailedError`, `run` raises `RankFailedError`."""
        ranks = self._placement[lost.member]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        # who waits for it, before anything fails
        waited = self._world.reports.waiting_for(ranks)
        text = f"process {lost.member} ({who}) is lost: {lost.reason}{'; ' if waited else ''}{waited}"
        # the first culprit ends the world, with all operations under way
        self._world.fail_elsewhere(ranks[0], PeerLostError(text, culprit=ranks[0]), [])
        # its wires: what breaks with them has failed already, and is told of no more
        self._on_loss(lost)

    def _hear(self, told: Told) -> None:
        """Act on what a process says of its ranks; if that cannot be meant, the process has failed."""
        member, own, communicators = told.member, self._placement[told.member], self._communicators
        try:
            said = decode_saying(told.body)
            if getattr(said, "rank", own[0]) not in own:
                raise OverlapError(f"it speaks of rank {getattr(said, 'rank', None)}, which is not one of its own")
            match said:
                # the end of a rank
                case Failed():
                    self._check_ranks([said.culprit])
                    self._world.fail_elsewhere(said.culprit, _heard(said), said.doing)
                case Issued():
                    self._issued.setdefault(said.rank, {}).update(said.counts)
                case Closing():
                    communicators.closing.add(said.rank)
                case Finished():
                    if said.uncounted:
                        self._uncounted.add(said.rank)
                    communicators.rank_left(said.rank)
                # operations
                case Called():
                    self._hear_called(said)
                case Disagreed():
                    self._check_ranks(said.ranks)
                    if (known := communicators.spanning.get(said.channel)) is not None:
                        group, seq, ranks, calls, sites = said.group, said.seq, said.ranks, said.calls, said.sites
                        error = partial(
                            CollectiveMismatchError, group=group, seq=seq, ranks=ranks, calls=calls, call_sites=sites
                        )
                        known.fail_here(seq, error)
                case EndFailed():
                    self._hear_end_failed(said)
                # groups
                case Broken():
                    kind = GroupAbortedError if said.aborted else PeerFailedError
                    communicators.break_off(said.channel, partial(kind, said.text, culprit=said.rank))
                case Unused():
                    for group_id, count, size, ids in said.groups:
                        meant = 0 <= count <= len(own)
                        if not meant or not communicators.end_elsewhere(group_id, count, size, ids):
                            raise OverlapError(f"it speaks of {count} ranks of its own in a group of {size}")
                # stalls
                case Busy():
                    self._busy[member] = (said.rank, said.place)
                    if not said.place:
                        del self._busy[member]
                case Quiet():
                    self._quiet[member] = self._own(member, said.standings)
                case Stopped():
                    self._stood[member] = self._own(member, said.standings)
                    self._stopping()
                    if said.reason:
                        self._world.stopped_elsewhere(said.reason)
        except OverlapError as error:
            failure = OverlapError(f"process {member} sent a message that cannot be meant: {error}")
            self._world.fail_elsewhere(own[0], failure, [])

    def _hear_called(self, said: Called) -> None:
        """Compare the call of a rank elsewhere with those here, or keep it until a rank here comes to the operation."""
        if not 0 < len(said.seqs) <= _MOST_ALIKE:
            raise OverlapError(f"it speaks of {len(said.seqs)} operations; at most {_MOST_ALIKE} are alike")
        voice = RankCall(rank=said.rank, call=unpack_call(said.call), call_site=said.site)
        for seq in said.seqs:
            if not self._communicators.compare_call(said.channel, seq, voice):
                self._said.setdefault((said.channel, seq), []).append(voice)
                if len(self._said) > _MOST_SAID:
                    self._said.popitem(last=False)
        if voice.call.kind in ANNOUNCED and voice.call.dtype is None:
            self._asked.add(said.channel)  # calls of this communicator are told at once from now on
            self._tell_announced()

    def _hear_end_failed(self, said: EndFailed) -> None:
        """Fail the ends here of an operation that a rank elsewhere cannot take part in, or those that come to it."""
        known = self._communicators.spanning.get(said.channel)
        if known is None or not known.fail_remote_end(said.seq, said.rank, said.message, _heard(said)):
            self._failed[said.channel, said.seq] = said
            if len(self._failed) > _MOST_SAID:
                self._failed.popitem(last=False)

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        known = {rank for placed in self._placement for rank in placed}
        if unknown := [rank for rank in ranks if rank not in known]:
            raise OverlapError(f"it speaks of rank {unknown[0]}, and there are {len(known)}")

    def _own(self, member: int, standings: list[Standing]) -> list[Standing]:
        """Return the standings that a process has told, if they are about its own ranks."""
        if any(standing.rank not in self._placement[member] for standing in standings):
            raise OverlapError("it told where the ranks of another process stand")
        self._check_ranks(rank for standing in standings for rank in standing.awaits)
        return standings


def _told(error: BaseException) -> dict[str, str]:
    """Return the fields that tell an error."""
    return {
        "kind": cut(type_name(error), LINE_BYTES),
        "text": cut(text_of(error)),
        "trace": cut(_trace_of(error), last=True),
        "place": cut(where(error), LINE_BYTES),
    }


def _heard(said: Failed | EndFailed) -> RemoteError:
    return RemoteError(said.kind, said.text, trace=said.trace, place=said.place)


def _trace_of(error: BaseException) -> str:
    try:
        return "".join(format_exception(error))
    except Exception:  # an error whose text raises an error
        return "".join(format_tb(error.__traceback__))


def _cut_pair(lines: Sequence[str]) -> tuple[str, str]:
    first, second = lines
    return cut(first, LINE_BYTES), cut(second, LINE_BYTES)
