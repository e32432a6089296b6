"""What it costs to start: importing, ranks up and down, and `overlap run` from the new process to its end."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns

import numpy as np

from overlap import OverlapError, Rank, run
from overlap.cli.bench.sampling import Sampling, Times
from overlap.config import RunConfig, setting_environment
from tests.benchmarks.children import environment
from tests.benchmarks.figures import few

RANKS_UP = 32
RANKS_RUN = 4
CROWD = 20

_IMPORT = (
    "from time import perf_counter_ns as now; import trio, numpy; begun = now(); import overlap; print(now() - begun)"
)
_TRIVIAL = """\
import overlap


async def main(rank):
    return rank.rank


overlap.run(main)
"""


def measure_import(sampling: Sampling) -> Times:
    """Time that `import overlap` takes in a fresh interpreter after `import trio, numpy`."""
    with fresh_python() as python:
        return Times.of_samples([int(python("-c", _IMPORT)) for _ in range(few(sampling))])


def measure_startup(sampling: Sampling) -> Times:
    """Time of a world of 32 ranks from start to end, each with a compute thread and one collective."""
    samples = []
    with setting_environment(RunConfig()):
        for _ in range(few(sampling)):
            begun_ns = perf_counter_ns()
            run(_up_and_down, ranks=RANKS_UP)
            samples.append(perf_counter_ns() - begun_ns)
    return Times.of_samples(samples)


async def _up_and_down(rank: Rank) -> None:
    await rank.all_reduce(rank.compute(np.ones, 2))


def measure_run(sampling: Sampling) -> Times:
    """Time of `overlap run --ranks 4` on a script whose ranks do nothing, from the new process to its end."""
    return _runs(few(sampling), "--ranks", str(RANKS_RUN))


def measure_crowded_run(sampling: Sampling) -> Times:
    """Time of `overlap run --processes 2` on the script, on a host that 20 other processes keep busy; 3 samples."""
    return _runs(min(3, few(sampling)), "--ranks", str(RANKS_RUN), "--processes", "2", crowd=CROWD)


def _runs(count: int, *options: str, crowd: int = 0) -> Times:
    samples = []
    with fresh_python() as python, TemporaryDirectory() as folder, _busy(crowd):
        script = Path(folder, "trivial.py")
        script.write_text(_TRIVIAL, encoding="utf-8")
        for _ in range(count):
            begun_ns = perf_counter_ns()
            python("-m", "overlap", "run", *options, str(script))
            samples.append(perf_counter_ns() - begun_ns)
    return Times.of_samples(samples)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep processors busy with so many processes."""
    crowd = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in crowd:
            each.kill()
            each.wait()


@contextmanager
def fresh_python() -> Iterator[Callable[..., str]]:
    """Give a function that runs the interpreter and returns what it prints, with everything compiled beforehand."""
    with TemporaryDirectory() as bytecode, setting_environment(RunConfig()):
        environ = environment(bytecode=bytecode)

        def python(*args: str) -> str:
            ended = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environ, check=False)
            if ended.returncode:
                last = ended.stderr.strip().splitlines()[-1:]
                raise OverlapError(f"{sys.executable} {' '.join(args[:3])} failed: {''.join(last)}")
            return ended.stdout

        python("-m", "overlap", "run", "--help")
        yield python
