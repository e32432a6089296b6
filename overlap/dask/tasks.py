"""Tasks of a gang: a member on each worker, which ends when its task is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import cloudpickle
import distributed

from ..engines.gang import GangSpec, MemberEnd
from ..engines.home import take_records
from ..engines.member import GangMember
from ..engines.pickling import Pickling
from .variables import VariableStore, removed

# How often a member looks whether its task is still wanted.
_LOOK_S = 0.2


def live(spec: GangSpec, member: int, partitions: Sequence[dict[int, object]] | None) -> MemberEnd:
    """Be a member of a gang, in a thread of a worker, and leave nothing in the store: the driver may be gone.

    Args:
        spec: The gang.
        member: Index of this member.
        partitions: Partitions of each rank here, if the program is given data.
    """
    worker = distributed.get_worker()
    one = GangMember(spec, member, Pickling(cloudpickle))
    with _ending_with_its_task(worker, str(worker.get_current_task()), one) as over:
        store = VariableStore(client := distributed.get_client(), over.is_set)
        store.set(here_key(spec, member), b"")
        end = one.run(store, () if partitions is None else (partitions,))
    with suppress(OSError, TimeoutError):  # the scheduler is gone, and all of it
        removed(store.touched, client)
    return end


def imports_of_ours() -> Callable[[], Awaitable[str | None]]:
    """Return a function for workers that says why one cannot import this module, or None. Dask pickles it by value.

    A worker that cannot read a task ends its connection to the scheduler, and says nothing.
    """

    async def refused() -> str | None:
        import asyncio
        import importlib

        try:
            await asyncio.to_thread(importlib.import_module, "overlap.dask.tasks")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    return refused


def here_key(spec: GangSpec, member: int) -> str:
    """Return the key under which a member reports the start of its task."""
    return f"overlap/{spec.label}/here/{member}"


@contextmanager
def _ending_with_its_task(worker: distributed.Worker, key: str, member: GangMember) -> Iterator[threading.Event]:
    """Stop a member in the block when its task is cancelled; Dask cannot end a thread.

    It is cancelled by the driver, and by the scheduler when the driver is gone. The event that is given is set then.
    """
    done, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            task = worker.state.tasks.get(key)
            if task is None or task.state == "cancelled":
                over.set()
                member.stop()
                return

    watcher = threading.Thread(target=watch, name="overlap task", daemon=True)
    watcher.start()
    try:
        yield over
    finally:
        done.set()
        watcher.join()


def left_behind(token: str) -> dict[str, bytes]:
    """Return the flight records of members of this machine that could not bring theirs, and remove the folder."""
    return take_records(token)
