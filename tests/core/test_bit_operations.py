"""Reductions bit by bit, along every path."""

from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import pytest

import overlap
from tests.embedded.connecting import TIMEOUT_S, connected

from .worlds import FEW_PATHS, run

R = overlap.Rank

OPS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
DTYPES = ("bool", "int8", "uint64")
COUNT = 12  # divisible by 2, 3 and 4


def bits(rank: int, dtype: str) -> Any:
    return np.random.default_rng(rank).integers(0, 2 if dtype == "bool" else 100, COUNT).astype(dtype)


def expected(op: str, dtype: str, ranks: int) -> Any:
    return reduce(OPS[op], [bits(rank, dtype) for rank in range(ranks)]).tolist()


async def everything(rank: R) -> list[Any]:
    found: list[Any] = []
    for op in OPS:
        for dtype in DTYPES:
            mine = bits(rank.rank, dtype)
            found += [
                (await rank.all_reduce(mine, op=op)).tolist(),
                (await rank.all_reduce(mine, op, exact=True)).tolist(),
            ]
            found += [(await rank.all_gather(await rank.reduce_scatter(mine, op=op))).tolist()]
            got = await rank.reduce(mine, op=op)
            found += [(await rank.broadcast(got)).tolist()]
    return found


@pytest.mark.parametrize("path", [*FEW_PATHS, "ring", "wire"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reductions_of_bits(path: str, ranks: int) -> None:
    wanted = [[expected(op, dtype, ranks)] * 4 for op in OPS for dtype in DTYPES]
    assert run(everything, ranks, path=path) == [list(chain.from_iterable(wanted))] * ranks


def test_in_virtual_time() -> None:
    wanted = [[expected(op, dtype, 4)] * 4 for op in OPS for dtype in DTYPES]
    assert overlap.run(everything, ranks=4, clock="virtual") == [list(chain.from_iterable(wanted))] * 4


def test_between_processes() -> None:
    def program(world: overlap.Connection) -> list[Any]:
        return [
            world.rank.all_reduce(bits(world.rank.rank, dtype), op=op).result(TIMEOUT_S).tolist()
            for op in OPS
            for dtype in DTYPES
        ]

    assert connected(program, 2) == [[expected(op, dtype, 2) for op in OPS for dtype in DTYPES]] * 2


@pytest.mark.parametrize("op", OPS)
def test_floats_have_no_bits_to_speak_of(op: str) -> None:
    async def main(rank: R) -> str:
        with pytest.raises(overlap.UsageError) as caught:
            rank.all_reduce(np.ones(1, np.float32), op=op)
        return str(caught.value)

    assert run(main, 1) == [f"op: '{op}' is not defined for float32; pass integers or bool"]
