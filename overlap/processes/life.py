"""One world in real time: its setup, the run of its ranks, and the files of its timeline."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import NeuronLink, Transport

from .. import trace_files
from ..config import RunConfig
from ..diagnostics import calling, is_interrupt
from ..errors import StallError, TraceWarning, UsageError, in_one_line
from ..flight.folder import FlightFile, describe_start, open_flight, restart_count
from ..kernel_facts import process_identity
from ..notice import notify
from ..runtime.blame.stall import STALL_S, StallLimits
from ..runtime.epoch import Epoch
from ..runtime.world import World
from ..timeline.recording import KeptSteps
from ..timeline.spans import Timeline

if TYPE_CHECKING:
    import topology

    from ..config import RunConfig
    from ..settings import Wires
    from .connect import WorldConnection
    from .identity import RendezvousConfig
    from .join import Membership
    from .place import Place
    from .traces import TraceFile
    from .wire import MemberLost

T = TypeVar("T")


async def run_ranks(
    opened: AbstractAsyncContextManager[WorldSetup],
    own_place: Place | None,
    main: Callable[..., Awaitable[T]],
    args: tuple[object, ...],
    run_config: RunConfig,
    keeper: Keeper,
    on_start: Callable[[World], None],
    *,
    has_signal: Callable[[], bool] = lambda: False,
    epochs: Sequence[Epoch] = (),
) -> list[T]:
    """Run `main(rank, *args)` on the ranks of this process; write their flight record and timeline.

    Args:
        opened: Sets up the world.
        own_place: Place of this process among several; None if it is alone.
        main: The program of each rank.
        args: Further arguments of the program.
        run_config: Settings of the run.
        keeper: Writes the timeline.
        on_start: Called with the world before its ranks start.
        has_signal: Whether a signal has asked this process to end.
        epochs: Epochs of the ranks here, if the world goes on after a loss.
    """
    failure: Exception | None = None
    async with opened as setup:
        connection = setup.connection
        restart = connection.restart if connection else restart_count()
        flight = _open_flight_record(run_config, own_place, setup, restart)
        world = World(
            setup.size,
            setup.cluster,
            setup.transport,
            algorithm=run_config.algorithm,
            others=connection.control_plane if connection else None,
            check=run_config.check,
            flight=flight.writer if flight else None,
            restart=restart,
            state_dir=run_config.state_dir,
            steps=KeptSteps.from_setting(run_config.trace_steps),
            epochs=epochs,
            limits=StallLimits(tell_s=run_config.stall_s or STALL_S, give_up_s=run_config.give_up_s),
        )
        on_start(world)
        if connection is not None:
            connection.notices.show = world.record_wire_event
        results: list[T] = []
        ended = ""  # how, for the flight record
        label = own_place.job if own_place else f"process {os.getpid()}"
        keeper.begin(world, connection.membership if connection else None, run=f"{label}.{restart}")
        try:
            results = await world.live(main, args, run_config.timeout_s)
        except Exception as error:  # raised outside, where no nursery of a transport wraps it in a group
            failure, ended = error, in_one_line(error)
        except BaseException as error:
            ended = "interrupted" if is_interrupt(error) else "told to end by a signal" if has_signal() else ""
            raise
        finally:
            if flight is not None:
                if ended:
                    how = "stalled" if isinstance(failure, StallError) else "failed" if failure else "interrupted"
                    flight.writer.end(how, rank=None, line=ended, began_here=True)
                flight.close(keep=flight.writer.ended)
            await keeper.keep(world, connection.membership if connection else None, failure)
        if connection is not None and failure is None:
            await connection.leave()
    if failure is not None:
        raise failure
    return results


def _open_flight_record(
    run_config: RunConfig, own_place: Place | None, setup: WorldSetup, restart: int
) -> FlightFile | None:
    """Open the flight record of this process; None if it cannot be written."""
    name, start = describe_start(
        job=own_place.label if own_place else None,
        restart=restart,
        process=own_place.process if own_place else 0,
        processes=own_place.processes if own_place else 1,
        world_size=setup.size,
        script=sys.argv[0],
    )
    return open_flight(run_config.flight_dir, name, setup.transport.ranks, start)


DEFAULT_RANKS = 2  # on the local machine: the fewest that can show an overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSetup:
    """Cluster, transport and processes of a world."""

    size: int  # Ranks in the world
    cluster: topology.Cluster  # The machines of the ranks
    transport: Transport  # Reaches all ranks; open
    connection: WorldConnection | None = None  # Connection to the other processes, if there are any


@asynccontextmanager
async def single_process_setup(config: RunConfig) -> AsyncIterator[WorldSetup]:
    """Set up a world in this process."""
    ranks, wires = config.ranks, config.wires
    if ranks is None and isinstance(wires, Transport):
        ranks = len(wires.ranks)
    placed = find_cluster(config.cluster, ranks, source=config.origin("ranks", "cluster"))
    size = ranks or placed.world_size
    transport = wrap_transport(NeuronLink(size), wires)
    if transport.ranks != tuple(range(size)):
        raise UsageError(f"transport: expected one of ranks 0 to {size - 1}, got one of ranks {list(transport.ranks)}")
    async with transport.open():
        yield WorldSetup(size=size, cluster=placed, transport=transport)


def wrap_transport(wires: Transport, wrap: Wires | None) -> Transport:
    """Return the transport with the wrapper of the caller around it.

    Raises:
        UsageError: If the result is no transport.
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
async def multi_process_setup(
    own_place: Place,
    config: RunConfig,
    *,
    meeting: RendezvousConfig | None = None,
    on_lost: Callable[[MemberLost], object] = lambda lost: None,
) -> AsyncIterator[WorldSetup]:
    """Set up a world of several processes, including this one.

    Args:
        own_place: Place of this process.
        config: Settings of the run.
        meeting: Configuration to join the others; by default from the launcher.
        on_lost: Called with each process that is lost, if there is a `meeting`.
    """
    from .connect import join_world

    cluster, transport = _cluster_of_place(own_place, config), config.wires
    fixed = transport if isinstance(transport, Transport) else None
    if fixed is not None and (fixed.ranks, len(fixed.peers)) != (tuple(own_place.ranks), own_place.world_size):
        raise UsageError(
            f"transport: serves ranks {list(fixed.ranks)} and reaches {len(fixed.peers)}; this is process "
            f"{own_place.process} of {own_place.processes}, with ranks {list(own_place.ranks)} of "
            f"{own_place.world_size}"
        )

    def wires(default: Transport) -> Transport:
        return fixed or wrap_transport(default, transport)

    opened = join_world(own_place, cluster.name, config, wires=wires, meeting=meeting, on_lost=on_lost)
    async with opened as connection:
        yield WorldSetup(
            size=own_place.world_size, cluster=cluster, transport=connection.transport, connection=connection
        )


def place_and_setup(
    meeting: tuple[RendezvousConfig, int] | None,
    run_config: RunConfig,
    *,
    source: str,
    timeout_s: float | None = None,
    ranks_each: int = 1,
    job: str | None = None,
    restart: int = 0,
) -> tuple[Place | None, AbstractAsyncContextManager[WorldSetup]]:
    """Return the place of a process that no launcher of ours has started, and the setup of its world.

    Args:
        meeting: Where the processes meet, and how many machines they are on; None: this one is alone.
        run_config: Settings of the run.
        source: What has started the processes, for messages.
        timeout_s: How long to wait for all processes; by default that of the settings.
        ranks_each: Ranks of each process.
        job: Name of the job in flight records; by default that of the meeting.
        restart: How often the job has been started before.
    """
    if meeting is None:
        return None, single_process_setup(run_config)
    from .identity import JOIN_TIMEOUT_S, WORLDS
    from .place import Place

    machine, nodes = getattr(run_config.cluster, "name", run_config.cluster or "local"), meeting[1]
    config = replace(
        meeting[0],
        epoch=meeting[0].epoch + restart * WORLDS,
        detail=f"{source}, {machine}, {ranks_each} a process, on {nodes} node{'s' * (nodes != 1)}",
        process=process_identity(),
        timeout_s=timeout_s or run_config.join_timeout_s or JOIN_TIMEOUT_S,
        ranks_each=ranks_each,
    )
    place = Place(
        source=source,
        process=config.member,
        processes=config.members,
        ranks_per_process=ranks_each,
        node=config.member // (config.members // nodes),  # each has equally many processes, in order
        nodes=nodes,
        endpoint=config.endpoint,
        job=job or config.job,
        secret=config.secret,
    )
    return place, multi_process_setup(place, run_config, meeting=config)


def find_cluster(cluster: str | topology.Cluster | None, ranks: int | None, *, source: str = "") -> topology.Cluster:
    """Return a cluster that has at least `ranks` ranks; without a name, the local machine with `ranks` ranks.

    Args:
        cluster: The cluster, its name, or None for the plain machine.
        ranks: Least number of ranks.
        source: Source of the values, as the end of the error.

    Raises:
        UsageError: If there is no such cluster, or the ranks do not fit.
    """
    import topology  # here, because a program that only imports us should not pay for the machines

    if cluster is None or cluster == "local":
        return topology.cluster("local", ranks=ranks or DEFAULT_RANKS)
    try:
        is_local = isinstance(cluster, str) and cluster.split()[0] == "local"  # "local x2" has as many ranks as wanted
        placed = topology.cluster(cluster, ranks=ranks if is_local else None) if isinstance(cluster, str) else cluster
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{source}") from error
    if ranks is not None and ranks > placed.world_size:
        raise UsageError(
            f"ranks: {ranks} do not fit on {placed.name}, which has {placed.world_size}{source}; "
            "give fewer, or a larger cluster"
        )
    return placed


def _cluster_of_place(own_place: Place, config: RunConfig) -> topology.Cluster:
    """Return the cluster of the settings, with one node for each host; on a single host, with its own nodes."""
    import topology

    cluster = config.cluster or "local"
    if not isinstance(cluster, str):
        if cluster.world_size < own_place.world_size:
            raise UsageError(
                f"{own_place.source} started {own_place.world_size} ranks; {cluster.name} has {cluster.world_size}; "
                "start as many"
            )
        return cluster
    try:
        # on one host, "local x2" runs as two
        nodes = own_place.nodes if own_place.nodes > 1 else None
        return topology.cluster(cluster, nodes=nodes, ranks=own_place.world_size)
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{config.origin('cluster')}") from error


class Keeper:
    """Writes the timeline of one run. A trace that cannot be written hides neither results nor the error of the run.

    Attributes:
        member: Number of this process in names of files; None: its number in its world.
        goes_on: Whether another world of the run follows one that has failed with an error.
        numbers: Number in the first world of each rank of the present one; None: the same.
        world_size: Ranks of the first world; None: those of the present one.
    """

    def __init__(self, run_config: RunConfig) -> None:
        self._run_config = run_config
        self._failure: str | None = None
        self.member: int | None = None
        self.goes_on: Callable[[Exception], bool] = lambda error: False
        self.numbers: Sequence[int] | None = None
        self.world_size: int | None = None
        self._file: TraceFile | None = None

    def begin(self, world: World, membership: Membership | None, *, run: str) -> None:
        """Begin to write the spans of a world into the file of this process, if a trace is requested.

        Args:
            world: The world.
            membership: This process among those of its world; None if it is alone.
            run: The job and its attempt.
        """
        if self._run_config.trace is None:
            return
        from ..timeline.files.trace import Header
        from .traces import TraceFile, part_path  # few runs write a trace

        member = self.member if self.member is not None else membership.member if membership else 0
        if self._file is None:
            self._file = TraceFile(part_path(os.path.abspath(self._run_config.trace), member))
        header = Header(
            world_size=self.world_size or world.size, clock=world.backend.name, meta=world.facts(), run=run,
            process=member,
        )  # fmt: skip
        clock = None if membership is None else lambda: membership.clock
        with suppress(OSError):  # the end reports it
            self._file.begin(header, world.recorders(), clock=clock, numbers=self.numbers)

    async def keep(self, world: World, membership: Membership | None, failure: Exception | None = None) -> None:
        """Write the last spans of a world; after the last world, one file of all processes.

        Args:
            world: The world.
            membership: This process among those of its world; None if it is alone.
            failure: The error that has ended the world.
        """
        if self._run_config.watcher is not None:
            self._run_config.watcher(world.timeline())
        if self._file is None:
            return
        with self._storing_failure(), trio.CancelScope(shield=True):
            file = self._file
            # in a thread: it may take long, and the loop may be the user's
            await trio.to_thread.run_sync(file.end_section, world.facts())
            if failure is not None and self.goes_on(failure):
                return
            self._file = None
            file.end()
            await self._finish(file, membership)

    async def _finish(self, file: TraceFile, membership: Membership | None) -> None:
        """Make one file of those of all processes, and note it for the commands that report it."""
        from .traces import join_files, write_together

        path = self._run_config.trace
        assert path is not None
        if membership is None:
            failure, _ = await trio.to_thread.run_sync(join_files, [file.path], path)
            if failure:
                raise UsageError(failure)
            trace_files.note_written(path)
        elif await write_together(file, path, membership):
            trace_files.note_written(path)

    async def keep_rest(self) -> None:
        """Print where the spans of earlier worlds are, if no further world has followed."""
        if self._file is not None:
            file, self._file = self._file, None
            file.end()
            notify(f"the trace of this process, until the others went on without it, is in {file.path}")

    def keep_now(self, timeline: Callable[[], Timeline]) -> None:
        """Write the spans of a world in virtual time, without a thread."""
        if self._run_config.watcher is not None:
            self._run_config.watcher(timeline())
        if self._run_config.trace is not None:
            from ..timeline.files.trace import write_trace

            with self._storing_failure():
                write_trace(timeline(), self._run_config.trace)
                trace_files.note_written(self._run_config.trace)

    @contextmanager
    def _storing_failure(self) -> Iterator[None]:
        """Store an error of the block as the reason why the trace could not be written; it is not raised."""
        try:
            yield
        except Exception as error:  # no error of writing may hide the results or the error of the run
            usual = isinstance(error, UsageError)
            self._failure = str(error) if usual else f"trace: cannot write {self._run_config.trace}: {error!r}"

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Add a note to an error of the block if the trace could not be written."""
        try:
            yield
        except BaseException as error:
            if self._failure is not None:
                error.add_note(self._failure)
            raise

    def warn(self) -> None:
        """Warn if the trace could not be written."""
        if self._failure is not None:
            warnings.warn(TraceWarning(self._failure), stacklevel=calling()[1])
