"""What strangers did: futures of other worlds, arrays that are being written, errors that cannot speak."""

import threading

import numpy as np
import pytest
import trio

import overlap

from .worlds import failure_of, run

R = overlap.Rank


@pytest.mark.parametrize("how", ["await", "reduce"])
def test_a_future_of_another_world_is_refused_where_it_is_used(how: str) -> None:
    futures: list[overlap.Future[None]] = []
    begun, over = threading.Event(), threading.Event()
    results: list[object] = []

    async def owner(rank: R) -> str:
        futures.append(rank.compute(over.wait, 30))
        begun.set()
        await futures[0]
        return "mine"

    async def stranger(rank: R) -> None:
        if how == "await":
            await futures[0]
        else:
            await rank.all_reduce(futures[0])

    thread = threading.Thread(target=lambda: results.extend(overlap.run(owner, ranks=1)))
    thread.start()
    begun.wait(30)
    try:
        failure = failure_of(run, stranger, 1)
        assert isinstance(failure.cause, overlap.UsageError)
        assert "compute 'wait' belongs to another world" in str(failure)
    finally:
        over.set()
        thread.join()
    assert results == ["mine"]


def test_an_array_that_is_being_written_is_not_read() -> None:
    refused = trio.Event()

    async def main(rank: R) -> list[str]:
        x, told = np.ones(4), []
        if rank.rank == 0:
            first = rank.all_reduce(x, out=x)  # waits for rank 1
            for use in (lambda: rank.send(x, 1), lambda: rank.compute(np.sum, [x])):
                with pytest.raises(overlap.UsageError) as caught:
                    use()
                told.append(str(caught.value))
            total = rank.compute(np.sum, first)  # its future may be passed at once
            refused.set()
            return [*told, str(float(await total))]
        await refused.wait()
        await rank.all_reduce(x, out=x)
        return []

    rule = "an operation that has not ended still writes this array; pass its future"
    assert run(main, 2)[0] == [f"x: {rule}", f"compute 'sum': {rule}", "8.0"]


def test_an_error_without_a_text_still_names_its_rank() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    async def main(rank: R) -> None:
        if rank.rank == 1:
            raise Mute
        await rank.barrier()

    failure = failure_of(run, main, 2)
    assert failure.rank == 1
    assert "Mute: (its text cannot be had: RuntimeError)" in str(failure)


def test_how_long_a_thread_waits() -> None:
    def wait(rank: R) -> list[str]:
        slow, told = rank.all_reduce(np.ones(1)), []
        for timeout in ("x", float("nan"), -1):
            with pytest.raises(overlap.UsageError, match="timeout: expected a number of seconds") as caught:
                slow.result(timeout)  # type: ignore[arg-type]
            told.append(str(caught.value).rpartition(" ")[2])
        return [*told, str(slow.result(float("inf"))), str(slow.result(1e30))]

    async def main(rank: R) -> list[str]:
        return await rank.compute(wait, rank)

    assert run(main, 2) == [["'x'", "nan", "-1", "[2.]", "[2.]"]] * 2


def test_a_task_that_is_no_async_function_is_told_by_what_it_returned() -> None:
    def plain() -> int:
        return 7

    async def main(rank: R) -> None:
        await rank.spawn(plain)  # type: ignore[arg-type]

    failure = failure_of(run, main, 1)
    assert isinstance(failure.cause, overlap.UsageError)
    assert str(failure.cause) == "fn: expected an async function, but plain returned 7"
