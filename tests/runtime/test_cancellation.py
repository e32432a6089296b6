"""Whatever is cut short, and wherever: no thread, no task, no guarded array, no half-done operation stays behind."""

import threading
from collections.abc import Awaitable, Generator
from itertools import count
from types import coroutine

import numpy as np
import pytest
import trio
from trio.lowlevel import Task
from trio.testing import wait_all_tasks_blocked

import overlap
from transports import NeuronLink, Recording, Transport

from .worlds import TIMEOUT_S, failure_of

R = overlap.Rank
LARGE = 1 << 17  # elements: 1 MiB, which the worker threads and the copying threads of the transport handle


class Boom(Exception):
    """Raised on purpose."""


class Program:
    """A bit of everything, and every array that it ever passed to an operation."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def array(self, elements: int) -> np.ndarray:
        self.arrays.append(np.ones(elements))
        return self.arrays[-1]

    async def main(self, rank: R) -> float:
        rank.stream("fifo", window=1)
        await rank.barrier()
        first = rank.all_reduce(self.array(4), out=self.array(4))
        late = rank.all_reduce(rank.compute(self.array, LARGE, seconds=1e-3), stream="fifo")
        queued = rank.all_gather(self.array(8), stream="fifo")
        large = self.array(LARGE)
        in_place = rank.all_reduce(large, out=large)
        right, left = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
        rank.send(self.array(3), right)
        received = rank.recv(self.array(3), left)
        half = await rank.split(rank.rank % 2)
        assert half is not None
        inner = half.all_reduce(self.array(2))
        total = rank.compute(lambda *xs: float(sum([x[0] for x in xs])), first, late, in_place, received, seconds=1e-3)
        await inner
        await queued
        return await total

    def check_returned(self) -> None:
        assert all(array.flags.writeable for array in self.arrays)


def check_threads() -> None:
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("overlap")]
    assert not ours


def make_transport(path: str, ranks: int = 3) -> Transport:
    link = NeuronLink(ranks)
    return Recording(link) if path == "wire" else link


def check_mailboxes(transport: Transport) -> None:
    link = transport.inner if isinstance(transport, Recording) else transport
    assert isinstance(link, NeuronLink)
    assert not any(box.sends or box.receives for box in link.mailboxes.values())


class CancelAt(trio.abc.Instrument):
    """Cancels a scope before the n-th step of any task."""

    def __init__(self, step: int) -> None:
        self.left, self.scope = step, trio.CancelScope()

    def before_task_step(self, task: Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


def run_and_cancel(step: int, path: str) -> bool:
    """Return whether the world was cancelled before it had ended."""
    program, transport = Program(), make_transport(path)
    instrument = CancelAt(step)

    async def outer() -> bool:
        before = trio.lowlevel.current_statistics().tasks_living
        with instrument.scope:
            await overlap.run_async(program.main, ranks=3, transport=transport, timeout_s=TIMEOUT_S)
        program.check_returned()
        check_threads()
        assert trio.lowlevel.current_statistics().tasks_living == before
        return instrument.scope.cancelled_caught

    cancelled = trio.run(outer, instruments=[instrument])
    check_mailboxes(transport)
    return cancelled


@pytest.mark.parametrize("path", ["direct", pytest.param("wire", marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", [1, *(pytest.param(start, marks=pytest.mark.slow) for start in (2, 3))])
def test_the_world_is_cancelled_at_any_step(start: int, path: str) -> None:
    """Every third step; threads make each run a little different anyway."""
    uncancelled = next(step for step in count(start, 3) if not run_and_cancel(step, path))
    assert uncancelled > 10


@coroutine
def breaking(main: Awaitable[float], step: int) -> Generator[object, object, float]:
    """Run `main`, but raise where it would go on for the n-th time."""
    inner = main.__await__()
    value: object = None
    for i in count():
        try:
            asked = inner.send(value) if i != step else inner.throw(Boom("on purpose"))
        except StopIteration as stop:
            return stop.value
        value = yield asked
    raise AssertionError("unreachable")


def run_and_break(step: int, path: str) -> bool:
    """Return whether rank 1 still raised."""
    program, transport = Program(), None if path == "virtual" else make_transport(path)

    async def main(rank: R) -> float:
        if rank.rank == 1:
            return await breaking(program.main(rank), step)
        return await program.main(rank)

    errors: list[overlap.RankFailedError] = []
    try:
        clock = "real" if transport is not None else "virtual"
        overlap.run(main, ranks=3, transport=transport, clock=clock, timeout_s=TIMEOUT_S)
    except overlap.RankFailedError as error:
        errors.append(error)
    assert [(error.rank, type(error.cause), error.others) for error in errors] in ([], [(1, Boom, {})])
    program.check_returned()
    check_threads()
    if transport is not None:
        check_mailboxes(transport)
    return bool(errors)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["direct", "wire"])
def test_a_rank_raises_at_any_await(path: str) -> None:
    """How often a rank goes on differs from run to run: to await what has ended is a turn of the loop now and then."""
    broken = [run_and_break(step, path) for step in range(12)]
    assert broken[0]
    assert not broken[-1]


def test_a_rank_raises_at_each_await_before_its_last_one_in_virtual_time() -> None:
    """There a rank goes on equally often in each run: at its later turns no run raises that did not before."""
    broken = [run_and_break(step, "virtual") for step in range(12)]
    turns = broken.index(False)
    assert turns > 4
    assert broken == [True] * turns + [False] * (12 - turns)


@pytest.mark.parametrize("path", ["direct", "wire"])
def test_the_program_itself_is_right(path: str) -> None:
    program = Program()
    got = overlap.run(program.main, ranks=3, transport=make_transport(path), timeout_s=TIMEOUT_S)
    assert got == [3.0 + 3.0 + 3.0 + 1.0] * 3
    program.check_returned()
    check_threads()


def test_a_task_of_a_rank_is_cancelled_and_its_operations_go_on() -> None:
    """Only the world's end ends operations: the partner still gets the sum."""

    async def main(rank: R) -> float | None:
        x = np.ones(LARGE)
        if rank.rank == 0:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait_for, rank.all_reduce(x))
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert not x.flags.writeable
            rank.send(np.zeros(1), 1)
            return None
        await rank.recv(((1,), float), 0)
        return float((await rank.all_reduce(x))[0])

    assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S) == [None, 2.0]


async def wait_for(future: "overlap.Future[object]") -> None:
    await future


async def test_cancelling_waits_for_the_function_that_runs_and_starts_no_other() -> None:
    ran: list[str] = []

    async def main(rank: R, inside: trio.Event, go_on: trio.Event) -> None:
        token = trio.lowlevel.current_trio_token()

        def function(name: str) -> None:
            token.run_sync_soon(inside.set)
            trio.from_thread.run(go_on.wait, trio_token=token)
            ran.append(name)

        rank.compute(function, "first")
        rank.compute(function, "second")
        await trio.sleep_forever()

    inside, go_on = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def world() -> None:
            with scope:
                await overlap.run_async(main, inside, go_on, ranks=1)

        nursery.start_soon(world)
        await inside.wait()
        scope.cancel()
        await wait_all_tasks_blocked()
        assert not ran
        go_on.set()
    assert ran == ["first"]


async def test_a_compute_that_ends_after_its_rank_starts_nothing_any_more() -> None:
    """Rank 0 dawdles while it is cancelled, so the world is still there when the compute of rank 1 ends."""
    arrays = [np.ones(4), np.ones(4)]
    computes: list[overlap.Future[np.ndarray]] = []

    async def main(rank: R, inside: trio.Event, compute: trio.Event, last: trio.Event) -> None:
        token = trio.lowlevel.current_trio_token()

        def function() -> np.ndarray:
            token.run_sync_soon(inside.set)
            trio.from_thread.run(compute.wait, trio_token=token)
            return arrays[1]

        if rank.rank:
            computes.append(rank.compute(function))
        rank.all_reduce(computes[0] if rank.rank else arrays[0])
        with trio.CancelScope(shield=rank.rank == 0):
            await last.wait()

    inside, compute, last = trio.Event(), trio.Event(), trio.Event()
    scope = trio.CancelScope()

    async def world() -> None:
        with scope:
            await overlap.run_async(main, inside, compute, last, ranks=2, transport=make_transport("wire", 2))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(world)
        await inside.wait()
        scope.cancel()
        await wait_all_tasks_blocked()
        compute.set()
        while not computes[0].done:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        last.set()
    assert scope.cancelled_caught
    assert all(array.flags.writeable for array in arrays)


async def never(rank: R) -> None:
    await rank.recv(((1,), float), 1 - rank.rank)


async def large_and_gone(rank: R) -> None:
    rank.all_reduce(np.ones(LARGE))
    raise Boom("on purpose")


@pytest.mark.parametrize("path", ["direct", "mesh"])
def test_errors_while_the_worker_threads_are_busy(path: str) -> None:
    for _ in range(5):
        failure = failure_of(overlap.run, large_and_gone, ranks=2, algorithm=path, timeout_s=TIMEOUT_S)
        assert type(failure.cause) is Boom
        check_threads()


async def test_cancelled_before_it_begins() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await overlap.run_async(never, ranks=2)
    assert scope.cancelled_caught


def lasting_threads() -> set[threading.Thread]:
    """Those that do not end by themselves, as Trio's do that have been idle for ten seconds: since an earlier test."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("Trio thread")}


def test_worlds_leave_nothing_to_the_next_one() -> None:
    async def main(rank: R) -> float:
        rank.compute(int)
        await rank.all_reduce(np.ones(LARGE))
        return float((await rank.all_reduce(np.ones(1)))[0])

    before = lasting_threads()
    for _ in range(10):
        assert overlap.run(main, ranks=3, timeout_s=TIMEOUT_S) == [3.0] * 3
        assert lasting_threads() == before
