"""Errors of operations whose await was cancelled: by the nursery that another error has failed, or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

import overlap

from .worlds import TIMEOUT_S

R = overlap.Rank
clocks = pytest.mark.parametrize("clock", ["real", "virtual"])
HERE = "test_nurseries.py"


def fail(what: object) -> None:
    raise ValueError(what)


async def wait_for(future: overlap.Future[Any]) -> None:
    await future


def fail_after(_: object, number: int) -> None:
    fail(number)


async def fail_in_task(gate: overlap.Future[Any], number: int) -> None:
    await gate
    fail(number)


Gate = overlap.Future[Any]


def computes(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    late = [rank.compute(fail_after, gate, number, stream="late", seconds=0.01) for number in (1, 2)]
    return [rank.compute(fail, 0, seconds=0.01), *late]


def tasks(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    return [rank.compute(fail, 0, seconds=0.01), *(rank.spawn(fail_in_task, gate, number) for number in (1, 2))]


def users(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    """Return the futures of operations that have the failing computes as inputs."""
    return [rank.compute(lambda x: x, future, stream="users", seconds=0.01) for future in computes(rank, gate)]


def kept(rank: R, gate: Gate) -> list[overlap.Future[Any]]:
    late = [rank.compute(fail_after, gate, number, stream="late", errors="await", seconds=0.01) for number in (1, 2)]
    return [rank.compute(fail, 0, seconds=0.01), *late]


@clocks
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


@clocks
def test_an_error_of_the_nurserys_own_block_cancels_its_awaits_likewise(clock: Any) -> None:
    async def main(rank: R) -> tuple[str, bool]:
        future, let = late(rank)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, future)
                await trio.sleep(0.01)
                fail("block")
        except* ValueError as group:
            told = repr(group.exceptions)
        await let()
        while not future.done:  # noqa: ASYNC110 (an await would be given the error)
            await trio.sleep(0.01)
        return told, future.failed

    got = overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert got == [("(ValueError('block'),)", True)]


@clocks
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

    with pytest.raises(overlap.RankFailedError) as failed:
        overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert events == ["goes on", "cancelled"]
    cause = failed.value.__cause__
    assert repr(cause) == "ValueError(7)"
    [note] = cause.__notes__
    assert note.startswith("raised by compute 'late' (train.py:3) while nobody awaited it; ")


@clocks
def test_the_rank_fails_with_the_error_of_a_nursery_that_nobody_handles(clock: Any) -> None:
    async def main(rank: R) -> None:
        futures = computes(rank, rank.recv(((1,), "int64"), 0))
        try:
            async with trio.open_nursery() as nursery:
                for future in futures:
                    nursery.start_soon(wait_for, future)
        finally:
            rank.send([1], 0)

    with pytest.raises(overlap.RankFailedError) as failed:
        overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    line = fail.__code__.co_firstlineno + 1
    assert (repr(failed.value.cause), failed.value.others) == ("ValueError(0)", {})
    message, unfinished, _ = str(failed.value).partition("; unfinished there: ")
    assert message == f"rank 0 failed at {HERE}:{line}: ValueError: 0"
    assert unfinished or clock == "real"  # threads of a busy machine may have ended by then


def test_the_await_of_a_failed_future_that_the_nursery_cancels_is_enough() -> None:
    """The await of an operation that has ended is a checkpoint."""

    async def main(rank: R) -> list[str]:
        future = rank.compute(fail, "before", seconds=0.01, errors="await")
        await trio.sleep(1)
        told: list[str] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, future)
                fail("first")
        except* ValueError as group:
            told += [str(error) for error in group.exceptions]
        return told

    assert overlap.run(main, ranks=1, clock="virtual") == [["first"]]
