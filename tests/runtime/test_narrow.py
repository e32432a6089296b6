"""Reductions that would keep the event loop from its work go to threads, whatever they cost for each byte."""

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap.runtime.engine import real_engine
from overlap.runtime.engine.workers import Workers

R = overlap.Rank


@pytest.mark.parametrize(
    ("dtype", "elements", "threads"),
    [
        ("float32", 1 << 18, False),  # 1 MiB takes 0.03 ms
        ("bfloat16", 1 << 18, True),  # 512 KiB take 0.9 ms
        ("bfloat16", 1 << 10, False),
        ("float8_e4m3fn", 1 << 16, True),  # 64 KiB take 0.5 ms
        ("float8_e4m3fn", 1 << 10, False),
    ],
)
def test_where_two_ranks_reduce(dtype: str, elements: int, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    class Watched(Workers):
        def submit(self, *args: object, **options: object) -> None:
            submitted.append(args)
            super().submit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(real_engine, "Workers", Watched)

    async def main(rank: R) -> bool:
        x = np.ones(elements, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        return bool(((await rank.all_reduce(x)) == 2).all())

    assert overlap.run(main, ranks=2) == [True, True]
    assert bool(submitted) is threads


def test_the_mean_of_bytes_goes_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides in 64 bits: 7.5 ms for 1 MiB, where the sum takes 0.03."""
    submitted = []
    monkeypatch.setattr(Workers, "submit", lambda self, work, done, priority: (submitted.append(work), done(None)))

    async def main(rank: R, op: str) -> None:
        await rank.all_reduce(np.ones(1 << 18, np.int8), op)

    overlap.run(main, "sum", ranks=2)
    assert submitted == []
    overlap.run(main, "mean", ranks=2)
    assert len(submitted) == 1
