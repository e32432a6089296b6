"""Life of one world in real time: set up, lived to its end, and its timeline kept."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import NeuronLink, Transport

from .. import trace_files
from ..config import RunConfig
from ..diagnostics import calling, is_interrupt
from ..errors import StallError, TraceWarning, UsageError, in_one_line
from ..flight.folder import FlightFile, attempt, began, open_flight
from ..notice import notify
from ..runtime.blame.stall import STALL_S, StallLimits
from ..runtime.epoch import Epoch
from ..runtime.world import World
from ..timeline.recording import KeptSteps
from ..timeline.sequence import in_sequence
from ..timeline.spans import Timeline

if TYPE_CHECKING:
    import topology

    from ..config import RunConfig
    from ..settings import Wires
    from .connect import Joined
    from .identity import RendezvousConfig
    from .member import Membership
    from .messages import MemberLost
    from .place import Place

T = TypeVar("T")


async def live(
    opened: AbstractAsyncContextManager[WorldSetup],
    place: Place | None,
    main: Callable[..., Awaitable[T]],
    args: tuple[object, ...],
    wanted: RunConfig,
    keeper: Keeper,
    begun: Callable[[World], None],
    *,
    told_to_end: Callable[[], bool] = lambda: False,
    epochs: Sequence[Epoch] = (),
) -> list[T]:
    """Run `main(rank, *args)` on the ranks of this process; keep their flight record and timeline.

    Args:
        opened: Sets up the world.
        place: Of this process among several; None if it is alone.
        main: The program of each rank.
        args: Its further arguments.
        wanted: Settings of the run.
        keeper: Keeps the timeline.
        begun: Is given the world before it lives.
        told_to_end: Whether a signal has told this process to end.
        epochs: Of the ranks here, if the world goes on after a loss.
    """
    failure: Exception | None = None
    async with opened as around:
        joined = around.joined
        restart = joined.restart if joined else attempt()
        flight = _flight(wanted, place, around, restart)
        world = World(
            around.size,
            around.cluster,
            around.transport,
            algorithm=wanted.algorithm,
            others=joined.control_plane if joined else None,
            check=wanted.check,
            flight=flight.writer if flight else None,
            restart=restart,
            state_dir=wanted.state_dir,
            steps=KeptSteps.given(wanted.trace_steps),
            epochs=epochs,
            limits=StallLimits(tell_s=wanted.stall_s or STALL_S, give_up_s=wanted.give_up_s),
        )
        begun(world)
        if joined is not None:
            joined.notices.show = world.show
        results: list[T] = []
        with _streamed(wanted, world, joined, keeper):
            try:
                results = await world.live(main, args, wanted.timeout_s)
            except Exception as error:  # raised outside, where no nursery of a transport wraps it in a group
                failure = error
            except BaseException as error:
                if is_interrupt(error):
                    _keep(flight, "interrupted", "interrupted")
                elif told_to_end():
                    _keep(flight, "interrupted", "told to end by a signal")
                raise
            finally:
                if failure is not None:
                    _keep(flight, "stalled" if isinstance(failure, StallError) else "failed", in_one_line(failure))
                if flight is not None:
                    flight.close(keep=flight.writer.ended)
                await keeper.keep(world.timeline, joined.membership if joined else None, failure)
        if joined is not None and failure is None:
            await joined.leave()
    if failure is not None:
        raise failure
    return results


def _streamed(wanted: RunConfig, world: World, joined: Joined | None, keeper: Keeper) -> AbstractContextManager[None]:
    """Write spans into a file for the length of the block, so that a killed run leaves a trace, if one is asked for."""
    if wanted.trace is None:
        return nullcontext()
    from .traces import (
        TraceStream,
        part_path,  # few runs keep a trace
        streamed,
    )

    membership = joined.membership if joined else None
    member = keeper.member if keeper.member is not None else membership.member if membership else 0
    path = part_path(os.path.abspath(wanted.trace), member)
    path = path.with_name(f"{path.name}.part")
    offset_ns = membership.clock.offset_ns if membership else 0

    def make() -> TraceStream:
        return TraceStream(path, world.recorders(), world.timeline(), offset_ns=offset_ns)

    return streamed(make, is_kept=lambda: not keeper.has_failed)


def _flight(wanted: RunConfig, place: Place | None, around: WorldSetup, restart: int) -> FlightFile | None:
    """Begin the flight record of this process."""
    name, start = began(
        job=place.label if place else None,
        restart=restart,
        process=place.process if place else 0,
        processes=place.processes if place else 1,
        world_size=around.size,
        script=sys.argv[0],
    )
    return open_flight(wanted.flight_dir, name, around.transport.ranks, start)


def _keep(flight: FlightFile | None, how: str, line: str) -> None:
    if flight is not None:
        flight.writer.end(how, rank=None, line=line, began_here=True)


DEFAULT_RANKS = 2  # on the local machine: the fewest that can show an overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSetup:
    """Cluster, wires and processes on which a world is built."""

    size: int  # Ranks in the world
    cluster: topology.Cluster  # Where they are placed
    transport: Transport  # Reaches them all; open
    joined: Joined | None = None  # The other processes, if there are any


@asynccontextmanager
async def alone(config: RunConfig) -> AsyncIterator[WorldSetup]:
    """Set up a world in this process."""
    ranks, wires = config.ranks, config.wires
    if ranks is None and isinstance(wires, Transport):
        ranks = len(wires.ranks)
    placed = cluster_of(config.cluster, ranks, told=config.origin("ranks", "cluster"))
    size = ranks or placed.world_size
    transport = around(NeuronLink(size), wires)
    if transport.ranks != tuple(range(size)):
        raise UsageError(f"transport: expected one of ranks 0 to {size - 1}, got one of ranks {list(transport.ranks)}")
    async with transport.open():
        yield WorldSetup(size=size, cluster=placed, transport=transport)


def around(wires: Transport, wrap: Wires | None) -> Transport:
    """Return the wires with the wrapper that the caller puts around them.

    Raises:
        UsageError: If that is no transport.
    """
    if wrap is None:
        return wires
    wrapped = wrap if isinstance(wrap, Transport) else wrap(wires)
    if not isinstance(wrapped, Transport):
        raise UsageError(
            f"transport: expected a transport of ranks {list(wires.ranks)}, or a function that makes one "
            f"of another, got {wrapped!r}"
        )
    return wrapped


@asynccontextmanager
async def among(
    place: Place,
    config: RunConfig,
    *,
    meeting: RendezvousConfig | None = None,
    on_lost: Callable[[MemberLost], object] = lambda lost: None,
) -> AsyncIterator[WorldSetup]:
    """Set up a world of several processes, of which this is one.

    Args:
        place: Where it stands.
        config: Settings of the run.
        meeting: Where and how the processes meet; by default as their launcher says.
        on_lost: Called with each process that is lost, if there is a `meeting`.
    """
    from .connect import joined, met

    placed, transport = _spread(place, config.cluster or "local", told=config.origin("cluster")), config.wires
    own = transport if isinstance(transport, Transport) else None
    if own is not None and (own.ranks, len(own.peers)) != (tuple(place.ranks), place.world_size):
        raise UsageError(
            f"transport: serves ranks {list(own.ranks)} and reaches {len(own.peers)}; this is process "
            f"{place.process} of {place.processes}, with ranks {list(place.ranks)} of {place.world_size}"
        )

    def wires(default: Transport) -> Transport:
        return own or around(default, transport)

    if meeting is None:
        opened = joined(place, placed.name, config, wires=wires)
    else:
        opened = met(place, meeting, config, wires=wires, on_lost=on_lost)
    async with opened as found:
        yield WorldSetup(size=place.world_size, cluster=placed, transport=found.transport, joined=found)


def cluster_of(cluster: str | topology.Cluster | None, ranks: int | None, *, told: str = "") -> topology.Cluster:
    """Return the cluster of that name; the plain machine has as many ranks as are asked for.

    Args:
        cluster: The cluster, its name, or None for the plain machine.
        ranks: How many ranks it is to have at least.
        told: Who has said so, for the error.

    Raises:
        UsageError: If there is no such cluster, or the ranks do not fit.
    """
    import topology  # here, because a program that only imports us should not pay for the machines

    if cluster is None or cluster == "local":
        return topology.cluster("local", ranks=ranks or DEFAULT_RANKS)
    try:
        placed = topology.cluster(cluster) if isinstance(cluster, str) else cluster
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{told}") from error
    if ranks is not None and ranks > placed.world_size:
        raise UsageError(f"ranks: {ranks} do not fit on {placed.name}, which has {placed.world_size}{told}")
    return placed


def _spread(place: Place, cluster: str | topology.Cluster, *, told: str) -> topology.Cluster:
    """Return the cluster, with as many nodes as the launcher has hosts, or on one host as the name says."""
    import topology

    if not isinstance(cluster, str):
        if cluster.world_size < place.world_size:
            raise UsageError(
                f"{place.source} started {place.world_size} ranks; {cluster.name} has {cluster.world_size}"
            )
        return cluster
    try:
        # on one host, "local x2" runs as two
        return topology.cluster(cluster, nodes=place.nodes if place.nodes > 1 else None, ranks=place.world_size)
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{told}") from error


class Keeper:
    """Keeps the timeline of one run. A trace that cannot be written costs neither results nor the error that is due.

    Attributes:
        member: Number of this process in names of files; None: that in its world.
        goes_on: Whether another world of the run follows one that has failed with an error.
        numbered: Gives the spans of a world the numbers of ranks that they have in the trace.
    """

    def __init__(self, wanted: RunConfig) -> None:
        self._wanted = wanted
        self._trouble: str | None = None
        self.member: int | None = None
        self.goes_on: Callable[[Exception], bool] = lambda error: False
        self.numbered: Callable[[Timeline], Timeline] = lambda timeline: timeline
        self._earlier: list[Timeline] = []  # of worlds that another one has followed

    @property
    def has_failed(self) -> bool:
        """Whether the trace could not be written."""
        return self._trouble is not None

    async def keep(
        self, timeline: Callable[[], Timeline], membership: Membership | None, failure: Exception | None = None
    ) -> None:
        """Hand on what was recorded; of several processes, the first one writes it for all, and that of all epochs.

        Args:
            timeline: Gives the spans.
            membership: This process among those of its world; None if it is alone.
            failure: The error that has ended the world.
        """
        if self._wanted.watcher is not None:
            self._wanted.watcher(timeline())
        if self._wanted.trace is None:
            return
        with self._minding(), trio.CancelScope(shield=True):
            numbered = self.numbered  # of this world
            if failure is not None and self.goes_on(failure):
                self._earlier.append(await trio.to_thread.run_sync(lambda: numbered(timeline())))
                return
            earlier, self._earlier = self._earlier, []

            def whole() -> Timeline:
                return in_sequence([*earlier, numbered(timeline())]) if earlier else numbered(timeline())

            if membership is None:  # in a thread: there may be much to write, and the loop may be the user's
                await trio.to_thread.run_sync(self._write, whole, self._wanted.trace)
                return
            from .traces import write_together

            if await write_together(whole, self._wanted.trace, membership):
                trace_files.keep(self._wanted.trace)

    async def keep_rest(self) -> None:
        """Write the spans of worlds that no other has followed after all into a file of this process."""
        if not self._earlier or self._wanted.trace is None:
            return
        from .traces import part_path

        earlier, self._earlier = self._earlier, []
        path = part_path(self._wanted.trace, self.member or 0)
        with self._minding(), trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._write, lambda: in_sequence(earlier), path)
            notify(f"the trace of this process, until the others went on without it, is in {path}")

    def keep_now(self, timeline: Callable[[], Timeline]) -> None:
        """Do what `keep` does, for a world in virtual time, whose loop waits for nothing real."""
        if self._wanted.watcher is not None:
            self._wanted.watcher(timeline())
        if self._wanted.trace is not None:
            with self._minding():
                self._write(timeline, self._wanted.trace)

    def _write(self, timeline: Callable[[], Timeline], path: str | PathLike[str]) -> None:
        from ..timeline.files.tracefile import write_trace

        write_trace(timeline(), path)
        trace_files.keep(path)

    @contextmanager
    def _minding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no error of writing may hide the results or the error of the run
            usual = isinstance(error, UsageError)
            self._trouble = str(error) if usual else f"trace: cannot write {self._wanted.trace}: {error!r}"

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Add a note to an error of the block if the trace could not be written."""
        try:
            yield
        except BaseException as error:
            if self._trouble is not None:
                error.add_note(self._trouble)
            raise

    def warn(self) -> None:
        """Warn if the trace could not be written."""
        if self._trouble is not None:
            warnings.warn(TraceWarning(self._trouble), stacklevel=calling()[1])
