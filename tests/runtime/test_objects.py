"""Collectives of Python objects."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import overlap
from tests.embedded.connecting import TIMEOUT_S, connected
from tests.errors import error_of

from .worlds import FEW_PATHS, run

R = overlap.Rank

VALUES: list[Any] = [
    None,
    [1, -(2**40), True, 0.5, "text", b"bytes", (1, (2, [3]))],
    {"a": {3: [1 + 2j]}, "b": np.float32(2.5)},
    "long " * 1000,
]


async def everything(rank: R) -> list[bool]:
    me, n = rank.rank, rank.world_size
    mine, all_ = VALUES[me], VALUES[:n]
    return [
        await rank.all_gather_object(mine) == all_,
        await rank.gather_object(mine, n - 1) == (all_ if me == n - 1 else None),
        await rank.broadcast_object(mine, n - 1) == VALUES[n - 1],
        await rank.scatter_object(all_[::-1] if me == 0 else None) == all_[::-1][me],
    ]


@pytest.mark.parametrize("path", [*FEW_PATHS, "wire"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_objects_reach_whom_they_shall(path: str, ranks: int) -> None:
    assert run(everything, ranks, path=path) == [[True] * 4] * ranks


def test_in_virtual_time() -> None:
    assert overlap.run(everything, ranks=4, clock="virtual") == [[True] * 4] * 4


def test_from_threads_and_between_processes() -> None:
    def program(world: overlap.Connection) -> list[Any]:
        rank, me = world.rank, world.rank.rank
        futures = [rank.all_gather_object(VALUES[me]), rank.broadcast_object({"from": me}, 1)]
        futures += [rank.scatter_object(["a", "b"] if me == 0 else None), rank.gather_object(me, 1)]
        return [future.result(TIMEOUT_S) for future in futures]

    assert connected(program, 2) == [
        [VALUES[:2], {"from": 1}, "a", None],
        [VALUES[:2], {"from": 1}, "b", [0, 1]],
    ]


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "bfloat16"])
def test_arrays_keep_their_dtype_and_shape(dtype: str) -> None:
    async def main(rank: R) -> bool:
        mine = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, dtype, dtype))
        (found,) = (await rank.all_gather_object({"x": mine}))[:1]
        same = found["x"].dtype == mine.dtype and found["x"].shape == (2, 3) and bool((found["x"] == mine).all())
        return same and bool(found["x"].flags.writeable)

    assert run(main, 2) == [True, True]


def test_what_is_issued_around_them_keeps_its_place() -> None:
    async def main(rank: R) -> list[Any]:
        futures: list[Any] = []
        for turn in range(10):
            futures += [rank.all_gather_object([rank.rank] * turn), rank.all_reduce(np.full(1, turn))]
        found = [await future for future in reversed(futures)]
        return [found[1], int(found[0][0])]

    assert run(main, 2, path="wire") == [[[[0] * 9, [1] * 9], 18]] * 2


def test_only_who_asks_for_pickle_gets_it() -> None:
    async def main(rank: R) -> list[Any]:
        error = error_of(overlap.UsageError, rank.all_gather_object, {1, 2})
        return [str(error), await rank.all_gather_object({rank.rank}, pickle=True)]

    assert (
        run(main, 2)
        == [
            [
                "value: msgpack cannot pack set; pass numbers, texts, bytes, arrays and lists, tuples and dicts of "
                "them, or pickle=True if every rank trusts every other",
                [{0}, {1}],
            ]
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda r: r.scatter_object(["a"]), "values: expected a list of 2 objects, one a rank, got 1 of them"),
        (lambda r: r.scatter_object(3), "values: expected a list of 2 objects, one a rank, got int"),
        (lambda r: r.broadcast_object(1, 2), "root: expected 0 to 1, a rank of group 'world', got 2"),
        (lambda r: r.gather_object(1, 2), "root: expected 0 to 1, a rank of group 'world', got 2"),
    ],
)
def test_objects_that_cannot_be_meant(wrong: Any, text: str) -> None:
    async def main(rank: R) -> str:
        if rank.rank == 0:
            return str(error_of(overlap.UsageError, wrong, rank))
        return text

    assert run(main, 2) == [text] * 2
