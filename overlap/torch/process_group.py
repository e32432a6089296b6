"""The process group that torch's functions call: tensors become arrays, options ours, and our futures Works."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import getmembers
from typing import Any, cast

import torch
import torch.distributed as dist

from ..runtime.group import Group
from ..runtime.interrupts import interruptible
from . import private
from .operations import call_and_wait, operation
from .reductions import Reductions
from .transfers import Transfers
from .work import Work

_BARRIER = ("barrier",)


class ProcessGroup(Reductions, Transfers, dist.ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group, as torch wants it.

    Args:
        store: Store of this group alone.
        group: Ours.
        timeout: How long an operation may take that names no limit.
        leave: Called when torch shuts the group down; by default there is nothing to end.
        abort: Called when torch gives it up, after its operations have failed.
    """

    def __init__(
        self,
        store: dist.Store,
        group: Group,
        timeout: timedelta,
        *,
        leave: Callable[[], None] | None = None,
        abort: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group.rank, group.size)  # with a store, no class of Python may be made from it
        self._store, self._group, self._timeout = store, group, timeout
        self._leave, self._abort = leave, abort
        self._name, self._description = group.name, "undefined"
        self._seq = 0
        self._barriers = 0
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # gloo then checks at the call
            for name, _ in getmembers(type(self), lambda member: getattr(member, "collective", False)):
                setattr(self, name, partial(call_and_wait, getattr(self, name)))

    # -- identity -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the backend in torch."""
        return "overlap"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """Name of this group in torch."""
        return self._name

    def getGroupName(self) -> str:
        """Return the name of this group in torch."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """Description of this group in torch."""
        return self._description

    def getGroupDesc(self) -> str:
        """Return the description of this group in torch."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"device: backend 'overlap' is for the CPU, got {device}; give it another backend")
        return self

    @property
    def options(self) -> Any:
        """Options of the group, of which torch reads the time limit; `set_timeout` changes it."""
        return private.group_options(self._timeout)

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def get_group_store(self) -> dist.Store:
        """Return the store of this group."""
        return self._store

    # -- its life ------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that name none."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; the last group of a world ends this process's part in it."""
        if self._leave is not None:
            self._leave()

    def abort(self) -> None:
        """Fail all operations under way, here and on the other ranks of the group."""
        self._group.abort("the process group was aborted")
        if self._abort is not None:
            self._abort()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ProcessGroup | None:
        """Make a group of some ranks; all ranks of this group call it, each with the ranks of its own new group.

        Returns:
            None on a rank that is not among them.
        """
        if self._group.rank not in new_ranks:
            return None
        part = self._group.group(new_ranks, name=group_name)
        store = dist.PrefixStore(f"{group_name or part.name}/", self._store)
        part_group = ProcessGroup(store, part, timeout or self._timeout)
        part_group._name, part_group._description = group_name or part.name, group_desc or "undefined"
        return part_group

    def _set_sequence_number_for_group(self) -> None:
        self._seq = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._seq

    def _has_hooks(self) -> bool:
        """Return False: torch calls no hooks of this backend."""
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: there are no hooks to wait for."""

    def _start_coalescing(self, device: object) -> None:
        raise RuntimeError("coalescing: backend 'overlap' starts each operation at once; use the *_coalesced forms")

    # -- barriers ------------------------------------------------------------------------------------------------

    @operation("barrier", "barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Finish once every rank of the group has arrived."""
        work = self._issue_again(_BARRIER, None, None, opts, []) if timeout is None else None
        if work is not None:
            return cast(Work, work)
        return Work(self._issue(None, "barrier", limit=self._limit_s(opts, timeout), key=_BARRIER), [])

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank of the group; rank 0 names ranks that are late.

        Args:
            timeout: How long; a float is seconds, as torch has it.
            wait_all_ranks: Name all that did not come, not only the first.

        Raises:
            DistBackendError: If one did not come.
        """
        self._barriers += 1
        limit = self._timeout if timeout is None else timeout
        if isinstance(limit, float):
            limit = timedelta(seconds=limit)
        key = f"overlap/monitored/{self._barriers}"
        if self._group.rank == 0:
            _await_arrivals(self._store, key, self._group.size, limit, every=wait_all_ranks)
        else:
            _report_arrival(self._store, key, self._group.rank, limit)


@interruptible
def _report_arrival(store: dist.Store, key: str, rank: int, timeout: timedelta) -> None:
    """Report to rank 0 that this rank has reached the barrier, and wait for the verdict."""
    store.set(f"{key}/{rank}", "here")
    verdict = b""
    try:
        # rank 0 may come late, and then waits as long for others
        store.wait([f"{key}/verdict"], 2 * timeout)
        verdict = store.get(f"{key}/verdict")
    except (dist.DistStoreError, RuntimeError):
        pass
    if verdict != b"all":
        raise dist.DistBackendError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {verdict.decode() or 'it said nothing in time'}"
        )


def _await_arrivals(store: dist.Store, key: str, size: int, timeout: timedelta, *, every: bool) -> None:
    """Wait for all other ranks in the store, which works where operations hang; send them the verdict."""
    limit_ms = round(timeout.total_seconds() * 1000)
    if timeout <= timedelta(0):
        store.set(f"{key}/verdict", "rank 0 had no time")
        raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms: it had no time at all")
    # One time limit for all: the wait for a rank takes from the time of the next one.
    until = time.monotonic() + timeout.total_seconds()
    missing: list[int] = []
    for rank in range(1, size):
        if not _has_arrived(store, f"{key}/{rank}", until):
            missing.append(rank)
            if not every:
                break
    if not missing:
        store.set(f"{key}/verdict", "all")
        return
    ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    verdict = f"{ranks} failed to pass monitoredBarrier in {limit_ms} ms"
    store.set(f"{key}/verdict", verdict)
    raise dist.DistBackendError(verdict)


@interruptible
def _has_arrived(store: dist.Store, key: str, until: float) -> bool:
    """Whether a rank arrives at a monitored barrier in time."""
    left_s = until - time.monotonic()
    try:
        if left_s <= 0:
            return bool(store.check([key]))
        store.wait([key], timedelta(seconds=left_s))
    except (dist.DistStoreError, RuntimeError):
        return False
    return True
