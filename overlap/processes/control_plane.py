"""The other processes of a world: what is said between them beside the data.

The bytes of collectives travel over the transport. This is the rest: which rank failed or has finished, what waits for
long, what a broadcast carries. Each process says it to all others through its `Membership`; what comes in is checked
field by field before it is believed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any

import trio

from transports import Transport

from ..errors import (
    CollectiveMismatchError,
    GroupAbortedError,
    OverlapError,
    PeerFailedError,
    PeerLostError,
    RemoteError,
)
from ..remote.communicators import SpanningCommunicators
from ..remote.spanning import ANNOUNCED
from ..runtime.blame.standing import Standing
from ..runtime.communicator import BaseEngine
from ..runtime.match import Voice
from ..runtime.world import World
from .codec import cut, pack_standings, unpack_call, unpack_standings
from .saying import LINE_BYTES, MOST_ALIKE, ControlConnection, Saying

# How often to look for operations that wait, and from when on one waits long enough to be told. Only programs that
# disagree, and stragglers, ever wait that long for a small message; a large one costs one message more.
_WATCH_S = 0.025
_LONG_NS = 50_000_000
# How long a broken wire may wait for news of who broke it, and a stalled world for the reports of the others.
_VERDICT_S = 0.5
_MOST_SAID = 100_000  # calls kept for operations that no rank here has come to


class ControlPlane(Saying):
    """Speaks for the ranks of this process, and listens.

    Args:
        connection: The way to the other processes.
        placement: World ranks of each process.
        stopping: Called when this process, or another, is stopped from outside.

    Attributes:
        speaks: Whether this process is the one that tells the user what concerns all.
    """

    def __init__(
        self,
        connection: ControlConnection,
        placement: Sequence[Sequence[int]],
        *,
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(connection)
        self._placement, self._stopping = placement, stopping
        self.speaks = connection.member == 0
        self._world: World
        self._communicators: SpanningCommunicators
        self._said: OrderedDict[tuple[int, int], list[Voice]] = OrderedDict()
        self._issued: dict[int, dict[int, int]] = {}
        self._uncounted: set[int] = set()  # ranks that no longer knew how many messages they had sent
        self._quiet: dict[int, list[Standing]] = {}  # by process: its ranks that make no progress
        self._busy: dict[int, tuple[int, str]] = {}  # by process: the rank that keeps its loop, and where
        self._stood: dict[int, list[Standing]] = {}  # by process: where its ranks stood when it was stopped
        self._broken_ends: deque[tuple[float, Callable[[], None]]] = deque()  # what is told at an instant, to come
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
        """Wait until the ranks of all processes have finished."""
        await self._connection.barrier("end")

    async def verdict(self) -> None:
        """Give the others a moment to say who is at fault."""
        with trio.move_on_after(_VERDICT_S, shield=True):
            while self._world.ending.failure is None:
                await self._next_news()

    async def standings(self, mine: Sequence[Standing]) -> list[Standing]:
        """Give the others a moment to say where theirs stood, and return those of all ranks that are known."""
        with trio.move_on_after(_VERDICT_S, shield=True):
            while len(self._stood) < len(self._placement) - 1:
                await self._next_news()
        told = {self._connection.member: list(mine), **self._stood}
        members = range(len(self._placement))
        return [standing for member in members for standing in told.get(member) or self._unheard(member)]

    def quiet(self) -> dict[int, Standing]:
        """Return what the others have said of their ranks that make no progress."""
        known = {**self._quiet, **{member: self._unheard(member) for member in self._busy}}
        return {standing.rank: standing for standings in known.values() for standing in standings}

    def _unheard(self, member: int) -> list[Standing]:
        """Say for a process that cannot where its ranks stand."""
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

    def tell_left(self, rank: int) -> None:
        """Say that a rank here has finished its program, and how many operations it issued on each communicator."""
        self._tell_announced()
        pairs = [list(pair) for pair in self._communicators.issued(rank).items()]
        for start in range(0, len(pairs), 1000):
            self._tell("issued", rank=rank, issued=pairs[start : start + 1000])
        self._tell("left", rank=rank, uncounted=self._communicators.lost_count)

    def hold_broken_end(self, fail: Callable[[], None]) -> None:
        """Fail an end whose wire broke a moment later, unless somebody says meanwhile who broke it."""
        self._broken_ends.append((trio.current_time() + _VERDICT_S, fail))

    def tell_standings(self, standings: Sequence[Standing], reason: str) -> None:
        """Say where the ranks here stood when they were stopped; with a reason, it ends the others as well."""
        self._stopping()
        self._tell("stopped", standings=pack_standings(standings), reason=cut(reason, LINE_BYTES))

    # -- what we know ----------------------------------------------------------------------------------------------

    @property
    def silent(self) -> bool:
        """Whether nobody has said anything of an operation that no rank here has come to."""
        return not self._said

    def said_before(self, communicator_id: int, seq: int) -> list[Voice]:
        """Return, once, what the others called in an operation before any rank here came to it."""
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
            while self._broken_ends and self._broken_ends[0][0] <= trio.current_time():
                self._broken_ends.popleft()[1]()
            before_ns = perf_counter_ns() - _LONG_NS
            for communicator in self._communicators.spanning.values():
                for seq, said in communicator.waiting(before_ns):
                    self.tell_call(communicator.id, (seq,), said)

    async def _listen(self) -> None:
        async for member, message, reason in self._connection.messages():
            if message is None:
                self._lost(member, reason)
            else:
                self._hear(member, message)
            self._news.set()

    def _lost(self, member: int, reason: str) -> None:
        ranks = self._placement[member]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        waited = self._world.reports.waiting_for(ranks)
        text = f"process {member} ({who}) is lost: {reason}{'; ' if waited else ''}{waited}"
        error = PeerLostError(text, culprit=ranks[0])
        self._world.fail_elsewhere(ranks[0], error, [])

    def _hear(self, member: int, message: Mapping[str, object]) -> None:
        """Act on a message; who makes no sense has failed."""
        try:
            self._act_on(member, message)
        except OverlapError as error:
            self._world.fail_elsewhere(self._placement[member][0], error, [])

    def _act_on(self, member: int, message: Mapping[str, object]) -> None:
        what = message.get("what")
        handler, fields = _HANDLERS.get(what if isinstance(what, str) else "", (None, {}))
        values = {name: message.get(name) for name in fields}
        if handler is None or any(not isinstance(values[name], kind) for name, kind in fields.items()):
            raise OverlapError(f"process {member} said {what!r}, which this version does not understand")
        rank = values.get("rank")
        if rank is not None and rank not in self._placement[member]:
            raise OverlapError(f"process {member} speaks of rank {rank}, which is not one of its own")
        handler(self, member, **values)

    def _hear_failed(
        self, _: int, *, culprit: int, type: str, text: str, trace: str, place: str, doing: list[object]
    ) -> None:
        error = RemoteError(type, text, trace=trace, place=place)
        self._world.fail_elsewhere(culprit, error, [str(line) for line in doing])

    def _hear_issued(self, _: int, *, rank: int, issued: list[list[int]]) -> None:
        self._issued.setdefault(rank, {}).update({int(channel): int(count) for channel, count in issued})

    def _hear_left(self, _: int, *, rank: int, uncounted: bool) -> None:
        if uncounted:
            self._uncounted.add(rank)
        self._communicators.rank_left(rank)

    def _hear_call(
        self, member: int, *, channel: int, seqs: list[int], rank: int, call: list[object], site: str
    ) -> None:
        if not 0 < len(seqs) <= MOST_ALIKE:
            raise OverlapError(f"process {member} speaks of {len(seqs)} operations; at most {MOST_ALIKE} are alike")
        said = Voice(rank=rank, call=unpack_call(call), call_site=site)
        for one in seqs:
            if not self._communicators.hear(channel, one, said):
                self._said.setdefault((channel, one), []).append(said)
                if len(self._said) > _MOST_SAID:
                    self._said.popitem(last=False)
        if said.call.kind in ANNOUNCED and said.call.dtype is None:
            self._announce_at_once(channel)

    def _hear_differ(
        self, _: int, *, channel: int, seq: int, group: str, ranks: list[int], calls: list[str], sites: list[str]
    ) -> None:
        known = self._communicators.spanning.get(channel)
        if known is not None and len(ranks) == len(calls) == len(sites) == 2:
            known.fail_here(seq, _mismatch(group, seq, ranks, calls, sites))

    def _hear_end_failed(self, _: int, *, channel: int, seq: int, rank: int, text: str) -> None:
        known = self._communicators.spanning.get(channel)
        if known is not None:
            known.hear_failed_end(seq, rank, text)

    def _hear_broken(self, _: int, *, channel: int, rank: int, text: str, aborted: bool) -> None:
        kind = GroupAbortedError if aborted else PeerFailedError
        self._communicators.break_off(channel, partial(kind, text, culprit=rank))

    def _hear_busy(self, member: int, *, rank: int, place: str) -> None:
        self._busy[member] = (rank, place)
        if not place:
            del self._busy[member]

    def _hear_quiet(self, member: int, *, standings: list[object]) -> None:
        self._quiet[member] = unpack_standings(standings, self._placement[member])

    def _hear_stopped(self, member: int, *, standings: list[object], reason: str) -> None:
        self._stood[member] = unpack_standings(standings, self._placement[member])
        self._stopping()
        if reason:
            self._world.stopped_elsewhere(reason)


def _mismatch(
    group: str, seq: int, ranks: list[int], calls: list[str], sites: list[str]
) -> Callable[[], CollectiveMismatchError]:
    return partial(
        CollectiveMismatchError,
        group=group,
        seq=seq,
        ranks=(int(ranks[0]), int(ranks[1])),
        calls=(str(calls[0]), str(calls[1])),
        call_sites=(str(sites[0]), str(sites[1])),
    )


_HANDLERS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "failed": (
        ControlPlane._hear_failed,
        {"culprit": int, "type": str, "text": str, "trace": str, "place": str, "doing": list},
    ),
    "issued": (ControlPlane._hear_issued, {"rank": int, "issued": list}),
    "left": (ControlPlane._hear_left, {"rank": int, "uncounted": bool}),
    "call": (
        ControlPlane._hear_call,
        {"channel": int, "seqs": list, "rank": int, "call": list, "site": str},
    ),
    "differ": (
        ControlPlane._hear_differ,
        {"channel": int, "seq": int, "group": str, "ranks": list, "calls": list, "sites": list},
    ),
    "end failed": (ControlPlane._hear_end_failed, {"channel": int, "seq": int, "rank": int, "text": str}),
    "broken": (ControlPlane._hear_broken, {"channel": int, "rank": int, "text": str, "aborted": bool}),
    "busy": (ControlPlane._hear_busy, {"rank": int, "place": str}),
    "quiet": (ControlPlane._hear_quiet, {"standings": list}),
    "stopped": (ControlPlane._hear_stopped, {"standings": list, "reason": str}),
}
"""What may be said: who handles it, and the type of each field."""
