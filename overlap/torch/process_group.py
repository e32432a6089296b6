"""The process group that torch's functions call: tensors become arrays, options ours, and our futures Works."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import getmembers
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.group import Group
from ..runtime.interrupts import interruptible
from . import private
from .operations import c10d_operation, call_and_wait
from .reductions import Reductions
from .transfers import Transfers
from .work import Work

_BARRIER = ("barrier",)


class ProcessGroup(Reductions, Transfers, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch over a `Group`, for one rank.

    Args:
        store: Store of torch that only this group uses.
        group: The group whose operations are issued.
        timeout: Time limit of operations that have none of their own.
        leave: Called by `shutdown`, to leave the world; None: the group does not own its world.
        abort: Called by `abort`, after the operations of the group have failed; None: nothing is called.
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
        super().__init__(group.rank, group.size)  # torch's constructor with a store allows no Python subclass
        self._store, self._group, self._timeout = store, group, timeout
        self._leave, self._abort = leave, abort
        self._name, self._description = group.name, "undefined"
        self._seq = 0
        self._barriers = 0
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # gloo then checks at the call
            # replace each collective of this object by one that waits for its operation
            for name, _ in getmembers(type(self), lambda member: getattr(member, "is_collective", False)):
                setattr(self, name, partial(call_and_wait, getattr(self, name)))

    # -- identity -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the backend in torch."""
        return "overlap"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """Return the name of this group in torch."""
        return self._name

    group_name: property = property(getGroupName)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupDesc(self) -> str:
        """Return the description of this group in torch."""
        return self._description

    group_desc: property = property(getGroupDesc)

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
        """Leave the group; if it is torch's default group, leave the world, too."""
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

        Args:
            new_ranks: Ranks of the new group, as numbers in this group.
            timeout: Time limit of the new group's operations; None: that of this group.
            opts: Ignored.
            group_name: Name of the new group; None: one is made.
            group_desc: Description of the new group; None: "undefined".
            device_types: Ignored, because all tensors are on the CPU.

        Returns:
            The new group; None on a rank that is not in `new_ranks`.
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

    def _start_coalescing(self, device: object) -> None:
        # backend 'overlap' starts each operation at its call
        raise RuntimeError("coalescing is not supported by backend 'overlap'; use the *_coalesced functions")

    # -- barriers ------------------------------------------------------------------------------------------------

    @c10d_operation("barrier", "barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Return the Work of a barrier, which ends once every rank of the group has called it.

        Args:
            opts: Options of c10d, with a time limit and whether the caller waits.
            timeout: Time limit, which takes precedence over that of the options.
        """
        if timeout is None and (work := self._reissue_call(_BARRIER, None, None, opts, [])) is not None:
            return work
        return Work(self._issue_operation(None, "barrier", limit=self._time_limit_s(opts, timeout), key=_BARRIER), [])

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank of the group has called this; if one does not, the error on all ranks names it.

        Args:
            timeout: Time limit; a float is in seconds, as torch passes it. None: that of the group.
            wait_all_ranks: Whether the error names all late ranks, and not only the first.

        Raises:
            DistBackendError: A rank did not call it in time.
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
    """Report to rank 0 that this rank has reached the barrier, and wait for the verdict.

    `key` begins the names of this barrier in the store. Raises a `DistBackendError` if a rank did not arrive in time,
    or if rank 0 has sent no verdict in twice the time.
    """
    store.set(f"{key}/{rank}", "here")
    verdict = b""
    try:
        # twice the limit, because rank 0 may arrive late, and then waits for others
        store.wait([f"{key}/verdict"], 2 * timeout)
        verdict = store.get(f"{key}/verdict")
    except (dist.DistStoreError, RuntimeError):
        pass
    if verdict != b"all":
        raise dist.DistBackendError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {verdict.decode() or 'it said nothing in time; see where it waits, or pass a longer timeout'}"
        )


def _await_arrivals(store: dist.Store, key: str, size: int, timeout: timedelta, *, every: bool) -> None:
    """Wait for all other ranks through the store, which works even if operations hang; send the ranks the verdict.

    `key` begins the names of this barrier in the store. The limit is for all ranks together. Raises a
    `DistBackendError` that names the first rank which did not arrive in time, or with `every` all of them.
    """
    limit_ms = round(timeout.total_seconds() * 1000)
    if timeout <= timedelta(0):
        store.set(f"{key}/verdict", "rank 0 had no time")
        raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms: it had no time at all")
    # one time limit for all ranks: the wait for a rank shortens the wait for the next one
    until = time.monotonic() + timeout.total_seconds()
    missing: list[int] = []
    for rank in range(1, size):
        if not _wait_for_arrival(store, f"{key}/{rank}", until):
            missing.append(rank)
            if not every:
                break
    if not missing:
        store.set(f"{key}/verdict", "all")
        return
    ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    look = f"look at what {'they do' if len(missing) > 1 else 'it does'}, or raise timeout"
    verdict = f"{ranks} failed to pass monitoredBarrier in {limit_ms} ms; {look}"
    store.set(f"{key}/verdict", verdict)
    raise dist.DistBackendError(verdict)


@interruptible
def _wait_for_arrival(store: dist.Store, key: str, until: float) -> bool:
    """Return whether a rank sets `key` before `until`, on the clock of `time.monotonic`; later, only look for it."""
    left_s = until - time.monotonic()
    try:
        if left_s <= 0:
            return bool(store.check([key]))
        store.wait([key], timedelta(seconds=left_s))
    except (dist.DistStoreError, RuntimeError):
        return False
    return True
