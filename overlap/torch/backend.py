"""The backend `overlap` of torch.distributed: a world of ours under torch's default group, its groups under others."""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
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

# Longest wait of `destroy_process_group` for other ranks. A program may go on after that: the world stays until they
# have left too, and the end of the process waits for them.
_LEAVE_S = 5.0


_JOINED: list[Connection] = []
"""The world under torch's default group, while it lives."""


def register() -> None:
    """Register the backend `overlap` with torch, unless it is registered."""
    # `is_backend_available` would load the entry point, which is this function.
    if "overlap" not in dist.Backend.backend_list:
        dist.Backend.register_backend("overlap", _create_group, extended_api=True, devices=["cpu"])
        private.replace_in_c10d("monitored_barrier", partial(_prefer_ours, ProcessGroup.monitored_barrier))
        private.replace_in_c10d("_set_pg_timeout", partial(_prefer_ours, ProcessGroup.set_timeout))
    register_scheme()


def _prefer_ours(method: Callable[..., None], original: Callable[..., None], *args: Any, **keywords: Any) -> None:
    """Call the method of a group of ours in place of torch's function, which knows its own backends by name."""
    given = signature(original).bind(*args, **keywords).arguments
    group = given.pop("group", None) or dist.group.WORLD
    return method(group, **given) if isinstance(group, ProcessGroup) else original(*args, **keywords)


def world() -> Connection | None:
    """Return the world under torch's default group, if that is one of ours."""
    return _JOINED[0] if _JOINED else None


def find_rank(rank: Rank | None) -> Rank:
    """Return the given rank; without one, that of the world under torch's default group, or raise a UsageError."""
    joined = world()
    if rank is None and joined is None:
        raise UsageError(
            "rank: there is no world; call init_process_group('overlap'), or pass overlap.connect(...).rank"
        )
    return rank or joined.rank  # type: ignore[union-attr]


def _create_group(options: Any, _: object = None) -> ProcessGroup:
    """Make a process group of torch: in the existing world, or in a world of its own."""
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
            job=surviving.world_job(),
        )
    except OverlapError as error:
        raise backend_error(error) from error
    connection.describe(torch="yes")
    if not ranks:
        _JOINED[:] = [connection]
        if surviving.is_started_to_survive():
            surviving.report_joined(connection)
    # forks of multiprocessing end without exit handlers, which a connection needs
    Finalize(None, _at_exit, (weakref.ref(connection),), exitpriority=0)
    world = connection.rank.world
    return ProcessGroup(
        options.store, world, timeout, leave=lambda: _leave_world(connection), abort=lambda: _abort_world(connection)
    )


def _at_exit(reference: weakref.ref[Connection]) -> None:
    """Close a world that a program has left open; an error that ends the program fails it for all ranks."""
    connection, error = reference(), sys.exc_info()[1]
    if connection is None:
        return
    if error is None or isinstance(error, SystemExit):
        _close(connection)
    else:
        connection.fail(error)


def _leave_world(connection: Connection) -> None:
    """Close a world in a thread, and wait for it a moment: late ranks do not delay the program."""
    _drop_world(connection)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            _close(connection)
        except dist.DistError as error:
            errors.append(error)

    closing = threading.Thread(target=close, name="overlap leaves", daemon=True)
    closing.start()
    closing.join(_LEAVE_S)
    if errors:
        raise errors[0]


def _close(connection: Connection) -> None:
    """Wait until the other ranks have left the world too, however late, as long as they live.

    Raises:
        DistBackendError: If ranks have disagreed, and no operation was left to fail with that.
    """
    _drop_world(connection)
    if connection.error is None:
        with suppress(OverlapError):  # the waiter of an operation has been given its error
            connection.close()
    if surviving.is_started_to_survive():
        surviving.report_left()
    if (error := connection.unraised_failure) is not None:
        raise backend_error(error)


def _abort_world(connection: Connection) -> None:
    _drop_world(connection)
    connection.fail(dist.DistBackendError("the process group was aborted"))


def _drop_world(connection: Connection) -> None:
    if connection in _JOINED:
        _JOINED.clear()


SCHEME = "overlap"
"""`init_process_group("overlap", init_method="overlap://")`."""

_registered: list[str] = []


def register_scheme() -> None:
    """Register `init_method="overlap://"` with torch, unless it is registered."""
    if not _registered:
        register_rendezvous_handler(SCHEME, _rendezvous)
        _registered.append(SCHEME)


def _rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a store that all processes reach, the rank of this one, and their number.

    Raises:
        ValueError: If no launcher has started this process, or it does not say where they meet.
    """
    try:
        process_place = surviving.next_place() or find_place(os.environ)
    except OverlapError as error:
        raise ValueError(f"init_method: {error}") from error
    if "RANK" in os.environ and (
        process_place is None or process_place.source != "overlap run"
    ):  # torchrun, or a launcher like it
        yield from rendezvous("env://", timeout=timeout, **options)
        return
    if process_place is None:
        raise ValueError("init_method: no launcher has started this process; use env:// or tcp://, with a rank")
    try:
        yield _open_store(process_place, timeout), process_place.process, process_place.processes
    except OverlapError as error:
        raise ValueError(f"init_method: {error}") from error
    raise RuntimeError(
        "init_method: overlap:// serves one init_process_group; call destroy_process_group before the next"
    )


def _listener_fd(process_place: ProcessPlace, listener: socket.socket | None) -> int | None:
    """Return a descriptor, for a store to own, of the socket that listens at the rendezvous."""
    if listener is not None:
        return listener.detach()
    return None if process_place.listener is None else os.dup(process_place.listener)


def _open_store(process_place: ProcessPlace, timeout: timedelta) -> dist.Store:
    """Return the store of a world's processes, at the address that the launcher has named or process 0 chose."""
    endpoint, listener = process_place.endpoint, None
    if endpoint is None:
        endpoint, _, listener = trio.run(introduce_by_mpi, process_place, timeout.total_seconds())
    return dist.TCPStore(
        *endpoint,
        world_size=process_place.processes,
        is_master=process_place.process == 0,
        timeout=timeout,
        master_listen_fd=_listener_fd(process_place, listener),
    )
