"""Stores on a Ray cluster: keys and values through which the processes of a world find each other."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import OverlapError, PeerLostError, UsageError

CALLS = 10_000
"""Number of calls that a store serves at the same time: every rank may wait in one."""
_GET_S = 600.0
"""Seconds that one call waits for a value; the limit for connecting a world is much shorter."""


def store_class() -> type:
    """Return the class of a store's actor.

    It is local, because Ray pickles a local class by value: the actor's process does not import overlap, so it starts
    in half the time, and needs no `runtime_env`.
    """

    class StoreActor:
        """Has the values of a store; its event loop serves any number of waiting callers."""

        def __init__(self) -> None:
            self._values: dict[str, bytes] = {}
            self._arrivals: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

        async def set(self, key: str, value: bytes) -> None:
            """Store a value."""
            self._values[key] = value
            self._arrivals.pop(key, asyncio.Event()).set()

        async def get(self, key: str) -> bytes:
            """Wait until a key has a value, and return the value."""
            while key not in self._values:
                await self._arrivals[key].wait()
            return self._values[key]

    return StoreActor


class RayStore:
    """A store on a Ray cluster, for `overlap.connect(store=...)`; it can be passed to actors and tasks.

    Args:
        actor: Handle of the store's actor.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        _call_and_wait(self.actor.set, key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return the value."""
        return bytes(_call_and_wait(self.actor.get, key))


def _call_and_wait(method: Any, *args: object) -> Any:
    """Call a method of a store's actor, block until it returns, and return the result.

    It does not use `ray.get`, which would warn in threads of async actors.

    Raises:
        UsageError: The call would block the event loop of an async actor.
        OverlapError: There was no answer within `_GET_S`.
        PeerLostError: The actor has ended.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()  # raises RuntimeError if this thread has no event loop
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
    """Return the store of a name on the Ray cluster; make it if there is none.

    It exists as long as the driver or actor that was the first to call this.

    Args:
        name: Name of the store, the same for all ranks of a job.

    Raises:
        UsageError: This process has no connection to a Ray cluster.
    """
    if not ray.is_initialized():
        raise UsageError("store: this process has no connection to a Ray cluster; call ray.init() first")
    return make_store(f"store/{name}", get_if_exists=True)


def make_store(name: str, **options: Any) -> RayStore:
    """Return a store with a new actor on the node of this process, which exists as long as this process.

    Args:
        name: Name of the actor, in a namespace that all drivers share.
        options: Further options of the actor, for Ray.

    Raises:
        ValueError: There is an actor of that name.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": name, "namespace": "overlap", "num_cpus": 0, "max_concurrency": CALLS, **options}
    return RayStore(ray.remote(store_class()).options(scheduling_strategy=here, **options).remote())
