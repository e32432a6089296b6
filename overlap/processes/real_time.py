"""World in real time: its cluster and transport, and the run of its ranks, with their flight record and trace."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import NeuronLink, Transport

from ..config import RunConfig
from ..diagnostics import is_interrupt
from ..errors import StallError, UsageError, one_line_text
from ..flight.folder import FlightFile, describe_start, open_flight, restart_count
from ..notice import notify
from ..runtime.blame.stall import STALL_S, StallLimits
from ..runtime.epoch import Epoch
from ..runtime.world import World
from ..timeline.recording import KeptSteps
from .trace_writer import TraceWriter

if TYPE_CHECKING:
    import topology

    from ..settings import Wires
    from .control import ControlPlane
    from .join import Membership
    from .place import ProcessPlace

T = TypeVar("T")

DEFAULT_RANKS = 2  # on the local machine: the fewest that can show an overlap
#: How long the first process waits for the others to leave, which may still compute.
LEAVE_S = 10.0


async def run_ranks(
    opened: AbstractAsyncContextManager[WorldSetup],
    own_place: ProcessPlace | None,
    main: Callable[..., Awaitable[T]],
    args: tuple[object, ...],
    run_config: RunConfig,
    writer: TraceWriter,
    on_start: Callable[[World], None],
    *,
    has_signal: Callable[[], bool] = lambda: False,
    epochs: Sequence[Epoch] = (),
) -> list[T]:
    """Run `main(rank, *args)` on the ranks of this process; write their flight record and timeline.

    Args:
        opened: Context manager that sets up the world, and closes it.
        own_place: Place of this process among several; None: it is alone.
        main: The program of each rank.
        args: Further arguments of the program.
        run_config: Settings of the run.
        writer: Writes the trace.
        on_start: Called with the world before its ranks start.
        has_signal: Returns whether a signal has asked this process to end.
        epochs: Epochs of the ranks of this process, if the run survives losses.

    Returns:
        The results of `main`, by rank of this process.

    Raises:
        Exception: The error that has ended the world, once the world is closed.
    """
    failure: Exception | None = None
    async with opened as setup:
        membership = setup.membership
        flight = _open_flight_record(run_config, own_place, setup)
        world = World(
            setup.size,
            setup.cluster,
            setup.transport,
            algorithm=run_config.algorithm,
            others=setup.control_plane,
            check=run_config.check,
            flight=flight.writer if flight else None,
            restart=setup.restart,
            state_dir=run_config.state_dir,
            steps=KeptSteps.from_setting(run_config.trace_steps),
            epochs=epochs,
            limits=StallLimits(report_s=run_config.stall_s or STALL_S, give_up_s=run_config.give_up_s),
        )
        on_start(world)
        if setup.notices is not None:
            setup.notices.record_in_timeline = world.record_wire_event
        results: list[T] = []
        how = ended = ""  # for the flight record: the kind of the end, and one line about it
        label = own_place.job if own_place else f"process {os.getpid()}"
        writer.begin_world(world, membership, run=f"{label}.{setup.restart}")
        try:
            results = await world.run_to_end(main, args, run_config.timeout_s)
        except Exception as error:  # raised below, outside of `opened`, so that no nursery wraps it in a group
            failure, ended = error, one_line_text(error)
            how = "stalled" if isinstance(error, StallError) else "failed"
        except BaseException as error:
            how = "interrupted"
            if is_interrupt(error) or has_signal():
                ended = "interrupted" if is_interrupt(error) else "told to end by a signal"
            raise
        finally:
            if flight is not None:
                if ended:
                    flight.writer.record_world_end(how, rank=None, line=ended, began_here=True)
                flight.close(keep=flight.writer.ended)
            await writer.end_world(world, failure, alone=membership is None)
        if membership is not None and failure is None:
            with trio.move_on_after(LEAVE_S):
                await membership.leave()
            await writer.join_all_files(membership)
    if failure is not None:
        raise failure
    return results


def _open_flight_record(run_config: RunConfig, own_place: ProcessPlace | None, setup: WorldSetup) -> FlightFile | None:
    """Return None if the record cannot be written."""
    job, process, processes = (
        (own_place.unique_job_name, own_place.process, own_place.processes) if own_place else (None, 0, 1)
    )
    name, start = describe_start(
        job=job, restart=setup.restart, process=process, processes=processes, world_size=setup.size, script=sys.argv[0]
    )
    return open_flight(run_config.flight_dir, name, setup.transport.ranks, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSetup:
    """Cluster, transport and processes of a world."""

    size: int  # Ranks in the world
    cluster: topology.Cluster  # The machines of the ranks
    transport: Transport  # Reaches all ranks; open
    restart: int  # Number of earlier attempts of the job
    # of a world of several processes
    membership: Membership | None = None  # The control connection to the other processes
    control_plane: ControlPlane | None = None  # Exchanges events of ranks with them
    notices: TransportNotices | None = None  # Lines of the transport for the user


class TransportNotices:
    """Prints lines of a transport for the user, until the world is stopped.

    After that, wires end because the processes end, which is no news.

    Attributes:
        record_in_timeline: Adds a line to the timeline, once there is one.
    """

    def __init__(self) -> None:
        self.record_in_timeline: Callable[[str], None] = lambda line: None
        self._is_stopped = False

    def __call__(self, line: str) -> None:
        """Print a line, unless `stop_reports` was called before."""
        if not self._is_stopped:
            notify(line)

    def record_line(self, line: str) -> None:
        """Add a line to the timeline, unless `stop_reports` was called before."""
        if not self._is_stopped:
            self.record_in_timeline(line)

    def stop_reports(self) -> None:
        """Drop all further lines of the transport."""
        self._is_stopped = True


@asynccontextmanager
async def single_process_setup(config: RunConfig) -> AsyncIterator[WorldSetup]:
    """Set up a world in this process.

    Raises:
        UsageError: The cluster, the ranks or the transport of the settings do not fit together.
    """
    ranks, wires = config.ranks, config.wires
    if ranks is None and isinstance(wires, Transport):
        ranks = len(wires.ranks)
    placed = find_cluster(config.cluster, ranks, source=config.source_text("ranks", "cluster"))
    size = ranks or placed.world_size
    transport = wrap_transport(NeuronLink(size), wires)
    if transport.ranks != tuple(range(size)):
        fact = f"it serves ranks {list(transport.ranks)}, and the world has ranks 0 to {size - 1}"
        served = len(transport.ranks)
        other_way = f", or ranks={served}" if transport.ranks == tuple(range(served)) else ""
        raise UsageError(f"transport: {fact}; pass one for {size} ranks{other_way}")
    async with transport.open():
        yield WorldSetup(size=size, cluster=placed, transport=transport, restart=restart_count())


def wrap_transport(wires: Transport, wrap: Wires | None) -> Transport:
    """Return the transport that the user wants in place of `wires`.

    Args:
        wires: The transport that overlap has made.
        wrap: The user's transport; or a function that returns one around `wires`; None: `wires` itself.

    Raises:
        UsageError: The result is no transport.
    """
    if wrap is None:
        return wires
    wrapped = wrap if isinstance(wrap, Transport) else wrap(wires)
    if not isinstance(wrapped, Transport):
        expected = f"a transport of ranks {list(wires.ranks)}, or a function that makes one of another"
        raise UsageError(f"transport: expected {expected}, got {wrapped!r}")
    return wrapped


def find_cluster(cluster: str | topology.Cluster | None, ranks: int | None, *, source: str = "") -> topology.Cluster:
    """Return a cluster that has at least `ranks` ranks; without a name, the local machine with `ranks` ranks.

    Args:
        cluster: The cluster, or its name; None: the local machine.
        ranks: Least number of ranks; None: any, or 2 on the local machine.
        source: Text about the origin of the two values, such as a variable; it ends the error message.

    Raises:
        UsageError: There is no such cluster, or the ranks do not fit.
    """
    import topology  # here, because a program that only imports us should not pay for the machines

    if cluster is None or cluster == "local":
        return topology.cluster("local", ranks=ranks or DEFAULT_RANKS)
    if isinstance(cluster, str):
        try:
            is_local = cluster.split()[0] == "local"  # "local x2" may have any number of ranks
            cluster = topology.cluster(cluster, ranks=ranks if is_local else None)
        except topology.TopologyError as error:
            raise UsageError(f"cluster: {error}{source}") from error
    if ranks is not None and ranks > cluster.world_size:
        reason = f"{ranks} do not fit on {cluster.name}, which has {cluster.world_size}{source}"
        raise UsageError(f"ranks: {reason}; give fewer, or a larger cluster")
    return cluster


def cluster_of_place(own_place: ProcessPlace, config: RunConfig) -> topology.Cluster:
    """Return the cluster of the settings for a world of several processes.

    It has one node for each host; on a single host, the nodes that its name has, such as "local x2".

    Raises:
        UsageError: There is no such cluster, or it has too few ranks.
    """
    import topology

    cluster = config.cluster or "local"
    if not isinstance(cluster, str):
        if cluster.world_size < own_place.world_size:
            started = f"cluster: {own_place.source} started {own_place.world_size} ranks"
            raise UsageError(f"{started}; {cluster.name} has {cluster.world_size}; start fewer, or pass a larger one")
        return cluster
    try:
        # on one host, "local x2" runs as two
        nodes = own_place.nodes if own_place.nodes > 1 else None
        return topology.cluster(cluster, nodes=nodes, ranks=own_place.world_size)
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{config.source_text('cluster')}") from error
