"""Running worlds in tests: a hang becomes a StallError, and a rank's error is what the test gets to see."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import trio

import overlap
from tests.errors import error_of
from transports import NeuronLink, Recording, Transport

T = TypeVar("T")

# Far above what any test here takes on a busy machine: it bounds a hang and decides nothing else.
TIMEOUT_S = 60.0

SIZES = (1, 2, 3, 4, 7, 8)
# How the bytes get there: the short cut, one algorithm wherever it exists, or whatever is chosen over a wire.
PATHS = ("direct", "ring", "mesh", "recursive_doubling", "wire")
FEW_PATHS = ("direct", "mesh")


def run(main: Callable[..., Awaitable[T]], ranks: int, *args: object, path: str = "direct") -> list[T]:
    """Run a world along one of `PATHS`."""
    transport: Transport = Recording(NeuronLink(ranks)) if path == "wire" else NeuronLink(ranks)
    algorithm = None if path in ("direct", "wire") else path
    return overlap.run(main, *args, ranks=ranks, transport=transport, algorithm=algorithm, timeout_s=TIMEOUT_S)


failure_of = partial(error_of, overlap.RankFailedError)
"""Call a function that runs a world, one of whose ranks fails; return the error that the call raises."""


class Turns:
    """Lets the ranks of one world pass one after the other, so that a test decides who comes first."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._passed = {rank: trio.Event() for rank in self._order}

    @asynccontextmanager
    async def of(self, rank: int) -> AsyncIterator[None]:
        """Be inside when it is the turn of `rank`; leaving lets the next one in."""
        place = self._order.index(rank)
        if place:
            await self._passed[self._order[place - 1]].wait()
        try:
            yield
        finally:
            self._passed[rank].set()
