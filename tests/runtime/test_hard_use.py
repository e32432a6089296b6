"""What programs do at their worst: futures that nobody awaits, aborts in the midst of it all, threads that stay on."""

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.runtime.operation import CollectiveFuture
from tests.embedded.connecting import TIMEOUT_S, connected

from .worlds import FEW_PATHS, failure_of, run

R = overlap.Rank
WIRES = ("memory", "efa")


def futures() -> int:
    """Return how many futures of collectives there are."""
    gc.collect()
    return sum(isinstance(each, CollectiveFuture) for each in gc.get_objects())


@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", [*FEW_PATHS, "wire"])
def test_futures_that_nobody_awaits_are_carried_out_and_forgotten(path: str) -> None:
    async def main(rank: R) -> tuple[float, bool]:
        before = futures()
        for _ in range(6):
            for _ in range(50):
                last = rank.all_reduce(np.ones(1))
                rank.barrier()
            await rank.barrier()  # so that none of them is under way
        return float(
            (await last)[0]
        ), futures() <= before + 6  # the barriers of both ranks, and those about to be issued

    assert run(main, 2, path=path) == [(2.0, True)] * 2


def test_the_failure_of_a_future_that_nobody_awaits_is_not_lost_among_many() -> None:
    def fail() -> Any:
        raise ValueError("the 700th")

    async def main(rank: R) -> None:
        for number in range(1000):
            rank.all_reduce(rank.compute(fail if number == 700 and rank.rank else partial(np.ones, 1)))

    error = failure_of(run, main, 2)
    assert (error.rank, str(error.cause)) == (1, "the 700th")


@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", [*FEW_PATHS, "wire"])
def test_groups_are_aborted_while_others_and_their_own_operations_are_under_way(path: str) -> None:
    """Each operation of an aborted group ends, well or with the abort; the world's own all end well."""

    async def main(rank: R) -> int:
        order, cut = random.Random(7), 0
        for number in range(15):
            group = rank.group([0, 1, 2], name=f"g{number}")
            victim, at = order.randrange(3), order.randrange(20)
            mine, theirs = [], []
            for issued in range(20):
                if rank.rank == victim and issued == at:
                    group.abort(ValueError(f"abort {number}"))
                mine.append(group.all_reduce(np.full(1 << order.choice([0, 12]), 1.0)))
                theirs.append(rank.all_reduce(np.full(300, number)))
            for future in theirs:
                assert (await future == 3 * number).all()
            for future in mine:
                try:
                    assert (await future == 3.0).all()
                except overlap.GroupAbortedError as error:
                    assert str(error).endswith(f"was aborted by rank {victim}: ValueError: abort {number}")  # noqa: PT017
                    cut += 1
            await rank.barrier()
        return cut

    found = run(main, 3, path=path)
    assert min(found) > 0


@pytest.mark.parametrize("wire", WIRES)
def test_threads_that_outlive_their_world_are_told(wire: str) -> None:
    """Each call raises, and none waits for somebody who has gone."""
    left = threading.Event()

    def use(rank: overlap.Rank) -> list[str]:
        left.wait(TIMEOUT_S)
        calls: list[Callable[[], Any]] = [
            lambda: rank.all_reduce(np.ones(1)).result(TIMEOUT_S),
            lambda: rank.send(np.ones(1), 1 - rank.rank).result(TIMEOUT_S),
            lambda: rank.barrier().result(TIMEOUT_S),
            lambda: rank.compute(np.ones, 1).result(TIMEOUT_S),
            lambda: rank.group([0, 1]).all_reduce(np.ones(1)).result(TIMEOUT_S),
        ]
        told = []
        for call in calls:
            try:
                told.append(f"returned {call()}")
            except overlap.OverlapError as error:
                told.append(str(error))
        return told

    with ThreadPoolExecutor(2) as pool:

        def program(world: overlap.Connection) -> Any:
            world.rank.barrier().result(TIMEOUT_S)
            return pool.submit(use, world.rank)

        try:
            staying = connected(program, 2, transport=wire if wire != "memory" else None)
        finally:
            left.set()
        told = [each.result(TIMEOUT_S) for each in staying]
    assert told == [["the world has ended"] * 5] * 2


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_nothing_grows_with_the_number_of_operations(wire: str) -> None:
    """Between processes by shared memory and by sockets; `test_soak` has a million of them."""

    def program(world: overlap.Connection) -> list[int]:
        rank, x, held = world.rank, np.ones(300), list[int]()
        other = 1 - rank.rank
        for number in range(10 * 300):
            first = rank.all_reduce(x)
            if rank.rank:
                rank.recv(np.empty(2), other, tag=number % 7).result(TIMEOUT_S)
            else:
                rank.send(x[:2], other, tag=number % 7).result(TIMEOUT_S)
            first.result(TIMEOUT_S)
            if number % 300 == 299:
                rank.barrier().result(TIMEOUT_S)
                if not rank.rank:
                    gc.collect()
                    held.append(len(gc.get_objects()))
                rank.barrier().result(TIMEOUT_S)
        return held

    held = connected(program, 2, transport=wire if wire != "memory" else None)[0]
    assert max(held[8:]) <= max(held[6:8]) + 300  # less than one object for two rounds


@pytest.mark.slow
def test_512_ranks_of_one_process() -> None:
    async def main(rank: R) -> tuple[int, int]:
        found = await rank.all_reduce(np.full(10, rank.rank))
        await rank.barrier()
        return int(found[0]), int((await rank.all_gather(np.array([rank.rank]))).sum())

    assert run(main, 512) == [(511 * 256, 511 * 256)] * 512
