"""Arrays that a compute uses: which they are, and that they are read-only until it is done."""

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.memory.buffer_locks import arrays_in

from .worlds import run

# -- what is passed to a compute is read-only until the compute is done, and the caller's again afterwards -------------

Array = np.ndarray


def guarded(*arrays: Array) -> list[bool]:
    return [not array.flags.writeable for array in arrays]


class Gate:
    """A function that waits in the compute's thread until the test has looked."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, *args: object) -> object:
        assert self.open.wait(30)
        return args


def total(gate: Gate, w: Array) -> float:
    gate(w)
    return float(w.sum())


def test_an_argument_cannot_be_changed_while_the_compute_waits_or_runs() -> None:
    async def main(rank: overlap.Rank) -> tuple[float, float]:
        gate, w = Gate(), np.ones(4)
        future = rank.compute(total, gate, w)
        with pytest.raises(ValueError, match="read-only"):
            w += 100
        gate.open.set()
        result = await future
        w += 100
        return result, float(w.sum())

    assert run(main, 2) == [(4.0, 404.0)] * 2


HOLDERS: list[Callable[[Array, Array], object]] = [
    lambda x, y: (x, [y]),
    lambda x, y: {"a": {"b": [x]}, "c": (y, 1)},
    lambda x, y: [[[[[x, y]]]]],
]


@pytest.mark.parametrize("holder", HOLDERS)
def test_arrays_at_any_depth(holder: Callable[[Array, Array], object]) -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        gate, x, y = Gate(), np.ones(2), np.ones(3)
        future = rank.compute(gate, holder(x, y))
        during = guarded(x, y)
        gate.open.set()
        await future
        return [during, guarded(x, y)]

    assert run(main, 1) == [[[True, True], [False, False]]]


def test_several_computes_and_a_collective_use_one_array() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        gates, w = [Gate(), Gate()], np.ones(2)
        futures = [rank.compute(gate, w) for gate in gates]
        sent = rank.send(w, 0)
        seen = guarded(w)
        gates[0].open.set()
        await futures[0]
        seen += guarded(w)
        gates[1].open.set()
        await futures[1]
        seen += guarded(w)
        await rank.recv(((2,), float), 0)
        await sent
        return seen + guarded(w)

    assert run(main, 1) == [[True, True, True, False]]


def test_ranks_that_share_an_array() -> None:
    """It comes back with the last of them, whichever came first."""
    w, gates = np.ones(2), [Gate(), Gate()]

    async def main(rank: overlap.Rank) -> list[bool]:
        if rank.rank == 1:
            await rank.recv(((1,), float), 0)
        future = rank.compute(gates[rank.rank], w)
        if rank.rank == 1:
            gates[0].open.set()
            await rank.send(np.ones(1), 0)
            await rank.recv(((1,), float), 0)
            seen = guarded(w)
            gates[1].open.set()
            await future
            return seen + guarded(w)
        await rank.send(np.ones(1), 1)
        await rank.recv(((1,), float), 1)
        await future
        await rank.send(np.ones(1), 1)
        return []

    assert run(main, 2) == [[], [True, False]]


def test_what_a_future_among_the_arguments_gives() -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        made, gate = np.ones(3), Gate()
        first = rank.compute(lambda: (made, 1))
        await first
        settled = rank.compute(gate, first[0])
        seen = [guarded(made)]  # at the call: the future is settled
        gate.open.set()
        await settled
        running, later = threading.Event(), Gate()
        second = rank.compute(lambda: {"a": made})
        third = rank.compute(lambda argument: (running.set(), later(argument))[1], [second])
        assert await rank_thread(running)
        seen.append(guarded(made))
        later.open.set()
        await third
        return [*seen, guarded(made)]

    assert run(main, 1) == [[[True], [True], [False]]]


async def rank_thread(event: threading.Event) -> bool:
    return await trio.to_thread.run_sync(event.wait, 30)


def test_the_function_itself_cannot_write_and_is_told_what_to_do() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        w = np.ones(2)

        def update(w: Array) -> None:
            w -= 1

        with pytest.raises(ValueError, match="read-only") as caught:
            await rank.compute(update, w, call_site="train.py:7")
        w -= 1
        return caught.value.__notes__

    ((note,),) = run(main, 1)
    held = "this one is held by compute 'update' (train.py:7)"
    assert note.endswith(f"others may read them: {held}; return the new value, or write into a copy")


def test_what_a_function_reaches_through_an_object_is_its_own() -> None:
    class Layer:
        def __init__(self) -> None:
            self.w = np.ones(2)

        def update(self, gradient: Array) -> None:
            self.w -= gradient

    async def main(rank: overlap.Rank) -> list[float]:
        layer = Layer()
        await rank.compute(layer.update, np.ones(2))
        return layer.w.tolist()

    assert run(main, 1) == [[0.0, 0.0]]


@pytest.mark.parametrize("elements", [4, 1 << 18])
def test_an_argument_or_a_view_of_it_that_comes_back_can_be_written(elements: int) -> None:
    """Also one of the pool, whose views are views of other memory for numpy."""

    async def main(rank: overlap.Rank) -> list[bool]:
        x = await rank.all_reduce(np.ones(elements))
        for fn in (lambda x: x, lambda x: x[1:], lambda x: (1, [x.reshape(2, -1).T])):
            result = await rank.compute(fn, x)
            while isinstance(result, (tuple, list)):
                result = result[-1]
            result += 1
        return guarded(x)

    assert run(main, 2) == [[False]] * 2


def test_read_only_arguments_stay_so() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        frozen = np.ones(2)
        frozen.setflags(write=False)
        view = await rank.compute(lambda x: x[1:], frozen)
        return guarded(frozen, view)

    assert run(main, 1) == [[True, True]]


def test_arguments_come_back_when_the_function_fails() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        x, y = np.ones(2), np.ones(2)
        failed = rank.compute(lambda x: 1 // 0, x)
        never = rank.compute(lambda x, failed: x, y, failed)
        for future in (failed, never):
            with pytest.raises(ZeroDivisionError):
                await future
        return guarded(x, y)

    assert run(main, 1) == [[False, False]]


def test_arguments_come_back_when_the_world_fails() -> None:
    """Those of the function that runs, of those that wait, and of one that waits for a future."""
    arrays: list[Array] = []

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            await rank.recv(((1,), float), 0)
            raise RuntimeError("on purpose")
        running, end = threading.Event(), threading.Event()
        arrays.extend(np.ones(2) for _ in range(3))
        rank.compute(lambda x: (running.set(), end.wait(0.05)), arrays[0])
        rank.compute(lambda x, y: x, arrays[1], rank.recv(((1,), float), 1))
        rank.compute(lambda x: x, {"a": arrays[2]})
        assert guarded(*arrays) == [True] * 3
        assert await rank_thread(running)
        await rank.send(np.zeros(1), 1)
        await rank.barrier()

    with pytest.raises(overlap.RankFailedError, match="on purpose"):
        run(main, 2)
    assert guarded(*arrays) == [False] * 3


def test_in_virtual_time() -> None:
    async def main(rank: overlap.Rank) -> list[list[bool]]:
        x = np.ones(2)
        first = rank.compute(lambda x: x[1:], x, seconds=1.0)
        second = rank.compute(lambda x, y: None, {"x": x}, first, seconds=1.0)
        seen = [guarded(x)]
        view = await first
        seen.append(guarded(x, view))
        await second
        return [*seen, guarded(x, view)]

    async def writing(rank: overlap.Rank) -> str:
        with pytest.raises(ValueError, match="read-only") as caught:
            await rank.compute(lambda x: np.add(x, 1, out=x), np.ones(2), seconds=1.0)
        return caught.value.__notes__[0]

    assert "return the new value" in overlap.run(writing, ranks=1, clock="virtual")[0]
    assert overlap.run(main, ranks=2, clock="virtual") == [[[True], [True, True], [False, False]]] * 2


# -- which arrays a compute is said to use: those that its arguments are or hold, at any depth -------------------------

Pair = namedtuple("Pair", "left right")
X, Y = np.ones(1), np.zeros(2)


@dataclass
class Record:
    """A dataclass is an object like any other."""

    x: object


class Odd(np.ndarray):
    """An array of another type."""


ODD, RECORD = np.ones(2).view(Odd), Record(X)


@pytest.mark.parametrize(
    ("args", "arrays", "others"),
    [
        ((), [], []),
        ((X,), [X], []),
        ((1, 2.5, "text", b"bytes", None, True, 1j, X, Y), [X, Y], []),
        (([X, [Y]],), [X, Y], []),
        (({"a": X, "b": (Y, 1)},), [X, Y], []),
        ((Pair(X, [Pair(1, Y)]),), [X, Y], []),
        ((OrderedDict(a=[X]),), [X], []),
        ((X, X), [X, X], []),
        ((ODD,), [ODD], []),
        ((RECORD, X), [X], [RECORD]),
        ((print,), [], [print]),
    ],
)
def test_what_is_found(args: tuple[object, ...], arrays: list[object], others: list[object]) -> None:
    found = arrays_in(args)
    assert list(map(id, found[0])) == list(map(id, arrays))
    assert list(map(id, found[1])) == list(map(id, others))


def test_what_holds_itself_is_looked_into_once() -> None:
    endless: list[object] = [X]
    endless.append(endless)
    assert arrays_in((endless, endless)) == ([X], [])


def test_ever_so_deep() -> None:
    deep: object = X
    for _ in range(5000):
        deep = [deep]
    assert arrays_in((deep,)) == ([X], [])
