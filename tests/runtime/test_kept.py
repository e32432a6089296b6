"""Nothing is kept of what is over: failures that were seen, operations that were withdrawn, waits that timed out."""

import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio

import overlap

TIMES = 10_000


class Held:
    """An object of a program, such as the arrays of a frame."""


class Boom(Exception):
    pass


def failing(held: list[weakref.ref[Held]]) -> Callable[[], None]:
    def fail() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        raise Boom

    return fail


async def computes_that_fail(rank: overlap.Rank, held: list[weakref.ref[Any]]) -> None:
    with pytest.raises(Boom):
        await rank.compute(failing(held), seconds=1e-6)


async def tasks_that_fail(rank: overlap.Rank, held: list[weakref.ref[Any]]) -> None:
    async def task() -> None:
        failing(held)()

    with pytest.raises(Boom):
        await rank.spawn(task)


async def collectives_of_inputs_that_fail(rank: overlap.Rank, held: list[weakref.ref[Any]]) -> None:
    with pytest.raises(Boom):
        await rank.all_reduce(rank.compute(failing(held), seconds=1e-6))


async def computes_that_are_cancelled(rank: overlap.Rank, held: list[weakref.ref[Any]]) -> None:
    mine = Held()
    held.append(weakref.ref(mine))
    message = rank.recv(((1,), float), src=0)
    assert rank.compute(lambda _, mine: None, message, mine, seconds=1e-6).cancel()
    assert message.cancel()


async def receives_that_are_withdrawn(rank: overlap.Rank, held: list[weakref.ref[Any]]) -> None:
    room = np.empty(1)
    held.append(weakref.ref(room))
    with trio.move_on_after(0):
        await rank.recv(room, src=0)


async def daemons(rank: overlap.Rank, held: list[weakref.ref[Any]]) -> None:
    async def wait(mine: Held) -> None:
        await trio.sleep_forever()

    mine = Held()
    held.append(weakref.ref(mine))
    task = rank.spawn(wait, mine, daemon=True)
    task.cancel()
    with pytest.raises(overlap.FutureCancelledError):
        await task


KINDS = [
    computes_that_fail,
    tasks_that_fail,
    collectives_of_inputs_that_fail,
    computes_that_are_cancelled,
    receives_that_are_withdrawn,
    daemons,
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand(kind: Callable[..., Awaitable[None]], clock: Any) -> None:
    async def main(rank: overlap.Rank) -> tuple[int, int]:
        held: list[weakref.ref[Any]] = []
        for _ in range(TIMES):
            await kind(rank, held)
        await rank.barrier()
        gc.collect()  # Trio's scopes and tasks refer to each other
        return len(held), sum(each() is not None for each in held)

    cluster = "local" if clock == "real" else "trn1.2xlarge"
    [(made, alive)] = overlap.run(main, ranks=1, clock=clock, cluster=cluster)
    assert made == TIMES
    assert alive <= 2  # of the last one


def test_cancelled_behind_one_that_runs(clock: Any) -> None:
    async def main(rank: overlap.Rank) -> object:
        held: list[weakref.ref[Any]] = []
        ended = threading.Event()
        first = rank.compute(lambda *_: ended.wait(60) and None, seconds=1.0)
        for _ in range(3):
            await computes_that_are_cancelled(rank, held)
        gc.collect()
        alive = [each() for each in held]
        ended.set()
        await first
        return alive

    cluster = "local" if clock == "real" else "trn1.2xlarge"
    assert overlap.run(main, ranks=1, clock=clock, cluster=cluster) == [[None, None, None]]


@pytest.mark.slow
def test_ten_thousand_waits_that_time_out() -> None:
    async def main(rank: overlap.Rank) -> object:
        future = rank.recv(((1,), float), src=0)

        def wait() -> None:
            for _ in range(TIMES):
                assert not future.wait(0)

        await rank.compute(wait)
        kept = dict(future._threads or {})
        assert future.cancel()
        return kept

    assert overlap.run(main, ranks=1) == [{}]


@pytest.mark.slow
def test_a_hundred_thousand_receives_are_withdrawn_one_after_the_other() -> None:
    async def main(rank: overlap.Rank) -> int:
        for _ in range(100_000):
            assert rank.recv(((1,), float), src=0).cancel()
        rank.send(np.ones(1), dst=0)
        return int((await rank.recv(((1,), float), src=0))[0])

    assert overlap.run(main, ranks=1) == [1]


def test_the_results_of_a_world_that_is_over() -> None:
    """The handler of Ctrl-C has replaced that of the world's loop, which refers to the results."""

    async def main(rank: overlap.Rank) -> Held:
        return Held()

    held = weakref.ref(overlap.run(main, ranks=1)[0])
    gc.collect()
    assert held() is None
