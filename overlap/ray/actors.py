"""Actors: members of a gang, the first of which is the store where they meet, and stores of their own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..engines.gang import GangSpec, MemberEnd
from ..engines.home import take_records
from ..engines.member import GangMember
from ..engines.pickling import Pickling
from ..errors import OverlapError, PeerLostError, UsageError

NAMESPACE = "overlap"
"""Of the named actors of all jobs, whatever the namespaces of their drivers."""
CALLS = 10_000
"""How many calls a store serves at once: every rank may wait in one."""
_GET_S = 600.0
"""How long a value is waited for in one call; the limit of the connection is much shorter."""


def _store_class() -> type:
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
        _check_not_in_loop()
        _wait_for_answer(self.actor.set.remote(key, value))

    def get(self, key: str) -> bytes:
        """Return the value, waiting until there is one."""
        _check_not_in_loop()
        return bytes(_wait_for_answer(self.actor.get.remote(key)))


def _wait_for_answer(answer: Any) -> Any:
    """Return the answer of a store's actor, without `ray.get`, which warns in threads of async actors."""
    try:
        return answer.future().result(_GET_S)
    except TimeoutError:
        raise OverlapError(
            f"store: no other process has answered within {_GET_S:g} s; let all ranks use one name"
        ) from None
    except ray.exceptions.RayActorError as error:
        text = "store: its actor has ended: it was lost, or the driver or the actor that made it is gone"
        raise PeerLostError(text, culprit=-1) from error


def _check_not_in_loop() -> None:
    """Refuse to block the event loop of an async actor, which has other calls to serve."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "store: this is the event loop of an async actor, and the call waits for other ranks; "
        "connect in a thread: await asyncio.to_thread(overlap.connect, ...)"
    )


def store(name: str) -> RayStore:
    """Return the store of that name on the Ray cluster, a new one if there is none.

    It lives as long as the driver or actor that was the first to ask for it.

    Args:
        name: Name of the store; ranks of one job ask for one name.

    Raises:
        UsageError: If this process has no connection to a Ray cluster.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"name: expected the name of a store, got {name!r}")
    if not ray.is_initialized():
        raise UsageError("store: this process has no connection to a Ray cluster; call ray.init() first")
    return make_store(f"store/{name}", get_if_exists=True)


def make_store(name: str, **options: Any) -> RayStore:
    """Return a store with a new actor, on the node of this process: it lives as long as this process does.

    Raises:
        ValueError: If there is an actor of that name.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": CALLS, **options}
    return RayStore(ray.remote(_store_class()).options(scheduling_strategy=here, **options).remote())


class MemberActor(_store_class()):  # type: ignore[misc]
    """A member of a gang as an async actor: its loop goes on serving calls while the ranks work in a thread.

    The first one is the store of the gang too: a process for a store alone would take a second to start.
    """

    def __init__(self, spec: GangSpec, member: int) -> None:
        super().__init__()
        self._member = GangMember(spec, member, Pickling(cloudpickle))
        self._token = spec.token
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="overlap ranks")

    async def run(self, store: RayStore) -> MemberEnd:
        """Run the program, and report its end."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._member.run, store)

    async def stop(self) -> None:
        """End the ranks; `run` returns soon."""
        self._member.stop()

    async def lives(self) -> bool:
        """Whether the world has started."""
        return self._member.lives

    async def left_behind(self) -> dict[str, bytes]:
        """Return the flight records of members of this machine that could not bring theirs, and remove the folder."""
        return take_records(self._token)
