"""Futures: awaited by anybody, any number of times, cancelled or not; their items; their words."""

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

import overlap
from tests.errors import error_from, error_of

from .worlds import failure_of, run

Program = Callable[[overlap.Rank], Awaitable[None]]
Issue = Callable[[overlap.Rank], "overlap.Future[object]"]


class Boom(Exception):
    """Raised on purpose."""


def boom() -> None:
    raise Boom("on purpose")


def test_it_may_be_awaited_many_times_and_by_many_tasks(path: str) -> None:
    async def main(rank: overlap.Rank) -> int:
        got: list[np.ndarray] = []

        async def wait() -> None:
            got.append(await future)

        async with trio.open_nursery() as nursery:
            future = rank.all_reduce(rank.compute(np.ones, 3))
            for _ in range(5):
                nursery.start_soon(wait)
        assert future.done
        for _ in range(5):
            await wait()
        assert all(result is got[0] for result in got)
        return len(got)

    assert run(main, 2, path=path) == [10, 10]


def test_an_error_is_raised_in_every_task_that_awaits(path: str) -> None:
    async def main(rank: overlap.Rank) -> int:
        caught: list[Boom] = []

        async def wait() -> None:
            caught.append(await error_from(Boom, future))

        future = rank.compute(boom)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
        await wait()
        return len(caught)

    assert run(main, 2, path=path) == [4, 4]


def test_cancelling_who_awaits_does_not_cancel_the_operation(path: str) -> None:
    async def main(rank: overlap.Rank) -> float:
        if rank.rank == 0:
            future = rank.all_reduce(np.ones(3))
            for _ in range(3):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await future
                assert scope.cancelled_caught
            assert not future.done
            await rank.send(np.zeros(1), 1)
        else:
            await rank.recv(((1,), float), 0)
            future = rank.all_reduce(np.ones(3))
        return float((await future)[0])

    assert run(main, 2, path=path) == [2.0, 2.0]


def test_one_of_several_waiting_tasks_is_cancelled() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        log: list[str] = []

        async def wait(name: str, scope: trio.CancelScope) -> None:
            with scope:
                await future
                log.append(name)

        scopes = [trio.CancelScope() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            future = rank.recv(((1,), float), 0)
            for name, scope in zip("abc", scopes, strict=True):
                nursery.start_soon(wait, name, scope)
            await wait_all_tasks_blocked()
            scopes[1].cancel()
            await wait_all_tasks_blocked()
            rank.send(np.zeros(1), 0)
        return sorted(log)

    assert run(main, 1) == [["a", "c"]]


OPERATIONS: list[Issue] = [
    lambda rank: rank.compute(int),
    lambda rank: rank.compute(lambda: (1, 2))[0],
    lambda rank: rank.all_reduce(np.ones(2)),
    lambda rank: rank.all_reduce(rank.compute(np.ones, 2)),
    lambda rank: rank.barrier(),
    lambda rank: rank.all_reduce(np.ones(1 << 18)),
    lambda rank: rank.all_gather(np.ones(2))[0],
]


@pytest.mark.parametrize("issue", OPERATIONS)
def test_every_await_notices_a_cancellation(issue: Issue, path: str) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        future = issue(rank)
        scopes = [trio.CancelScope(), trio.CancelScope()]
        for scope in scopes:
            with scope:
                scope.cancel()
                await future
            await future
        return [scope.cancelled_caught for scope in scopes]

    assert run(main, 2, path=path) == [[True, True]] * 2


def test_in_virtual_time_every_await_lets_others_run() -> None:
    async def main(rank: overlap.Rank) -> bool:
        future = rank.all_reduce(np.ones(2))
        for _ in range(2):
            with assert_checkpoints():
                await future
        return future.done

    assert overlap.run(main, ranks=2, clock="virtual") == [True, True]


def test_others_run_while_what_is_done_is_awaited_again_and_again() -> None:
    async def main(rank: overlap.Rank) -> bool:
        future = rank.all_reduce(np.ones(2))
        await future
        ran = trio.Event()

        async def other() -> None:
            ran.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            while not ran.is_set():
                await future
        return future.done

    assert run(main, 1) == [True]


def test_split_is_a_checkpoint() -> None:
    async def main(rank: overlap.Rank) -> bool:
        with assert_checkpoints():
            await rank.split(None)
        return True

    assert run(main, 2) == [True, True]


def test_items_of_a_future() -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        go_on = threading.Event()
        pair = rank.compute(lambda: (go_on.wait() and {"a": 1, "b": (2, 3)}, np.arange(4)))
        assert not pair[0].done
        go_on.set()
        assert await pair[0]["b"][1] == 3
        reduced = rank.all_reduce(pair[1][1:3])
        return [await pair[0]["a"], pair[0]["a"].result(), (await reduced).tolist(), pair[1][-1].done]

    assert run(main, 2) == [[1, 1, [2, 4], True]] * 2


def test_an_item_that_is_not_there() -> None:
    async def main(rank: overlap.Rank) -> None:
        future = rank.compute(lambda: {"a": 1})
        with pytest.raises(KeyError, match="'b'"):
            await future["b"]
        with pytest.raises(KeyError, match="'b'"):
            await rank.compute(int, future["b"])
        with pytest.raises(KeyError, match="'b'"):
            await rank.all_reduce(future["b"])

    assert run(main, 1) == [None]


def test_an_item_of_a_failure_is_that_failure() -> None:
    async def main(rank: overlap.Rank) -> None:
        item = rank.compute(boom)[0]
        for future in (item, rank.compute(int, item), rank.all_reduce(item)):
            with pytest.raises(Boom):
                await future

    assert run(main, 1) == [None]


def test_result_does_not_wait() -> None:
    async def main(rank: overlap.Rank) -> float:
        future = rank.recv(((1,), float), 0)
        for early in (future, future[0]):
            with pytest.raises(trio.WouldBlock, match="has not ended"):
                early.result()
        rank.send(np.array([4.0]), 0)
        assert future.done
        return float(future[0].result())

    assert run(main, 1) == [4.0]


def test_result_raises_and_counts_as_seen() -> None:
    async def main(rank: overlap.Rank) -> None:
        future = rank.compute(boom)
        while not future.done:
            await trio.lowlevel.checkpoint()
        with pytest.raises(Boom):
            future.result()

    assert run(main, 1) == [None]


def test_a_future_is_not_iterable() -> None:
    """`a, b = future` would never end; it says what to do instead."""

    async def main(rank: overlap.Rank) -> None:
        future = rank.compute(lambda: (1, 2))
        with pytest.raises(TypeError, match="cannot be iterated; await it, or take items by index"):
            _a, _b = future
        assert await future == (1, 2)

    assert run(main, 1) == [None]


def test_words() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        reduce, named = rank.all_reduce(np.ones(1)), rank.barrier(name="sync")
        waits, fails = rank.recv(((1,), float), 0, name="late"), rank.compute(boom)
        with pytest.raises(Boom):
            await fails
        said = [repr(future) for future in (reduce, named, waits, waits[0], fails)]
        rank.send(np.ones(1), 0)
        return [*said, repr(waits), repr(rank.stream("comm")), repr(rank)]

    assert run(main, 1) == [
        [
            "<CollectiveFuture all_reduce #0 on group 'world': done>",
            "<CollectiveFuture sync #1 on group 'world': done>",
            "<Message late #0 from rank 0 on group 'world': matching>",
            "<Item item 0 of late #0 from rank 0 on group 'world': matching>",
            "<ComputeFuture compute 'boom': failed>",
            "<Message late #0 from rank 0 on group 'world': done>",
            "<Stream 'comm' of rank 0: 0 in flight, 0 queued>",
            "<Rank 0 of 1: 0 operations unfinished>",
        ]
    ]


def test_what_a_future_says_of_its_operation() -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        stream = rank.stream("grads", priority=3)
        future = rank.all_reduce(np.ones(1), priority=-5, stream=stream, name="w1")
        await future
        assert future.call_site.startswith("tests/runtime/test_futures.py:"), future.call_site
        return [future.op, future.name, future.seq, future.priority, future.group is rank.world, future.algorithm]

    assert run(main, 2) == [["all_reduce", "w1", 0, -2, True, "direct"]] * 2
    assert run(main, 2, path="mesh") == [["all_reduce", "w1", 0, -2, True, "mesh"]] * 2


def test_a_failed_dependency_fails_what_depends_on_it(path: str) -> None:
    """The rank whose input failed gets its own error, the others get one that names it and carries the cause."""

    async def main(rank: overlap.Rank) -> str:
        future = rank.all_reduce(rank.compute(boom if rank.rank == 1 else np.ones, *([] if rank.rank == 1 else [2])))
        expected: type[Exception] = Boom if rank.rank == 1 else overlap.PeerFailedError
        error = await error_from(expected, future)
        if isinstance(error, overlap.PeerFailedError):
            assert error.culprit == 1
            assert isinstance(error.__cause__, Boom)
            assert str(error).startswith("rank 1 failed before all_reduce #0 on group 'world' (")
            assert str(error).endswith("): Boom: on purpose")
        assert (await rank.all_reduce(np.ones(1))).tolist() == [3.0]
        return type(error).__name__

    assert run(main, 3, path=path) == ["PeerFailedError", "Boom", "PeerFailedError"]


def test_an_input_that_cannot_be_used_is_found_when_it_exists(path: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        future = rank.reduce_scatter(rank.compute(np.ones, 3))
        with pytest.raises(overlap.UsageError, match=r"^x: reduce_scatter needs axis 0 divisible by the group's 2"):
            await future

    assert run(main, 2, path=path) == [None, None]


@pytest.mark.parametrize("links", [10, 400])
def test_a_long_chain_of_futures(links: int, path: str) -> None:
    """All of them wait for the compute; when it ends, one follows the other without any recursion."""

    async def main(rank: overlap.Rank) -> float:
        gate = rank.compute(np.ones, 2)
        future: overlap.Future[object] = gate
        for _ in range(links):
            future = rank.all_reduce(future, "max")
        return float((await future)[0])

    assert run(main, 2, path=path) == [1.0, 1.0]


def test_a_failure_passes_through_a_chain() -> None:
    async def main(rank: overlap.Rank) -> None:
        future: overlap.Future[object] = rank.compute(boom)
        for _ in range(3):
            future = rank.compute(abs, rank.all_reduce(future))
        with pytest.raises(Boom):
            await future

    assert run(main, 1) == [None]


async def issue_nothing(rank: overlap.Rank) -> None:
    rank.compute(boom)


async def issue_collective(rank: overlap.Rank) -> None:
    rank.all_reduce(rank.compute(boom))


async def issue_and_go_on(rank: overlap.Rank) -> None:
    rank.compute(boom)
    for _ in range(3):
        await rank.compute(int)


@pytest.mark.parametrize("main", [issue_nothing, issue_collective, issue_and_go_on])
def test_a_failure_that_nobody_awaits_fails_the_rank(main: Program, path: str) -> None:
    failure = failure_of(run, main, 1, path=path)
    assert failure.rank == 0
    assert isinstance(failure.cause, Boom)
    assert failure.__cause__ is failure.cause


def test_one_that_was_seen_does_not() -> None:
    """Of two futures of one error it is enough to await one."""

    async def main(rank: overlap.Rank) -> None:
        first = rank.compute(boom)
        rank.compute(int, first)
        with pytest.raises(Boom):
            await first

    assert run(main, 1) == [None]


def test_a_future_is_not_taken_for_its_result() -> None:
    async def main(rank: overlap.Rank) -> None:
        future = rank.all_reduce(np.ones(2))
        for mistake in (np.sum, np.asarray, lambda f: np.ones(2) + f):
            with pytest.raises(TypeError, match=r"^a future is no array yet; await it first"):
                mistake(future)
        with pytest.raises(TypeError, match=r"^a future is neither true nor false; await it first"):
            bool(future)
        await future

    run(main, 1)


def _put(x: Any) -> None:
    x[0] = 1


def _in(x: Any) -> bool:
    return 1 in x


@pytest.mark.everyday(8)
@pytest.mark.parametrize(
    "wrong", [lambda x: x & 1, _put, _in, lambda x: x + 1, lambda x: -x, lambda x: x < 1, float, round]
)
def test_a_future_that_is_computed_with_says_to_await_it(wrong: Callable[[object], object]) -> None:
    async def main(rank: overlap.Rank) -> None:
        future = rank.all_reduce(np.ones(2))
        with pytest.raises(TypeError, match=r"^a future cannot be computed with; await it first, or pass it"):
            wrong(future)
        with pytest.raises(AttributeError, match=r"^a future has no 'shape'; await it first, or pass it"):
            _ = future.shape  # type: ignore[attr-defined]
        await future

    run(main, 1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda x: f"{x:.3f}", "cannot be formatted as '.3f'"),
        (len, "has no length"),
        (lambda x: x == 2, "cannot be compared with int"),
        (lambda x: 2.0 != x, "cannot be compared with float"),  # noqa: SIM300 (the future stands right)
        (lambda x: x == np.ones(2), "cannot be compared with ndarray"),
    ],
)
def test_a_future_is_neither_formatted_nor_compared_with_numbers(wrong: Callable[[object], object], told: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        future, other = rank.all_reduce(np.ones(2)), rank.all_reduce(np.ones(2))
        error = error_of(TypeError, wrong, future)
        assert str(error) == f"a future {told}; await it first, or pass it to rank.compute or a collective"
        assert future != other
        assert future in [other, future]
        assert {future: 1, other: 2}[future] == 1
        assert f"{future}" == str(future)
        await future
        await other

    run(main, 1)
