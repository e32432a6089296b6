"""Arrays are read-only while an operation or anybody else uses them, and not for longer."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from trio.testing import wait_all_tasks_blocked

import overlap
from overlap.runtime.memory.buffer_locks import BufferLocks
from overlap.runtime.memory.buffer_pool import BufferPool
from tests.threads import run_threads

from .worlds import failure_of, run

# -- arrays are read-only while anybody uses them, and not for longer, whatever they are views of ----------------------


def guarded(*arrays: np.ndarray) -> list[bool]:
    return [not array.flags.writeable for array in arrays]


def test_the_last_user_gives_it_back() -> None:
    locks, x = BufferLocks(), np.ones(3)
    assert [len(locks.lock((x,))) for _ in range(3)] == [1] * 3
    states = []
    for _ in range(3):
        states += guarded(x)
        locks.unlock((x,))
    assert states + guarded(x) == [True, True, True, False]
    assert len(locks) == 0


def test_what_was_read_only_is_left_alone() -> None:
    locks, x = BufferLocks(), np.ones(3)
    x.setflags(write=False)
    assert not locks.lock((x,))
    assert guarded(x) == [True]
    assert len(locks) == 0


@pytest.mark.parametrize("first", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("last", list(itertools.permutations(range(3))))
def test_views_of_views_in_any_order(first: tuple[int, ...], last: tuple[int, ...]) -> None:
    locks = BufferLocks()
    base = np.ones((4, 4))
    arrays = [base, base[1:], base[1:].T]
    for index in first:
        assert locks.lock((arrays[index],))
    for index in last:
        locks.unlock((arrays[index],))
    assert guarded(*arrays) == [False] * 3
    arrays[2][...] = 5
    assert len(locks) == 0


def test_a_view_that_waits_for_its_base_can_be_locked_again() -> None:
    locks, base = BufferLocks(), np.ones(4)
    view = base[1:]
    locks.lock((base,))
    assert not locks.lock((base[1:],))  # made while the base is read-only, it was so to begin with
    locks.unlock((base,))
    locks.lock((view,))
    locks.lock((base,))
    locks.unlock((view,))
    assert guarded(view) == [True]  # it waits
    assert locks.lock((view,))
    locks.unlock((base,))
    assert guarded(view, base) == [True, False]
    locks.unlock((view,))
    assert guarded(view, base) == [False, False]


def test_an_array_whose_base_the_user_has_frozen_is_not_kept() -> None:
    locks, base = BufferLocks(), np.ones(4)
    view = base[1:]
    locks.lock((view,))
    base.setflags(write=False)
    locks.unlock((view,))
    alive = weakref.ref(view)
    del view
    assert alive() is None


def test_a_view_that_waits_is_not_kept() -> None:
    locks, base = BufferLocks(), np.ones(4)
    view = base[1:]
    locks.lock((view,))
    locks.lock((base,))
    locks.unlock((view,))
    alive = weakref.ref(view)
    del view
    gc.collect()
    assert alive() is None
    others = [base[index:] for index in range(4)]  # some of them where it has been
    assert not locks.lock(tuple(others))
    locks.unlock((base,))
    assert guarded(base, *others) == [False] + [True] * 4


@pytest.mark.parametrize("pooled", [False, True])
def test_views_made_of_locked_arrays_follow_them(pooled: bool) -> None:
    locks = BufferLocks()
    x = BufferPool().empty((1 << 20,), np.dtype(np.uint8)) if pooled else np.ones(1 << 20, np.uint8)
    locks.lock((x,))
    locks.lock((x,))
    views, foreign = [x[3:], x.reshape(2, -1).T, x], np.ones(3)[1:]
    foreign.setflags(write=False)
    locks.unlock_with_base([*views, foreign], [x])
    locks.unlock((x,))
    assert guarded(*views) == [True] * 3
    assert locks.lock((views[0],))
    locks.unlock((x,))
    assert guarded(*views, foreign) == [True, False, False, True]
    locks.unlock((views[0],))
    assert guarded(views[0]) == [False]


def test_thousands_in_flight() -> None:
    locks, arrays = BufferLocks(), [np.ones(1) for _ in range(5000)]
    for array in arrays * 2:
        assert locks.lock((array,))
    for array in arrays:
        locks.unlock((array,))
    assert all(guarded(*arrays))
    for array in arrays:
        locks.unlock((array,))
    assert not any(guarded(*arrays))


def test_threads_lock_and_unlock_the_same_arrays() -> None:
    locks, base = BufferLocks(), np.ones(8)
    arrays = [base, base[1:], base[2:], np.ones(2)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(2000):
            array = arrays[(number + turn) % len(arrays)]
            if locks.lock((array,)):
                if array.flags.writeable:
                    wrong.append(turn)
                locks.unlock((array,))

    run_threads(threading.Thread(target=work, args=(number,)) for number in range(4))
    assert wrong == []
    assert len(locks) == 0
    assert guarded(*arrays) == [False] * 4


# -- arrays in flight are read-only, and the caller's again afterwards, however the operation ended --------------------

Array = np.ndarray


def test_touching_an_array_in_flight_raises(path: str) -> None:
    async def main(rank: overlap.Rank) -> bool:
        x, out = np.ones(3), np.zeros(3)
        if rank.rank == 0:
            future = rank.all_reduce(x, out=out)
            for array in (x, out):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 5
                with pytest.raises(ValueError, match="read-only"):
                    array += 1
            await rank.send(np.zeros(1), 1)
        else:
            await rank.recv(((1,), float), 0)
            future = rank.all_reduce(x, out=out)
        await future
        x += 1
        out += 1
        return x.tolist() == [2, 2, 2] and out.tolist() == [3, 3, 3]

    assert run(main, 2, path=path) == [True, True]


@pytest.mark.parametrize("elements", [3, 1 << 18])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast", "all_to_all", "reduce", "send", "permute"])
def test_every_operation_guards_and_gives_back(kind: str, elements: int, path: str) -> None:
    """Rank 0 waits for rank 1, which comes only after rank 0 has looked."""

    def issue(rank: overlap.Rank, x: Array) -> overlap.CollectiveFuture:
        if kind == "send":
            return rank.send(x, 1, 1) if rank.rank == 0 else rank.recv(x, 0, 1)
        return getattr(rank, kind)(x, *([[(0, 1)]] if kind == "permute" else []))

    async def main(rank: overlap.Rank) -> list[list[bool]]:
        x = np.ones(elements * 2)
        if rank.rank == 1:
            await rank.recv(((1,), float), 0)
            await issue(rank, x)
            return [guarded(x)]
        future = issue(rank, x)
        during = guarded(x)
        await rank.send(np.zeros(1), 1)
        await future
        return [during, guarded(x)]

    assert run(main, 2, path=path) == [[[True], [False]], [[False]]]


def test_large_arrays_while_the_threads_work(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        x, out = np.ones(1 << 20), np.zeros(1 << 20)
        future = rank.all_reduce(x, out=out)
        during = guarded(x, out) if not future.done else [True, True]
        await future
        return during + guarded(x, out)

    assert run(main, 2, path=path) == [[True, True, False, False]] * 2


def test_operations_that_wait_for_room_guard_their_arrays_too(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        rank.stream("s", window=1)
        late = rank.recv(((1,), float), rank.rank)
        rank.all_reduce(late, stream="s")
        x, out, future_out = np.ones(1), np.zeros(1), np.zeros(1)
        futures = [rank.all_reduce(x, stream="s", out=out), rank.all_reduce(late, stream="s", out=future_out)]
        during = guarded(x, out, future_out)
        rank.send(np.ones(1), rank.rank)
        for future in futures:
            await future
        return [during, guarded(x, out, future_out)]

    assert run(main, 2, path=path) == [[[True] * 3, [False] * 3]] * 2


def test_out_is_guarded_while_the_input_does_not_exist_yet_and_the_input_once_it_does() -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        out, made = np.zeros(1), np.ones(1)
        late = rank.recv(made, rank.rank)
        future = rank.all_reduce(late, out=out)
        seen = [guarded(out)]
        rank.send(np.ones(1), rank.rank)
        await late
        if rank.rank == 0:
            await wait_all_tasks_blocked()
            seen.append(guarded(made, out))
            await rank.send(np.ones(1), 1)
        await future
        return [*seen, guarded(made, out)]

    async def late_second(rank: overlap.Rank) -> list[list[bool]]:
        if rank.rank == 1:
            await rank.recv(((1,), float), 0)
        return await main(rank)

    first, second = run(late_second, 2)
    assert first == [[True], [True, True], [False, False]]
    assert second == [[True], [False, False]]


def test_an_array_used_twice_is_given_back_by_the_last_user(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        x = np.ones(2)
        futures = [rank.send(x, 0, tag) for tag in range(3)]
        seen = [guarded(x)]
        for tag in (1, 2, 0):
            rank.recv(((2,), float), 0, tag)
            await futures[tag]
            seen.append(guarded(x))
        return seen

    assert run(main, 1, path=path) == [[[True], [True], [True], [False]]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_view_and_its_base_in_either_order(order: tuple[int, int], path: str) -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        base = np.ones(4)
        view = base[1:3]
        arrays = [base, view]
        futures = [rank.send(arrays[tag], 0, tag) for tag in order]
        during = guarded(base, view)
        for tag in reversed(order):
            rank.recv((arrays[tag].shape, float), 0, tag)
        for future in futures:
            await future
        return [during, guarded(base, view)]

    assert run(main, 1, path=path) == [[[True, True], [False, False]]]


def test_blocks_of_one_array_in_flight_at_once(path: str) -> None:
    """The buckets of a flat gradient, each reduced in place."""

    async def main(rank: overlap.Rank) -> list[float]:
        flat = np.arange(12.0)
        blocks = [flat[i : i + 3] for i in range(0, 12, 3)]
        for future in [rank.all_reduce(block, out=block) for block in blocks]:
            await future
        assert guarded(flat, *blocks) == [False] * 5
        return flat.tolist()

    assert run(main, 3, path=path) == [[3.0 * i for i in range(12)]] * 3


def test_read_only_arrays_stay_read_only(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        frozen = np.ones(3)
        frozen.setflags(write=False)
        await rank.all_reduce(frozen)
        for future in [rank.all_gather(frozen), rank.all_reduce(frozen[:2])]:
            await future
        return guarded(frozen)

    assert run(main, 2, path=path) == [[True], [True]]


def test_an_out_in_flight_cannot_be_used_again() -> None:
    async def main(rank: overlap.Rank) -> None:
        out = np.zeros(1)
        future = rank.recv(out, 0)
        with pytest.raises(overlap.UsageError, match=r"^out: is read-only"):
            rank.all_reduce(np.ones(1), out=out)
        rank.send(np.ones(1), 0)
        await future
        await rank.all_reduce(np.ones(1), out=out)

    assert run(main, 1) == [None]


def test_arrays_come_back_after_a_failure(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        x, out = np.ones(3 + rank.rank), np.zeros(3 + rank.rank)
        with pytest.raises(overlap.CollectiveMismatchError):
            await rank.all_reduce(x, out=out)
        return guarded(x, out)

    assert run(main, 2, path=path) == [[False, False]] * 2


def test_arrays_come_back_when_the_world_fails(path: str) -> None:
    """Those of started, of queued and of half-ready operations alike."""
    arrays: list[Array] = []

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 2:
            await rank.recv(((1,), float), 0)
            await rank.recv(((1,), float), 1)
            raise RuntimeError("on purpose")
        rank.stream("s", window=2)
        base = np.zeros(8)
        mine = [base[:4], base, np.ones(8), np.zeros(8), np.zeros(2)]
        arrays.extend(mine)
        for x, out in ((base, None), (base[:4], None), (mine[2], mine[3])):
            rank.all_reduce(x, out=out, stream="s")
        rank.all_reduce(rank.recv(((2,), float), 2, 5), out=mine[4], stream="s")
        assert guarded(base, *mine[2:]) == [True] * 4
        rank.send(np.zeros(1), 2)
        await rank.barrier()

    with pytest.raises(overlap.RankFailedError, match="on purpose"):
        run(main, 3, path=path)
    assert guarded(*arrays) == [False] * 10


def test_a_refused_call_guards_nothing(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        x, out = np.ones(3), np.zeros(4)
        with pytest.raises(overlap.UsageError):
            rank.all_reduce(x, out=out)
        with pytest.raises(overlap.UsageError):
            rank.reduce(x, op="median")
        return guarded(x, out)

    assert run(main, 2, path=path) == [[False, False]] * 2


class Model:
    def __init__(self, w: Array) -> None:
        self.weights = {"w": w}

    def update(self) -> None:
        self.weights["w"] += 1


def write_into_view(x: Array) -> None:
    x[:1] += 1


def write_by_library(x: Array) -> None:
    np.put(x, [0], 1)


def write_into_attribute(x: Array) -> None:
    Model(x).update()


def write_elsewhere(_: Array) -> None:
    own = np.ones(1)
    own.flags.writeable = False
    own += 1


@pytest.mark.parametrize("write", [write_into_view, write_by_library, write_into_attribute, write_elsewhere])
@pytest.mark.everyday(4)
def test_the_error_of_a_write_names_the_operation_that_holds_the_array(write: Callable[[Array], None]) -> None:
    async def main(rank: overlap.Rank) -> None:
        x = np.ones(1)
        rank.all_reduce(np.ones(2), call_site="train.py:6")
        rank.all_reduce(x, call_site="train.py:7")
        write(x)

    failure = failure_of(overlap.run, main, ranks=2)
    held = "this one is held by all_reduce #1 on group 'world' (train.py:7); " * (write is not write_elsewhere)
    told = (
        f"arrays that an operation works on are read-only until it is done: {held}await it first, or write into a copy"
    )
    assert getattr(failure.cause, "__notes__", []) == [told]
