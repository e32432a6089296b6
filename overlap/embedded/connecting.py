"""`overlap.connect`: a rank for programs that own their main thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, ParamSpec

from .. import trace_files
from ..config import ARGUMENT, RunConfig
from ..errors import UsageError
from ..hints import suggest_arguments
from ..processes.identity import JOIN_TIMEOUT_S
from ..processes.place import LONGEST_JOB
from ..processes.real_time import run_ranks
from ..processes.secret import check_secret_argument
from ..processes.trace_writer import TraceWriter
from ..runtime.interrupts import deferring_interrupts
from ..runtime.rank import Rank
from ..runtime.world import World
from ..settings import Wires
from ..uncaught import install_error_hooks
from .connection import Connection
from .rendezvous import Meeting, RendezvousStore, rendezvous_at_endpoint, rendezvous_through_store

if TYPE_CHECKING:
    import topology

# Longest `job=`: where ranks meet through a store, "-" and 16 digits follow it, other ones for each connection.
_LONGEST_NAME = LONGEST_JOB - 17

P = ParamSpec("P")


def _enter_returned_connection(connect: Callable[P, Connection]) -> Callable[P, Connection]:
    """Decorator: enter the returned connection, so that a Ctrl-C that came meanwhile is raised there, and ends it.

    It is the outermost one: Python 3.11 looks for signals after a call that unpacks arguments, but not after
    `__enter__`. A program that itself calls `connect(**settings)` may get the error in place of the connection there.
    """

    @wraps(connect)
    def connect_and_enter(*args: P.args, **kwargs: P.kwargs) -> Connection:
        return connect(*args, **kwargs).__enter__()

    return connect_and_enter


@_enter_returned_connection
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

    The event loop runs in a thread of its own. Any thread can issue operations on `.rank` and wait with
    `future.result()`. A thread that runs asyncio can also await futures. A process may have several connections, of one
    job or of different ones, and may use `overlap.run` as well. Settings are also read from the environment
    (`OVERLAP_TRACE` and so on: see `overlap.config`), which is not changed.

    A fork of this process is not a rank: calls in the fork raise errors, and pending operations have failed there. Each
    worker that is to be a rank must connect by itself.

        with overlap.connect(rank=index, size=4, endpoint="127.0.0.1:29500") as connection:
            total = connection.rank.all_reduce(np.ones(8)).result()

    Args:
        rank: Index of this rank.
        size: Number of ranks.
        endpoint: Address at which rank 0 listens, as "HOST:PORT"; the same on all ranks. None: pass a store.
        store: An object in place of an endpoint, with `set(key, value)` and a `get(key)` that waits, such as a store of
            `torch.distributed`. Rank 0 then finds a free port, and makes a new secret.
        secret: Proof of membership, at least 8 bytes; the same on all ranks. None: with a store, the secret that rank 0
            makes; with an endpoint on the loopback interface, a secret that all processes of this user share.
        transport: Name of the transport between ranks, or a transport, as for `overlap.run`.
        timeout_s: Seconds to wait for all ranks; None: 60 s.
        job: Name of the job. Only ranks of the same job meet.
        host: With a store, on rank 0: the name or address at which the other ranks reach it. None: it is detected.
        nodes: Number of machines. Each has equally many ranks, in order. None: with a store it is detected; otherwise 1
            on the loopback interface, and one for each rank elsewhere.
        cluster: As for `overlap.run`.
        trace: File to which the timeline of all ranks is written when the connection is closed; None: no timeline.
        algorithm: As for `overlap.run`.
        check: As for `overlap.run`.

    Returns:
        The connection. Use it in a ``with``, or call `close` once all operations are done.

    Raises:
        UsageError: An argument is invalid.
        JoinError: Not all ranks have joined in time.
    """
    install_error_hooks()
    _check_rank(rank, size)
    if size > 1 and (endpoint is None) == (store is None):
        raise UsageError("endpoint: give either endpoint= or store=, where the ranks find each other")
    if not isinstance(job, str) or not 0 < len(job) <= _LONGEST_NAME or not job.isprintable():
        raise UsageError(f"job: expected 1 to {_LONGEST_NAME} printable characters, got {job!r}")
    strong = None if secret is None else check_secret_argument("secret", secret)
    run_config = _make_run_config(cluster, transport, trace=trace, algorithm=algorithm, check=check, ranks=size)
    if run_config.survive and endpoint is not None:  # set by OVERLAP_SURVIVE
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
    with deferring_interrupts():  # no KeyboardInterrupt between the start of the loop's thread and the return
        with rendezvous as meeting:
            return _open_connection(rank, size, meeting, run_config, limit_s)


def _open_connection(
    rank: int, size: int, meeting: Meeting | None, run_config: RunConfig, timeout_s: float
) -> Connection:
    """Return a connection when its world has started, alone without a meeting; raise JoinError after `timeout_s`."""

    async def run_world(on_start: Callable[[World], None], main: Callable[[Rank], Awaitable[None]]) -> None:
        """Set up the world, and run its rank until the connection closes; before, `on_start` gets the world."""
        from ..processes.connect import make_place_and_setup  # imported here, because it imports much

        place, setup = make_place_and_setup(meeting, run_config, source="overlap.connect", timeout_s=timeout_s)
        with TraceWriter(run_config) as writer:
            await run_ranks(setup, place, main, (), run_config, writer, on_start)

    connection = Connection(rank, size, run_world)
    connection.open()
    return connection


def _check_rank(rank: int, size: int) -> None:
    """Raise `UsageError` unless `size` is a number of ranks, and `rank` the index of one of them."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"size: expected a positive integer, got {size!r}")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
        raise UsageError(f"rank: expected 0 to {size - 1}, got {rank!r}")


def _make_run_config(cluster: str | topology.Cluster, transport: str | Wires | None, **settings: Any) -> RunConfig:
    """Return settings, from the environment where None or "local" is passed; raise UsageError if one is invalid."""
    name, wires = (transport, None) if isinstance(transport, str) else (None, transport)
    is_default = isinstance(cluster, str) and cluster == "local"
    arguments = RunConfig.from_values(cluster=None if is_default else cluster, transport=name, wires=wires, **settings)
    config = RunConfig.from_environment().merged_over(arguments).with_changes(ARGUMENT, ranks=arguments.ranks)
    config.check_values()
    if config.trace is not None:
        trace_files.give_out(str(config.trace))
    return config
