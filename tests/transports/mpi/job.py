"""What every process of an MPI job does for test_job: sends everything everywhere and checks every byte, or fails.

    mpiexec -n 4 python -m mpi4py tests/transports/mpi/job.py everything 2

sends with two ranks in each process. Process 0 prints "OK" when all have been content.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import trio

from transports import Endpoint, LinkLostError
from transports.mpi import Mpi, exchange

SIZES = (0, 1, 7, 1000, 16_384, 16_385, 100_003, 2**20, 4 * 2**20)
ROUNDS = 2


def message(src: int, dst: int, tag: int, turn: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    seed = np.random.SeedSequence([src, dst, tag, turn, nbytes])
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def plan(src: int, dst: int, turn: int) -> list[tuple[int, int]]:
    """Return (tag, nbytes) in an order that both ends know; every size on two tags, one of them huge."""
    pairs = [(tag, nbytes) for at, nbytes in enumerate(SIZES) for tag in (at % 3, 2**64 - 1 - at)]
    random.Random(f"{src}/{dst}/{turn}").shuffle(pairs)
    return pairs


async def send_all(end: Endpoint, dst: int) -> None:
    for turn in range(ROUNDS):
        async with trio.open_nursery() as nursery:
            for tag in {tag for tag, _ in plan(end.rank, dst, turn)}:
                nursery.start_soon(send_tag, end, dst, tag, turn)


async def send_tag(end: Endpoint, dst: int, tag: int, turn: int) -> None:
    for wanted, nbytes in plan(end.rank, dst, turn):
        if wanted == tag:
            await end.send(dst, tag, message(end.rank, dst, tag, turn, nbytes), priority=nbytes)


async def receive_all(end: Endpoint, src: int) -> None:
    for turn in range(ROUNDS):
        async with trio.open_nursery() as nursery:
            for tag in {tag for tag, _ in plan(src, end.rank, turn)}:
                nursery.start_soon(receive_tag, end, src, tag, turn)


async def receive_tag(end: Endpoint, src: int, tag: int, turn: int) -> None:
    for wanted, nbytes in plan(src, end.rank, turn):
        if wanted == tag:
            with await end.recv(src, tag, nbytes) as delivery:
                expected = message(src, end.rank, tag, turn, nbytes)
                if delivery.view != memoryview(expected):
                    raise SystemExit(f"rank {end.rank}: {nbytes} bytes of rank {src}, tag {tag}, came out wrong")


async def everything(ranks_each: int) -> None:
    told = await exchange()("ranks", str(ranks_each).encode())
    if told != [str(ranks_each).encode()] * len(told):
        raise SystemExit(f"the exchange brought {told}")
    placement = [range(m * ranks_each, (m + 1) * ranks_each) for m in range(len(told))]
    async with Mpi(placement=placement).open() as transport:
        async with trio.open_nursery() as nursery:
            for rank in transport.ranks:
                for peer in transport.peers:
                    nursery.start_soon(send_all, transport.endpoint(rank), peer)
                    nursery.start_soon(receive_all, transport.endpoint(rank), peer)
        left = transport.statistics()
        if left.unmatched_sends or left.unmatched_receives:
            raise SystemExit(f"something is left: {left}")
    if await exchange()("content", b"yes") == [b"yes"] * len(told) and transport.member == 0:
        print("OK")


async def leave() -> None:
    """Process 1 closes while process 0 waits for it."""
    async with Mpi().open() as transport:
        if transport.member == 0:
            try:
                await transport.endpoint(0).recv_into(1, 0, bytearray(8))
            except LinkLostError as error:
                print(error)


async def end_badly(how: str) -> None:
    """Process 1 ends badly while process 0 waits for it."""
    async with Mpi().open() as transport:
        if transport.member == 0:
            await transport.endpoint(0).recv_into(1, 0, bytearray(8))
            print("not reached")
        elif how == "abort":
            transport.abort(7)
        else:
            raise RuntimeError("this process fails")


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "everything":
        trio.run(everything, int(sys.argv[2]))
    elif what == "leave":
        trio.run(leave)
    else:
        trio.run(end_badly, what)
