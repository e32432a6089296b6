"""The barrier that says who did not come: over torch's store, so that it works where operations hang."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist


def barrier(store: dist.Store, rank: int, size: int, number: int, timeout: timedelta, *, every: bool) -> None:
    """Wait until every rank has come; rank 0 looks for them, and tells the others.

    Args:
        store: Of the group.
        rank: Of this process in the group.
        size: Of the group.
        number: How many such barriers there have been; the same on all ranks.
        timeout: How long.
        every: Name all that are missing, not only the first.

    Raises:
        DistBackendError: If one did not come.
    """
    key = f"overlap/monitored/{number}"
    if rank == 0:
        _look(store, key, size, timeout, every=every)
        return
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


def _look(store: dist.Store, key: str, size: int, timeout: timedelta, *, every: bool) -> None:
    limit_ms = round(timeout.total_seconds() * 1000)
    if timeout <= timedelta(0):
        store.set(f"{key}/verdict", "rank 0 had no time")
        raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms: it had no time at all")
    until = time.monotonic() + timeout.total_seconds()
    missing: list[int] = []
    for rank in range(1, size):
        if not _came(store, f"{key}/{rank}", until):
            missing.append(rank)
            if not every:
                break
    if not missing:
        store.set(f"{key}/verdict", "all")
        return
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    told = f"{who} failed to pass monitoredBarrier in {limit_ms} ms"
    store.set(f"{key}/verdict", told)
    raise dist.DistBackendError(told)


def _came(store: dist.Store, key: str, until: float) -> bool:
    left_s = until - time.monotonic()
    try:
        if left_s <= 0:
            return bool(store.check([key]))
        store.wait([key], timedelta(seconds=left_s))
    except (dist.DistStoreError, RuntimeError):
        return False
    return True
