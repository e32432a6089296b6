"""Tasks of a gang: a member on each worker, which ends when its task is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import cloudpickle
import distributed

from ..engines.gang import GangSpec, MemberEnd
from ..engines.member import GangMember
from ..engines.pickling import Pickling
from .variables import VariableStore, remove_values

# Interval at which a member checks whether its task was cancelled.
_LOOK_S = 0.2


def run_member(spec: GangSpec, member: int, partitions: Sequence[dict[int, object]] | None) -> MemberEnd:
    """Run a member of a gang in a thread of a worker, and remove its values from the store: the driver may be lost.

    Args:
        partitions: Partitions of each rank here, if the program is given data.
    """
    worker = distributed.get_worker()
    gang_member = GangMember(spec, member, Pickling(cloudpickle))
    with _ended_with_task(worker, str(worker.get_current_task()), gang_member) as cancelled:
        store = VariableStore(client := distributed.get_client(), cancelled.is_set)
        store.set(here_key(spec, member), b"")
        end = gang_member.run(store, () if partitions is None else (partitions,))
    with suppress(OSError, TimeoutError):  # the scheduler is gone, and all of it
        remove_values(store.touched, client)
    return end


def import_check() -> Callable[[], Awaitable[str | None]]:
    """Return a function for workers, pickled by value, that returns why this module cannot be imported, or None.

    A worker that cannot read a task ends its connection to the scheduler without an error.
    """

    async def find_import_error() -> str | None:
        """Return why the module cannot be imported, or None; in a thread, to keep the worker's loop running."""
        import asyncio
        import importlib

        try:
            await asyncio.to_thread(importlib.import_module, "overlap.dask.tasks")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    return find_import_error


def here_key(spec: GangSpec, member: int) -> str:
    """Return the key under which a member reports the start of its task."""
    return f"overlap/{spec.label}/here/{member}"


@contextmanager
def _ended_with_task(worker: distributed.Worker, key: str, member: GangMember) -> Iterator[threading.Event]:
    """Stop a member in the block when its task is cancelled; Dask cannot end a thread.

    The driver cancels it, and the scheduler when the driver is lost. The yielded event is set then.
    """
    ended, cancelled = threading.Event(), threading.Event()

    def watch() -> None:
        """Stop the member once its task is cancelled, or the scheduler has forgotten it."""
        while not ended.wait(_LOOK_S):
            task = worker.state.tasks.get(key)
            if task is None or task.state == "cancelled":
                cancelled.set()
                member.stop()
                return

    watcher = threading.Thread(target=watch, name="overlap task", daemon=True)
    watcher.start()
    try:
        yield cancelled
    finally:
        ended.set()
        watcher.join()
