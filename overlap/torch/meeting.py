"""Where the processes of a launcher meet that tells torch nothing: mpiexec and srun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import trio
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from ..errors import OverlapError
from ..processes.introduction import introduced
from ..processes.place import Place, find_place

SCHEME = "overlap"
"""`init_process_group("overlap", init_method="overlap://")`."""

_registered: list[str] = []


def register_meeting() -> None:
    """Make `init_method="overlap://"` known to torch; again does no harm."""
    if not _registered:
        register_rendezvous_handler(SCHEME, _meet)
        _registered.append(SCHEME)


def _meet(url: str, timeout: timedelta = dist.default_pg_timeout, **more: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a store that all processes reach, the rank of this one, and how many there are.

    Raises:
        ValueError: If no launcher has started this process, or it does not say where they meet.
    """
    if "RANK" in os.environ:  # torchrun, or whoever does as it does
        yield from rendezvous("env://", timeout=timeout, **more)
        return
    try:
        place = find_place(os.environ)
        if place is None:
            raise ValueError("init_method: no launcher has started this process; use env:// or tcp://, with a rank")
        yield _store(place, timeout), place.process, place.processes
    except OverlapError as error:
        raise ValueError(f"init_method: {error}") from error
    raise RuntimeError("init_method: processes meet once by overlap://")


def _store(place: Place, timeout: timedelta) -> dist.Store:
    endpoint, listener = place.endpoint, None
    if endpoint is None:
        endpoint, _, listener = trio.run(introduced, place)
    return dist.TCPStore(
        *endpoint,
        world_size=place.processes,
        is_master=place.process == 0,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )
