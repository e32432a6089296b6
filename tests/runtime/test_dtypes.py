"""Every number type: all operators that it has, and all collectives that only move it."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import overlap

from .cases import KINDS, REDUCING, SCATTERING, Case, operators
from .reference import Array
from .test_collectives import check_world, issue_all
from .worlds import PATHS, run

NUMPY = "?bBhHiIlLqQefdgFDG"
NARROW = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e3m4,
    ml_dtypes.float8_e4m3,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
)
DTYPES = [np.dtype(code) for code in NUMPY] + [np.dtype(kind) for kind in NARROW]


READ_NAMES = """
import sys
from overlap.runtime.forms import dtype_of
assert "ml_dtypes" not in sys.modules
print(*map(dtype_of, sys.argv[1:]))
"""


def test_every_dtype_is_found_by_its_name_where_nobody_has_imported_it() -> None:
    public = [name for name in dir(ml_dtypes) if not name.startswith("_")]
    types = [name for name in public if isinstance(getattr(ml_dtypes, name), type)]
    names = [name for name in types if issubclass(getattr(ml_dtypes, name), np.generic)]
    assert len(names) >= 14
    done = subprocess.run([sys.executable, "-c", READ_NAMES, *names], capture_output=True, text=True, check=True)
    assert done.stdout.split() == names


def dtype_cases(size: int) -> list[Case]:
    """All operators that each dtype has, then the collectives that reduce nothing."""
    todo = []
    for dtype in DTYPES:
        for kind in KINDS:
            shape = (5 * size, 3) if kind in SCATTERING else (11,)
            if kind in REDUCING:
                todo += [Case(kind=kind, shape=shape, dtype=dtype, kwargs={"op": op}) for op in operators(dtype)]
            else:
                # everybody receives: float8_e8m0fnu has no zero to give to the others
                kwargs = {"pairs": [(rank, (rank + 1) % size) for rank in range(size)]} if kind == "permute" else {}
                todo.append(Case(kind=kind, shape=shape, dtype=dtype, kwargs=kwargs))
    return todo


WORLDS = [
    (1, "direct"),
    (4, "direct"),
    pytest.param(8, "direct", marks=pytest.mark.slow),
    *((2, path) for path in ("ring", "wire")),
    (3, "mesh"),
    *(pytest.param(2, path, marks=pytest.mark.slow) for path in PATHS if path not in ("ring", "wire")),
    *(pytest.param(3, path, marks=pytest.mark.slow) for path in PATHS if path != "mesh"),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("size", "path"), WORLDS)
def test_every_dtype_with_every_operator(size: int, path: str) -> None:
    todo = dtype_cases(size)
    check_world(todo, run(issue_all, size, todo, path=path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "first", "total"),
    [
        (ml_dtypes.bfloat16, 256, 264),
        (np.float16, 2048, 2056),
        (ml_dtypes.float8_e4m3fn, 16, 24),
        (ml_dtypes.float8_e5m2, 8, 16),
    ],
)
def test_narrow_floats_accumulate_in_float32(dtype: type, first: int, total: int, path: str) -> None:
    """One at a time, a unit is half of the last place of `first`, or less: added narrowly, all seven would vanish."""
    assert dtype(first) + dtype(1) == dtype(first)

    async def main(rank: overlap.Rank) -> list[Array]:
        x = np.full(8, 1 if rank.rank else first, dtype)
        return [await rank.all_reduce(x), await rank.reduce_scatter(x), await rank.all_reduce(x, "mean")]

    for summed, block, mean in run(main, 8, path=path):
        assert summed.dtype == block.dtype == mean.dtype == dtype
        assert (summed == dtype(total)).all()
        assert (block == dtype(total)).all()
        assert (mean == dtype((first + 7) / 8)).all()


def test_five_hundred_and_twelve_ones_in_bfloat16() -> None:
    """Added up in bfloat16 they would be 256."""

    async def main(rank: overlap.Rank) -> float:
        return float(await rank.all_reduce(np.ones((), ml_dtypes.bfloat16)))

    assert run(main, 512) == [512.0] * 512


@pytest.mark.parametrize("path", PATHS)
def test_the_mean_of_integers_is_truncated_towards_zero_and_does_not_overflow(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[list[int]]:
        signed = np.array([127, -128, -7 + rank.rank, 7 - rank.rank], np.int8)
        unsigned = np.array([255, 3 + rank.rank], np.uint8)
        return [(await rank.all_reduce(x, "mean")).tolist() for x in (signed, unsigned)]

    assert run(main, 3, path=path) == [[[127, -128, -6, 6], [255, 4]]] * 3
    assert run(main, 2, path=path) == [[[127, -128, -6, 6], [255, 3]]] * 2


def test_integers_wrap_and_floats_overflow_without_a_warning(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[Array]:
        large = np.full(1 << 20, 3e38, np.float32)
        small = [np.array([200], np.uint8), np.array([3e38], np.float32), np.array([np.inf - 0.0 * rank.rank])]
        return [await rank.all_reduce(x) for x in (*small, large)]

    for wrapped, overflowed, infinite, large in run(main, 2, path=path):
        assert wrapped.tolist() == [144]
        assert overflowed.tolist() == infinite.tolist() == [np.inf]
        assert (large == np.inf).all()


def test_opposite_infinities_are_not_a_number_and_no_warning(path: str) -> None:
    async def main(rank: overlap.Rank) -> bool:
        x = np.array([np.inf if rank.rank else -np.inf])
        return bool(np.isnan(await rank.all_reduce(x)).all() and np.isnan(await rank.all_reduce(x, "mean")).all())

    assert run(main, 2, path=path) == [True, True]
