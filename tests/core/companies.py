"""Worlds of several processes inside one: their worlds share nothing but a wire and what they tell each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self, TypeVar

import msgpack
import trio

import topology
from overlap.neighbours import Neighbours
from overlap.world import World
from transports import Endpoint, NeuronLink, Statistics, Transport

T = TypeVar("T")

TIMEOUT_S = 30.0  # bounds a hang and decides nothing else

#: Processes by ranks in each: what every collective must pass on.
LAYOUTS = ((1, 4), (2, 2), (4, 1), (2, 3))


class Part(Transport):
    """Some of a transport's ranks, as the process that they live in sees it."""

    shares_memory = True

    def __init__(self, whole: NeuronLink, ranks: Sequence[int]) -> None:
        self.whole, self.ranks, self.peers = whole, tuple(ranks), whole.ranks

    def endpoint(self, rank: int) -> Endpoint:
        assert rank in self.ranks
        return self.whole.endpoint(rank)

    def statistics(self) -> Statistics:
        return self.whole.statistics()

    def open(self) -> AbstractAsyncContextManager[Self]:
        raise AssertionError("the test opens the whole")


class Company:
    """A membership in memory. What is told travels as bytes, as on a socket."""

    def __init__(self, member: int, everybody: list[Company]) -> None:
        self.member, self._everybody = member, everybody
        self._send, self._receive = trio.open_memory_channel[tuple[int, bytes | None, str]](float("inf"))
        self._parted = trio.Event()
        everybody.append(self)

    @property
    def members(self) -> int:
        return len(self._everybody)

    def tell(self, message: Mapping[str, object]) -> None:
        for other in self._everybody:
            if other is not self:
                other._send.send_nowait((self.member, msgpack.packb(message), ""))

    def lose(self, member: int, reason: str) -> None:
        self._send.send_nowait((member, None, reason))

    async def messages(self) -> AsyncIterator[tuple[int, Mapping[str, Any] | None, str]]:
        async for member, message, reason in self._receive:
            yield member, None if message is None else msgpack.unpackb(message), reason

    async def barrier(self, name: str) -> None:
        self._parted.set()
        for other in self._everybody:
            await other._parted.wait()


@asynccontextmanager
async def opened(processes: int, each: int) -> AsyncIterator[tuple[list[World], list[Company]]]:
    """Open the worlds of `processes` processes with `each` ranks."""
    size = processes * each
    placement = [range(start, start + each) for start in range(0, size, each)]
    cluster = topology.cluster("local", nodes=processes, ranks=size)
    everybody: list[Company] = []
    async with NeuronLink(size).open() as link:
        worlds = [
            World(
                size,
                cluster,
                Part(link, ranks),
                algorithm=None,
                neighbours=Neighbours(Company(member, everybody), placement),
            )
            for member, ranks in enumerate(placement)
        ]
        yield worlds, everybody


def run_far(
    main: Callable[..., Awaitable[T]],
    processes: int,
    each: int,
    *args: object,
    timeout_s: float = TIMEOUT_S,
    nemesis: Callable[[list[Company]], Awaitable[None]] | None = None,
) -> list[T | BaseException]:
    """Run `main` in a world of several processes; return each rank's result, or its process's error."""
    outcomes: dict[int, list[T] | BaseException] = {}

    async def one(member: int, world: World) -> None:
        try:
            outcomes[member] = await world.live(main, args, timeout_s)
        except Exception as error:
            outcomes[member] = error

    async def all_of_them() -> None:
        async with opened(processes, each) as (worlds, everybody), trio.open_nursery() as nursery:
            for member, world in enumerate(worlds):
                nursery.start_soon(one, member, world)
            if nemesis is not None:
                await nemesis(everybody)

    trio.run(all_of_them)
    results: list[T | BaseException] = []
    for member in range(processes):
        outcome = outcomes[member]
        results += [outcome] * each if isinstance(outcome, BaseException) else outcome
    return results
