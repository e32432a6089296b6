"""The compute stream: plain functions, in order, in one thread of each rank."""

import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import pytest
import threadpoolctl
import trio

import overlap
from overlap.runtime.compute import ComputeFuture, ThreadedCompute

from .worlds import TIMEOUT_S, failure_of, run

CALLER: ContextVar[str] = ContextVar("caller")


def test_a_function_sees_the_context_variables_of_its_caller(clock: str) -> None:
    def work() -> str:
        seen = CALLER.get()
        CALLER.set("the function's own")
        return seen

    async def task(rank: overlap.Rank) -> overlap.ComputeFuture[str]:
        CALLER.set("task")
        return rank.compute(work, seconds=1.0)

    async def main(rank: overlap.Rank) -> list[str]:
        CALLER.set("main")
        first, second = rank.compute(work, seconds=1.0), await rank.spawn(task, rank)
        CALLER.set("later")
        return [await first, await second, CALLER.get()]

    assert overlap.run(main, ranks=2, clock=clock) == [["main", "task", "later"]] * 2


def test_order_of_issue_is_order_of_running() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        ran: list[int] = []
        futures = [rank.compute(ran.append, i) for i in range(100)]
        await futures[-1]
        return ran

    assert run(main, 2) == [list(range(100))] * 2


def test_a_function_waits_for_the_futures_among_its_arguments_and_the_next_one_for_it() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        ran: list[str] = []
        late = rank.recv(((1,), float), 0)
        first = rank.compute(lambda x: ran.append(f"first {x[0]}"), late)
        second = rank.compute(ran.append, "second")
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        assert not ran
        assert not first.done
        rank.send(np.ones(1), 0)
        await second
        return ran

    assert run(main, 1) == [["first 1.0", "second"]]


def test_each_rank_has_one_thread_of_its_own() -> None:
    async def main(rank: overlap.Rank) -> set[str]:
        futures = [rank.compute(lambda: threading.current_thread().name) for _ in range(5)]
        return {await future for future in futures}

    assert run(main, 3) == [{"overlap-rank-0"}, {"overlap-rank-1"}, {"overlap-rank-2"}]


def test_another_stream_does_not_wait_for_what_is_queued() -> None:
    """The head of the default stream needs what the other one computes: in one queue it would wait for ever."""

    async def main(rank: overlap.Rank) -> tuple[str, str]:
        late = rank.recv(((1,), float), 0)
        rank.compute(np.sum, late)
        aside = rank.compute(lambda: threading.current_thread().name, stream="casts")
        name = await aside
        rank.send(np.ones(1), 0)
        return name, await rank.compute(lambda: threading.current_thread().name)

    assert run(main, 1) == [("overlap-rank-0-casts", "overlap-rank-0")]


@pytest.mark.parametrize("stream", ["", 3])
def test_a_compute_stream_has_a_name(stream: object) -> None:
    async def main(rank: overlap.Rank) -> None:
        with pytest.raises(overlap.UsageError) as caught:
            rank.compute(int, stream=stream)  # type: ignore[arg-type]
        assert str(caught.value) == f"stream: expected the name of a compute stream, got {stream!r}"

    run(main, 1)


def test_ranks_compute_at_the_same_time() -> None:
    """Each one waits inside its function until all are inside theirs."""
    barrier = threading.Barrier(4, timeout=60)

    async def main(rank: overlap.Rank) -> None:
        await rank.compute(barrier.wait)

    assert run(main, 4) == [None] * 4


class Pair(NamedTuple):
    """A tuple whose constructor takes its items one by one."""

    a: object
    b: object


ARGUMENTS = [
    (lambda future: future, 5),
    (lambda future: (1, future), (1, 5)),
    (lambda future: [future, [future]], [5, [5]]),
    (lambda future: {"a": future, "b": (future,)}, {"a": 5, "b": (5,)}),
    (lambda future: Pair(future, 2), Pair(5, 2)),
    (lambda future: {"a": Pair(1, [future])}, {"a": Pair(1, [5])}),
    (lambda future: OrderedDict(a=future), OrderedDict(a=5)),
    (lambda future: (1, [2], {"a": Pair(3, 4)}), (1, [2], {"a": Pair(3, 4)})),
]


@pytest.mark.parametrize(("make", "resolved"), ARGUMENTS)
def test_futures_inside_arguments_are_resolved(make: object, resolved: object) -> None:
    async def main(rank: overlap.Rank) -> tuple[type, object]:
        argument = make(rank.compute(int, "5"))  # type: ignore[operator]
        return await rank.compute(lambda value: (type(value), value), argument)

    ((kind, value),) = run(main, 1)
    assert value == resolved
    if isinstance(resolved, Pair):
        assert kind is Pair


def test_arguments_without_futures_are_passed_as_they_are() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        arguments: list[object] = [[1], {"a": 1}, (1, 2), np.ones(2), Pair(1, 2)]
        return [await rank.compute(lambda value, original=x: value is original, x) for x in arguments]

    assert run(main, 1) == [[True] * 5]


def test_an_argument_that_holds_itself() -> None:
    """Whatever comes of it, it comes out, and the stream goes on."""

    async def main(rank: overlap.Rank) -> int:
        endless: list[object] = []
        endless.append(endless)
        try:
            got = await rank.compute(len, endless)
        except RecursionError:
            got = 1
        return got + await rank.compute(int, "1")

    assert run(main, 1) == [2]


def test_an_error_keeps_its_traceback_and_the_stream_goes_on() -> None:
    async def main(rank: overlap.Rank) -> int:
        future = rank.compute(np.ones, -1)
        later = rank.compute(int, "7")
        with pytest.raises(ValueError, match="negative dimensions"):
            await future
        return await later

    assert run(main, 1) == [7]


def test_a_failed_argument_fails_the_function_without_running_it() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        ran: list[int] = []
        failed = rank.compute(np.ones, -1)
        with pytest.raises(ValueError, match="negative dimensions"):
            await rank.compute(lambda *_: ran.append(1), 1, {"x": [failed]})
        return ran

    assert run(main, 1) == [[]]


async def coroutine_function() -> None:
    """Not for a thread."""


@pytest.mark.parametrize("fn", [3, None, "fn", coroutine_function])
def test_what_is_not_a_plain_function_is_refused_at_the_call(fn: object) -> None:
    async def main(rank: overlap.Rank) -> None:
        with pytest.raises(overlap.UsageError, match=r"^fn: expected a"):
            rank.compute(fn)  # type: ignore[arg-type]

    assert run(main, 1) == [None]


def test_results_pass_from_rank_to_rank_in_order() -> None:
    """A two-stage pipeline of computes and messages, all issued before anything is awaited."""

    async def main(rank: overlap.Rank) -> list[float]:
        futures = []
        for i in range(20):
            x = rank.compute(np.full, 2, float(i)) if rank.rank == 0 else rank.recv(((2,), float), 0)
            y = rank.compute(lambda x: x * 2 + 1, x)
            futures.append(rank.send(y, 1) if rank.rank == 0 else y)
        return [0.0 if rank.rank == 0 else float((await future)[0]) for future in futures]

    assert run(main, 2)[1] == [4.0 * i + 3 for i in range(20)]


def test_declared_costs_are_ignored_on_the_real_clock() -> None:
    async def main(rank: overlap.Rank) -> int:
        return await rank.compute(int, "3", name="free", seconds=1e9, flops=1e30, bytes_moved=1e30)

    assert run(main, 1) == [3]


def test_blas_has_one_thread_while_a_world_computes_and_what_it_had_afterwards() -> None:
    def blas_threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    async def main(rank: overlap.Rank) -> set[int]:
        return await rank.compute(blas_threads)

    with threadpoolctl.threadpool_limits(2, "blas"):
        before = blas_threads()
        assert run(main, 2) == [{1}] * 2
        assert blas_threads() == before
        failure_of(run, break_in_compute, 1)
        assert blas_threads() == before


async def break_in_compute(rank: overlap.Rank) -> None:
    await rank.compute(np.ones, -1)


@pytest.fixture
def unusual_settings() -> Iterator[tuple[float, tuple[int, int, int]]]:
    """Settings that no world could have left behind."""
    before = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(0.25)
    gc.set_threshold(701, 11, 12)
    yield sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(before[0])
    gc.set_threshold(*before[1])


def test_the_interpreter_is_tuned_while_a_world_runs_and_only_then(
    unusual_settings: tuple[float, tuple[int, int, int]],
) -> None:
    async def main(rank: overlap.Rank) -> float:
        return sys.getswitchinterval()

    assert run(main, 1) == [pytest.approx(0.0005)]
    assert (sys.getswitchinterval(), gc.get_threshold()) == unusual_settings
    failure_of(run, break_in_compute, 1)
    assert (sys.getswitchinterval(), gc.get_threshold()) == unusual_settings


def test_a_rank_that_can_have_no_thread_says_so(monkeypatch):
    """The system allows so many, and a world of many ranks in one process is where one meets that."""
    real = threading.Thread.start

    def start(thread):
        if thread.name == "overlap-rank-1":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    async def main(rank, catches):
        try:
            await rank.all_reduce(await rank.compute(np.ones, 3))
        except overlap.UsageError:
            if not catches:
                raise
            await rank.all_reduce(np.ones(3))

    overlap.run(main, True, ranks=2, timeout_s=TIMEOUT_S)  # nothing stays unfinished
    error = failure_of(overlap.run, main, False, ranks=2, timeout_s=TIMEOUT_S)
    assert (error.rank, str(error.cause)) == (
        1,
        "no thread for 'overlap-rank-1' (can't start new thread); each rank of a process computes in one of its own: "
        "allow more (ulimit -u), or spread the ranks over processes of several machines",
    )


def test_a_function_that_the_end_of_its_world_prevents_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is about to call the function as the world ends."""
    about_to_call, stopped = threading.Event(), threading.Event()
    resolve_arguments, stop = ComputeFuture.resolve_arguments, ThreadedCompute.stop

    def resolve_late(future: ComputeFuture[object]) -> object:
        about_to_call.set()
        assert stopped.wait(TIMEOUT_S)
        return resolve_arguments(future)

    def stop_and_join(stream: ThreadedCompute) -> None:
        stop(stream)
        stopped.set()
        if stream._thread is not None:
            stream._thread.join(TIMEOUT_S)

    prevented: list[overlap.ComputeFuture[str]] = []

    async def main(rank: overlap.Rank) -> None:
        first = rank.compute(str, 1)
        await first
        prevented.append(rank.compute(str.upper, first))
        await trio.to_thread.run_sync(about_to_call.wait, TIMEOUT_S)
        raise ValueError("no")

    monkeypatch.setattr(ComputeFuture, "resolve_arguments", resolve_late)
    monkeypatch.setattr(ThreadedCompute, "stop", stop_and_join)
    with pytest.raises(overlap.RankFailedError, match="ValueError: no"):
        overlap.run(main, ranks=1)
    error = prevented[0].exception(TIMEOUT_S)
    assert isinstance(error, overlap.PeerFailedError)
    assert "ValueError: no" in str(error)


def test_a_function_may_return_after_its_loop_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt has ended the wait for it."""
    begun, go_on, streams, lost = threading.Event(), threading.Event(), list[ThreadedCompute](), list[object]()

    def work() -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)

    async def wait_ended(stream: ThreadedCompute) -> None:
        streams.append(stream)

    async def main(rank: overlap.Rank) -> None:
        rank.compute(work)
        await trio.to_thread.run_sync(begun.wait, TIMEOUT_S)
        raise ValueError("no")

    monkeypatch.setattr(ThreadedCompute, "wait_ended", wait_ended)
    monkeypatch.setattr(threading, "excepthook", lost.append)
    with pytest.raises(overlap.RankFailedError, match="ValueError: no"):
        overlap.run(main, ranks=1)
    go_on.set()
    for stream in streams:
        assert stream._thread is not None
        stream._thread.join(TIMEOUT_S)
    assert (len(streams), lost) == (1, [])
