"""Several processes of a world, as objects of one process: each has its own Efa, and they really talk over sockets."""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

import trio

from tests.waiting import Lines
from transports import Efa, Transport, Wire
from transports.factory import Exchange
from transports.testing import MakePair

Met = TypeVar("Met", bound=Transport)

SECRET = b"of the tests"


class Table:
    """Where processes put what the others shall read: the all-gather that a launcher provides."""

    def __init__(self, members: int) -> None:
        self.members = members
        self._put: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self._full: defaultdict[str, trio.Event] = defaultdict(trio.Event)

    def of(self, member: int) -> Exchange:
        return partial(self._exchange, member)

    async def _exchange(self, member: int, name: str, mine: bytes) -> list[bytes]:
        put = self._put[name]
        put[member] = mine
        if len(put) == self.members:
            self._full[name].set()
        await self._full[name].wait()
        return [put[i] for i in range(self.members)]


class Meeting(Generic[Met]):
    """Transports of several processes that can find each other.

    Attributes:
        transports: One for each process.
        reports: The lines that each has reported.
        tables: Where they find each other.
    """

    def __init__(
        self, make: Callable[..., Met], placement: Sequence[Sequence[int]] = ((0,), (1,)), **settings: object
    ) -> None:
        self.tables = Table(len(placement))
        self.reports = [Lines() for _ in placement]
        self.transports = [
            make(
                member=member,
                placement=placement,
                exchange=self.tables.of(member),
                report=self.reports[member].append,
                **{"secret": SECRET, **settings},
            )
            for member in range(len(placement))
        ]

    def ends(self) -> list[Wire]:
        """The endpoint of the first rank of each process."""
        return [transport.wire(transport.ranks[0]) for transport in self.transports]


class World(Meeting[Efa]):
    """Efas that can find each other.

    Attributes:
        efas: One for each process.
    """

    def __init__(self, placement: Sequence[Sequence[int]] = ((0,), (1,)), **settings: object) -> None:
        super().__init__(Efa, placement, **settings)
        self.efas = self.transports


@asynccontextmanager
async def opened(transports: Sequence[Transport]) -> AsyncIterator[None]:
    """Open all at once, each in a task of its own; close them one after the other, the last first."""
    async with trio.open_nursery() as nursery:
        ready = [trio.Event() for _ in transports]
        leave = [trio.Event() for _ in transports]
        left = [trio.Event() for _ in transports]

        async def stay(i: int) -> None:
            try:
                async with transports[i].open():
                    ready[i].set()
                    await leave[i].wait()
            finally:
                left[i].set()

        for i in range(len(transports)):
            nursery.start_soon(stay, i)
        for event in ready:
            await event.wait()
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                for i in reversed(range(len(transports))):
                    leave[i].set()
                    await left[i].wait()


@asynccontextmanager
async def open_world(placement: Sequence[Sequence[int]] = ((0,), (1,)), **settings: object) -> AsyncIterator[World]:
    """Make a world, and open its efas until the end of the block."""
    world = World(placement, **settings)
    async with opened(world.efas):
        yield world


def pairs(wrap: Callable[[Transport], Transport] = lambda inner: inner, **settings: object) -> MakePair:
    """Make pairs of endpoints in two processes, for the contract suite."""

    @asynccontextmanager
    async def make_pair() -> AsyncIterator[tuple[Wire, Wire]]:
        world = World(((5, 0), (3,)), **settings)
        transports = [wrap(efa) for efa in world.efas]
        async with opened(transports):
            yield transports[0].wire(0), transports[1].wire(3)

    return make_pair


async def quietly(call: Callable[[], Awaitable[object]], outcome: list[BaseException]) -> None:
    """Note the error of a call."""
    try:
        await call()
    except Exception as error:
        outcome.append(error)
