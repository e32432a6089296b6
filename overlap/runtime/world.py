"""The world: all ranks of this process, from their start to their common end."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from inspect import isawaitable
from threading import get_ident
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from transports import Transport, TransportError

from ..diagnostics import calling, only, origin, where
from ..errors import PeerError, RemoteError, StallError, UsageError, in_one_line
from ..flight.recorder import NOT_RECORDED, Writer
from ..timeline.spans import Recorder, Timeline
from .backend import Backend, RealBackend
from .communicator import BaseEngine, Communicator, Communicators
from .compute import ComputeStream
from .context import RankContext
from .ending import Ending
from .interpreter import tuned
from .match import Key
from .memory.buffer_locks import BufferLocks
from .outstanding import Outstanding
from .rank import Rank

if TYPE_CHECKING:
    import topology

T = TypeVar("T")

_TOLD = 16  # lines on who waits for whom, when the user has had enough

__all__ = ["OtherProcesses", "World"]


class OtherProcesses(Protocol):
    """The other processes of a world, as it sees them."""

    def communicators(self, engine: BaseEngine, transport: Transport) -> Communicators:
        """Return where the ranks of all processes meet."""

    def attached(self, world: World) -> AbstractAsyncContextManager[None]:
        """Tell a world what the others say, for the length of an ``async with``."""

    async def part(self) -> None:
        """Wait until the ranks of all processes have finished."""

    async def verdict(self) -> None:
        """Give the others a moment to say who is at fault."""

    async def reports(self, mine: list[str]) -> list[str]:
        """Exchange the reports of a world that made no end of it, and return them all."""

    def tell_failure(self, rank: int, error: BaseException, doing: list[str]) -> None:
        """Say that a rank here has ended the world. Never raises."""

    def tell_left(self, rank: int) -> None:
        """Say that a rank here has finished its program."""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A rank, and what works for it."""

    rank: Rank
    context: RankContext
    compute: ComputeStream


class World:
    """What the ranks of this process share: where they meet, who works for them, and how they end.

    They are those of the transport, or `ranks` of them.

    Attributes:
        size: Ranks in the world.
        local: Those of this process.
        backend: What time it is, and who works in it.
        ending: The first failure, and what follows from it.
        communicators: Where the ranks meet.
    """

    def __init__(
        self,
        size: int,
        cluster: topology.Cluster,
        transport: Transport,
        *,
        algorithm: str | None,
        others: OtherProcesses | None = None,
        backend: Backend | None = None,
        ranks: Sequence[int] | None = None,
        flight: Writer | None = None,
        restart: int = 0,
        state_dir: str | None = None,
    ) -> None:
        self.size, self.backend, self.ending = size, backend or RealBackend(), Ending()
        local = transport.ranks if ranks is None else ranks
        self.local = frozenset(local)
        self._token = trio.lowlevel.current_trio_token()
        self._engine = self.backend.engine(transport, cluster, self._token, algorithm=algorithm)
        self.communicators = (
            others.communicators(self._engine, transport) if others else self.backend.communicators(self._engine)
        )
        self._cluster, self._others, self._flight = cluster, others, flight
        self._survival = restart, state_dir
        self._legal: set[tuple[int, ...]] = set()
        self._advised: set[str] = set()  # rules of which a warning has been given
        self._scope = trio.CancelScope()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling = False
        self._stalled: list[str] = []  # the first report of a rank that did not end in peace
        self._deadlocked = False
        self._locks = BufferLocks()
        everybody = tuple(range(size))  # one object: thousands of ranks would have one of thousands each
        self._members = [self._member(rank, everybody) for rank in local]

    def _member(self, rank: int, everybody: tuple[int, ...]) -> _Member:
        recorder = Recorder(rank)
        context = RankContext(
            rank=rank,
            now_ns=self.backend.now_ns,
            soon=self._soon,
            record=recorder.append,
            arrays=self.backend,
            locks=self._locks,
            outstanding=Outstanding(),
            ending=self.ending,
            token=self._token,
            thread=get_ident(),
            flight=self._flight.rank(rank) if self._flight is not None else NOT_RECORDED,
        )
        place = divmod(rank, self._cluster.ranks_per_node or self.size)
        compute = self.backend.compute_stream(context)
        restart, state_dir = self._survival
        made = Rank(
            context, self.backend, compute, self, everybody=everybody, place=place, recorder=recorder, restart=restart,
            state_dir=state_dir,
        )  # fmt: skip
        return _Member(made, context, compute)

    # -- life --------------------------------------------------------------------------------------------------

    async def live(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on every rank to the common end."""
        results: dict[int, T] = {}
        async with self._others.attached(self) if self._others else nullcontext():
            await self._live(main, args, timeout_s, results)
            if self._others and self._scope.cancelled_caught and self.ending.failure is None:
                self._stalled = await self._others.reports(self._stalled)
        if self.ending.failure is not None:
            raise self.ending.rank_failed(self.size) from self.ending.failure[1]
        if self._scope.cancelled_caught:
            raise StallError(None if self._deadlocked else timeout_s, self._stalled)
        return [results[member.context.rank] for member in self._members]

    async def _live(
        self,
        main: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        timeout_s: float | None,
        results: dict[int, T],
    ) -> None:
        if timeout_s is not None:
            self.backend.limit(timeout_s, self._scope)
        with tuned(), self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    for member in self._members:
                        nursery.start_soon(self._live_rank, member, main, args, results)
                if self._others:
                    await self._others.part()
            finally:
                await self._end()

    async def _live_rank(
        self, member: _Member, main: Callable[..., Awaitable[T]], args: tuple[object, ...], results: dict[int, T]
    ) -> None:
        rank, context = member.rank, member.context
        try:
            async with trio.open_nursery() as context.nursery:
                finished = False
                try:
                    results[context.rank] = await _begun(main, rank, args)
                    await context.outstanding.drain()
                    finished = True
                finally:  # while the nursery is open: what has not ended may still want to start a program
                    if not finished:
                        self._stalled = self._stalled or self.report()
                    self._abandon(member)
        except* (Exception, SystemExit) as group:
            error = only(group)
            if self._others and self._is_consequence(context.rank, error):
                await self._others.verdict()
            self.fail(context.rank, error)
        else:
            if self._others:
                self._others.tell_left(context.rank)
            self.communicators.rank_left(context.rank)
            context.flight.left()

    def _abandon(self, member: _Member) -> None:
        """Fail everything unfinished; let nothing else start."""
        member.context.closed = True
        member.compute.stop()
        member.context.outstanding.abandon(self.ending.peer_failed)

    async def _end(self) -> None:
        """Settle what is unfinished and join every thread; bounded by the compute that runs."""
        with trio.CancelScope(shield=True):
            for member in self._members:
                self._abandon(member)
            for member in self._members:
                await member.compute.ended()
            await self._engine.aclose()
            self.backend.close()

    # -- failure -----------------------------------------------------------------------------------------------

    def fail(self, rank: int, error: BaseException) -> None:
        """Take note that `rank` raised; the first culprit ends the world."""
        culprit, cause = origin(rank, error)
        doing = self._doing(culprit)
        if self.ending.failure is None:
            self._end_because(culprit, cause, doing, spared=rank)
            if self._others:  # once it is recorded: telling may fail as well
                self._others.tell_failure(culprit, cause, doing)
        elif not isinstance(error, PeerError) and culprit != self.ending.failure[0]:
            self.ending.add(culprit, cause, doing, self.backend.now_ns() if self.backend.name == "virtual" else None)

    def _doing(self, rank: int) -> list[str]:
        """Say what a rank of this process had not finished when it was abandoned."""
        mine = [member.context.outstanding for member in self._members if member.context.rank == rank]
        return [line for outstanding in mine for line in outstanding.doing or outstanding.lines()]

    def fail_elsewhere(self, culprit: int, cause: BaseException, doing: list[str]) -> None:
        """Take note that a rank of another process ended the world."""
        if self.ending.failure is None:
            self._end_because(culprit, cause, doing)

    def _end_because(self, culprit: int, cause: BaseException, doing: list[str], *, spared: int | None = None) -> None:
        self.ending.begin(culprit, cause, doing, self.backend.now_ns())
        if self._flight is not None:
            here = culprit in self.local and not isinstance(cause, (PeerError, RemoteError, TransportError))
            self._flight.end("failed", rank=culprit, line=f"{in_one_line(cause)}{where(cause)}", here=here)
        for member in self._members:
            if member.context.rank != spared:
                self._abandon(member)
        self._scope.cancel(reason=f"rank {culprit} failed: {in_one_line(cause)}")

    def _is_consequence(self, rank: int, error: BaseException) -> bool:
        """Whether the error looks like the consequence of one in another process, which is about to be told."""
        culprit, cause = origin(rank, error)
        return culprit not in self.local or isinstance(cause, TransportError)

    def deadlock(self) -> None:
        """End the world because every rank is blocked and nothing is due; only virtual time can know."""
        self._deadlocked = True
        self._stalled = self.report()
        self._scope.cancel(reason="every rank is blocked, and nothing is due")

    def stalled_elsewhere(self) -> None:
        """End the world because another process has waited long enough."""
        self._scope.cancel(reason="another process gave up")

    def interrupted(self, error: BaseException) -> None:
        """Note on an interrupt who was waiting for whom."""
        more = [f"and {len(self._stalled) - _TOLD} lines more"] if len(self._stalled) > _TOLD else []
        for line in [*self._stalled[:_TOLD], *more]:
            error.add_note(f"  {line}")

    def report(self) -> list[str]:
        """Say of each rank what it waits for and on whom, one line each."""
        return [f"rank {m.context.rank}: {line}" for m in self._members for line in self._states(m.context)]

    def _states(self, context: RankContext) -> Iterable[str]:
        if context.outstanding.operations:
            return context.outstanding.lines(detailed=True)
        left = context.rank in self.communicators.left
        return ["has finished" if left else "has nothing issued; its program is elsewhere"]

    # -- what ranks ask of it ------------------------------------------------------------------------------------

    def communicator(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Return where the members of a group meet."""
        return self.communicators.open(key, name, members)

    def notes(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return what ranks of this process tell each other besides an operation, where arrays have no data."""
        return self.backend.notes(key, seq)

    def _soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, or after the one that is running: chains of operations must not recurse."""
        self._callbacks.append(callback)
        if self._calling:
            return
        self._calling = True
        try:
            while self._callbacks:
                self._callbacks.popleft()()
        finally:
            self._calling = False

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` if the cluster does not allow such a group; the first member finds out.

        What is allowed but not advised is a `topology.TopologyWarning`, once for each rule.
        """
        if ranks not in self._legal:
            for finding in self._cluster.check_group(ranks, warn=False):
                if finding.rule.id not in self._advised:
                    self._advised.add(finding.rule.id)
                    finding.warn(stacklevel=calling()[1])
            self._legal.add(ranks)

    def timeline(self) -> Timeline:
        """Return what has been recorded so far."""
        meta = {"script": sys.argv[0]} | self.backend.meta()
        recorders = [member.rank.recorder for member in self._members]
        return Timeline.collect(recorders, world_size=self.size, clock=self.backend.name, meta=meta)


def _begun(main: Callable[..., Awaitable[T]], rank: Rank, args: tuple[object, ...]) -> Awaitable[T]:
    program = main(rank, *args)
    if not isawaitable(program):
        name = getattr(main, "__name__", repr(main))
        raise UsageError(f"main: expected an async function, but {name}(rank) returned {type(program).__name__}")
    return program
