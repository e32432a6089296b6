"""`Future.cancel` used twice, too late, or at a bad moment: its answer, and what is raised, to the letter.

Programs at random are in `cancelled_awaits`.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

import overlap

from .worlds import TIMEOUT_S

R = overlap.Rank
LIKE, GO = ((3,), "float64"), ((1,), "float64")


async def end_of(future: overlap.Future[Any]) -> str:
    try:
        return repr(await future)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# -- twice, and too late -----------------------------------------------------------------------------------------------


def receive(rank: R) -> overlap.Future[Any]:
    return rank.recv(LIKE, 0, tag=9, call_site="train.py:7")


def item(rank: R) -> overlap.Future[Any]:
    return receive(rank)[0]


def compute(rank: R) -> overlap.Future[Any]:
    return rank.compute(abs, rank.recv(GO, 0), name="queued", seconds=0.01, call_site="train.py:7")


def task(rank: R) -> overlap.Future[Any]:
    return rank.spawn(trio.sleep_forever, name="serve", call_site="train.py:7")


def daemon(rank: R) -> overlap.Future[Any]:
    return rank.spawn(trio.sleep_forever, name="serve", daemon=True, call_site="train.py:7")


async def send_gate(rank: R, issue: Callable[[R], overlap.Future[Any]]) -> None:
    """Send the message for which the compute would have waited."""
    rank.send(np.ones(1), 0)
    if issue is not compute:
        await rank.recv(GO, 0)


NAMES = {
    receive: "recv #0 from rank 0 with tag 9 on group 'world' (train.py:7)",
    item: "recv #0 from rank 0 with tag 9 on group 'world' (train.py:7)",
    compute: "compute 'queued' (train.py:7)",
    task: "task 'serve' (train.py:7)",
    daemon: "daemon 'serve' (train.py:7)",
}
kinds = pytest.mark.parametrize("issue", NAMES)


@kinds
def test_of_two_calls_both_say_that_it_is_withdrawn(issue: Callable[[R], overlap.Future[Any]], clock: Any) -> None:
    async def main(rank: R) -> list[Any]:
        future = issue(rank)
        answers = [future.cancelled(), future.cancel(), future.cancel()]
        told = await end_of(future)
        again = [future.cancel(), future.cancelled(), bool(future.done), future.failed]
        await send_gate(rank, issue)
        return [answers, told, again, type(future.exception()).__name__]

    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == [
        [
            [False, True, True],
            f"FutureCancelledError: {NAMES[issue]} was cancelled",
            [True, True, True, True],
            "FutureCancelledError",
        ]
    ]


def fail(_: object = None) -> None:
    raise ValueError("boom")


async def returns() -> int:
    return 4


def test_nothing_that_has_ended_is_withdrawn(clock: Any) -> None:
    async def main(rank: R) -> list[Any]:
        sent, received = rank.send(np.full(1, 2.0), 0), rank.recv(GO, 0)
        ended = {
            "send": sent,
            "receive": received,
            "its item": received[0],
            "all_reduce": rank.all_reduce(np.full(1, 3.0)),
            "compute": rank.compute(abs, -1, seconds=0.01),
            "failed compute": rank.compute(fail, seconds=0.01),
            "task": rank.spawn(returns),
        }
        before = {name: await end_of(future) for name, future in ended.items()}
        answers = {name: (future.cancel(), future.cancelled()) for name, future in ended.items()}
        assert {name: await end_of(future) for name, future in ended.items()} == before
        return [before, {*answers.values()}]

    [[before, answers]] = overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert answers == {(False, False)}
    assert before == {
        "send": "None",
        "receive": "array([2.])",
        "its item": "np.float64(2.0)",
        "all_reduce": "array([3.])",
        "compute": "1",
        "failed compute": "ValueError: boom",
        "task": "4",
    }


def test_a_user_of_what_is_withdrawn_is_given_the_same_error_and_fails_nobody(clock: Any) -> None:
    async def main(rank: R) -> list[str]:
        withdrawn = receive(rank)
        user = rank.compute(abs, withdrawn, name="user", seconds=0.01, call_site="train.py:8")
        further = rank.all_reduce(user)
        assert withdrawn.cancel()
        told = [await end_of(each) for each in (user, further)]
        assert user.cancelled()
        return told

    told = f"FutureCancelledError: {NAMES[receive]} was cancelled"
    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == [[told, told]]


# -- from another thread -----------------------------------------------------------------------------------------------


@kinds
def test_another_thread_is_answered_as_the_loop_is(issue: Callable[[R], overlap.Future[Any]]) -> None:
    async def main(rank: R) -> list[Any]:
        future = issue(rank)
        await trio.lowlevel.checkpoint()
        answers = [await trio.to_thread.run_sync(future.cancel) for _ in range(2)]
        told = await end_of(future)
        await send_gate(rank, issue)
        return [answers, told]

    told = f"FutureCancelledError: {NAMES[issue]} was cancelled"
    assert overlap.run(main, ranks=1, timeout_s=TIMEOUT_S) == [[[True, True], told]]


def test_a_thread_that_waits_for_a_receive_is_woken_by_its_cancellation() -> None:
    async def main(rank: R) -> list[str]:
        told: list[str] = []
        future = receive(rank)

        def wait() -> None:
            try:
                future.result()
            except overlap.FutureCancelledError as error:
                told.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, wait)
            while not future._threads:  # noqa: ASYNC110 (until it waits)
                await trio.sleep(1e-3)
            assert future.cancel()
        return told

    assert overlap.run(main, ranks=1, timeout_s=TIMEOUT_S) == [[f"{NAMES[receive]} was cancelled"]]


@pytest.mark.parametrize("issue", [receive, task])
def test_an_error_of_a_cancellation_is_raised_in_the_thread_that_asks_for_it(
    issue: Callable[[R], overlap.Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop, which calls the function for the thread, goes on."""

    def fail_on_loop(future: overlap.Future[Any]) -> bool:
        monkeypatch.undo()
        raise ValueError("boom")

    async def main(rank: R) -> list[Any]:
        future = issue(rank)
        await trio.lowlevel.checkpoint()
        monkeypatch.setattr(type(future), "_cancel_on_loop", fail_on_loop)
        with pytest.raises(ValueError, match="boom"):
            await trio.to_thread.run_sync(future.cancel)
        answer = await trio.to_thread.run_sync(future.cancel)
        return [answer, await end_of(future)]

    told = f"FutureCancelledError: {NAMES[issue]} was cancelled"
    assert overlap.run(main, ranks=1, timeout_s=TIMEOUT_S) == [[True, told]]


def test_after_the_end_of_the_world_nothing_is_withdrawn() -> None:
    futures: list[overlap.Future[Any]] = []

    async def main(rank: R) -> None:
        futures.extend([receive(rank), compute(rank), daemon(rank)])
        assert futures[0].cancel()
        await rank.send(np.ones(1), 0)
        await futures[1]

    overlap.run(main, ranks=1, timeout_s=TIMEOUT_S)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.extend(future.cancel() for future in futures))
    thread.start()
    thread.join()
    assert answers == [True, False, True]  # the receive by the program, the daemon at the end of its rank


# -- in a callback -----------------------------------------------------------------------------------------------------


def test_a_callback_cancels_its_own_future_and_others(clock: Any) -> None:
    async def main(rank: R) -> list[Any]:
        called: list[Any] = []
        first = rank.compute(abs, -1, seconds=0.01)
        held = rank.compute(abs, rank.recv(GO, 0, tag=1), seconds=0.01)
        never = rank.compute(called.append, "never", seconds=0.01)
        waiting = receive(rank)
        waiting.add_done_callback(lambda done: called.append(["withdrawn", done.cancel(), done.cancelled()]))
        first.add_done_callback(
            lambda done: called.append([done.result(), done.cancel(), never.cancel(), waiting.cancel(), never.cancel()])
        )
        await first
        await rank.send(np.full(1, -2.0), 0, tag=1)
        called.append((await held).tolist())
        return called

    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == [
        [["withdrawn", True, True], [1, False, True, True, True], [2.0]]
    ]
