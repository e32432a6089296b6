"""Small operations of threads: issued and ended by the thread itself wherever its loop sleeps, and never beside it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.engine.small_run import SmallAllReduce
from overlap.runtime.handover import Handover

from .connecting import TIMEOUT_S, connected

ROUNDS = 60


@contextmanager
def looping() -> Iterator[Handover]:
    """A loop in another thread that lets threads in, and its handover."""
    found: list[Handover] = []
    begun, over = threading.Event(), threading.Event()

    async def main() -> None:
        handover, end = Handover(trio.lowlevel.current_trio_token()), trio.Event()
        handover.let_threads_in()
        found.append(handover)
        begun.set()
        await trio.to_thread.run_sync(over.wait)
        end.set()

    loop = threading.Thread(target=trio.run, args=(main,))
    loop.start()
    try:
        assert begun.wait(TIMEOUT_S)
        yield found[0]
    finally:
        over.set()
        loop.join(TIMEOUT_S)


def entered(handover: Handover) -> None:
    """Enter as soon as the loop sleeps."""
    gate = threading.Event()
    while not handover.enter():
        gate.wait(0.001)


def test_nothing_of_the_loop_runs_while_a_thread_is_in() -> None:
    with looping() as handover:
        called = threading.Event()
        entered(handover)
        handover.post(called.set)
        assert not called.wait(0.05)
        assert not handover.enter()
        handover.leave()
        assert called.wait(TIMEOUT_S)


def test_who_comes_after_others_waits_for_its_turn() -> None:
    with looping() as handover:
        seen = list[bool]()
        looked = threading.Event()

        def ask() -> None:  # on the loop
            handover.post(looked.set)
            seen.append(handover.enter())

        handover.post(ask)
        assert looked.wait(TIMEOUT_S)
        assert seen == [False]


def test_a_loop_that_lets_nobody_in() -> None:
    async def main() -> bool:
        return Handover(trio.lowlevel.current_trio_token()).enter()

    assert not trio.run(main)


def test_whoever_comes_last_ends_the_operation_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_by = set[int]()
    ends = SmallAllReduce._end

    def end(run: SmallAllReduce) -> None:
        ended_by.add(threading.get_ident())
        ends(run)

    monkeypatch.setattr(SmallAllReduce, "_end", end)

    def program(world: overlap.Connection) -> None:
        while True:  # until it has happened once; the time-out bounds it
            mine = np.array(threading.get_ident() in ended_by)
            if world.rank.all_reduce(mine, op="bor", timeout_s=TIMEOUT_S).result(TIMEOUT_S):
                return

    connected(program, 2)


def test_threads_of_all_kinds_get_what_is_theirs() -> None:
    def program(world: overlap.Connection) -> list[Any]:
        rank, found = world.rank, dict[str, list[Any]]()
        told = list[float]()

        def issue(name: str, elements: int) -> None:
            results, stream = [], rank.stream(name)
            for index in range(ROUNDS):
                x = np.full(elements, float(index + rank.rank))
                future = rank.all_reduce(x, stream=stream, timeout_s=TIMEOUT_S if index % 3 else None)
                if index % 4 == 0:
                    future.add_done_callback(lambda each: told.append(float(each.result()[0])))
                if index % 5:
                    future.result(TIMEOUT_S)
                results.append(future)
            found[name] = [float(future.result(TIMEOUT_S)[-1]) for future in results]

        sizes = {"small": 1, "more": 7, "on the board": 500, "large": 200_000}
        threads = [threading.Thread(target=issue, args=each) for each in sizes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        rank.barrier().result(TIMEOUT_S)
        return [*(found[name] for name in sizes), sorted(told)]

    sums = [float(2 * index + 1) for index in range(ROUNDS)]
    told = sorted(4 * [total for index, total in enumerate(sums) if index % 4 == 0])
    assert connected(program, 2) == [[sums, sums, sums, sums, told]] * 2


def test_who_waits_hears_that_the_other_has_failed() -> None:
    def program(world: overlap.Connection) -> str:
        for _ in range(3):
            world.rank.all_reduce(np.ones(1)).result(TIMEOUT_S)
        if world.rank.rank == 1:
            world.fail(ValueError("out of luck"))
            return "failed"
        with pytest.raises(overlap.PeerFailedError) as caught:
            world.rank.all_reduce(np.ones(1)).result(TIMEOUT_S)
        with pytest.raises(overlap.RankFailedError):
            world.close()
        return str(caught.value)

    assert connected(program, 2) == ["rank 1 failed: ValueError: out of luck", "failed"]
