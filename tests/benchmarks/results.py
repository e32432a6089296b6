"""What it costs that a collective makes its result: all-reduces without `out=` against those that are given an array.

A loop that drops each result before the next one needs one array, one that keeps two needs three. Mapping and touching
fresh pages for each result would cost more than the operation.
"""

from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter_ns
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from overlap import Rank, run
from overlap.cli.bench.sampling import BATCH, Sampling, slowest_times
from overlap.config import RunConfig, setting_environment
from overlap.units import format_bytes, format_ns

from .figures import Figure, as_fast_as, time_of

RANKS = 2
SIZES_BYTES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
AIM = 1 / 1.3  # at most 1.3 times as long

_MANY_BYTES = 64 << 10  # up to here a sample is many operations; above, a few: two results are kept of at least three
_FEW = 4
TOTAL = RANKS * (RANKS + 1) / 2  # of 1, 2, ...

Array: TypeAlias = NDArray[np.float32]
Loop: TypeAlias = "Callable[[Rank, Array, Array, int], Awaitable[None]]"
"""So many all-reduces of the first array, one after the other; the second one is there for results."""


async def given(rank: Rank, x: Array, out: Array, batch: int) -> None:
    """Put every result into the same array."""
    for _ in range(batch):
        await rank.all_reduce(x, out=out)


async def dropped(rank: Rank, x: Array, out: Array, batch: int) -> None:
    """Drop each result before the next operation, as a loop does that updates weights with it."""
    for _ in range(batch):
        await rank.all_reduce(x)


async def kept(rank: Rank, x: Array, out: Array, batch: int) -> None:
    """Keep the latest two results."""
    latest = previous = None
    for _ in range(batch):
        latest, previous = await rank.all_reduce(x), latest
    del latest, previous


KINDS: dict[str, Loop] = {loop.__name__: loop for loop in (given, dropped, kept)}
_TEXTS = {"dropped": "without out=, dropped", "kept": "without out=, two kept"}


def figures(sampling: Sampling) -> Iterator[Figure]:
    """Measure one size after the other, its three loops in turn."""
    for size_bytes in SIZES_BYTES:
        yield from _compared(size_bytes, sampling)


def _compared(size_bytes: int, sampling: Sampling) -> Iterator[Figure]:
    batch = BATCH if size_bytes <= _MANY_BYTES else _FEW
    with setting_environment(RunConfig()):
        told = run(_on_rank, size_bytes, sampling, batch, ranks=RANKS)
    times = {kind: slowest_times([samples[kind] for samples, _ in told], batch=batch) for kind in KINDS}
    wrong = sum(wrong for _, wrong in told)
    name, size = f"results/{size_bytes}", format_bytes(size_bytes)
    yield time_of(name, f"all_reduce, {size}, {RANKS} ranks, out=", times["given"], wrong=wrong)
    for kind, text in _TEXTS.items():
        shown = f"  {text}: as fast ({format_ns(times[kind].median_ns)})"
        yield as_fast_as(f"{name}/{kind}", shown, times["given"], times[kind], AIM)


async def _on_rank(rank: Rank, size_bytes: int, sampling: Sampling, batch: int) -> tuple[dict[str, list[int]], int]:
    """Take the loops in turn, so that whatever else the machine does meets all alike; return samples and wrong sums."""
    x = np.full(size_bytes // 4, rank.rank + 1, np.float32)
    out = np.zeros_like(x)
    samples: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for _ in range(sampling.warmup + sampling.iters):
        for kind, loop in KINDS.items():
            await rank.barrier()
            begun_ns = perf_counter_ns()
            await loop(rank, x, out, batch)
            samples[kind].append(perf_counter_ns() - begun_ns)
    made = await rank.all_reduce(x)
    wrong = int(np.count_nonzero(out != TOTAL)) + int(np.count_nonzero(made != TOTAL))
    return {kind: taken[sampling.warmup :] for kind, taken in samples.items()}, wrong
