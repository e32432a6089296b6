"""Small operations of threads: issued and ended by the thread itself wherever its loop sleeps, never beside it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap.collectives.kinds import Collective
from overlap.runtime import handover as handover_module
from overlap.runtime.callbacks import call_when_settled
from overlap.runtime.engine.host_memory import HostPlan, HostRun
from overlap.runtime.handover import Handover
from overlap.runtime.operation import CollectiveFuture, Operation
from overlap.runtime.stream import start_queued_operation
from tests.threads import run_threads
from transports.base import OPERATIONS
from transports.patience import Patience
from transports.shared_memory.engine import BUILT, DONE

from .connecting import TIMEOUT_S, connected

# ----------------------------------------------------------------------------------------------------------------------
# Small operations of threads: issued and ended by the thread itself wherever its loop sleeps, and never beside it

needs_engine = pytest.mark.skipif(not BUILT, reason="it was not compiled")

ROUNDS = 60
POOL = "ThreadPoolExecutor"  # as threads are called in which programs run


# On the board, in memory that all map, and where they are read: elements of float64, with what threads may do of them.
SIZES = {"small": 1, "more": 7, "on the board": 500, "mapped": 20_000, "read": 200_000}


@contextmanager
def looping() -> Iterator[Handover]:
    """A loop in another thread that lets threads in, and its handover."""
    found: list[Handover] = []
    begun, over = threading.Event(), threading.Event()

    async def main() -> None:
        handover, end = Handover(trio.lowlevel.current_trio_token()), trio.Event()
        handover.allow_work_in_place(lambda _: None)
        found.append(handover)
        begun.set()
        await trio.to_thread.run_sync(over.wait)
        end.set()

    loop = threading.Thread(target=trio.run, args=(main,))
    loop.start()
    try:
        assert begun.wait(TIMEOUT_S)
        yield found[0]
    finally:
        over.set()
        loop.join(TIMEOUT_S)


def in_place(handover: Handover, work: Callable[[], bool]) -> None:
    """Do work in the loop's place as soon as it sleeps."""
    gate = threading.Event()
    while not handover.run_in_place(work, False):
        gate.wait(0.001)


def test_nothing_of_the_loop_runs_while_a_thread_is_in() -> None:
    with looping() as handover:
        called, seen = threading.Event(), list[bool]()

        def work() -> bool:
            handover.post(called.set)
            seen.append(called.wait(0.05))
            seen.append(handover.run_in_place(lambda: True, False))  # behind what waits
            seen.append(called.is_set())  # which gave nobody the place
            return True

        in_place(handover, work)
        assert called.wait(TIMEOUT_S)
        assert seen == [False, False, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])  # a handler of signals may raise anything
def test_a_loop_hears_of_work_that_was_left_half_done(error: type[BaseException]) -> None:
    with looping() as handover:
        told, heard = list[BaseException](), threading.Event()
        handover.post(handover.allow_work_in_place, lambda raised: (told.append(raised), heard.set()))

        def work() -> bool:
            raise error

        with pytest.raises(error):
            in_place(handover, work)
        assert heard.wait(TIMEOUT_S)
        assert [type(each) for each in told] == [error]
        assert not handover.run_in_place(lambda: True, False)  # for good


def test_who_comes_after_others_waits_for_its_turn() -> None:
    with looping() as handover:
        seen = list[bool]()
        looked = threading.Event()

        def ask() -> None:  # on the loop
            handover.post(looked.set)
            seen.append(handover.run_in_place(lambda: True, False))

        handover.post(ask)
        assert looked.wait(TIMEOUT_S)
        assert seen == [False]


def test_a_loop_that_is_about_to_sleep_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_module, "ABOUT_TO_SLEEP_S", TIMEOUT_S)
    with looping() as handover:
        awake, busy, seen = threading.Event(), threading.Event(), list[bool]()

        def keep() -> None:  # in one call: of a second one, something might wait
            awake.set()
            busy.wait(TIMEOUT_S)

        handover.post(keep)
        assert awake.wait(TIMEOUT_S)
        thread = threading.Thread(target=lambda: seen.append(handover.run_in_place(lambda: True, False)))
        thread.start()
        thread.join(0.05)  # it has not given up by then
        busy.set()
        thread.join(TIMEOUT_S)
        assert seen == [True]


def test_a_loop_that_lets_nobody_in() -> None:
    async def main() -> bool:
        return Handover(trio.lowlevel.current_trio_token()).run_in_place(lambda: True, False)

    assert not trio.run(main)


@needs_engine
def test_whoever_comes_last_ends_the_operation_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_by = set[int]()
    finishes = HostPlan.try_to_finish

    def finish(plan: HostPlan, operation: Operation) -> bool:
        finished = finishes(plan, operation)
        if finished:
            ended_by.add(threading.get_ident())
        return finished

    monkeypatch.setattr(HostPlan, "try_to_finish", finish)

    def program(world: overlap.Connection) -> None:
        while True:  # until it has happened once; the time-out bounds it
            mine = np.array(threading.get_ident() in ended_by)
            if world.rank.all_reduce(mine, op="bor", timeout_s=TIMEOUT_S).result(TIMEOUT_S):
                return

    connected(program, 2)
    assert ended_by


@needs_engine
def test_a_thread_that_came_first_ends_the_operation_itself_when_the_other_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, ended_by = set[int](), set[int]()
    look, end = HostRun.wait_in_engine, HostRun.on_end

    def wait_in_engine(run: HostRun, handover: Handover, longest_s: float | None) -> None:
        looking.add(threading.get_ident())
        look(run, handover, longest_s)
        looking.discard(threading.get_ident())

    def ending(run: HostRun) -> None:
        if run.state == DONE:
            ended_by.update(looking & {threading.get_ident()})
        end(run)

    monkeypatch.setattr(HostRun, "wait_in_engine", wait_in_engine)
    monkeypatch.setattr(HostRun, "on_end", ending)

    def program(world: overlap.Connection) -> None:
        for _ in range(20 * ROUNDS):  # until it has happened once
            mine = np.array(threading.get_ident() in ended_by)
            if world.rank.all_reduce(mine, op="bor", timeout_s=TIMEOUT_S).result(TIMEOUT_S):
                return

    connected(program, 2)
    assert ended_by


def test_a_waiting_thread_leaves_to_the_loop_what_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not end what tasks and callbacks of the loop hear of."""
    ended_by, told = set[str](), list[object]()
    settle = HostRun._settle

    def settling(run: HostRun, error: BaseException | None) -> None:
        if run.operation.end_wakes_loop:  # it may end before the callback is added
            ended_by.add(threading.current_thread().name.split("-")[0])
        settle(run, error)

    monkeypatch.setattr(HostRun, "_settle", settling)

    def program(world: overlap.Connection) -> None:
        x = np.ones(SIZES["mapped"])
        for _ in range(ROUNDS):
            future = world.rank.all_gather(x, timeout_s=TIMEOUT_S)
            future.add_done_callback(told.append)
            future.result(TIMEOUT_S)

    connected(program, 2)
    assert len(told) == 2 * ROUNDS
    assert POOL not in ended_by


def test_a_callback_for_any_thread_keeps_no_thread_from_ending_it() -> None:
    called_in = set[int]()

    def program(world: overlap.Connection) -> None:
        while True:  # until it has happened once; the time-out bounds it
            future = world.rank.all_gather(np.ones(2), timeout_s=TIMEOUT_S)
            call_when_settled(future, lambda _: called_in.add(threading.get_ident()))
            future.result(TIMEOUT_S)
            mine = np.array(threading.get_ident() in called_in)
            if world.rank.all_reduce(mine, op="bor", timeout_s=TIMEOUT_S).result(TIMEOUT_S):
                return

    connected(program, 2)
    assert called_in


@needs_engine
def test_a_thread_begins_what_it_knows_enough_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it gives something to all others or takes something from one of them."""
    begun_by = dict[Collective, set[str]]()
    submit = HostRun.submit

    def started(run: HostRun) -> None:
        begun_by.setdefault(run.operation.kind, set()).add(threading.current_thread().name.split("-")[0])
        submit(run)

    monkeypatch.setattr(HostRun, "submit", started)

    def program(world: overlap.Connection) -> None:
        x, out = np.ones(2_000), np.empty(1_000)  # too long for the board
        while True:  # until each has happened once; the time-out bounds it
            world.rank.broadcast(x, out=x).result(TIMEOUT_S)
            world.rank.scatter(x, out=out).result(TIMEOUT_S)
            here = [POOL in begun_by[kind] for kind in (Collective.BROADCAST, Collective.SCATTER)]
            if world.rank.all_reduce(np.array(all(here)), op="bor", timeout_s=TIMEOUT_S).result(TIMEOUT_S):
                return

    connected(program, 2)
    assert all(POOL in threads for threads in begun_by.values())


def test_what_waits_for_room_begins_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may end what was in the window, but what follows may need a task."""
    activated_by = set[str]()
    activate = start_queued_operation

    def late(operation: CollectiveFuture[Any]) -> None:
        activated_by.add(threading.current_thread().name)
        activate(operation)

    monkeypatch.setattr("overlap.runtime.stream.start_queued_operation", late)
    monkeypatch.setattr(Patience, "next_poll_s", lambda _: 1.0)  # who waits sees the other come

    def program(world: overlap.Connection) -> list[float]:
        rank, x, found = world.rank, np.ones(1), list[float]()
        stream = rank.stream("narrow", window=1)
        for _ in range(ROUNDS):
            futures = [rank.all_reduce(x, stream=stream), rank.broadcast(x, stream=stream)]
            found += [float(future.result(TIMEOUT_S)[0]) for future in futures]
        return found

    assert connected(program, 2) == [[2.0, 1.0] * ROUNDS] * 2
    assert activated_by <= {"overlap rank 0", "overlap rank 1"}


def test_threads_of_all_kinds_get_what_is_theirs() -> None:
    def program(world: overlap.Connection) -> list[Any]:
        rank, found = world.rank, dict[str, list[Any]]()
        told = list[float]()

        def issue(name: str, elements: int) -> None:
            results, stream = [], rank.stream(name)
            for index in range(ROUNDS):
                x = np.full(elements, float(index + rank.rank))
                future = rank.all_reduce(x, stream=stream, timeout_s=TIMEOUT_S if index % 3 else None)
                if index % 4 == 0:
                    future.add_done_callback(lambda each: told.append(float(each.result()[0])))
                if index % 5:
                    future.result(TIMEOUT_S)
                results.append(future)
            found[name] = [float(future.result(TIMEOUT_S)[-1]) for future in results]

        run_threads(threading.Thread(target=issue, args=each) for each in SIZES.items())
        rank.barrier().result(TIMEOUT_S)
        return [*(found[name] for name in SIZES), sorted(told)]

    sums = [float(2 * index + 1) for index in range(ROUNDS)]
    told = sorted(len(SIZES) * [total for index, total in enumerate(sums) if index % 4 == 0])
    assert connected(program, 2) == [[*[sums] * len(SIZES), told]] * 2


def every_collective(rank: overlap.Rank, elements: int) -> list[Any]:
    """Issue what there is, one after the other."""
    x = np.full(elements, float(rank.rank + 1))
    calls = (
        lambda: rank.all_gather(x),
        lambda: rank.reduce_scatter(x),
        lambda: rank.all_to_all(x),
        lambda: rank.reduce(x, root=1),
        lambda: rank.broadcast(x if rank.rank == 0 else None),
        lambda: rank.all_gather(x[: elements - rank.rank], counts=[elements, elements - 1]),
        lambda: rank.all_reduce(x, shared=True),
        lambda: rank.barrier(),
        lambda: rank.all_reduce([x, x])[1],
        lambda: rank.all_reduce(x, out=x),
    )
    return [call().result(TIMEOUT_S) for call in calls]


@pytest.mark.parametrize("root", [0, 1, 2])
@pytest.mark.parametrize("elements", [3, 3_000, 200_000])
def test_collectives_in_place(elements: int, root: int) -> None:
    """The root of a broadcast and ranks that gather find their own part where it belongs; it is not copied."""

    def program(world: overlap.Connection) -> list[list[float]]:
        rank = world.rank
        own, room = np.full(elements, 2.0**rank.rank), np.zeros(3 * elements)
        mine = room[rank.rank * elements : (rank.rank + 1) * elements]
        found = []
        for name in ("broadcast", "reduce", "all_gather", "gather"):
            room[...] = 0
            mine[...] = own
            if name == "broadcast":
                rank.broadcast(mine, root, out=mine).result(TIMEOUT_S)
            elif name == "reduce":
                rank.reduce(mine, root=root, out=mine if rank.rank == root else None).result(TIMEOUT_S)
            elif name == "all_gather":
                rank.all_gather(mine, out=room).result(TIMEOUT_S)
            else:
                rank.gather(mine, root, out=room if rank.rank == root else None).result(TIMEOUT_S)
            rank.barrier().result(TIMEOUT_S)
            parts = room.reshape(3, elements)
            assert (parts == parts[:, :1]).all()
            found.append(parts[:, 0].tolist())
        return found

    def only(index: int, value: float) -> list[float]:
        return [value if each == index else 0.0 for each in range(3)]

    every = [1.0, 2.0, 4.0]
    assert connected(program, 3) == [
        [
            only(rank, every[root]),
            only(rank, 7.0 if rank == root else every[rank]),
            every,
            every if rank == root else only(rank, every[rank]),
        ]
        for rank in range(3)
    ]


@pytest.mark.parametrize("limit", ["1GiB", "9MiB"], ids=["room", "no room"])
def test_every_collective_of_threads(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_SHARED_MEMORY", limit)

    def program(world: overlap.Connection) -> list[list[Any]]:
        found = [every_collective(world.rank, elements) for elements in (2, 2, 80_000, 80_000)]
        return [[None if value is None else float(value.sum()) for value in each] for each in found]

    found = connected(program, 2)
    for rank, rows in enumerate(found):
        for n, row in zip((2, 2, 80_000, 80_000), rows, strict=True):
            reduced = None if rank == 0 else 3 * n
            assert row == [3 * n, 3 * n / 2, 3 * n / 2, reduced, n, 3 * n - 2, 3 * n, None, 3 * n, 3 * n]


def test_who_waits_hears_that_the_other_has_failed() -> None:
    def reduce(world: overlap.Connection, times: int) -> None:
        for _ in range(times):
            world.rank.all_reduce(np.ones(1)).result(TIMEOUT_S)

    def program(world: overlap.Connection) -> str:
        if world.rank.rank == 1:
            reduce(world, 3)
            world.fail(ValueError("out of luck"))
            return "failed"
        with pytest.raises(overlap.PeerFailedError) as caught:
            reduce(world, 4)  # the third may be under way here when the other has ended it
        with pytest.raises(overlap.RankFailedError):
            world.close()
        return str(caught.value)

    assert connected(program, 2) == ["rank 1 failed: ValueError: out of luck", "failed"]


# -- more operations than a board has rows, issued before the first of them has ended ----------------------------------


@pytest.mark.parametrize(
    ("count", "elements"),
    [(20 * OPERATIONS, 1), (20 * OPERATIONS, 2_000), pytest.param(100_000, 1, marks=pytest.mark.slow)],
)
def test_operations_that_nobody_awaits_yet(count: int, elements: int) -> None:
    def program(world: overlap.Connection) -> bool:
        rank = world.rank
        mine = [np.full(elements, float(number % 7 + rank.rank)) for number in range(7)]
        futures = [rank.all_reduce(mine[number % 7]) for number in range(count)]
        if rank.rank:
            futures.reverse()  # it hears of the last one first
        found = [float(future.result(TIMEOUT_S)[-1]) for future in futures]
        sums = [float(2 * (number % 7) + 1) for number in range(count)]
        return found == (sums[::-1] if rank.rank else sums)

    assert connected(program, 2) == [True, True]
