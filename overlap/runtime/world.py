"""The world: all ranks of this process, from their start to their common end."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from inspect import isawaitable
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import Transport, TransportError

from ..diagnostics import calling, only, origin, where
from ..errors import PeerError, PeerFailedError, RankFailedError, StallError, UsageError, in_one_line
from ..remote.spanning import FarChannel
from ..timeline.spans import Timeline
from .backend import Clock, RealClock
from .communicator import Channel
from .interpreter import BlasLimit, tuned
from .memory.buffer_locks import BufferLocks
from .rank import Rank

if TYPE_CHECKING:
    import topology

    from ..remote.control_plane import Neighbours
    from .operation import CollectiveFuture

T = TypeVar("T")

_TOLD = 16  # lines on who waits for whom, when the user has had enough

__all__ = ["World"]


def _begun(main: Callable[..., Awaitable[T]], rank: Rank, args: tuple[object, ...]) -> Awaitable[T]:
    program = main(rank, *args)
    if not isawaitable(program):
        name = getattr(main, "__name__", repr(main))
        raise UsageError(f"main: expected an async function, but {name}(rank) returned {type(program).__name__}")
    return program


class World:
    """What the ranks of this process share: channels, engine, and the first failure.

    They are those of the transport, or `ranks` of them.

    Attributes:
        size: Ranks in the world.
        local: Those of this process.
        clock: What time it is, and who works in it.
        now_ns: Its present instant.
        left: World ranks that have finished their program.
        everybody: All world ranks.
        engine: Runs their operations.
        token: Of the event loop.
    """

    def __init__(
        self,
        size: int,
        cluster: topology.Cluster,
        transport: Transport,
        *,
        algorithm: str | None,
        neighbours: Neighbours | None = None,
        clock: Clock | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.clock = clock or RealClock()
        self.now_ns = self.clock.now_ns
        self.size, self.left = size, set[int]()
        local = transport.ranks if ranks is None else ranks
        self.local = frozenset(local)
        self.failure: tuple[int, BaseException] | None = None
        self.token = trio.lowlevel.current_trio_token()
        self.engine = self.clock.engine(transport, cluster, self.token, algorithm=algorithm)
        self.locks = BufferLocks()  # of all ranks here: they may pass the same array
        self.everybody = tuple(range(size))  # one object: thousands of ranks would have one of thousands each
        self._cluster = cluster
        self._legal: set[tuple[int, ...]] = set()
        self._advised: set[str] = set()  # rules of which a warning has been given
        self._scope = trio.CancelScope()
        self._channels: dict[tuple[object, ...], Channel] = {}
        self._far: dict[int, FarChannel] = {}  # those that reach into other processes, by id
        self._neighbours = neighbours
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling = False
        self._doing: list[str] = []
        self._failed_ns = -1
        self._stalled: list[str] = []  # the first report of a rank that did not end in peace
        self._deadlocked = False
        self._others: dict[int, BaseException] = {}
        self._blas = BlasLimit()
        self._ranks = [Rank(self, rank) for rank in local]

    # -- life --------------------------------------------------------------------------------------------------

    async def live(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on every rank to the common end."""
        results: dict[int, T] = {}
        async with self._neighbours.attached(self) if self._neighbours else nullcontext():
            await self._live(main, args, timeout_s, results)
            if self._neighbours and self._scope.cancelled_caught and self.failure is None:
                self._stalled = await self._neighbours.reports(self._stalled)
        if self.failure is not None:
            raise self._rank_failed() from self.failure[1]
        if self._scope.cancelled_caught:
            raise StallError(None if self._deadlocked else timeout_s, self._stalled)
        return [results[rank.rank] for rank in self._ranks]

    async def _live(
        self,
        main: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        timeout_s: float | None,
        results: dict[int, T],
    ) -> None:
        if timeout_s is not None:
            self.clock.limit(timeout_s, self._scope)
        with tuned(), self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    for rank in self._ranks:
                        nursery.start_soon(self._live_rank, rank, main, args, results)
                if self._neighbours:
                    await self._neighbours.part()
            finally:
                await self._end()

    async def _live_rank(
        self, rank: Rank, main: Callable[..., Awaitable[T]], args: tuple[object, ...], results: dict[int, T]
    ) -> None:
        try:
            async with trio.open_nursery() as rank._nursery:
                finished = False
                try:
                    results[rank.rank] = await _begun(main, rank, args)
                    await rank._drain()
                    finished = True
                finally:  # while the nursery is open: what has not ended may still want to start a program
                    if not finished:
                        self._stalled = self._stalled or self.report()
                    rank._abandon(self.ended)
        except* (Exception, SystemExit) as group:
            error = only(group)
            if self._neighbours and self._is_consequence(rank, error):
                await self._neighbours.verdict()
            self.fail(rank, error)
        else:
            self._leave(rank)

    def _leave(self, rank: Rank) -> None:
        if self._neighbours:
            issued = {c.id: c.issued[rank.rank] for c in self._far.values() if rank.rank in c.issued}
            self._neighbours.tell_left(rank.rank, issued)
        self._left(rank.rank)

    def _left(self, rank: int) -> None:
        self.left.add(rank)
        for channel in list(self._channels.values()):
            if channel._meetings and rank in channel.members:  # most have none: asking that first is quicker
                channel.rank_left(rank)

    async def _end(self) -> None:
        """Settle what is unfinished and join every thread; bounded by the compute that runs."""
        with trio.CancelScope(shield=True):
            for rank in self._ranks:
                rank._abandon(self.ended)
            for rank in self._ranks:
                await rank._compute.ended()
            await self.engine.aclose()
            self.clock.buffers.close()
            self._blas.lift()

    # -- failure -----------------------------------------------------------------------------------------------

    def fail(self, rank: Rank, error: BaseException) -> None:
        """Take note that `rank` raised; the first culprit ends the world."""
        culprit, cause = origin(rank.rank, error)
        doing = [line for r in self._ranks if r.rank == culprit for line in r._doing or r._unfinished_lines()]
        if self.failure is not None:
            if not isinstance(error, PeerError) and culprit != self.failure[0]:
                if self._is_before(culprit):
                    self.failure, (culprit, cause), self._doing = (culprit, cause), self.failure, doing
                self._others[culprit] = cause
            return
        if self._neighbours:
            self._neighbours.tell_failure(culprit, cause, doing)
        self._end_because(culprit, cause, doing, spared=rank)

    def _is_before(self, culprit: int) -> bool:
        """Whether a rank fails in the same instant as the first culprit and comes before it; virtual time only."""
        assert self.failure is not None
        return self.clock.name == "virtual" and self._failed_ns == self.now_ns() and culprit < self.failure[0]

    def fail_elsewhere(self, culprit: int, cause: BaseException, doing: list[str]) -> None:
        """Take note that a rank of another process ended the world."""
        if self.failure is None:
            self._end_because(culprit, cause, doing)

    def _end_because(self, culprit: int, cause: BaseException, doing: list[str], *, spared: Rank | None = None) -> None:
        self.failure, self._doing, self._failed_ns = (culprit, cause), doing, self.now_ns()
        for rank in self._ranks:
            if rank is not spared:
                rank._abandon(self.peer_failed)
        self._scope.cancel(reason=f"rank {culprit} failed: {in_one_line(cause)}")

    def _is_consequence(self, rank: Rank, error: BaseException) -> bool:
        """Whether the error looks like the consequence of one in another process, which is about to be told."""
        culprit, cause = origin(rank.rank, error)
        return culprit not in self.local or isinstance(cause, TransportError)

    def ended(self) -> PeerFailedError:
        """Return the error of operations that the end of the world overtakes."""
        if self.failure is not None:
            return self.peer_failed()
        return PeerFailedError("the world has ended", culprit=-1)

    def peer_failed(self) -> PeerFailedError:
        """Return the error that operations get once the world has failed."""
        assert self.failure is not None
        culprit, cause = self.failure
        return PeerFailedError.caused_by(cause, f"rank {culprit} failed: {in_one_line(cause)}", culprit=culprit)

    def _rank_failed(self) -> RankFailedError:
        assert self.failure is not None
        culprit, cause = self.failure
        return RankFailedError(
            rank=culprit,
            cause=cause,
            where=where(cause),
            doing=self._doing,
            others=self._others,
            world_size=self.size,
        )

    def deadlock(self) -> None:
        """End the world because every rank is blocked and nothing is due; only virtual time can know."""
        self._deadlocked = True
        self._stalled = self.report()
        self._scope.cancel(reason="every rank is blocked, and nothing is due")

    def interrupted(self, error: BaseException) -> None:
        """Note on an interrupt who was waiting for whom."""
        more = [f"and {len(self._stalled) - _TOLD} lines more"] if len(self._stalled) > _TOLD else []
        for line in [*self._stalled[:_TOLD], *more]:
            error.add_note(f"  {line}")

    def report(self) -> list[str]:
        """Say of each rank what it waits for and on whom, one line each."""
        lines = []
        for rank in self._ranks:
            lines += [f"rank {rank.rank}: {line}" for line in rank._unfinished_lines(self._awaited)]
            if not rank._unfinished:
                state = "has finished" if rank.rank in self.left else "has nothing issued; its program is elsewhere"
                lines.append(f"rank {rank.rank}: {state}")
        return lines

    def _awaited(self, operation: CollectiveFuture[object]) -> str:
        missing = operation.port.channel.missing(operation.seq)
        return f"; waits for rank {', '.join(map(str, missing))}" if missing else ""

    # -- what its neighbours ask of it -----------------------------------------------------------------------------

    def far_channels(self) -> Iterable[FarChannel]:
        """Return the channels that reach into other processes."""
        return self._far.values()

    def far_channel(self, channel_id: int) -> FarChannel | None:
        """Return the one of that id, if a rank here has opened it."""
        return self._far.get(channel_id)

    def left_elsewhere(self, rank: int) -> None:
        """Take note that a rank of another process has finished its program."""
        self._left(rank)

    def stalled_elsewhere(self) -> None:
        """End the world because another process has waited long enough."""
        self._scope.cancel(reason="another process gave up")

    # -- what ranks ask of it ------------------------------------------------------------------------------------

    def channel(self, key: tuple[object, ...], name: str, members: tuple[int, ...]) -> Channel:
        """Return the channel of that key, the same for all ranks of this process."""
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = self._new_channel(key, name, members)
        return found

    def _new_channel(self, key: tuple[object, ...], name: str, members: tuple[int, ...]) -> Channel:
        if self._neighbours is None or self.local.issuperset(members):
            return Channel(self, key, name, members)
        channel = FarChannel(self, key, name, members, self._neighbours)
        self._far[channel.id] = channel
        return channel

    def soon(self, callback: Callable[[], None]) -> None:
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

    def limit_blas(self) -> None:
        """Give every compute thread one BLAS thread, until the world ends."""
        self._blas.impose()

    def place(self, rank: int) -> tuple[int, int]:
        """Return (node, local_rank)."""
        return divmod(rank, self._cluster.ranks_per_node or self.size)

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
        meta = {"script": sys.argv[0]} | self.clock.meta()
        return Timeline.collect(
            [rank.recorder for rank in self._ranks], world_size=self.size, clock=self.clock.name, meta=meta
        )
