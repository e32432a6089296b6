"""Groups that a program drops: their communicators, ports and shared memory are given back, in all processes."""

import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import overlap
from overlap import GroupAbortedError
from overlap.processes.wire import Finished
from transports import Router

from .companies import Company, Wires, by_shared_memory, by_sockets, in_memory, opened, run_far
from .worlds import TIMEOUT_S, run


@contextmanager
def no_collector() -> Iterator[None]:
    """Let nothing but the counting of references free anything: cycles stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def inside(rank: overlap.Rank) -> Any:
    return rank._communicators  # type: ignore[attr-defined]


def kept(rank: overlap.Rank) -> dict[str, int]:
    """Return the sizes of everything that a process keeps of groups."""
    here, host = inside(rank), inside(rank).engine.__dict__.get("_host_memory")  # type: ignore[attr-defined]
    names = ["_open", "_unused", "broken_errors", "unraised_errors", "spanning", "early_reports"]
    sizes = {"notes": len(getattr(rank._backend, "_notes", ())), "communicators": len(here)}
    if here.local is not None:
        assert len(here._closed) <= 256
        transport = here.engine._transport
        for part in transport.parts if isinstance(transport, Router) else ():
            boards = getattr(part, "_boards", None)
            if boards is not None:
                with boards.loan_pool._lock:
                    boards.loan_pool._free_released()
                sizes |= {
                    "boards": len(boards._open),
                    "told": len(boards._early_notes),
                    "lent": sum(boards.loan_pool._heap._sizes.values()),
                }
    if host is not None:
        sizes["of communicators"] = len(host._boards)
    return sizes | {name: len(getattr(here, name)) for name in names}


async def until_kept(rank: overlap.Rank, expected: dict[str, int]) -> None:
    """Wait until a process keeps just that: news of other processes takes a moment."""
    with trio.move_on_after(TIMEOUT_S / 4):
        while kept(rank) != expected:  # noqa: ASYNC110 - nothing tells when
            await trio.sleep(0.001)
    assert kept(rank) == expected


@asynccontextmanager
async def nothing_more_kept(rank: overlap.Rank) -> AsyncIterator[dict[str, int]]:
    """Let ranks do something after which their process keeps what it kept before; yield the sizes."""
    await rank.barrier()
    before = kept(rank)
    await quiet(rank)
    yield before
    await quiet(rank)
    assert kept(rank) == before
    await quiet(rank)


async def use(group: overlap.Group, turn: int) -> None:
    """Use a group in every way."""
    size = group.size
    total = await group.all_reduce(np.array([group.rank + turn]))
    assert total.tolist() == [sum(range(size)) + size * turn]
    other = (group.rank + 1) % size
    sent = group.send(np.array([turn]), other, tag=turn)
    assert (await group.recv(((1,), np.int64), src=(group.rank - 1) % size, tag=turn)).tolist() == [turn]
    await sent


async def quiet(rank: overlap.Rank) -> None:
    """Wait until all ranks have come, and the loop has done what it was asked for."""
    for _ in range(2):
        await rank.barrier()
        await trio.sleep(0.001)


async def kept_after_use(rank: overlap.Rank) -> dict[str, int]:
    """Use the world; return the sizes of what a process keeps then."""
    await use(rank.world, 0)
    await quiet(rank)
    sizes = kept(rank)
    await quiet(rank)
    return sizes


MANY = [50, pytest.param(2_500, marks=pytest.mark.slow)]


@pytest.mark.parametrize("turns", MANY)
def test_nothing_is_kept_of_ten_thousand_groups(clock: Any, turns: int) -> None:
    seen = weakref.WeakSet[Any]()

    async def some(rank: overlap.Rank, turn: int) -> None:
        split = await rank.split(0) if turn % 50 == 0 else rank.group([1, 0])
        mesh = rank.mesh(a=2, b=1)
        for group in (mesh["a"], mesh["b"], mesh["a", "b"].on("comm"), split):
            assert group is not None
            await group.barrier()
        if turn % 50 == 0:
            await use(mesh["a"], turn)
        seen.update(inside(rank))

    async def main(rank: overlap.Rank) -> None:
        async with nothing_more_kept(rank):
            communicators = list(inside(rank))
            for turn in range(turns):
                await some(rank, turn)
        assert set(seen) == set(communicators)

    with no_collector():
        overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)


def test_nothing_is_kept_where_ranks_stand_for_others() -> None:
    """All groups like that of a rank which runs are one communicator, closed with the last of these ranks."""

    async def some(rank: overlap.Rank, x: Any) -> None:
        mesh = rank.mesh(a=4, b=2)
        for group in (mesh["a"], mesh["b"], mesh["a", "b"]):
            await group.all_reduce(x)
            sent = group.send(x, (group.rank + 1) % group.size)
            await group.recv(x, src=(group.rank - 1) % group.size)
            await sent

    async def main(rank: overlap.Rank) -> None:
        x = overlap.shape_only((4,), "float32")
        async with nothing_more_kept(rank):
            for _ in range(20):
                await some(rank, x)

    with no_collector():
        overlap.run(main, ranks=8, clock=overlap.Virtual(shapes_only=True, alike=1), timeout_s=TIMEOUT_S)


def test_operations_of_a_dropped_group_end_first(clock: Any) -> None:
    """Rank 0 keeps nothing but the future: the operation takes place, and then the group is closed."""

    async def main(rank: overlap.Rank) -> int:
        async with nothing_more_kept(rank) as before:
            if rank.rank == 0:
                future = rank.group([0, 1]).all_reduce(np.ones(1))
                received = rank.group([0, 1]).recv(((1,), np.int64), src=None, tag=3)  # from any source
            await quiet(rank)
            if rank.rank == 1:
                assert len(inside(rank)) > before["communicators"]
                assert not inside(rank)._unused  # rank 0 still uses both
                future = rank.group([0, 1]).all_reduce(np.ones(1))
                received = rank.group([0, 1]).send(np.array([7]), 0, tag=3)
            assert (await future).tolist() == [2.0]
            got = await received
        assert future.done  # it is still there
        return int(got[0]) if rank.rank == 0 else 7

    with no_collector():
        assert overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S) == [7, 7]


def test_a_group_is_closed_when_all_ranks_have_had_it(clock: Any) -> None:
    """Rank 0 drops an aborted group before rank 1 makes its own, which is aborted as well; the next one is not."""

    async def main(rank: overlap.Rank) -> None:
        async with nothing_more_kept(rank):
            if rank.rank == 0:
                rank.group([0, 1]).abort("enough")
            await quiet(rank)
            if rank.rank == 1:
                with pytest.raises(GroupAbortedError, match="enough"):
                    await rank.group([0, 1]).barrier()
        await rank.group([0, 1]).barrier()

    with no_collector():
        overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)


def test_a_group_in_a_cycle_is_closed_when_a_thread_collects_it() -> None:
    async def main(rank: overlap.Rank) -> None:
        async with nothing_more_kept(rank) as before:
            cycle: list[Any] = [rank.group([0, 1])]
            cycle.append(cycle)
            await cycle[0].barrier()
            del cycle
            await quiet(rank)
            assert len(inside(rank)) == before["communicators"] + 1
            await quiet(rank)
            if rank.rank == 0:
                await trio.to_thread.run_sync(gc.collect)

    with no_collector():
        run(main, 2)


@pytest.mark.slow
def test_where_the_collector_runs_changes_no_trace() -> None:
    """Ranks drop groups in cycles, under faults and with tasks in an order that the seed shuffles."""

    def trace(threshold: int, seed: int) -> list[Any]:
        spans: list[Any] = []

        async def some(rank: overlap.Rank, group: overlap.Group, task: int) -> None:
            for turn in range(5):
                await rank.compute(int, seconds=1e-6 * (task + 1), stream=f"lane {task}")
                await group.all_reduce(np.ones(turn + 1), stream=f"stream {task}")
                spans.append((rank.now_ns(), rank.rank, task, turn))

        async def main(rank: overlap.Rank) -> None:
            for task in range(3):
                rank.stream(f"stream {task}")
            for _ in range(5):
                cycle: list[Any] = [rank.group([0, 1, 2])]
                cycle.append(cycle)
                async with trio.open_nursery() as nursery:
                    for task in range(3):
                        nursery.start_soon(some, rank, cycle[0], task)

        faults = overlap.Faults(seed=seed, delay=0.2, delay_s=1e-5, loss=0, death=0)
        before = gc.get_threshold()
        gc.collect()
        try:
            overlap.run(lambda rank: _collecting(main, rank, threshold), ranks=3, clock=overlap.Virtual(faults=faults))
        finally:
            gc.set_threshold(*before)
        return spans

    for seed in range(5):
        assert trace(0, seed) == trace(1, seed) == trace(97, seed)


async def _collecting(main: Any, rank: overlap.Rank, threshold: int) -> None:
    gc.set_threshold(threshold)
    await main(rank)


WIRES: dict[str, Wires] = {"shared memory": by_shared_memory, "sockets": by_sockets, "one wire": in_memory}


@pytest.mark.parametrize("turns", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("wires", "processes", "each"), [*((name, 2, 1) for name in WIRES), ("shared memory", 2, 2)])
def test_nothing_is_kept_by_any_process(wires: str, processes: int, each: int, turns: int) -> None:
    seen, lasting = weakref.WeakSet[Any](), set[Any]()

    async def some(rank: overlap.Rank, turn: int) -> None:
        mesh = rank.mesh(a=rank.world_size, b=1)
        split = await mesh["a"].split(0)
        assert split is not None
        for group in (mesh["b"], split):
            await use(group, turn)
        x = np.arange(30_000.0) if split.rank == 0 else None  # not on the board, and the others ask what comes
        assert (await split.broadcast(x, root=0)).size == 30_000
        seen.update(each for each in inside(rank) if each.key not in lasting)

    async def main(rank: overlap.Rank) -> None:
        await use(rank.world, 0)
        await quiet(rank)
        before = kept(rank)
        lasting.update(each.key for each in inside(rank))
        await quiet(rank)
        for turn in range(turns):
            await some(rank, turn)
        await until_kept(rank, before)
        await quiet(rank)
        assert not seen
        await quiet(rank)

    with no_collector():
        assert run_far(main, processes, each, wires=WIRES[wires]) == [None] * processes * each


@pytest.mark.parametrize("wires", WIRES)
def test_a_process_that_has_no_part_in_a_group_keeps_nothing_of_it(wires: str) -> None:
    """Rank 2 hears what the root of a broadcast says, and of an abort."""
    turn = [trio.Event(), trio.Event()]

    async def main(rank: overlap.Rank) -> None:
        before = await kept_after_use(rank)
        if rank.rank < 2:
            group = rank.group([0, 1])
            assert (await group.broadcast(np.ones(4) if rank.rank == 0 else None)).size == 4
            (await group.send(np.ones(4), 1)) if rank.rank == 0 else (await group.recv(src=0))
            await group.barrier()
            if rank.rank == 0:
                group.abort("enough")
            else:
                with pytest.raises(GroupAbortedError, match="enough"):
                    await group.recv(src=0)
            del group
            turn[rank.rank].set()
        for event in turn:
            await event.wait()
        await until_kept(rank, before)
        await rank.barrier()

    with no_collector():
        assert run_far(main, 3, 1, wires=WIRES[wires]) == [None] * 3


@pytest.mark.parametrize("wires", ["shared memory", "sockets"])  # where a root waits for nobody
def test_a_rank_that_has_dropped_a_group_is_still_known_to_have_sent(wires: str) -> None:
    """Rank 0 gives, drops the group and finishes; only then rank 1 takes."""
    late = trio.Event()

    async def main(rank: overlap.Rank) -> list[float]:
        group = rank.group([0, 1])
        await group.barrier()
        if rank.rank == 1:
            await late.wait()
        return (await group.broadcast(np.ones(2) if rank.rank == 0 else None)).tolist()

    async def nemesis(everybody: list[Company]) -> None:
        await everybody[1].heard(Finished, rank=0)
        late.set()

    with no_collector():
        assert run_far(main, 2, 1, wires=WIRES[wires], nemesis=nemesis) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("wires", ["shared memory", "sockets"])  # where a root waits for nobody
def test_a_mismatch_is_found_though_one_side_has_dropped_the_group(wires: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        group = rank.group([0, 1])
        await group.barrier()
        if rank.rank == 0:
            await group.broadcast(np.ones(2))
            del group
            await rank.barrier()
        else:
            await rank.barrier()
            await group.all_reduce(np.ones(3))

    with no_collector():
        failures = run_far(main, 2, 1, wires=WIRES[wires])
    assert all(isinstance(each, overlap.RankFailedError) for each in failures)
    assert any(isinstance(each.__cause__, overlap.CollectiveMismatchError) for each in failures)  # type: ignore[union-attr]


def test_rows_of_a_board_that_not_all_have_opened_are_given_back() -> None:
    """Rank 0 has told where its rows are, and rank 1 never asks."""
    aborted = trio.Event()

    async def begin(rank: overlap.Rank) -> overlap.Future[Any]:
        group = rank.group([0, 1])
        future = group.all_reduce(np.ones(4))
        group.abort()
        return future

    async def main(rank: overlap.Rank) -> None:
        before = await kept_after_use(rank)
        if rank.rank == 0:
            future = await begin(rank)
            with pytest.raises(GroupAbortedError):
                await future
            aborted.set()
        else:
            await aborted.wait()
            rank.group([0, 1])
        await until_kept(rank, before)
        await rank.barrier()

    with no_collector():
        assert run_far(main, 2, 1, wires=by_shared_memory) == [None, None]


def test_errors_that_were_seen_are_not_kept() -> None:
    """Each has the frame of the program that has caught it."""

    class Noted:
        pass

    async def fail(rank: overlap.Rank) -> weakref.ref[Noted]:
        noted, group = Noted(), rank.group([0])
        group.abort()
        with pytest.raises(GroupAbortedError):
            await group.barrier()
        return weakref.ref(noted)

    async def main(rank: overlap.Rank) -> list[bool]:
        noted = [await fail(rank) for _ in range(3)]
        gc.collect()
        return [each() is None for each in noted[:-1]]

    assert run(main, 1) == [[True, True]]


def test_what_is_dropped_after_the_end_of_a_world_is_left_alone() -> None:
    """Rank 0 would close the group, but its transport may be closed by now."""
    lasting: list[overlap.Group] = []

    async def some(rank: overlap.Rank) -> None:
        group = rank.group([0, 1])
        await group.barrier()
        if rank.rank == 0:
            lasting.append(group)

    async def all_of_them() -> None:
        async with opened(2, 1, by_shared_memory) as (worlds, everybody):

            async def main(rank: overlap.Rank) -> None:
                await some(rank)
                if rank.rank == 0:
                    await everybody[0].heard(Finished, rank=1)

            async with trio.open_nursery() as nursery:
                for world in worlds:
                    nursery.start_soon(world.run_to_end, main, (), TIMEOUT_S)
            before = len(worlds[0].communicators)
            lasting.clear()
            await wait_all_tasks_blocked(0.01)
            assert len(worlds[0].communicators) == before == 1

    with no_collector():
        trio.run(all_of_them)
