"""Ranks that share memory: small operations, all on the board, and ranks that only give and wait for nobody."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio

import overlap
from overlap import PeerFailedError
from overlap.collectives.call import Call
from overlap.runtime.operation import CollectiveFuture
from transports import Router, Transport
from transports.base import OPERATIONS, PAYLOAD_BYTES
from transports.shared_memory import SharedMemory
from transports.shared_memory.engine import BUILT

from .companies import Company, by_shared_memory, run_far

# -- small operations between processes that share memory: all on the board, whose rows are used again in time ---------

# ----------------------------------------------------------------------------------------------------------------------
# Small operations between processes that share memory, again and again: all on the board, mostly without a match

pytestmark = pytest.mark.skipif(not BUILT, reason="the engine was not compiled")

INPUTS: list[tuple[str, Any]] = [
    ("sum", np.float64(3)),
    ("sum", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("mean", np.array([-7, 3, 5], np.int8)),
    ("max", np.array([True, False])),
    ("prod", np.array([2, 0.5], ml_dtypes.bfloat16)),
    ("sum", np.arange(PAYLOAD_BYTES // 8)),
]


async def again_and_again(rank: overlap.Rank) -> list[bool]:
    same = []
    for turn in range(OPERATIONS):  # each row is used several times
        for op, x in INPUTS:
            mine = np.asarray(x * (rank.rank + 1) if x.dtype != bool else x == bool(rank.rank), x.dtype)
            issued = rank.all_reduce(mine, op, out=mine) if turn % 3 == 0 and mine.shape else rank.all_reduce(mine, op)
            if turn % 5 == 0:
                await rank.barrier()
            result = await issued
            found = expected(op, x, rank.world_size)
            same.append(result.dtype == x.dtype and result.shape == x.shape and bool((result == found).all()))
            assert mine.flags.writeable
    return same


def expected(op: str, x: Any, ranks: int) -> Any:
    each = [x * (rank + 1) if x.dtype != bool else x == bool(rank) for rank in range(ranks)]
    if op == "mean":  # truncated towards zero
        return (sum(part.astype(np.int64) for part in each) / ranks).astype(x.dtype)
    return {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op].reduce(np.stack(each), axis=0)


@pytest.mark.parametrize("processes", [2, 3])
def test_results_are_right_however_often_a_row_is_used(processes: int) -> None:
    assert (
        run_far(again_and_again, processes, 1, wires=by_shared_memory)
        == [[True] * (OPERATIONS * len(INPUTS))] * processes
    )


def test_who_comes_last_and_cannot_end_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_result = CollectiveFuture.prepare_result

    def short_of_memory(operation: CollectiveFuture[Any], pattern: Call) -> None:
        if operation.context.rank == 1 and operation.name == "last":
            raise MemoryError("no more")
        prepare_result(operation, pattern)

    async def main(rank: overlap.Rank) -> str:
        for _ in range(2):
            await rank.all_reduce(np.ones(2))
        monkeypatch.setattr(CollectiveFuture, "prepare_result", short_of_memory)
        try:
            total = await rank.all_reduce(np.ones(2), name="last")
        except MemoryError as error:
            return str(error)
        except PeerFailedError as error:
            return str(error.culprit)
        return str(total.tolist())

    first, last = run_far(main, 2, 1, wires=by_shared_memory)
    assert last == "no more"
    assert first in ("1", "[2.0, 2.0]")  # it may have its result before rank 1 has failed, and then that is right


# -- rows of boards are used again only once all ranks are done with them, whatever else a group does in between -------

ELEMENTS = {"on the board": 1, "behind its rows": 100, "mapped": 20_000}


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("between", [OPERATIONS - 2, OPERATIONS - 1, 2 * OPERATIONS - 1])
def test_a_rank_that_only_sends_meanwhile_does_not_run_round(between: int, kind: str) -> None:
    """Rank 0 has ended the first operation, and the messages after it, before rank 1 sees that all have come to it."""
    begun, elements = trio.Event(), ELEMENTS[kind]

    async def main(rank: overlap.Rank) -> list[float]:
        x = np.full(elements, 1.0 + rank.rank)
        await rank.all_reduce(x)
        await rank.broadcast(np.ones(1), algorithm="binomial")
        if rank.rank == 0:
            await begun.wait()
        first = rank.all_reduce(10 * x)
        begun.set()
        told = [rank.broadcast(np.full(1, float(number)), algorithm="binomial") for number in range(between)]
        last = rank.all_reduce(100 * x)
        assert [float((await each)[0]) for each in told] == [float(number) for number in range(between)]
        return [float((await each)[-1]) for each in (first, last)]

    assert run_far(main, 2, 1, wires=by_shared_memory) == [[30.0, 300.0]] * 2


@pytest.mark.parametrize("begins", ["before the loss", "after the loss"])
def test_an_operation_fails_whose_board_is_never_ready_because_a_process_is_lost(begins: str) -> None:
    """The lost process lives, and sends a note that makes no sense: no other news ends the operation."""
    pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")
    memories = list[SharedMemory]()

    @asynccontextmanager
    async def wires(companies: list[Company], placement: Sequence[range]) -> AsyncIterator[list[Transport]]:
        async with by_shared_memory(companies, placement) as routers:
            for router in routers:
                assert isinstance(router, Router)
                memories.extend(each for each in router.parts if isinstance(each, SharedMemory))
            yield routers

    async def main(rank: overlap.Rank) -> None:
        here, there = memories
        if rank.rank == 0:
            first = rank.all_reduce(np.ones(1)) if begins == "before the loss" else None
            assert there.engine is not None
            there.engine.note(0, 1, 99, 0)
            while here.links[1].gone is None:
                await trio.lowlevel.checkpoint()
            await (rank.all_reduce(np.ones(1)) if first is None else first)
        await trio.sleep_forever()

    outcome = run_far(main, 2, 1, wires=wires)[0]
    assert isinstance(outcome, overlap.RankFailedError)
    assert "process 1 (rank 1) is lost: it sent a note about rank 99" in str(outcome)


# -- ranks that only give something: where memory is shared, they wait for nobody, and others get what they gave -------


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
