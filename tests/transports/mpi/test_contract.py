"""The Mpi transport keeps the contract: over MPI itself where it is installed, and over a wire in memory anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

import pytest
import trio

from tests.transports.promises import assert_kept
from transports import Endpoint, Recording, Transport
from transports.mpi import Mpi
from transports.testing import CHECKS, MakePair

from .loop import Fabric, LoopMpi

needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed: pip install mpi4py")


@pytest.fixture(scope="module")
def _mpi_is_up() -> None:
    """MPI opens sockets of its own as it starts, and when it first sends; no test is to be blamed for them."""
    from mpi4py import MPI

    MPI.COMM_SELF.sendrecv(b"", 0)


def self_mpi() -> Mpi:
    """Two ranks in this process, whose messages go through MPI to this process itself."""
    from mpi4py import MPI

    return Mpi(placement=[(0, 1)], comm=MPI.COMM_SELF)


@asynccontextmanager
async def over_mpi() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    async with self_mpi().open() as transport:
        yield transport.endpoint(0), transport.endpoint(1)


@asynccontextmanager
async def over_recorded_mpi() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    transport: Transport = Recording(self_mpi())
    async with transport.open():
        yield transport.endpoint(0), transport.endpoint(1)


@asynccontextmanager
async def inside_a_member() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    async with LoopMpi(Fabric(1), 0, placement=[(5, 3)]).open() as transport:
        yield transport.endpoint(5), transport.endpoint(3)


@asynccontextmanager
async def between_members() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    fabric = Fabric(2)
    async with LoopMpi(fabric, 0).open() as a, LoopMpi(fabric, 1).open() as b:
        yield a.endpoint(0), b.endpoint(1)
        async with trio.open_nursery() as nursery:  # each waits for the other
            nursery.start_soon(a.aclose)
            nursery.start_soon(b.aclose)


@needs_mpi
@pytest.mark.usefixtures("_mpi_is_up")
@pytest.mark.parametrize("make_pair", [over_mpi, over_recorded_mpi])
@pytest.mark.parametrize("check", CHECKS)
def test_over_mpi(check: str, make_pair: MakePair) -> None:
    assert_kept(check, make_pair)


@pytest.mark.everyday(14)
@pytest.mark.parametrize("make_pair", [inside_a_member, between_members])
@pytest.mark.parametrize("check", CHECKS)
def test_over_a_wire_in_memory(check: str, make_pair: MakePair) -> None:
    assert_kept(check, make_pair)
