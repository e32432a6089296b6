"""The front door: `run` and `run_async` open the surroundings of a world, let it live, and keep its timeline."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import NeuronLink, Transport

from .errors import UsageError
from .settings import from_environment, next_trace_path
from .world import World

if TYPE_CHECKING:
    import topology

    from .launch.environment import Place
    from .launch.joining import Joined

T = TypeVar("T")

__all__ = ["run", "run_async"]

_SIGNS = {"OVERLAP_NODE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}

DEFAULT_RANKS = 2  # on the local machine: the fewest that can show an overlap


def run(
    main: Callable[..., Awaitable[T]],
    *args: object,
    ranks: int | None = None,
    cluster: str | topology.Cluster = "local",
    clock: str = "real",
    trace: str | PathLike[str] | None = None,
    timeout_s: float | None = None,
    transport: Transport | None = None,
    algorithm: str | None = None,
) -> list[T]:
    """Run `main(rank, *args)` on every rank and return their results in rank order.

    Args:
        main: An async function; its first argument is the rank.
        args: Further arguments, the same objects on every rank of this process.
        ranks: How many ranks; by default those of the cluster, or 2 on the local machine.
        cluster: A cluster or its name, such as "trn2.48xlarge x4"; "local" has no rules.
        clock: "real".
        trace: Where to write the timeline as a Chrome trace-event file when the run ends, well or badly.
        timeout_s: Give up after that many seconds and say who waits for whom.
        transport: What carries the bytes; by default `NeuronLink`, which joins the ranks inside this process.
        algorithm: Use this algorithm wherever it exists, such as "ring"; by default the fastest.

    Raises:
        UsageError: At once, for arguments that cannot be meant.
        RankFailedError: When a rank raises; names the first culprit, its error is the `__cause__`.
        StallError: When `timeout_s` is over.
    """
    entry = partial(
        run_async,
        main,
        *args,
        ranks=ranks,
        cluster=cluster,
        clock=clock,
        trace=trace,
        timeout_s=timeout_s,
        transport=transport,
        algorithm=algorithm,
    )
    try:
        return trio.run(entry)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        raise


async def run_async(
    main: Callable[..., Awaitable[T]],
    *args: object,
    ranks: int | None = None,
    cluster: str | topology.Cluster = "local",
    clock: str = "real",
    trace: str | PathLike[str] | None = None,
    timeout_s: float | None = None,
    transport: Transport | None = None,
    algorithm: str | None = None,
) -> list[T]:
    """Do what `run` does, inside a Trio program. Cancelling it ends all ranks and leaves nothing behind.

    What a launcher has put in the environment (see `overlap.settings`, `overlap.launch`) wins over the arguments.
    """
    told = from_environment()
    place = _place()
    ranks, timeout_s, algorithm = told.ranks or ranks, told.timeout_s or timeout_s, told.algorithm or algorithm
    cluster, trace = told.cluster or cluster, next_trace_path(told.trace) if told.trace else trace
    if clock != "real":
        raise UsageError(f"clock: {clock!r} is unknown; known are real")
    _check_run(main, ranks, timeout_s, trace)
    if algorithm is not None:
        from .collectives.select import check_algorithm  # and with it the generators

        check_algorithm(algorithm)
    opened = _alone(ranks, cluster, transport) if place is None else _among(place, cluster, transport)
    failure: Exception | None = None
    async with opened as around:
        neighbours = around.joined.neighbours if around.joined else None
        world = World(around.size, around.cluster, around.transport, algorithm=algorithm, neighbours=neighbours)
        try:
            return await world.live(main, args, timeout_s)
        except Exception as error:  # raised outside, where no nursery of a transport wraps it in a group
            failure = error
        finally:
            if trace is not None:
                await _keep(world, trace, around.joined)
    raise failure


def _place() -> Place | None:
    """Ask the environment, if it looks as if anybody had started several processes."""
    if _SIGNS.isdisjoint(os.environ):
        return None
    from .launch.environment import find_place  # and with it all that processes need to meet

    return find_place()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What a world stands on.

    Attributes:
        size: Ranks in the world.
        cluster: Where they are placed.
        transport: Reaches them all; open.
        joined: The other processes, if there are any.
    """

    size: int
    cluster: topology.Cluster
    transport: Transport
    joined: Joined | None = None


@asynccontextmanager
async def _alone(
    ranks: int | None, cluster: str | topology.Cluster, transport: Transport | None
) -> AsyncIterator[_Surroundings]:
    """Open the surroundings of a world in this process."""
    if ranks is None and transport is not None:
        ranks = len(transport.ranks)
    placed = _cluster(cluster, ranks)
    size = ranks or placed.world_size
    transport = transport or NeuronLink(size)
    if transport.ranks != tuple(range(size)):
        raise UsageError(f"transport: joins ranks {list(transport.ranks)}, but the world has ranks 0 to {size - 1}")
    async with transport.open():
        yield _Surroundings(size=size, cluster=placed, transport=transport)


@asynccontextmanager
async def _among(
    place: Place, cluster: str | topology.Cluster, transport: Transport | None
) -> AsyncIterator[_Surroundings]:
    """Open the surroundings of a world of several processes, of which this is one."""
    from .launch.joining import joined

    placed = _spread(place, cluster)
    if transport is not None and (transport.ranks, len(transport.peers)) != (tuple(place.ranks), place.world_size):
        raise UsageError(
            f"transport: serves ranks {list(transport.ranks)} and reaches {len(transport.peers)}; this is process "
            f"{place.process} of {place.processes}, with ranks {list(place.ranks)} of {place.world_size}"
        )
    async with joined(place, placed.name, transport=transport) as around:
        yield _Surroundings(size=place.world_size, cluster=placed, transport=around.transport, joined=around)


async def _keep(world: World, trace: str | PathLike[str], joined: Joined | None) -> None:
    """Write the timeline; of several processes, the first one writes it for all."""
    if joined is not None:
        from .launch.traces import write_together

        await write_together(world.timeline(), trace, joined.membership)
        return
    from .timeline.tracefile import write_trace

    write_trace(world.timeline(), trace)


def _check_run(main: object, ranks: object, timeout_s: float | None, trace: str | PathLike[str] | None) -> None:
    if not callable(main):
        raise UsageError(f"main: expected an async function, got {type(main).__name__}")
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise UsageError(f"ranks: expected a positive integer, got {ranks!r}")
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"timeout_s: expected a positive number of seconds, got {timeout_s!r}")
    if trace is not None and not Path(trace).parent.is_dir():
        raise UsageError(f"trace: the folder {str(Path(trace).parent)!r} does not exist")


def _cluster(cluster: str | topology.Cluster, ranks: int | None) -> topology.Cluster:
    import topology  # here, because a program that only imports us should not pay for the machines

    if cluster == "local":
        return topology.cluster("local", ranks=ranks or DEFAULT_RANKS)
    placed = topology.cluster(cluster) if isinstance(cluster, str) else cluster
    if ranks is not None and ranks > placed.world_size:
        raise UsageError(f"ranks: {ranks} do not fit on {placed.name}, which has {placed.world_size}")
    return placed


def _spread(place: Place, cluster: str | topology.Cluster) -> topology.Cluster:
    """Return the cluster, with as many nodes as the launcher says."""
    import topology

    if not isinstance(cluster, str):
        if cluster.world_size < place.world_size:
            raise UsageError(
                f"{place.source} started {place.world_size} ranks; {cluster.name} has {cluster.world_size}"
            )
        return cluster
    return topology.cluster(cluster, nodes=place.nodes, ranks=place.world_size)
