"""Waits of threads at their edges: receives that are left and asked for again, and what a wait leaves behind."""

import asyncio
import threading
import time

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.callbacks import call_when_settled
from overlap.runtime.state import DONE, MATCHING, PARKED, RUNNING, UNWANTED

from .connecting import TIMEOUT_S, connected

R = overlap.Rank
ROUNDS = 20


def test_a_wait_that_ended_well_is_forgotten() -> None:
    """Else a cancelled await of the same receive would keep its message from the next one."""

    def program(world: overlap.Connection) -> bool:
        future = world.rank.all_reduce(np.ones(1))
        assert future.wait(TIMEOUT_S)
        return bool(future._threads)

    assert connected(program, 2) == [False, False]


def test_an_item_that_was_given_out_is_not_given_back() -> None:
    async def main(rank: R) -> list[float]:
        if rank.rank == 1:
            rank.send(np.array([1.0]), 0)
            rank.send(np.array([2.0]), 0)
            return []
        future = rank.recv(((1,), float), 1)
        while not future.done:  # noqa: ASYNC110 (to await it would take the result)
            await trio.sleep(1e-3)
        first = float(future[0].result())
        with trio.CancelScope() as scope:
            scope.cancel()
            await future
        return [first, float((await rank.recv(((1,), float), 1))[0])]

    assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)[0] == [1.0, 2.0]


@pytest.mark.parametrize("transport", [None, "efa"], ids=["memory", "sockets"])
def test_a_thread_that_asks_for_a_receive_that_was_left_gets_the_message(transport: str | None) -> None:
    """The await is cancelled before a long message, in the midst of it, or after it."""

    async def leave(future: overlap.Future[np.ndarray], delay_s: float) -> None:
        task = asyncio.ensure_future(waiting(future))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])

    async def waiting(future: overlap.Future[np.ndarray]) -> object:
        return await future

    def receiver(world: overlap.Connection) -> list[float]:
        found = []
        for number in range(ROUNDS):
            future = world.rank.recv(np.empty(400_000), 1)
            about.wait(TIMEOUT_S)
            asyncio.run(leave(future, number * 1e-4))
            found.append(float(future.result(TIMEOUT_S)[0]))
        return found

    def sender(world: overlap.Connection) -> list[float]:
        for number in range(ROUNDS):
            about.wait(TIMEOUT_S)
            world.rank.send(np.full(400_000, float(number)), 0).result(TIMEOUT_S)
        return []

    about = threading.Barrier(2)
    found = connected(lambda world: sender(world) if world.rank.rank else receiver(world), 2, transport=transport)
    assert found == [[float(number) for number in range(ROUNDS)], []]


def test_to_wait_for_a_receive_that_nobody_wants_wants_it_again() -> None:
    async def main(rank: R) -> list[str]:
        if rank.rank == 1:
            await rank.barrier()
            rank.send(np.ones(1), 0)
            return []
        future = rank.recv(((1,), float), 1)
        future._enter(UNWANTED)
        seen = [future.state.word]
        thread = threading.Thread(target=lambda: got.append(float(future.result(TIMEOUT_S)[0])))
        thread.start()
        while future.state is UNWANTED:  # noqa: ASYNC110 (what changes it is another thread)
            await trio.sleep(1e-3)
        seen.append(future.state.word)
        await rank.barrier()
        await trio.to_thread.run_sync(thread.join)
        assert future.state is DONE
        return seen

    got = list[float]()
    assert MATCHING < RUNNING < PARKED
    assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)[0] == ["unwanted", "matching"]
    assert got == [1.0]


def test_an_await_of_a_receive_of_another_thread_that_is_cancelled_at_once_takes_no_message() -> None:
    """The loop has not heard of the receive when the await of it is cancelled."""

    async def main(rank: R) -> list[float]:
        if rank.rank == 1:
            await rank.barrier()
            rank.send(np.array([1.0]), 0)
            return []
        found = list[overlap.Future[np.ndarray]]()
        thread = threading.Thread(target=lambda: found.append(rank.recv(((1,), float), 1)))
        thread.start()
        thread.join()  # keeps the loop, which cannot hear of it meanwhile
        with trio.CancelScope() as scope:
            scope.cancel()
            await found[0]
        await rank.barrier()
        return [float((await rank.recv(((1,), float), 1))[0])]

    assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)[0] == [1.0]


def test_a_ctrl_c_in_a_callback_that_is_called_at_once_is_the_programs() -> None:
    def program(world: overlap.Connection) -> bool:
        future = world.rank.all_reduce(np.ones(1))
        future.result(TIMEOUT_S)

        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            call_when_settled(future, interrupt)
        return True

    assert connected(program, 2) == [True, True]


def test_the_first_small_operation_of_a_thread_after_one_with_an_algorithm() -> None:
    """Whether a thread may issue it is asked of a plan, which opens what the ranks have in common."""

    def program(world: overlap.Connection) -> list[float]:
        rank = world.rank
        first = rank.all_reduce(np.ones(4), algorithm="ring").result(TIMEOUT_S)
        rest = [rank.all_reduce(np.full(1, float(number))).result(TIMEOUT_S)[0] for number in range(20)]
        return [float(first[0]), *map(float, rest)]

    assert connected(program, 2) == [[2.0, *(2.0 * number for number in range(20))]] * 2


def boom() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_an_operation_whose_input_fails_elsewhere_fails_alone_however_late_it_comes(kind: str) -> None:
    """Rank 1 comes to it after it has heard of that; later operations go on, and nothing is kept of it."""

    def program(world: overlap.Connection) -> tuple[list[float], int]:
        rank, found = world.rank, list[float]()
        for number in range(ROUNDS):
            if rank.rank == 0:
                bad = rank.compute(boom)
                issued = rank.all_reduce(bad) if kind == "collective" else rank.send(bad, 1)
                with pytest.raises(ValueError, match="boom"):
                    issued.result(TIMEOUT_S)
                rank.send(np.ones(1), 1, tag=number + 1).result(TIMEOUT_S)
            else:
                rank.recv(np.empty(1), 0, tag=number + 1).result(TIMEOUT_S)
                issued = rank.all_reduce(np.ones(1)) if kind == "collective" else rank.recv(np.empty(1), 0)
                with pytest.raises(overlap.PeerFailedError, match="boom"):
                    issued.result(TIMEOUT_S)
            found.append(float(rank.all_reduce(np.ones(1)).result(TIMEOUT_S)[0]))
        assert world._world is not None
        spanning = world._world.communicators.spanning.values()  # type: ignore[attr-defined]
        kept, last_s = 1, time.monotonic() + TIMEOUT_S
        while kept and time.monotonic() < last_s:  # the loop forgets an operation after it has woken its thread
            kept = sum(len(each._matches) for each in spanning)
        return found, kept

    assert connected(program, 2) == [([2.0] * ROUNDS, 0)] * 2
