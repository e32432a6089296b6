"""Stores on a Ray cluster, where the processes of a world meet."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import OverlapError, PeerLostError, UsageError

CALLS = 10_000
"""Number of calls that a store serves at once: every rank may wait in one."""
_GET_S = 600.0
"""Time that one call waits for a value; the limit of the connection is much shorter."""


def store_class() -> type:
    """Return the class of a store's actor; Ray pickles a local class by value, so that no actor imports overlap.

    So the process of a store starts in half the time, and needs no `runtime_env`.
    """

    class StoreActor:
        """Holds the values of a store; its loop serves any number of callers that wait."""

        def __init__(self) -> None:
            self._values: dict[str, bytes] = {}
            self._arrivals: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

        async def set(self, key: str, value: bytes) -> None:
            """Store a value."""
            self._values[key] = value
            self._arrivals.pop(key, asyncio.Event()).set()

        async def get(self, key: str) -> bytes:
            """Return a value once there is one."""
            while key not in self._values:
                await self._arrivals[key].wait()
            return self._values[key]

    return StoreActor


class RayStore:
    """A store on a Ray cluster, for `overlap.connect(store=...)`; it can be passed to actors and tasks.

    Args:
        actor: The handle of its actor.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        _wait_for(self.actor.set, key, value)

    def get(self, key: str) -> bytes:
        """Return the value, waiting until there is one."""
        return bytes(_wait_for(self.actor.get, key))


def _wait_for(method: Any, *args: object) -> Any:
    """Return the result of a method of a store's actor; `ray.get` would warn in threads of async actors."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()  # of an async actor, which has other calls to serve
        raise UsageError(
            "store: this is the event loop of an async actor, and the call waits for other ranks; "
            "connect in a thread: await asyncio.to_thread(overlap.connect, ...)"
        )
    try:
        return method.remote(*args).future().result(_GET_S)
    except TimeoutError:
        text = f"store: no other process has answered within {_GET_S:g} s; let all ranks use one name"
        raise OverlapError(text) from None
    except ray.exceptions.RayActorError as error:
        text = "store: its actor has ended: it was lost, or the driver or the actor that made it is gone"
        raise PeerLostError(text, culprit=-1) from error


def store(name: str) -> RayStore:
    """Return the store of that name on the Ray cluster, a new one if there is none.

    It lives as long as the driver or actor that was the first to ask for it.

    Args:
        name: Name of the store; ranks of one job ask for one name.

    Raises:
        UsageError: If this process has no connection to a Ray cluster.
    """
    if not ray.is_initialized():
        raise UsageError("store: this process has no connection to a Ray cluster; call ray.init() first")
    return make_store(f"store/{name}", get_if_exists=True)


def make_store(name: str, **options: Any) -> RayStore:
    """Return a store with a new actor, on the node of this process: it lives as long as this process does.

    All names are in one namespace, whatever those of the drivers.

    Raises:
        ValueError: If there is an actor of that name.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": name, "namespace": "overlap", "num_cpus": 0, "max_concurrency": CALLS, **options}
    return RayStore(ray.remote(store_class()).options(scheduling_strategy=here, **options).remote())
