"""Front door on Dask: `run` starts a world on the workers of a cluster, and returns its results to the client."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from os import PathLike
from typing import TYPE_CHECKING, TypeVar, cast

import cloudpickle
import distributed

from ..config import RunConfig
from ..engines.gang import GangOutcome, GangSpec
from ..engines.job import WAIT_S, config_of_arguments, name_error, run_gang
from ..errors import UsageError
from .data import compute_partitions
from .gang import DaskGang

if TYPE_CHECKING:
    import topology

T = TypeVar("T")


def run(
    client: distributed.Client,
    main: Callable[..., Awaitable[T]],
    *args: object,
    ranks: int,
    ranks_per_worker: int = 1,
    data: object = None,
    workers: Sequence[str] | None = None,
    max_restarts: int = 0,
    wait_s: float = WAIT_S,
    name: str | None = None,
    cluster: str | topology.Cluster = "local",
    trace: str | PathLike[str] | None = None,
    trace_steps: str | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
    algorithm: str | None = None,
    check: str | None = None,
    state_dir: str | None = None,
    flight_dir: str | None = None,
) -> list[T]:
    """Run `main(rank, *args)` on ranks in workers of a Dask cluster, and return their results in rank order.

    Each worker has one task, which occupies one of its threads. All of them start, or none: of two gangs, one waits.
    If one fails or its worker is lost, all end, and the first failure is raised here: the rank, its operation and its
    line. Nothing stays pinned to a worker. With `max_restarts` they start again on the workers that are there, and the
    program goes on from `rank.state` or from checkpoints. A client that goes away takes the tasks along.

    A thread cannot be killed: a rank that is inside a long compute ends when that returns.

    Args:
        client: The cluster.
        main: An async function; its first argument is the rank. It is pickled, by value if it is not importable there.
        args: Further arguments, pickled too.
        ranks: How many ranks.
        ranks_per_worker: Ranks of each worker, which is one process.
        data: A Dask collection, or futures. Each rank is given a dict of its partitions, by number, as the argument
            after the rank: those that its worker holds already; workers that hold more are chosen first.
        workers: Addresses of the workers that may be chosen; by default all.
        max_restarts: How often the world may be started again.
        wait_s: How long to wait for workers, and for one of their threads. After a second a line names missing ones.
        name: Name of the job, for `overlap top`; two jobs of one name do not run at once. By default a new one.
        cluster: As for `overlap.run`.
        trace: Where this process writes the timeline of all ranks.
        trace_steps: As for `overlap.run`.
        timeout_s: As for `overlap.run`; of each attempt.
        transport: Name of the transport between processes, as for `overlap run --transport`.
        algorithm: As for `overlap.run`.
        check: As for `overlap.run`.
        state_dir: Folder of the states of `rank.state`, for restarts, that all machines share.
        flight_dir: Where this process puts the flight records of a run that fails.

    Raises:
        UsageError: For arguments that cannot be meant; for objects that cannot be sent; for workers with another
            version of this package; if a job of that name runs.
        ResourcesError: If there are not enough workers in time.
        RankFailedError: When a rank raises, or its worker is lost; its error is the `__cause__`.
        StallError: As `overlap.run`.
    """
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise UsageError(f"client: expected a distributed.Client that is not asynchronous, got {client!r}")
    config = config_of_arguments(
        main, args if data is None else ({}, *args), ranks=ranks, cluster=cluster, trace=trace,
        trace_steps=trace_steps, timeout_s=timeout_s, transport=transport, algorithm=algorithm, check=check,
        state_dir=state_dir, flight_dir=flight_dir,
    )  # fmt: skip
    results = run_configured(
        client, main, args, config, ranks_per_worker=ranks_per_worker, data=data, workers=workers,
        max_restarts=max_restarts, wait_s=wait_s, name=name,
    )  # fmt: skip
    return cast("list[T]", results)


def run_configured(
    client: distributed.Client,
    main: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    config: RunConfig,
    *,
    ranks_per_worker: int = 1,
    data: object = None,
    workers: Sequence[str] | None = None,
    max_restarts: int = 0,
    wait_s: float = WAIT_S,
    name: str | None = None,
) -> list[object]:
    """Run `main` as `run` does, with settings that are checked already."""

    @contextmanager
    def reserve(spec: GangSpec) -> Iterator[Callable[[GangSpec], GangOutcome]]:
        """Reserve the name of the job for the block, and yield a function that runs an attempt."""
        with _reserved_name(spec, client):
            partitions = None if data is None else compute_partitions(data, client)
            yield DaskGang(client=client, workers=workers, wait_s=wait_s, partitions=partitions).run_attempt

    return run_gang(
        main, args, config, reserve,
        engine="Dask", cloudpickle=cloudpickle, ranks_each=ranks_per_worker, argument="ranks_per_worker", name=name,
        wait_s=wait_s, max_restarts=max_restarts, import_path=sys.path[:1],
    )  # fmt: skip


@contextmanager
def default_client(address: str | None) -> Iterator[distributed.Client]:
    """Yield the client of this process, or a new one of the cluster at an address, or of a new local cluster."""
    try:
        context = nullcontext(distributed.Client.current())
    except ValueError:
        context = distributed.Client(address)
    with context as client:
        yield client


@contextmanager
def _reserved_name(spec: GangSpec, client: distributed.Client) -> Iterator[None]:
    """Reserve the name of a job for the block; the lease ends with its driver."""
    lease = distributed.Semaphore(
        max_leases=1, name=f"overlap job {spec.job}", scheduler_rpc=client.scheduler, loop=client.loop
    )
    if not lease.acquire(timeout=1):
        raise name_error(spec)
    try:
        yield
    finally:
        with suppress(Exception):  # the cluster is gone
            lease.release()
            lease.close()
