"""Errors of a rank's own code that nobody awaits: how each ends the rank, to the letter, and in which order.

What a job of several processes prints is in `tests/runtime/structured.py`; nurseries are in `test_nurseries`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio

import overlap

from .worlds import TIMEOUT_S

R = overlap.Rank
clocks = pytest.mark.parametrize("clock", ["real", "virtual"])
HERE = "test_prompt_errors.py"
KEEPS = 'with errors="await", it waits until the future is awaited'


class Mute(Exception):
    """Has neither a text nor a representation."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


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
    with pytest.raises(overlap.RankFailedError) as failed:
        overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    cause = failed.value.__cause__
    return str(failed.value), repr(cause), getattr(cause, "__notes__", [])


# -- errors that cannot be shown ---------------------------------------------------------------------------------------


@clocks
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


@clocks
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


@clocks
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


@clocks
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


@clocks
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


@clocks
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


@clocks
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


@clocks
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


@clocks
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
