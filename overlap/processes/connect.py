"""Connection of a process to the others of its world: membership, wires and control plane."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import msgspec
import trio

from transports import ArgumentError, NeuronLink, Router, Transport, factory, nearest
from transports.factory import Bootstrap
from transports.failures import LinkLostError
from transports.tls import Tls

from ..config import RunConfig
from ..errors import UsageError
from ..flight.folder import restart_count
from ..kernel_facts import process_identity
from ..notice import notify
from .control import ControlPlane
from .identity import JOIN_TIMEOUT_S, WORLDS, RendezvousConfig, SilenceLimits
from .introduce import introduce_by_mpi
from .join import Membership, join
from .members import MemberLostError
from .place import ProcessPlace
from .real_time import TransportNotices, WorldSetup, cluster_of_place, single_process_setup, wrap_transport
from .secret import user_secret
from .shared_folder import check_shared_folder
from .sockets import local_address
from .status import Entering, Leaving, report_to_launcher
from .wire import MemberLost

_worlds = count()
"""Numbers of worlds: a program may run several, one after the other, in the same order in all processes."""
# Held while this process is in a world of its job.
_world_lock = threading.Lock()
_attempts: list[int] = []
"""The attempt of the job, once this process has agreed on it with the others."""


@asynccontextmanager
async def join_launched_world(own_place: ProcessPlace, run: RunConfig) -> AsyncIterator[WorldSetup]:
    """Join the other processes as `join_world` does, at the endpoint that the launcher has set.

    The launcher gets a report when this process enters the world, when all have joined, and at the end.

    Args:
        own_place: Place of this process.
        run: Settings of the run.

    Raises:
        UsageError: This process is in a world of its job already, as when a rank's own function calls `run`.
    """
    machine = cluster_of_place(own_place, run).name
    with ExitStack() as stack:
        if not _world_lock.acquire(blocking=False):
            fact = "this process is in a world of its job already, and the others would wait for it in a second one"
            raise UsageError(f"run: {fact}; take a rank of this one, or clock='virtual'")
        stack.callback(_world_lock.release)
        world = next(_worlds)
        meeting = await make_rendezvous_config(own_place, world, machine, run)
        entering = Entering(world=world + 1, joined=False, ranks_each=own_place.ranks_per_process)
        report_to_launcher(entering)
        # also when the world fails, before the lock is released
        stack.callback(report_to_launcher, Leaving(world=world + 1))
        report_joined = partial(report_to_launcher, msgspec.structs.replace(entering, joined=True))
        async with join_world(own_place, run, meeting, on_joined=report_joined, on_lost=report_to_launcher) as setup:
            yield setup


@asynccontextmanager
async def join_world(
    own_place: ProcessPlace,
    run: RunConfig,
    meeting: RendezvousConfig,
    *,
    on_joined: Callable[[], object] = lambda: None,
    on_lost: Callable[[MemberLost], object] = lambda lost: None,
) -> AsyncIterator[WorldSetup]:
    """Join the other processes, and open the wires to them, for the length of an ``async with``.

    Args:
        own_place: Place of this process.
        run: Settings of the run.
        meeting: Configuration with which to join; its listener is closed at the end.
        on_joined: Called when all processes have joined.
        on_lost: Called with each loss of a process once the wires are open.

    Raises:
        JoinError: Not all processes joined in time, or this process was refused.
        UsageError: The cluster or the transport of the settings does not fit the place.
    """
    cluster, wires = cluster_of_place(own_place, run), run.wires
    fixed = wires if isinstance(wires, Transport) else None
    if fixed is not None and (fixed.ranks, len(fixed.peers)) != (tuple(own_place.ranks), own_place.world_size):
        process = f"process {own_place.process} of {own_place.processes}"
        ranks = f"ranks {list(own_place.ranks)} of {own_place.world_size}"
        served = f"serves ranks {list(fixed.ranks)} of {len(fixed.peers)}"
        advice = "pass one made for this process, or leave it out"
        raise UsageError(f"transport: {served}; this is {process}, with {ranks}; {advice}")
    placement = own_place.placement
    async with AsyncExitStack() as stack:
        if meeting.listener is not None:
            stack.enter_context(meeting.listener)
        membership = await stack.enter_async_context(join(meeting, report=notify))
        on_joined()
        config = await _agree_on_attempt(membership, meeting)
        await check_shared_folder(own_place, membership, config.timeout_s)
        notices = TransportNotices()
        between = await _make_transport(own_place, config, membership, run, notices)

        def lose(lost: MemberLost) -> None:
            between.lose(placement[lost.member], lost.reason)

        membership.on_loss = lose  # until the wires are open; then the control plane reports losses
        transport = fixed or wrap_transport(Router([NeuronLink(list(own_place.ranks)), between]), wires)
        with _convert_argument_errors():
            await stack.enter_async_context(transport.open())
        membership.on_loss = on_lost
        yield WorldSetup(
            size=own_place.world_size,
            cluster=cluster,
            transport=transport,
            restart=config.epoch // WORLDS,
            membership=membership,
            control_plane=ControlPlane(membership, placement, stopping=notices.stop_reports, on_loss=lose),
            notices=notices,
        )


async def _agree_on_attempt(membership: Membership, config: RendezvousConfig) -> RendezvousConfig:
    """Return the configuration with the highest attempt number of all processes, which may differ in their first world.

    A process that its launcher has replaced may count fewer attempts. Later worlds exchange nothing.
    """
    if not config.fresh:
        return config
    epochs = await membership.exchange("epoch", str(config.epoch).encode())
    config = replace(config, epoch=max(map(int, epochs)))
    _attempts.append(config.epoch // WORLDS)
    return config


def make_place_and_setup(
    meeting: tuple[RendezvousConfig, int] | None,
    run_config: RunConfig,
    *,
    source: str,
    timeout_s: float | None = None,
    ranks_each: int = 1,
    job: str | None = None,
    restart: int = 0,
) -> tuple[ProcessPlace | None, AbstractAsyncContextManager[WorldSetup]]:
    """Return the place of a process that a foreign launcher has started, and the setup of its world.

    Args:
        meeting: Configuration to join the other processes, and the number of their machines; None: this process is
            alone, and so the returned place is None.
        run_config: Settings of the run.
        source: Name of the launcher, for messages.
        timeout_s: Time to wait for all processes, in seconds; None: that of the settings.
        ranks_each: Number of ranks of each process.
        job: Name of the job in flight records; None: that of the configuration.
        restart: Number of earlier attempts of the job.
    """
    if meeting is None:
        return None, single_process_setup(run_config)
    config, nodes = meeting
    # the name of the cluster, whether the settings have an object, a name or nothing
    machine = getattr(run_config.cluster, "name", run_config.cluster or "local")
    config = replace(
        config,
        epoch=config.epoch + restart * WORLDS,
        detail=f"{source}, {machine}, {ranks_each} a process, on {nodes} node{'s' * (nodes != 1)}",
        process=process_identity(),
        timeout_s=timeout_s or run_config.join_timeout_s or JOIN_TIMEOUT_S,
        ranks_each=ranks_each,
    )
    place = ProcessPlace(
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
    return place, join_world(place, run_config, config)


async def make_rendezvous_config(own_place: ProcessPlace, world: int, machine: str, run: RunConfig) -> RendezvousConfig:
    """Return the configuration with which a process joins a world of this attempt.

    If the launcher has set no endpoint, MPI sends one, see `introduce_by_mpi`, whose errors may be raised.

    Args:
        own_place: Place of this process.
        world: Number of the world in this attempt, from 0.
        machine: Name of the cluster.
        run: Settings of the run.
    """
    tls = run.tls_files()
    endpoint, secret, listener = own_place.endpoint, own_place.secret, None
    if endpoint is None:
        endpoint, secret, listener = await introduce_by_mpi(own_place, run.join_timeout_s or JOIN_TIMEOUT_S)
    elif own_place.listener is not None:
        # a copy, because the next world of this program uses the descriptor again
        listener = socket.socket(fileno=os.dup(own_place.listener))
    restarts = bool(os.environ.get("OVERLAP_RESTART"))  # set by a launcher that restarts the job
    ranks = f"{own_place.ranks_per_process} rank{'s' * (own_place.ranks_per_process != 1)} a process"
    return RendezvousConfig(
        job=own_place.job,
        epoch=(_attempts[-1] if _attempts else restart_count()) * WORLDS + world,
        fresh=restarts and not _attempts,
        member=own_place.process,
        members=own_place.processes,
        endpoint=endpoint,
        listener=listener,
        secret=secret or user_secret(),
        tls=Tls(certificate=tls[0], key=tls[1], authority=tls[2]) if tls else None,
        timeout_s=run.join_timeout_s or JOIN_TIMEOUT_S,
        patience=SilenceLimits.of_run(lost_after_s=run.lost_after_s, outage_s=run.outage_s),
        process=process_identity(),
        ranks_each=own_place.ranks_per_process,
        detail=f"{ranks}, {machine}" + ", with --max-restarts" * restarts,
    )


async def _make_transport(
    own_place: ProcessPlace,
    config: RendezvousConfig,
    membership: Membership,
    run: RunConfig,
    notices: TransportNotices,
) -> Transport:
    """Return that of the settings, by default `transports.nearest`; raise `UsageError` if an option does not fit it."""
    bootstrap = Bootstrap(
        member=own_place.process,
        placement=own_place.placement,
        exchange=partial(_exchange_for_transport, membership),
        secret=config.secret,
        job=config.job,
        epoch=config.epoch,
        # in a thread, because it may ask a name server
        host=await trio.to_thread.run_sync(local_address, config.endpoint),
        tls=config.tls,
        options=run.transport_options(),
        report=notices,
        note=notices.record_line,
        watched=True,
    )
    with _convert_argument_errors():
        if run.transport not in (None, "auto"):
            return factory.find_factory(run.transport)(bootstrap)
        return nearest.factory(bootstrap)


async def _exchange_for_transport(membership: Membership, name: str, part: bytes) -> list[bytes]:
    """Exchange parts; if a process is lost, raise `LinkLostError`, an error of transports."""
    try:
        return await membership.exchange(name, part)
    except MemberLostError as error:
        raise LinkLostError(f"process {error.member} {error.how}") from None


@contextmanager
def _convert_argument_errors() -> Iterator[None]:
    """Turn an `ArgumentError` of a transport into a `UsageError`, because the user has set the arguments."""
    try:
        yield
    except ArgumentError as error:
        raise UsageError(f"transport: {error}") from None
