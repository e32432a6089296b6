"""Errors of a rank's own code, and of operations whose await was cancelled: what each ends, and in which order."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from tests.errors import Mute, error_of

from .worlds import TIMEOUT_S

# -- errors of a rank's own code that nobody awaits: how each ends the rank, to the letter, and in which order ---------

# What a job of several processes prints is in `tests/runtime/structured.py`.

R = overlap.Rank
HERE = "test_prompt_errors.py"
KEEPS = 'with errors="await", it waits until the future is awaited'


MUTE = "Mute: (its text cannot be had: RuntimeError)"


def fail(text: str = "boom") -> None:
    raise ValueError(text)


def fail_mutely() -> None:
    raise Mute


async def task() -> None:
    fail()


async def mute_task() -> None:
    fail_mutely()


def line_of(function: Callable[..., object]) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + 1}"


def failure(main: Callable[[R], Awaitable[object]], clock: Any) -> tuple[str, str, list[str]]:
    """Return the text of the failure of a rank, its cause and the notes of that."""
    error = error_of(overlap.RankFailedError, overlap.run, main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    cause = error.__cause__
    return str(error), repr(cause), getattr(cause, "__notes__", [])


# -- errors that cannot be shown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compute", "task", "daemon"])
def test_an_error_that_cannot_be_shown_is_told_with_the_line_that_issued_it(kind: str, clock: Any) -> None:
    events: list[str] = []

    async def main(rank: R) -> None:
        if kind == "compute":
            rank.compute(fail_mutely, name="work", seconds=0.01, call_site="train.py:5")
        else:
            rank.spawn(mute_task, name="work", daemon=kind == "daemon", call_site="train.py:5")
        try:
            await trio.sleep_forever()
        finally:
            events.append("cancelled")

    text, cause, notes = failure(main, clock)
    assert events == ["cancelled"]
    assert text == f"rank 0 failed at {line_of(fail_mutely)}: RuntimeError: {MUTE}"
    assert cause == f"RuntimeError({MUTE!r})"
    assert notes == [f"raised by {kind} 'work' (train.py:5) while nobody awaited it; {KEEPS}"]


def test_an_error_that_cannot_be_shown_comes_to_its_await_as_it_is(clock: Any) -> None:
    async def main(rank: R) -> list[object]:
        with pytest.raises(Mute):
            await rank.compute(fail_mutely, seconds=0.01)
        kept = rank.compute(fail_mutely, seconds=0.01, errors="await")
        await trio.sleep(0.1)
        return [kept.failed, type(kept.exception())]

    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == [[True, Mute]]


def test_a_further_error_that_cannot_be_shown_is_a_line_of_the_first() -> None:
    async def main(rank: R) -> None:
        rank.compute(fail, name="first", seconds=1, call_site="train.py:4")
        rank.compute(fail_mutely, name="second", seconds=1, call_site="train.py:5")
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)

    text, _, notes = failure(main, "virtual")
    assert text == f"rank 0 failed at {line_of(fail)}: ValueError: boom"
    assert notes == [
        f"raised by compute 'first' (train.py:4) while nobody awaited it; {KEEPS}",
        f"then {MUTE}, raised by compute 'second' (train.py:5) while nobody awaited it",
    ]


def test_a_program_that_raises_when_it_is_cancelled_fails_with_both(clock: Any) -> None:
    async def main(rank: R) -> None:
        rank.compute(fail, name="work", seconds=0.01, call_site="train.py:5")
        try:
            await trio.sleep_forever()
        finally:
            fail_mutely()

    text, cause, _ = failure(main, clock)
    assert text == f"rank 0 failed at {line_of(fail)}: ValueError: boom, and 1 more"
    message = "an error that nobody awaited, and the error of the program that it cancelled"
    assert cause == f"ExceptionGroup({message!r}, [ValueError('boom'), RuntimeError({MUTE!r})])"


# -- daemons -----------------------------------------------------------------------------------------------------------


def test_an_error_of_a_daemon_ends_its_rank_at_once(clock: Any) -> None:
    events: list[str] = []

    async def serve() -> None:
        try:
            await trio.sleep(0.01)
            fail()
        finally:
            events.append("daemon")

    async def main(rank: R) -> None:
        rank.spawn(serve, daemon=True, call_site="train.py:5")
        try:
            await trio.sleep_forever()
        finally:
            events.append("program" + f" at {trio.current_time():g} s" * (clock == "virtual"))

    text, _, notes = failure(main, clock)
    assert events == ["daemon", "program" + " at 0.01 s" * (clock == "virtual")]
    assert text == f"rank 0 failed at {line_of(fail)}: ValueError: boom"
    assert notes == [f"raised by daemon 'serve' (train.py:5) while nobody awaited it; {KEEPS}"]


def test_an_error_of_a_daemon_that_is_cancelled_at_the_end_fails_the_rank(clock: Any) -> None:
    events: list[str] = []

    async def serve() -> None:
        try:
            await trio.sleep_forever()
        finally:
            events.append("cleaning up")
            fail()

    async def main(rank: R) -> None:
        rank.spawn(serve, daemon=True)
        await trio.sleep(0.01)
        events.append("returns")

    assert failure(main, clock) == (f"rank 0 failed at {line_of(fail)}: ValueError: boom", "ValueError('boom')", [])
    assert events == ["returns", "cleaning up"]


@pytest.mark.parametrize("awaited", [False, True])
def test_a_kept_error_of_a_daemon_fails_the_rank_at_its_end_unless_it_was_seen(awaited: bool, clock: Any) -> None:
    async def main(rank: R) -> str:
        daemon = rank.spawn(task, daemon=True, errors="await")
        await trio.sleep(0.01)
        return str(daemon.exception()) if awaited else f"failed: {daemon.failed}"

    if awaited:
        assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == ["boom"]
    else:
        assert failure(main, clock)[:2] == (f"rank 0 failed at {line_of(fail)}: ValueError: boom", "ValueError('boom')")


def test_a_daemon_may_await_the_error_of_a_compute(clock: Any) -> None:
    """It is a task of the program: what it awaits is awaited."""
    told: list[str] = []

    async def main(rank: R) -> str:
        async def watch() -> None:
            try:
                await work
            except ValueError as error:
                told.append(str(error))

        work = rank.compute(fail, seconds=0.01)
        rank.spawn(watch, daemon=True)
        await trio.sleep(0.1)
        return "ended"

    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == ["ended"]
    assert told == ["boom"]


# -- withdrawn operations ----------------------------------------------------------------------------------------------


def test_the_error_of_a_task_that_was_withdrawn_is_raised_if_it_is_none_of_the_cancellation(clock: Any) -> None:
    async def stubborn() -> None:
        try:
            await trio.sleep_forever()
        finally:
            fail()

    async def main(rank: R) -> None:
        work = rank.spawn(stubborn, call_site="train.py:5")
        await trio.sleep(0.01)
        assert work.cancel()
        await trio.sleep_forever()

    text, _, notes = failure(main, clock)
    assert text == f"rank 0 failed at {line_of(fail)}: ValueError: boom"
    assert notes == [f"raised by task 'stubborn' (train.py:5) while nobody awaited it; {KEEPS}"]


def test_a_compute_that_is_withdrawn_behind_one_that_fails_raises_nothing(clock: Any) -> None:
    async def main(rank: R) -> list[str]:
        first = rank.compute(lambda _: fail("first"), rank.recv(((1,), "float64"), 0), seconds=0.01)
        never = rank.compute(fail, "never", seconds=0.01)
        after = rank.compute(abs, -3, seconds=0.01)
        assert never.cancel()
        rank.send(np.ones(1), 0)
        with pytest.raises(ValueError, match="first"):
            await first
        return [str(await after), type(never.exception()).__name__]

    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == [["3", "FutureCancelledError"]]


# -- errors of operations whose await was cancelled: by the nursery that another error has failed, or otherwise --------


def fail_with(what: object) -> None:
    raise ValueError(what)


async def wait_for(future: overlap.Future[Any]) -> None:
    await future


def fail_after(_: object, number: int) -> None:
    fail_with(number)


async def fail_in_task(gate: overlap.Future[Any], number: int) -> None:
    await gate
    fail_with(number)


Gate = overlap.Future[Any]


def computes(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    late = [rank.compute(fail_after, gate, number, stream="late", seconds=0.01) for number in (1, 2)]
    return [rank.compute(fail_with, 0, seconds=0.01), *late]


def tasks(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    return [rank.compute(fail_with, 0, seconds=0.01), *(rank.spawn(fail_in_task, gate, number) for number in (1, 2))]


def users(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    """Return the futures of operations that have the failing computes as inputs."""
    return [rank.compute(lambda x: x, future, stream="users", seconds=0.01) for future in computes(rank, gate)]


def kept(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    late = [rank.compute(fail_after, gate, number, stream="late", errors="await", seconds=0.01) for number in (1, 2)]
    return [rank.compute(fail_with, 0, seconds=0.01), *late]


@pytest.mark.parametrize("issue", [computes, tasks, users, kept])
def test_errors_of_a_nursery_that_has_failed_are_handled_with_it(
    issue: Callable[[R, Gate], list[overlap.Future[Any]]], clock: Any
) -> None:
    """The program goes on, and the rank ends well, although nobody awaits the later errors."""

    async def main(rank: R) -> list[Any]:
        futures, told = issue(rank, rank.recv(((1,), "int64"), 0)), list[str]()
        try:
            async with trio.open_nursery() as nursery:
                for future in futures:
                    nursery.start_soon(wait_for, future)
        except* ValueError as group:
            told += [str(error) for error in group.exceptions]
        states = [future.failed for future in futures]
        await rank.send([1], 0)
        while not all(future.done for future in futures):  # noqa: ASYNC110 (an await would be given the errors)
            await trio.sleep(0.01)
        return [told, states, await rank.compute(int, seconds=0.01), str(futures[2].exception())]

    assert overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S) == [[["0"], [True, False, False], 0, "2"]]


def late(rank: R) -> tuple[overlap.Future[Any], Callable[[], overlap.Future[Any]]]:
    """Return a compute that raises once it is let, and the function that lets it."""
    gate = rank.recv(((1,), "int64"), 0)
    future = rank.compute(fail_after, gate, 7, name="late", seconds=0.01, call_site="train.py:3")
    return future, lambda: rank.send([1], 0)


def test_an_error_of_the_nurserys_own_block_cancels_its_awaits_likewise(clock: Any) -> None:
    async def main(rank: R) -> tuple[str, bool]:
        future, let = late(rank)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, future)
                await trio.sleep(0.01)
                fail_with("block")
        except* ValueError as group:
            told = repr(group.exceptions)
        await let()
        while not future.done:  # noqa: ASYNC110 (an await would be given the error)
            await trio.sleep(0.01)
        return told, future.failed

    got = overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert got == [("(ValueError('block'),)", True)]


@pytest.mark.parametrize("way", ["deadline", "explicit"])
def test_an_error_after_an_await_that_the_program_itself_has_cancelled_ends_the_rank(way: str, clock: Any) -> None:
    """Nothing of the program has failed yet: the error is news."""
    events: list[str] = []

    async def main(rank: R) -> None:
        future, let = late(rank)
        async with trio.open_nursery() as nursery:
            if way == "deadline":
                nursery.cancel_scope.deadline = trio.current_time() + 0.01
            nursery.start_soon(wait_for, future)
            await trio.sleep(0.005)
            if way == "explicit":
                nursery.cancel_scope.cancel()
        events.append("goes on")
        try:
            await let()
            await trio.sleep_forever()
        finally:
            events.append("cancelled")

    error = error_of(overlap.RankFailedError, overlap.run, main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert events == ["goes on", "cancelled"]
    cause = error.__cause__
    assert repr(cause) == "ValueError(7)"
    [note] = cause.__notes__
    assert note.startswith("raised by compute 'late' (train.py:3) while nobody awaited it; ")


def test_the_rank_fails_with_the_error_of_a_nursery_that_nobody_handles(clock: Any) -> None:
    async def main(rank: R) -> None:
        futures = computes(rank, rank.recv(((1,), "int64"), 0))
        try:
            async with trio.open_nursery() as nursery:
                for future in futures:
                    nursery.start_soon(wait_for, future)
        finally:
            rank.send([1], 0)

    error = error_of(overlap.RankFailedError, overlap.run, main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    line = fail_with.__code__.co_firstlineno + 1
    assert (repr(error.cause), error.others) == ("ValueError(0)", {})
    message, unfinished, _ = str(error).partition("; unfinished there: ")
    assert message == f"rank 0 failed at {HERE}:{line}: ValueError: 0"
    assert unfinished or clock == "real"  # threads of a busy machine may have ended by then


def test_the_await_of_a_failed_future_that_the_nursery_cancels_is_enough() -> None:
    """The await of an operation that has ended is a checkpoint."""

    async def main(rank: R) -> list[str]:
        future = rank.compute(fail_with, "before", seconds=0.01, errors="await")
        await trio.sleep(1)
        told: list[str] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, future)
                fail_with("first")
        except* ValueError as group:
            told += [str(error) for error in group.exceptions]
        return told

    assert overlap.run(main, ranks=1, clock="virtual") == [["first"]]
