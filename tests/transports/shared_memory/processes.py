"""Several processes of a host, as objects of one process, which really pass memory and read it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from transports import Transport, Wire
from transports.shared_memory import SharedMemory
from transports.testing import MakePair

from ..efa.processes import Meeting, opened


class Host(Meeting[SharedMemory]):
    """Transports that can find each other."""

    def __init__(self, placement: Sequence[Sequence[int]] = ((0,), (1,)), **settings: object) -> None:
        super().__init__(SharedMemory, placement, **settings)


def pairs(wrap: Callable[[Transport], Transport] = lambda inner: inner, **settings: object) -> MakePair:
    """Make pairs of endpoints in two processes, for the contract suite."""

    @asynccontextmanager
    async def make_pair() -> AsyncIterator[tuple[Wire, Wire]]:
        transports = [wrap(each) for each in Host(((5, 0), (3,)), **settings).transports]
        async with opened(transports):
            yield transports[0].wire(0), transports[1].wire(3)

    return make_pair
