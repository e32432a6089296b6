"""The backend `overlap` of torch.distributed: a world of ours under torch's default group, its groups under others."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from ..embedded.connection import Connection
from ..embedded.door import connect
from ..errors import OverlapError
from .errors import backend_error
from .meeting import register_meeting
from .process_group import ProcessGroup

# How long `destroy_process_group` waits for the other ranks to come to it too; who is later finds this one gone.
_LEAVE_S = 5.0


class _Joined:
    """The world under torch's default group, while it lives."""

    world: Connection | None = None


def register() -> None:
    """Make `init_process_group("overlap")` known to torch; once is enough, and again does no harm."""
    if not dist.is_backend_available("overlap"):
        dist.Backend.register_backend("overlap", _create, extended_api=True, devices=["cpu"])
    register_meeting()


def world() -> Connection | None:
    """Return the world under torch's default group, if that is one of ours."""
    return _Joined.world


def _create(asked: Any, _: object = None) -> ProcessGroup:
    """Make the process group that torch asks for: in the world that is there, or in one of its own."""
    ranks, timeout = list(asked.global_ranks_in_group), asked.timeout
    if ranks and _Joined.world is not None:
        group = _Joined.world.group(ranks)
        return ProcessGroup(asked.store, group, timeout, leave=_nothing, abort=_nothing)
    try:
        made = connect(
            asked.group_rank,
            asked.group_size,
            store=asked.store if asked.group_size > 1 else None,
            timeout_s=timeout.total_seconds(),
        )
    except OverlapError as error:
        raise backend_error(error) from error
    if not ranks:
        _Joined.world = made
    # forks of multiprocessing end without the exit handlers that a connection counts on
    Finalize(None, _at_exit, (weakref.ref(made),), exitpriority=0)
    return ProcessGroup(asked.store, made.rank.world, timeout, leave=lambda: _leave(made), abort=lambda: _abort(made))


def _at_exit(reference: weakref.ref[Connection]) -> None:
    """Let a world end that a program has left open; if it ends with an error, the others hear of that."""
    connection, error = reference(), sys.exc_info()[1]
    if connection is None:
        return
    if error is None or isinstance(error, SystemExit):
        _leave(connection)
    else:
        connection.fail(error)


def _leave(connection: Connection) -> None:
    """Let a world end, as soon as the other ranks are done too; does not wait here for those that are late."""
    _forget(connection)

    def close() -> None:
        with suppress(OverlapError):  # whoever waits for an operation has been given its error
            connection.close()

    if connection.error is not None:
        return
    closing = threading.Thread(target=close, name="overlap leaves", daemon=True)
    closing.start()
    closing.join(_LEAVE_S)


def _abort(connection: Connection) -> None:
    _forget(connection)
    connection.fail(dist.DistBackendError("the process group was aborted"))


def _forget(connection: Connection) -> None:
    if _Joined.world is connection:
        _Joined.world = None


def _nothing() -> None:
    """Leave a group of a world: there is nothing of its own to end."""
