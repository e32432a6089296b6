"""`overlap.connect`: a rank for programs that own their main thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..config import ARGUMENT, RunConfig
from ..errors import UsageError
from ..hints import suggest_arguments
from ..processes.identity import JOIN_TIMEOUT_S
from ..processes.place import LONGEST_JOB
from ..processes.real_time import run_ranks
from ..processes.secret import strong_secret
from ..processes.trace_writer import TraceWriter
from ..runtime.interrupts import deferring_interrupts, interruption_point
from ..runtime.rank import Rank
from ..runtime.world import World
from ..settings import Wires
from ..uncaught import report_uncaught
from .connection import Connection
from .rendezvous import Meeting, RendezvousStore, rendezvous_at_endpoint, rendezvous_through_store

if TYPE_CHECKING:
    import topology


@suggest_arguments
def connect(
    rank: int,
    size: int,
    *,
    endpoint: str | None = None,
    store: RendezvousStore | None = None,
    secret: bytes | str | None = None,
    transport: str | Wires | None = None,
    timeout_s: float | None = None,
    job: str = "overlap",
    host: str | None = None,
    nodes: int | None = None,
    cluster: str | topology.Cluster = "local",
    trace: str | PathLike[str] | None = None,
    algorithm: str | None = None,
    check: str | None = None,
) -> Connection:
    """Join a world as one rank, in a program that owns its main thread, and return when all ranks have joined.

    The event loop runs in a thread of its own; any thread issues on `.rank` and waits with `future.result()`, also one
    that runs asyncio, where futures can be awaited as well. A process may have several connections, of one job or of
    different ones, and beside them `overlap.run`. Nothing is taken from or put into the environment but settings
    (`OVERLAP_TRACE` and so on: see `overlap.config`).

    A fork of this process is no rank: calls there raise, and pending operations have failed. Workers that are ranks
    connect on their own.

        with overlap.connect(rank=index, size=4, endpoint="127.0.0.1:29500") as connection:
            total = connection.rank.all_reduce(np.ones(8)).result()

    Args:
        rank: Index of this rank.
        size: How many ranks there are.
        endpoint: Where rank 0 listens, as "HOST:PORT"; the same on all ranks.
        store: Instead: an object with `set(key, value)` and a `get(key)` that waits, such as a store of
            `torch.distributed`. Rank 0 then finds a free port and a new secret by itself.
        secret: Proof of membership, at least 8 bytes; the same on all ranks. By default that of the store; or, where
            the endpoint is on the loopback interface, one that all processes of this user share.
        transport: Name of the transport between ranks, or a transport, as for `overlap.run`.
        timeout_s: How long to wait for all ranks; by default 60 s.
        job: Only ranks of one job meet.
        host: Name or address of rank 0 that the others reach, with a store; by default it is found.
        nodes: How many machines; each has equally many ranks, in order. By default that is found, if there is a store.
        cluster: As for `overlap.run`.
        trace: Where to write the timeline of all ranks when the connection is closed.
        algorithm: As for `overlap.run`.
        check: As for `overlap.run`.

    Returns:
        The connection; leave its `with`, or call its `close`, once all is done.

    Raises:
        UsageError: For arguments that cannot be meant.
        JoinError: If not all ranks have joined in time.
    """
    report_uncaught()
    _check_rank(rank, size)
    if size > 1 and (endpoint is None) == (store is None):
        raise UsageError("endpoint: give either endpoint= or store=, where the ranks find each other")
    if not isinstance(job, str) or not job or len(job) > LONGEST_JOB - 17 or not job.isprintable():
        raise UsageError(f"job: expected 1 to {LONGEST_JOB - 17} printable characters, got {job!r}")
    strong = None if secret is None else strong_secret("secret", secret)
    run_config = _make_run_config(cluster, transport, trace=trace, algorithm=algorithm, check=check, ranks=size)
    if run_config.survive and endpoint is not None:
        raise UsageError(
            "survive: after a loss, a program that owns its main thread cannot be called again; start it with "
            "--max-restarts instead of --survive; PyTorch's go on by `overlap.torch.next_world`"
        )
    limit_s = timeout_s or run_config.join_timeout_s or JOIN_TIMEOUT_S
    rendezvous: AbstractContextManager[Meeting | None]
    if size == 1:
        rendezvous = nullcontext()
    elif store is None:
        rendezvous = nullcontext(rendezvous_at_endpoint(str(endpoint), rank, size, secret=strong, job=job, nodes=nodes))
    else:
        rendezvous = rendezvous_through_store(store, rank, size, secret=strong, job=job, nodes=nodes, host=host)
    with deferring_interrupts():
        with rendezvous as meeting:
            connection = _open_connection(rank, size, meeting, run_config, limit_s)
        try:
            interruption_point()
        except BaseException as error:  # the program never gets the connection
            connection.fail(error)
            raise
    return connection


def _open_connection(
    rank: int, size: int, meeting: Meeting | None, run_config: RunConfig, timeout_s: float
) -> Connection:
    async def run_world(on_start: Callable[[World], None], main: Callable[[Rank], Awaitable[None]]) -> None:
        """Set up the world, alone or with the other processes, and run its rank until the connection closes."""
        from ..processes.connect import place_and_setup  # and with it all that processes need to meet

        place, setup = place_and_setup(meeting, run_config, source="overlap.connect", timeout_s=timeout_s)
        with TraceWriter(run_config) as writer:
            await run_ranks(setup, place, main, (), run_config, writer, on_start)

    connection = Connection(rank, size, run_world)
    connection.open()
    return connection


def _check_rank(rank: int, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"size: expected a positive integer, got {size!r}")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
        raise UsageError(f"rank: expected 0 to {size - 1}, got {rank!r}")


def _make_run_config(cluster: str | topology.Cluster, transport: str | Wires | None, **settings: Any) -> RunConfig:
    """Return the settings of a connection, from its arguments and the environment, after their checks."""
    name, wires = (transport, None) if isinstance(transport, str) else (None, transport)
    is_default = isinstance(cluster, str) and cluster == "local"
    arguments = RunConfig.given(cluster=None if is_default else cluster, transport=name, wires=wires, **settings)
    config = RunConfig.from_environment().over(arguments).changed(ARGUMENT, ranks=arguments.ranks)
    config.verify()
    return config
