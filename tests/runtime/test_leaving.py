"""Ranks that end otherwise than by an error of their own: they leave early, exit, or are interrupted."""

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import overlap
from overlap import RankLeftError

from .worlds import Turns, failure_of, run

R = overlap.Rank
HERE = "tests/runtime/test_leaving.py"


async def wait_for(rank: R) -> None:
    await rank.barrier()


@pytest.mark.parametrize("first", [True, False], ids=["leaves-first", "leaves-last"])
def test_a_rank_that_leaves_while_others_wait(first: bool, path: str) -> None:
    turns = Turns((1, 0, 2) if first else (0, 2, 1))
    told: dict[int, RankLeftError] = {}
    everybody = trio.Event()

    async def main(rank: R) -> None:
        async with turns.of(rank.rank):
            if rank.rank == 1:
                return
            future = rank.all_reduce(np.ones(2))
        with pytest.raises(RankLeftError) as caught:
            await future
        told[rank.rank] = caught.value
        if len(told) == 2:
            everybody.set()
        await everybody.wait()
        raise caught.value

    failure = failure_of(run, main, 3, path=path)
    assert failure.rank == 1
    assert isinstance(failure.cause, RankLeftError)
    assert sorted(told) == [0, 2]
    assert told[0] is not told[2]
    for error in told.values():
        assert error.culprit == 1
        assert "rank 1 finished its program while rank" in str(error)
        assert f" it in all_reduce #0 on group 'world' ({HERE}:" in str(error)
    if not first:
        assert all("while ranks 0, 2 need it" in str(error) for error in told.values())


def test_the_one_that_left_is_named_by_a_rank_with_two_waiting_tasks(path: str) -> None:
    inside = trio.Event()

    async def main(rank: R) -> None:
        if rank.rank == 1:
            await inside.wait()
            return
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(wait_for, rank)
            await wait_all_tasks_blocked()
            inside.set()

    failure = failure_of(run, main, 2, path=path)
    assert failure.rank == 1
    assert isinstance(failure.cause, RankLeftError)
    assert not failure.others
    assert str(failure).startswith("rank 1 left too early: RankLeftError: rank 1 finished its program while rank 0 ")


@pytest.mark.parametrize("sending", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_leaves_its_partner(order: tuple[int, int], sending: bool, path: str) -> None:
    turns = Turns(order)

    async def main(rank: R) -> None:
        async with turns.of(rank.rank):
            if rank.rank == 1:
                return
            future = rank.send(np.ones(1), 1) if sending else rank.recv(((1,), float), 1)
        await future

    failure = failure_of(run, main, 2, path=path)
    assert failure.rank == 1
    name = "send #0 to rank 1" if sending else "recv #0 from rank 1"
    assert str(failure.cause).startswith(f"rank 1 finished its program while rank 0 needs it in {name} on")


def test_operations_that_nobody_awaits_keep_a_rank_until_they_are_done(path: str) -> None:
    ran: list[int] = []

    async def main(rank: R) -> None:
        if rank.rank == 0:
            for _ in range(20):
                rank.all_reduce(rank.compute(np.ones, 1))
            rank.compute(ran.append, 0)
            return
        for _ in range(20):
            await rank.all_reduce(np.ones(1))

    assert run(main, 2, path=path) == [None, None]
    assert ran == [0]


def test_results_are_in_rank_order_and_leaving_early_is_fine_if_nobody_waits(path: str) -> None:
    turns = Turns((2, 0, 1))

    async def main(rank: R) -> int:
        await rank.barrier()
        async with turns.of(rank.rank):
            return rank.rank * 10
        raise AssertionError("unreachable")

    assert run(main, 3, path=path) == [0, 10, 20]


async def raise_interrupt(rank: R) -> None:
    raise KeyboardInterrupt


async def press_ctrl_c(rank: R) -> None:
    signal.raise_signal(signal.SIGINT)
    await trio.sleep_forever()


async def interrupt_in_a_nursery(rank: R) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raise_interrupt, rank)
        nursery.start_soon(wait_for, rank)


def interrupt() -> None:
    raise KeyboardInterrupt


async def interrupt_in_a_compute(rank: R) -> None:
    await rank.compute(interrupt)


@pytest.mark.parametrize(
    "program", [raise_interrupt, press_ctrl_c, interrupt_in_a_nursery, interrupt_in_a_compute], ids=lambda f: f.__name__
)
def test_an_interrupt_comes_out_plain(program: Callable[[R], Awaitable[None]], path: str) -> None:
    arrays: list[np.ndarray] = []

    async def main(rank: R) -> None:
        x = np.ones(2)
        arrays.append(x)
        future = rank.all_reduce(x)
        if rank.rank == 1:
            rank.recv(((1,), float), 0)
            await program(rank)
        await future

    with pytest.raises(KeyboardInterrupt):
        run(main, 3, path=path)
    assert all(x.flags.writeable for x in arrays)


def test_others_are_told_which_rank_was_interrupted(path: str) -> None:
    """A program that ends with that error is no failure of the world."""
    futures: list[overlap.Future[Any]] = []

    async def main(rank: R) -> None:
        future = rank.recv(((1,), float), (rank.rank + 1) % 3)
        futures.append(future)
        if len(futures) == 3:
            await raise_interrupt(rank)
        try:
            await future
        except trio.Cancelled:
            if future is futures[0]:
                futures[-1].result()
            raise

    with pytest.raises(KeyboardInterrupt):
        run(main, 3, path=path)
    errors = [future.exception() for future in futures[1:]]
    culprits = {error.culprit for error in errors if isinstance(error, overlap.PeerFailedError)}
    assert len(culprits) == 1
    text = f"the world has ended: rank {culprits.pop()} was interrupted"
    assert [str(error) for error in errors] == [text] * 2


def test_a_rank_that_exits_is_a_rank_that_failed() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 1:
            sys.exit(3)
        await rank.barrier()

    failure = failure_of(run, main, 2)
    assert failure.rank == 1
    assert isinstance(failure.cause, SystemExit)
    assert failure.cause.code == 3
