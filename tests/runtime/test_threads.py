"""Collectives issued in threads that run no event loop, and futures that such threads wait for."""

import threading
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel

import overlap
from overlap.runtime.handover import Handover
from tests.errors import error_of

from .worlds import failure_of, run

R = overlap.Rank


def test_a_compute_issues_collectives_and_waits_for_them() -> None:
    def work(rank: R) -> list[float]:
        futures = [rank.all_reduce(np.full(3, float(rank.rank + step))) for step in range(5)]
        return [float(future.result(timeout=20)[0]) for future in futures]

    async def main(rank: R) -> list[float]:
        return await rank.compute(work, rank)

    assert run(main, 3) == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


@pytest.mark.parametrize("path", ["direct", "ring", "wire"])
def test_any_thread_sends_and_receives_in_the_order_of_its_calls(path: str) -> None:
    def talk(rank: R) -> list[int]:
        sent = [rank.send(np.array([number]), 1 - rank.rank, tag=number % 2) for number in range(6)]
        got = [rank.recv(((1,), "int64"), 1 - rank.rank, tag=number % 2).result(20) for number in range(6)]
        for future in sent:
            future.result(20)
        return [int(array[0]) for array in got]

    async def main(rank: R) -> list[int]:
        return await trio.to_thread.run_sync(talk, rank)

    assert run(main, 2, path=path) == [list(range(6))] * 2


def test_on_the_loop_a_result_that_is_not_there_raises_at_once() -> None:
    async def main(rank: R) -> str:
        if rank.rank == 1:
            await told.wait()
            await rank.barrier()
            return ""
        future = rank.barrier()
        error = error_of(trio.WouldBlock, future.result, timeout=5)
        told.set()
        await future
        return str(error)

    told = trio.Event()
    assert run(main, 2)[0] == (
        "barrier #0 on group 'world' has not ended, and waiting here would stop the event loop; await its future, or "
        "wait in a thread that runs no event loop"
    )


def test_a_thread_gives_up_waiting_in_time() -> None:
    async def main(rank: R) -> str | None:
        if rank.rank == 1:
            await told.wait()
            await rank.barrier()
            return None
        future = rank.barrier()
        try:
            await trio.to_thread.run_sync(future.result, 0.01)
        except TimeoutError as error:
            return str(error)
        finally:
            told.set()
            await future
        return "no"

    told = trio.Event()
    assert run(main, 2)[0] == "barrier #0 on group 'world' has not ended within 0.01 s; pass a longer timeout"


def test_a_mistake_is_told_in_the_thread_that_made_it() -> None:
    def wrong(rank: R) -> str:
        texts = []
        for call in (
            lambda: rank.all_reduce(np.ones(2), stream="nowhere"),
            lambda: rank.send(np.ones(2), 9),
            lambda: rank.all_reduce("text"),
            lambda: rank.broadcast(np.ones(1), root=5),
        ):
            texts.append(str(error_of(overlap.UsageError, call)).partition(":")[0])
        return " ".join(texts)

    async def main(rank: R) -> str:
        return await rank.compute(wrong, rank)

    assert run(main, 2) == ["stream dst x root"] * 2


def test_what_a_thread_has_passed_is_locked_when_the_call_returns() -> None:
    def work(rank: R) -> None:
        mine = np.ones(4)
        future = rank.all_reduce(mine)
        if not future.done:
            assert not mine.flags.writeable or future.done
        future.result(20)
        mine += 1

    async def main(rank: R) -> None:
        await rank.compute(work, rank)

    run(main, 2)


def test_a_thread_learns_that_the_world_has_failed() -> None:
    def wait(rank: R) -> None:
        rank.barrier().result()

    async def main(rank: R) -> None:
        if rank.rank == 0:
            raise ValueError("boom")
        await rank.compute(wait, rank)

    failure = failure_of(run, main, 2)
    assert "boom" in str(failure)


def test_a_call_after_the_end_says_so() -> None:
    kept: list[R] = []

    async def main(rank: R) -> None:
        kept.append(rank)

    run(main, 1)
    errors: list[BaseException] = []

    def late() -> None:
        try:
            kept[0].all_reduce(np.ones(1)).result()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    thread.join(20)
    assert [type(error) for error in errors] == [overlap.PeerFailedError]
    assert "the world has ended" in str(errors[0])


def test_callbacks_are_called_once_with_the_future() -> None:
    async def main(rank: R) -> list[Any]:
        heard: list[Any] = []
        future = rank.all_reduce(np.full(2, 1.0))
        future.add_done_callback(heard.append)
        await future
        future.add_done_callback(heard.append)
        item = rank.compute(lambda: (1, 2))[1]
        item.add_done_callback(lambda it: heard.append(it.result()))
        await item
        return [each is future for each in heard[:2]] + heard[2:]

    assert run(main, 2) == [[True, True, 2]] * 2


def test_a_callback_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(rank: R) -> float:
        future = rank.all_reduce(np.ones(1))
        future.add_done_callback(lambda _: 1 / 0)
        return float((await future)[0])

    assert run(main, 2) == [2.0, 2.0]
    assert "ZeroDivisionError" in caplog.text


CALLBACKS = {
    "collective": lambda rank: rank.all_reduce(np.ones(1)),
    "compute": lambda rank: rank.compute(np.ones, 1),
    "item": lambda rank: rank.compute(lambda: [1])[0],
    "task": lambda rank: rank.spawn(trio.lowlevel.checkpoint),
}


@pytest.mark.everyday(8)
@pytest.mark.parametrize("returns", [False, True], ids=["waiting", "returned"])
@pytest.mark.parametrize("issue", CALLBACKS.values(), ids=CALLBACKS)
def test_an_interrupt_in_a_callback_ends_the_world(issue: Any, returns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them once: as Ctrl-C and as `sys.exit`; the program waits, or has returned before the callback."""

    async def main(rank: R, interrupt: BaseException) -> None:
        def callback(_: Any) -> None:
            raise interrupt

        future = issue(rank)
        if rank.rank == 0:
            future.add_done_callback(callback)
        if not returns:
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        overlap.run(main, KeyboardInterrupt(), ranks=2, timeout_s=60)
    error = failure_of(overlap.run, main, end := SystemExit(3), ranks=2, timeout_s=60)
    assert (error.rank, error.cause, error.others) == (0, end, {})
    assert not caplog.records


def test_the_error_of_an_operation_can_be_asked_for() -> None:
    async def main(rank: R) -> list[str]:
        bad, good = rank.compute(lambda: 1 / 0, errors="await"), rank.compute(lambda: 1)
        await good
        return [type(bad.exception()).__name__, type(good.exception()).__name__]

    assert run(main, 1) == [["ZeroDivisionError", "NoneType"]]


def test_a_burst_of_a_thread_wakes_the_loop_once() -> None:
    async def main(rank: R) -> list[Any]:
        called, woken = [], []
        token = trio.lowlevel.current_trio_token()

        class Counting:
            def run_sync_soon(self, function: Any) -> None:
                woken.append(function)
                token.run_sync_soon(function)

        handover = Handover(Counting())  # type: ignore[arg-type]

        def burst() -> None:  # in the loop's thread, which so cannot look in between
            for number in range(100):
                handover.post(called.append, number)

        burst()
        while len(called) < 100:
            await trio.lowlevel.checkpoint()
        first = len(woken)
        burst()
        while len(called) < 200:
            await trio.lowlevel.checkpoint()
        return [called == [*range(100), *range(100)], first, len(woken)]

    assert run(main, 1) == [[True, 1, 2]]


def test_many_threads_issue_at_once_and_nothing_is_lost() -> None:
    def work(rank: R, stream: str) -> float:
        futures = [rank.all_reduce(np.full(1, 1.0), stream=stream) for _ in range(50)]
        return sum(float(future.result(20)[0]) for future in futures)

    async def main(rank: R) -> list[float]:
        streams = [rank.stream(f"s{k}").name for k in range(4)]
        found: list[float] = []

        async def one(stream: str) -> None:
            found.append(await trio.to_thread.run_sync(work, rank, stream))

        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(one, stream)
        return found

    assert run(main, 2) == [[100.0] * 4] * 2
