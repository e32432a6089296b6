"""The backend `overlap` of torch.distributed: torch's default group is a world, its other groups are groups of it."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from inspect import signature
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
import trio
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from ..embedded.connecting import connect
from ..embedded.connection import Connection
from ..errors import OverlapError, UsageError
from ..processes.introduce import introduce_by_mpi
from ..processes.place import ProcessPlace, find_place
from ..runtime.rank import Rank
from . import private, surviving
from .errors import backend_error
from .process_group import ProcessGroup

# Longest wait of `destroy_process_group` for other ranks. After that the program continues, while a thread keeps the
# world until they have left, too; the end of the process waits for that thread.
_LEAVE_S = 5.0


_JOINED: list[Connection] = []
"""The connection to the world of torch's default group; empty if there is none."""


def register() -> None:
    """Register the backend `overlap` and `init_method="overlap://"` with torch, once.

    This also replaces `monitored_barrier` and `_set_pg_timeout` of c10d for the whole process: the functions of torch
    refuse or ignore backends that they do not know by name. For groups of other backends, the replacements call torch's
    functions. A method of DDP's Reducer is replaced, too, see `keep_works_of_forwards`.
    """
    # `is_backend_available` would load the entry point, which is this function.
    if "overlap" not in dist.Backend.backend_list:
        dist.Backend.register_backend("overlap", _create_group, extended_api=True, devices=["cpu"])
        private.replace_in_c10d("monitored_barrier", partial(_call_group_or_original, ProcessGroup.monitored_barrier))
        private.replace_in_c10d("_set_pg_timeout", partial(_call_group_or_original, ProcessGroup.set_timeout))
        private.keep_works_of_forwards()
    register_scheme()


def _call_group_or_original(
    method: Callable[..., None], original: Callable[..., None], *args: Any, **keywords: Any
) -> None:
    """Call a method of our `ProcessGroup` in place of torch's function; for other backends' groups, the function.

    The method has the arguments of the function, without `group`, which is None or missing for the default group.
    """
    given = signature(original).bind(*args, **keywords).arguments
    group = given.pop("group", None) or dist.group.WORLD
    return method(group, **given) if isinstance(group, ProcessGroup) else original(*args, **keywords)


def world() -> Connection | None:
    """Return the connection to the world of torch's default group; None if that group has another backend."""
    return _JOINED[0] if _JOINED else None


def find_rank(rank: Rank | None) -> Rank:
    """Return `rank`; if it is None, the rank of this process in torch's default group.

    Raises:
        UsageError: There is no such group of backend `overlap`.
    """
    joined = world()
    if rank is None and joined is None:
        raise UsageError(
            "rank: there is no world; call init_process_group('overlap'), or pass overlap.connect(...).rank"
        )
    return rank or joined.rank  # type: ignore[union-attr]


def _create_group(options: Any, _: object = None) -> ProcessGroup:
    """Return a new process group for torch, which calls this function.

    The default group, which has no ranks in `options`, and a group without a default group of ours, become a new world.
    Other groups become groups of the default group's world.
    """
    # empty for the default group
    ranks, timeout = list(options.global_ranks_in_group), options.timeout
    if ranks and _JOINED:
        group = _JOINED[0].group(ranks)
        return ProcessGroup(options.store, group, timeout)
    try:
        connection = connect(
            options.group_rank,
            options.group_size,
            store=options.store if options.group_size > 1 else None,
            timeout_s=timeout.total_seconds(),
            job=surviving.world_job_name(),
        )
    except OverlapError as error:
        raise backend_error(error) from error
    connection.describe(torch="yes")
    # the default group: later groups are made in its world
    if not ranks:
        _JOINED[:] = [connection]
        if surviving.is_started_to_survive():
            surviving.report_joined(connection)
    # forks of multiprocessing end without exit handlers, which a connection needs
    Finalize(None, _close_at_exit, (weakref.ref(connection),), exitpriority=0)
    world = connection.rank.world
    return ProcessGroup(
        options.store, world, timeout, leave=lambda: _leave_world(connection), abort=lambda: _abort_world(connection)
    )


def _close_at_exit(reference: weakref.ref[Connection]) -> None:
    """Close a world that the program has left open. If an error ends the program, the world fails for all ranks.

    A connection that nothing refers to has closed before.
    """
    connection, error = reference(), sys.exc_info()[1]
    if connection is None:
        return
    if error is None or isinstance(error, SystemExit):
        _close_world(connection)
    else:
        connection.fail(error)


def _leave_world(connection: Connection) -> None:
    """Close a world in a new thread, and wait for it up to `_LEAVE_S`, so that late ranks do not delay the program.

    An error of the closing is raised here if it comes within that time.
    """
    _forget_world(connection)
    errors: list[BaseException] = []

    def close_and_keep_error() -> None:
        try:
            _close_world(connection)
        except dist.DistError as error:
            errors.append(error)

    closing = threading.Thread(target=close_and_keep_error, name="overlap leaves", daemon=True)
    closing.start()
    # after that time the thread continues alone, and its error is dropped
    closing.join(_LEAVE_S)
    if errors:
        raise errors[0]


def _close_world(connection: Connection) -> None:
    """Leave a world: wait until all other ranks have left it, too.

    Raises a `DistBackendError` if the world has failed, because ranks disagreed, and no operation has raised that
    error.
    """
    _forget_world(connection)
    # a world that has failed has ended already
    if connection.error is None:
        with suppress(OverlapError):  # the error of an operation, which its own wait has raised
            connection.close()
    if surviving.is_started_to_survive():
        surviving.report_left()
    if (error := connection.unraised_failure) is not None:
        raise backend_error(error)


def _abort_world(connection: Connection) -> None:
    """Fail the world for all ranks, because torch gives up its default group."""
    _forget_world(connection)
    connection.fail(dist.DistBackendError("the process group was aborted"))


def _forget_world(connection: Connection) -> None:
    """Forget the world of torch's default group, if this is it: later groups are not made in it."""
    if connection in _JOINED:
        _JOINED.clear()


SCHEME = "overlap"
"""`init_process_group("overlap", init_method="overlap://")`."""


@cache
def register_scheme() -> None:
    """Register `init_method="overlap://"` with torch, once."""
    register_rendezvous_handler(SCHEME, _rendezvous)


def _rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield, once, a store that all processes reach, the rank of this process, and the number of processes.

    Torch calls it for `init_method="overlap://"`. If the launcher sets torch's own variables, as torchrun does, the
    values are those of "env://". Raises a `ValueError` if no launcher has started this process, if its variables are
    wrong, or if the processes could not meet.
    """
    try:
        process_place = surviving.place_in_next_world() or find_place(os.environ)
    except OverlapError as error:
        raise ValueError(f"init_method: {error}") from error
    if "RANK" in os.environ and (
        # `RANK` was set by torchrun, or a launcher like it: torch reads its variables itself
        process_place is None or process_place.source != "overlap run"
    ):
        yield from rendezvous("env://", timeout=timeout, **options)
        return
    if process_place is None:
        raise ValueError("init_method: no launcher has started this process; use env:// or tcp://, with a rank")
    try:
        yield _open_store(process_place, timeout), process_place.process, process_place.processes
    except OverlapError as error:
        raise ValueError(f"init_process_group: the processes could not meet: {error}") from error
    # torch asks for a second value only when the first was used up
    raise RuntimeError(
        "init_method: overlap:// serves one init_process_group; call destroy_process_group before the next"
    )


def _open_store(process_place: ProcessPlace, timeout: timedelta) -> dist.Store:
    """Return a store for the processes of a world, which process 0 serves.

    It is at the endpoint that the launcher has set, or at one that process 0 chooses and MPI sends.
    """
    endpoint = process_place.endpoint
    listener_fd = None if process_place.listener is None else os.dup(process_place.listener)  # the store owns it
    if endpoint is None:
        endpoint, _, listener = trio.run(introduce_by_mpi, process_place, timeout.total_seconds())
        listener_fd = None if listener is None else listener.detach()
    return dist.TCPStore(
        *endpoint,
        world_size=process_place.processes,
        is_master=process_place.process == 0,
        timeout=timeout,
        master_listen_fd=listener_fd,
    )
