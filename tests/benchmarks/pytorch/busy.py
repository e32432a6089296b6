"""All-reduces of PyTorch beside busy processes, in turn with gloo's."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median

from overlap.cli.bench.sampling import Sampling
from overlap.units import format_bytes
from transports.patience import usable_cores

from . import run_ranks

BUSY_PER_CORE = 15
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
_ROW = 10
"""Operations of one backend that follow each other; each is a sample."""
_BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def lines(how: Sampling) -> Iterator[str]:
    """Measure on 2 and 4 processes: medians and means of both backends, and the processor time of an operation.

    Args:
        how: How many rows of 10 operations.
    """
    with _busy_processes():
        for processes in (2, 4):
            yield f"{processes} processes beside {BUSY_PER_CORE} busy ones on each core, {_ROW * how.iters} operations"
            yield f"  {'all_reduce, us':12}{'median of gloo, ours':>24}{'mean':>20}{'processor time':>20}"
            told = run_ranks(processes, how, {"names": ["all_reduce"], "sizes": SIZES, "buckets": [], "row": _ROW})
            for size, both in zip(SIZES, told["operations"]["all_reduce"], strict=True):
                columns = [(median(both[name]), fmean(both[name]), both[f"{name}, busy"][0]) for name in _NAMES]
                texts = [f"{gloo / 1e3:.0f}, {ours / 1e3:.0f}" for gloo, ours in zip(*columns, strict=True)]
                worse = "" if columns[1][0] <= columns[0][0] else "  slower"
                yield f"  {format_bytes(size):12}{texts[0]:>26}{texts[1]:>20}{texts[2]:>20}{worse}"


_NAMES = ("gloo", "overlap")


@contextmanager
def _busy_processes() -> Iterator[None]:
    """Keep processes busy in sessions of their own, which the scheduler treats as equals of the whole measurement."""
    started = [
        subprocess.Popen([sys.executable, "-c", _BUSY, str(core)], start_new_session=True)
        for core in sorted(usable_cores())
        for _ in range(BUSY_PER_CORE)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
