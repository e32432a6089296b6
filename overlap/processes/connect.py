"""Connection of a process to the others of its world: membership, wires and control plane."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import msgpack
import trio

from transports import ArgumentError, NeuronLink, Router, Transport, factory, nearest
from transports.factory import Bootstrap
from transports.failures import LinkLostError
from transports.tls import Tls

from ..config import RunConfig
from ..errors import UsageError
from ..flight.folder import attempt
from ..notice import notify
from .control_plane import ControlPlane
from .identity import WORLDS, RendezvousConfig
from .inbox import MemberLostError
from .join import join
from .member import Membership
from .messages import MemberLost
from .place import Place
from .secret import user_secret
from .silence import SilenceLimits, identity
from .sockets import listening, local_address
from .status import Entering, Leaving, report_to_launcher

# How long the first process stays for the others to leave; whatever they still compute, they have been told.
LEAVE_S = 10.0
# From the first process to the last; a cluster's scheduler may start them a while apart.
JOIN_TIMEOUT_S = 60.0

_worlds = count()
"""A program may run several worlds, one after the other; each process counts them alike."""
_in_a_world = threading.Lock()
_attempts: list[int] = []
"""Which attempt of its job this process belongs to, once it has agreed on that with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The world of several processes, as one that has joined uses it."""

    transport: Transport  # Reaches every rank of the world
    control_plane: ControlPlane  # Tells the other processes about this one, and hears from them
    membership: Membership  # The control connection itself
    notices: Notices  # Lines of the transport for the user
    restart: int  # How often the launcher has started the job again

    async def leave(self) -> None:
        """Say goodbye: this process has done its part. Without it, its end is a loss to the others."""
        with trio.move_on_after(LEAVE_S):
            await self.membership.leave()


@asynccontextmanager
async def joined(
    place: Place, machine: str, run: RunConfig, *, wires: Callable[[Transport], Transport] = lambda default: default
) -> AsyncIterator[Joined]:
    """Meet the other processes and open the wires to them, for the length of an ``async with``.

    Args:
        place: Where this process stands.
        machine: Name of the cluster; all processes must mean the same.
        run: What joins them, how, and how long to wait for them.
        wires: Given memory inside the process and sockets or MPI between processes, returns what to use.

    Raises:
        JoinError: If not all came in time, or this process is not one of those expected.
        UsageError: If this process is in a world of its job already, such as in a compute of one of its ranks.
    """
    with _one_at_a_time():
        async with _joined(place, machine, run, wires=wires) as found:
            yield found


def count_world() -> None:
    """Count a world that this process joins late, so that the next world has the same number on all processes."""
    next(_worlds)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    if not _in_a_world.acquire(blocking=False):
        raise UsageError(
            "run: this process is in a world of its job already, and the others would wait for it in a second one; "
            "take a rank of this one, or clock='virtual'"
        )
    try:
        yield
    finally:
        _in_a_world.release()


@asynccontextmanager
async def _joined(
    place: Place, machine: str, run: RunConfig, *, wires: Callable[[Transport], Transport]
) -> AsyncIterator[Joined]:
    world = next(_worlds)
    config = await rendezvous(place, world, machine, run)
    each = place.ranks_per_process
    with _told(world + 1, each):
        on_joined = partial(report_to_launcher, Entering(world=world + 1, joined=True, ranks_each=each))
        async with met(place, config, run, wires=wires, on_joined=on_joined, on_lost=report_to_launcher) as found:
            yield found


@asynccontextmanager
async def met(
    place: Place,
    config: RendezvousConfig,
    run: RunConfig,
    *,
    wires: Callable[[Transport], Transport] = lambda default: default,
    on_joined: Callable[[], object] = lambda: None,
    on_lost: Callable[[MemberLost], object] = lambda lost: None,
) -> AsyncIterator[Joined]:
    """Do what `joined` does, at a given place.

    Args:
        place: Where this process stands.
        config: Where and how the processes meet; its listener is closed in the end.
        run: What joins them.
        wires: As for `joined`.
        on_joined: Called when all processes have met.
        on_lost: Called with each process that is lost.
    """
    each = place.ranks_per_process
    placement = [range(process * each, (process + 1) * each) for process in range(place.processes)]
    with config.listener or nullcontext():
        async with join(config, report=notify) as membership:
            on_joined()
            config = await _agreed(config, membership)
            notices = Notices()
            between = await _between(place, placement, config, membership, run, notices)

            def lose(lost: MemberLost) -> None:
                between.lose(placement[lost.member], lost.reason)

            membership.on_loss = lose  # until the wires are open; then the control plane tells losses
            transport = wires(Router([NeuronLink(list(place.ranks)), between]))
            async with _opened(transport):
                membership.on_loss = on_lost
                yield Joined(
                    transport=transport,
                    control_plane=ControlPlane(membership, placement, stopping=notices.cease, on_loss=lose),
                    membership=membership,
                    notices=notices,
                    restart=config.epoch // WORLDS,
                )


@contextmanager
def _told(world: int, ranks_each: int) -> Iterator[None]:
    """Tell the launcher of a world that this process enters, and that it is done with it."""
    report_to_launcher(Entering(world=world, joined=False, ranks_each=ranks_each))
    try:
        yield
    finally:
        report_to_launcher(Leaving(world=world))


async def _agreed(config: RendezvousConfig, membership: Membership) -> RendezvousConfig:
    """Let processes that have come from different attempts be of the latest: one may be there instead of another."""
    if config.fresh:
        told = await membership.exchange("epoch", str(config.epoch).encode())
        config = replace(config, epoch=max(int(epoch) for epoch in told))
        _attempts.append(config.epoch // WORLDS)
    return config


async def rendezvous(place: Place, world: int, machine: str, run: RunConfig) -> RendezvousConfig:
    """Return where and how the processes meet in one of their worlds, which are numbered from 0 in each attempt."""
    tls = run.tls_files()
    endpoint, secret, listener = place.endpoint, place.secret, None
    if endpoint is None:
        endpoint, secret, listener = await introduced(place)
    elif place.listener is not None:
        listener = socket.socket(fileno=os.dup(place.listener))  # the next world of this program listens there again
    restarts = bool(os.environ.get("OVERLAP_RESTART"))  # the launcher, which does it, says so
    ranks = f"{place.ranks_per_process} rank{'s' * (place.ranks_per_process != 1)} a process"
    return RendezvousConfig(
        job=place.job,
        epoch=(_attempts[-1] if _attempts else attempt()) * WORLDS + world,
        fresh=restarts and not _attempts,
        member=place.process,
        members=place.processes,
        endpoint=endpoint,
        listener=listener,
        secret=secret or user_secret(),
        tls=Tls(certificate=tls[0], key=tls[1], authority=tls[2]) if tls else None,
        timeout_s=run.join_timeout_s or JOIN_TIMEOUT_S,
        patience=SilenceLimits.given(lost_after_s=run.lost_after_s, outage_s=run.outage_s),
        process=identity(),
        ranks_each=place.ranks_per_process,
        detail=f"{ranks}, {machine}" + ", with --max-restarts" * restarts,
    )


async def introduced(place: Place) -> tuple[tuple[str, int], bytes, socket.socket | None]:
    """Let process 0 listen, and tell the others the endpoint and the secret through MPI, if no launcher has told them.

    Returns:
        The endpoint, the secret, and the listening socket on process 0.

    Raises:
        UsageError: If mpi4py is not installed.
    """
    try:
        from transports.mpi import introduce
    except ImportError:
        raise _missing(place) from None
    listener = None
    mine = b""
    if place.process == 0:
        host = socket.gethostname() if place.nodes > 1 else "127.0.0.1"
        listener = listening(host)
        mine = msgpack.packb([host, listener.getsockname()[1], secrets.token_bytes(32)])
    try:
        told = await introduce(mine)
    except ImportError:
        raise _missing(place) from None
    if len(told) != place.processes:
        raise _misfit(place, len(told))
    host, port, secret = msgpack.unpackb(told[0])
    return (str(host), int(port)), bytes(secret), listener


def _misfit(place: Place, seen: int) -> UsageError:
    library = sys.modules["mpi4py.MPI"].Get_library_version().split("\n")[0].split(",")[0].strip()
    return UsageError(
        f"{place.source} started {place.processes} processes, and the library of mpi4py ({library[:60]}) sees {seen}: "
        "it is not the launcher's; start with the mpiexec that belongs to it, install an mpi4py that was built for the "
        "launcher's library, or set MASTER_ADDR and MASTER_PORT"
    )


def _missing(place: Place) -> UsageError:
    return UsageError(
        f"{place.source} started {place.processes} processes and said nothing of where they meet: "
        "pip install mpi4py to let MPI introduce them, or set MASTER_ADDR and MASTER_PORT"
    )


async def _between(
    place: Place,
    placement: Sequence[Sequence[int]],
    config: RendezvousConfig,
    membership: Membership,
    run: RunConfig,
    notices: Notices,
) -> Transport:
    """Make what joins the processes: what is asked for, else memory and sockets, or MPI where that is all there is."""
    bootstrap = Bootstrap(
        member=place.process,
        placement=placement,
        exchange=partial(_exchange, membership),
        secret=config.secret,
        job=config.job,
        epoch=config.epoch,
        host=await trio.to_thread.run_sync(local_address, config.endpoint),
        tls=config.tls,
        # what is sent is checked by the event loop
        options=run.transport_options() | ({} if run.check is None else {"mailbox": False}),
        report=notices,
        note=notices.note,
        watched=True,
    )
    with _as_the_users():
        if run.transport not in (None, "auto"):
            return factory.find(run.transport)(bootstrap)
        return factory.find("mpi")(bootstrap) if place.endpoint is None else nearest.factory(bootstrap)


async def _exchange(membership: Membership, name: str, mine: bytes) -> list[bytes]:
    """Exchange what a transport needs; who is lost meanwhile is told as who is lost while wires are made."""
    try:
        return await membership.exchange(name, mine)
    except MemberLostError as error:
        raise LinkLostError(f"process {error.member} {error.how}") from None


@asynccontextmanager
async def _opened(transport: Transport) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        with _as_the_users():
            await stack.enter_async_context(transport.open())
        yield


@contextmanager
def _as_the_users() -> Iterator[None]:
    """Raise a `UsageError` for arguments that a transport refuses: the user has chosen them."""
    try:
        yield
    except ArgumentError as error:
        raise UsageError(f"transport: {error}") from None


class Notices:
    """Passes on what a transport has to say, until the world is stopped: then wires end because processes do.

    Attributes:
        show: Puts a line into the timeline, once there is one.
    """

    def __init__(self) -> None:
        self.show: Callable[[str], None] = lambda line: None
        self._ceased = False

    def __call__(self, line: str) -> None:
        """Show the user a line, unless `cease` was called before."""
        if not self._ceased:
            notify(line)

    def note(self, line: str) -> None:
        """Let the timeline show a line."""
        if not self._ceased:
            self.show(line)

    def cease(self) -> None:
        """Pass nothing on any more."""
        self._ceased = True
