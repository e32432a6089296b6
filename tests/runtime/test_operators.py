"""Every entry of `overlap.OPS` through every consumer of an operator: collectives, clocks, processes, the benchmark."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap.cli.bench import measuring
from overlap.cli.bench.cases import OPERATIONS, Case
from overlap.cli.bench.sampling import Sampling
from tests.collectives.playback import replay
from tests.embedded.connecting import TIMEOUT_S, connected
from tests.errors import error_of

from .cases import differs, operators, whole_numbers
from .reference import Array, fold
from .worlds import FEW_PATHS, run

R = overlap.Rank

DTYPES = [np.dtype(each) for each in ("bool", "int8", "uint64", "float32", "complex64", ml_dtypes.bfloat16)]
COUNT = 12  # divisible by 2, 3 and 4
PAIRS = [pytest.param(op, dtype, id=f"{op}-{dtype}") for dtype in DTYPES for op in operators(dtype)]
REDUCTIONS = [operation for operation in OPERATIONS if operation.kind.traits.reduces]


def inputs(dtype: np.dtype, ranks: int) -> list[Array]:
    return [whole_numbers((COUNT,), dtype, rank) for rank in range(ranks)]


def wrong(results: list[dict[tuple[str, str], list[Array]]]) -> list[str]:
    """Say for each rank, operator and dtype how its results are not the reference's."""
    return [
        f"rank {rank}, {op} of {dtype}: {said}"
        for rank, found in enumerate(results)
        for dtype in DTYPES
        for op in operators(dtype)
        for got in found[op, dtype.name]
        if (said := differs(got, fold(op, inputs(dtype, len(results))))) is not None
    ]


async def everything(rank: R) -> dict[tuple[str, str], list[Array]]:
    found = {}
    for dtype in DTYPES:
        for op in operators(dtype):
            mine = inputs(dtype, rank.world_size)[rank.rank]
            rows = [COUNT - rank.world_size + 1, *[1] * (rank.world_size - 1)]
            reduced = await rank.reduce(mine, op=op)
            found[op, dtype.name] = [
                await rank.all_reduce(mine, op),
                await rank.all_reduce(mine, op, exact=True),
                (await rank.all_reduce({"tree": mine}, op))["tree"],
                await rank.all_gather(await rank.reduce_scatter(mine, op)),
                await rank.all_gather(await rank.reduce_scatter(mine, op, counts=rows), counts=rows),
                await rank.broadcast(reduced),
            ]
    return found


@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", [*FEW_PATHS, "ring", "wire"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_reductions(path: str, ranks: int) -> None:
    assert wrong(run(everything, ranks, path=path)) == []


@pytest.mark.slow
def test_in_virtual_time() -> None:
    assert wrong(overlap.run(everything, ranks=4, clock="virtual")) == []


def test_between_processes() -> None:
    def program(world: overlap.Connection) -> list[tuple[str, str, Array]]:
        rank = world.rank
        return [
            (op, dtype.name, rank.all_reduce(inputs(dtype, 2)[rank.rank], op).result(TIMEOUT_S))
            for dtype in DTYPES
            for op in operators(dtype)
        ]

    found: Any = connected(program, 2)
    assert wrong([{(op, dtype): [got] for op, dtype, got in each} for each in found]) == []


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_on_the_bench(op: str, dtype: np.dtype) -> None:
    for operation in REDUCTIONS:
        case, rows = Case(operation=operation, ranks=3, count=COUNT, dtype=dtype, op=op), []
        overlap.run(measuring.measure_on_rank, [case], Sampling(iters=1, warmup=0), rows.append, ranks=case.ranks)
        assert [row.wrong for row in rows] == [0], operation.name


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_in_a_schedule_row_by_row(op: str, dtype: np.dtype) -> None:
    schedule = overlap.collectives.generate("all_reduce", "ring", 3)
    for got in replay(schedule, inputs(dtype, 3), op):
        assert differs(got, fold(op, inputs(dtype, 3))) is None


def test_answers_by_hand() -> None:
    three = [np.array(each, np.int32) for each in ([6, -3], [3, 5], [5, -9])]
    assert {op: fold(op, three).tolist() for op in ("sum", "mean", "max", "min", "prod", "band", "bor", "bxor")} == {
        "sum": [14, -7],
        "mean": [4, -2],
        "max": [6, 5],
        "min": [3, -9],
        "prod": [90, 135],
        "band": [0, 5],
        "bor": [7, -1],
        "bxor": [0, 15],
    }


@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_floats_have_no_bits_to_speak_of(op: str) -> None:
    async def main(rank: R) -> str:
        return str(error_of(overlap.UsageError, rank.all_reduce, np.ones(1, np.float32), op=op))

    assert run(main, 1) == [f"op: '{op}' is not defined for float32; pass integers or bool"]
