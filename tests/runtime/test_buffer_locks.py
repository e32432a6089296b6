"""Arrays are read-only while anybody uses them, and not for longer, whatever they are views of."""

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest

from overlap.runtime.memory.buffer_locks import BufferLocks
from overlap.runtime.memory.buffer_pool import BufferPool
from tests.threads import run_threads


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
    locks.follow([*views, foreign], [x])
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
