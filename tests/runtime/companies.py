"""Worlds of several processes inside one: their worlds share nothing but a wire and what they tell each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

import trio

import overlap
import topology
from overlap.processes.control import ControlPlane
from overlap.processes.wire import BODY_LIMIT_BYTES, MemberLost, MemberNotice, MessageError, RankEvent, decode_message
from overlap.runtime.world import World
from transports import NeuronLink, Router, Transport, Wire
from transports.efa import Efa
from transports.shared_memory import SharedMemory

from .worlds import TIMEOUT_S, run

T = TypeVar("T")

#: Processes by ranks in each: what every collective must pass on.
LAYOUTS = ((1, 4), (2, 2), (4, 1), (2, 3))


class Part(Transport):
    """Some of a transport's ranks, as the process that they live in sees it."""

    def __init__(self, whole: NeuronLink, ranks: Sequence[int]) -> None:
        self.whole, self.ranks, self.peers = whole, tuple(ranks), whole.ranks

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        return set(ranks) <= set(self.ranks)

    def wire(self, rank: int) -> Wire:
        assert rank in self.ranks
        return self.whole.wire(rank)

    def open(self) -> AbstractAsyncContextManager[Self]:
        raise AssertionError("the test opens the whole")


class Company:
    """A membership in memory. Notices travel as bytes, as on a socket."""

    def __init__(self, member: int, everybody: list[Company]) -> None:
        self.member, self._everybody = member, everybody
        self._send, self._receive = trio.open_memory_channel[MemberNotice | MemberLost](float("inf"))
        self._parted = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._handing: MemberNotice | MemberLost | None = None  # the message that its world is acting on
        self._acted_on: list[RankEvent] = []
        self._acted = trio.Event()
        self._given: dict[str, bytes] = {}
        self._asked: dict[str, trio.Event] = {}
        everybody.append(self)

    @property
    def members(self) -> int:
        return len(self._everybody)

    def send_notice(self, body: bytes) -> None:
        assert len(body) <= BODY_LIMIT_BYTES
        if trio.lowlevel.in_trio_run():
            self._pass_on(body)
        else:  # from the thread that watches the loop
            self._token.run_sync_soon(self._pass_on, body)

    def _pass_on(self, body: bytes) -> None:
        for other in self._everybody:
            if other is not self:
                other._send.send_nowait(MemberNotice(self.member, body))

    def lose(self, member: int, reason: str) -> None:
        self._send.send_nowait(MemberLost(member, reason))

    @property
    def unread(self) -> bool:
        return self._receive.statistics().current_buffer_used > 0

    def __aiter__(self) -> Company:
        return self

    async def __anext__(self) -> MemberNotice | MemberLost:
        if isinstance(self._handing, MemberNotice):
            with suppress(MessageError):
                self._acted_on.append(decode_message(self._handing.body))
            self._acted.set()
        self._handing = await self._receive.receive()
        return self._handing

    async def heard(self, kind: type[RankEvent], **fields: object) -> None:
        """Wait until this process has acted on a message of a kind, with such fields."""

        def fits(said: RankEvent) -> bool:
            return isinstance(said, kind) and all(getattr(said, name) == value for name, value in fields.items())

        while not any(map(fits, self._acted_on)):
            self._acted = trio.Event()
            await self._acted.wait()

    async def exchange(self, name: str, mine: bytes) -> list[bytes]:
        self._given[name] = mine
        self._asked.setdefault(name, trio.Event()).set()
        for other in self._everybody:
            await other._asked.setdefault(name, trio.Event()).wait()
        return [other._given[name] for other in self._everybody]

    async def barrier(self, name: str) -> None:
        self._parted.set()
        for other in self._everybody:
            await other._parted.wait()


@asynccontextmanager
async def in_memory(companies: list[Company], placement: Sequence[range]) -> AsyncIterator[list[Transport]]:
    """Join the processes by one wire that all ranks share."""
    async with NeuronLink(placement[-1].stop).open() as link:
        yield [Part(link, ranks) for ranks in placement]


@asynccontextmanager
async def by_sockets(
    companies: list[Company], placement: Sequence[range], **options: Any
) -> AsyncIterator[list[Transport]]:
    """Join the processes as real ones on several hosts are: by memory inside, by sockets between."""
    async with _routed(companies, placement, partial(Efa, **options)) as routers:
        yield routers


@asynccontextmanager
async def by_shared_memory(
    companies: list[Company], placement: Sequence[range], **options: Any
) -> AsyncIterator[list[Transport]]:
    """Join the processes as real ones on one host are."""
    async with _routed(companies, placement, partial(SharedMemory, **options)) as routers:
        yield routers


@asynccontextmanager
async def _routed(
    companies: list[Company], placement: Sequence[range], make: Callable[..., Transport]
) -> AsyncIterator[list[Transport]]:
    routers = []
    for company, ranks in zip(companies, placement, strict=True):
        between = make(member=company.member, placement=placement, secret=b"of this test", exchange=company.exchange)
        routers.append(Router([NeuronLink(list(ranks)), between]))
    over = trio.Event()

    async def keep_open(router: Router, *, task_status: trio.TaskStatus[None]) -> None:
        async with router.open():
            task_status.started()
            await over.wait()

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as opening:  # each waits for the others
            for router in routers:
                opening.start_soon(nursery.start, keep_open, router)
        try:
            yield list(routers)
        finally:
            over.set()


Wires = Callable[[list[Company], Sequence[range]], AbstractAsyncContextManager[list[Transport]]]


@asynccontextmanager
async def opened(
    processes: int, each: int, wires: Wires, check: str | None = None, algorithm: str | None = None
) -> AsyncIterator[tuple[list[World], list[Company]]]:
    """Open the worlds of `processes` processes with `each` ranks."""
    size = processes * each
    placement = [range(start, start + each) for start in range(0, size, each)]
    cluster = topology.cluster("local", nodes=processes, ranks=size)
    everybody: list[Company] = []
    for member in range(processes):
        Company(member, everybody)
    async with wires(everybody, placement) as transports:
        worlds = [
            World(size, cluster, transport, algorithm=algorithm, check=check, others=ControlPlane(company, placement))
            for company, transport in zip(everybody, transports, strict=True)
        ]
        yield worlds, everybody


def run_far(
    main: Callable[..., Awaitable[T]],
    processes: int,
    each: int,
    *args: object,
    timeout_s: float = TIMEOUT_S,
    nemesis: Callable[[list[Company]], Awaitable[None]] | None = None,
    wires: Wires = in_memory,
    check: str | None = None,
    algorithm: str | None = None,
) -> list[T | BaseException]:
    """Run `main` in a world of several processes; return each rank's result, or its process's error."""
    outcomes: dict[int, list[T] | BaseException] = {}

    async def one(member: int, world: World) -> None:
        try:
            outcomes[member] = await world.run_to_end(main, args, timeout_s)
        except Exception as error:
            outcomes[member] = error

    async def all_of_them() -> None:
        async with (
            opened(processes, each, wires, check, algorithm) as (worlds, everybody),
            trio.open_nursery() as nursery,
        ):
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


FAR: dict[str, Wires] = {"in_memory": in_memory, "by_sockets": by_sockets, "by_shared_memory": by_shared_memory}


def world(main: Callable[[overlap.Rank], Awaitable[Any]], way: str, ranks: int = 2) -> list[Any]:
    """Run a world along one of `PATHS`, in virtual time, or by one of `FAR` in as many processes as there are ranks."""
    if way == "virtual":
        return overlap.run(main, ranks=ranks, clock="virtual")
    return run_far(main, ranks, 1, wires=FAR[way]) if way in FAR else run(main, ranks, path=way)
