"""Ranks that only give something: where memory is shared, they wait for nobody, and others get what they gave."""

from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap import PeerFailedError
from transports.base import OPERATIONS
from transports.shared_memory.engine import BUILT

from .companies import by_shared_memory, run_far

pytestmark = pytest.mark.skipif(not BUILT, reason="the engine was not compiled")

ELEMENTS = {"on the board": 1, "behind its rows": 100, "mapped": 20_000}


def given(rank: overlap.Rank, kind: str, x: Any) -> Any:
    """An operation in which rank 0 gives and rank 1 takes."""
    if kind == "broadcast":
        return rank.broadcast(x)
    if kind == "scatter":
        return rank.scatter(np.repeat(x, 2))
    if kind == "gather":
        return rank.gather(x, 1)
    return rank.reduce(x, 1, "max") if kind == "reduce" else rank.permute(x, [(0, 1)])


@pytest.mark.parametrize("elements", ELEMENTS.values(), ids=ELEMENTS)
@pytest.mark.parametrize("kind", ["broadcast", "scatter", "gather", "reduce", "permute"])
def test_who_gives_is_done_before_others_come(kind: str, elements: int) -> None:
    ahead, over = 20, trio.Event()

    async def main(rank: overlap.Rank) -> list[float]:
        await rank.all_reduce(np.ones(1))
        found = []
        if rank.rank:
            await over.wait()
        for number in range(ahead):
            x = np.full(elements, 1.0 + number if rank.rank == 0 else 0.0)
            result = await given(rank, kind, x)
            found.append(0.0 if result is None else float(np.max(result)))
            x[...] = 1e6  # it may be written again
        over.set()
        return found

    assert run_far(main, 2, 1, wires=by_shared_memory)[1] == [1.0 + number for number in range(ahead)]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("elements", ELEMENTS.values(), ids=ELEMENTS)
def test_who_gives_much_waits_for_rows_and_no_longer(elements: int) -> None:
    """Each rank gives, in turn, more than there are rows; the others take it late, each at another time."""

    async def main(rank: overlap.Rank) -> list[float]:
        found = []
        for root in range(rank.world_size):
            for number in range(2 * OPERATIONS + 5):
                if rank.rank != root and number % 7 == rank.rank:
                    await trio.sleep(0.0005)
                x = np.full(elements, 1000.0 * root + number if rank.rank == root else -1.0)
                found.append(float((await rank.broadcast(x, root, out=x))[-1]))
                x[...] = -2.0
        return found

    told = [1000.0 * root + number for root in range(3) for number in range(2 * OPERATIONS + 5)]
    assert run_far(main, 3, 1, wires=by_shared_memory) == [told] * 3


def test_an_operation_that_fails_keeps_no_row() -> None:
    """Rank 1 has come to it, and is never done with it; more than all rows are used after that."""

    def fail() -> Any:
        raise ValueError("no input")

    async def main(rank: overlap.Rank) -> list[float]:
        await rank.all_reduce(np.ones(1))
        failed = rank.broadcast(rank.compute(fail) if rank.rank == 0 else np.zeros(1))
        with pytest.raises((ValueError, PeerFailedError)):
            await failed
        found = []
        for number in range(3 * OPERATIONS):
            x = np.full(1, float(number) if rank.rank == 0 else -1.0)
            found.append(float((await rank.broadcast(x, out=x))[0]))
        return found

    assert run_far(main, 2, 1, wires=by_shared_memory)[1] == [float(number) for number in range(3 * OPERATIONS)]


def inputs(block: int) -> list[Any]:
    return [np.arange(3 * block, dtype=np.float32) + 100 * rank for rank in range(3)]


@pytest.mark.parametrize("block", [1, 40, 2_000])
def test_every_operation_cuts_and_combines_what_was_given(block: int) -> None:
    xs, ranks = inputs(block), range(3)
    parts = [x[:block] + 7 for x in xs]
    cut = [[x[rank * block : (rank + 1) * block] for x in xs] for rank in ranks]

    async def main(rank: overlap.Rank) -> list[str]:
        me = rank.rank
        x, part, wrong = inputs(block)[me], parts[me].copy(), list[str]()
        for _ in range(2):  # the second time by a shorter way
            whole = np.zeros(3 * block, np.float32)
            mine = whole[me * block : (me + 1) * block]
            mine[...] = part
            found = {
                "all_gather": (await rank.all_gather(part), np.concatenate(parts)),
                "in place": (await rank.all_gather(mine, out=whole), np.concatenate(parts)),
                "all_to_all": (await rank.all_to_all(x), np.concatenate(cut[me])),
                "reduce_scatter": (await rank.reduce_scatter(x), sum(cut[me])),
                "gather": (await rank.gather(part, 1), np.concatenate(parts) if me == 1 else None),
                "scatter": (await rank.scatter(x, 2), cut[me][2]),
                "broadcast": (await rank.broadcast(x, 1), xs[1]),
                "reduce": (await rank.reduce(x, 2, "max"), xs[2] if me == 2 else None),
                "permute": (await rank.permute(part, [(0, 2), (2, 1)]), [0 * part, parts[2], parts[0]][me]),
                "all_reduce": (await rank.all_reduce(x.reshape(3, block), "min"), xs[0].reshape(3, block)),
            }
            wrong += [name for name, (result, expected) in found.items() if not np.array_equal(result, expected)]
        return wrong

    assert run_far(main, 3, 1, wires=by_shared_memory) == [[]] * 3
