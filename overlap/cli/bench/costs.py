"""What the library itself costs: issuing, recording a span, importing, starting and ending, and its schedules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns

import numpy as np

from ... import OverlapError, Rank, run
from ...settings import Settings, imposed
from ...timeline.spans import RawCollective, Recorder
from . import schedules
from .process import environment
from .sampling import Sampling, Times

__all__ = ["COSTS", "Cost"]

RANKS_UP = 32
RANKS_RUN = 4

_IN_FLIGHT = 8  # issued before the first is awaited: fits in a stream's window
_SPANS = 1000  # in a sample: one span is shorter than two looks at the clock

_IMPORT = (
    "from time import perf_counter_ns as now; import trio, numpy; begun = now(); import overlap; print(now() - begun)"
)
_TRIVIAL = """\
import overlap


async def main(rank):
    return rank.rank


overlap.run(main)
"""


def measure_issue(sampling: Sampling) -> Times:
    """Time until `all_reduce()` of 8 bytes returns, on rank 0 of 2."""
    with imposed(Settings()):
        return Times.of(run(_issue, sampling, ranks=2)[0])


async def _issue(rank: Rank, sampling: Sampling) -> list[int]:
    arrays = [np.ones(2, np.float32) for _ in range(_IN_FLIGHT)]
    samples = []
    for _ in range((sampling.warmup + sampling.iters) * 10):
        futures = []
        for x in arrays:
            begun_ns = perf_counter_ns()
            future = rank.all_reduce(x)
            samples.append(perf_counter_ns() - begun_ns)
            futures.append(future)
        for future in futures:
            await future
    return samples[sampling.warmup * 10 * _IN_FLIGHT :]


def measure_span(sampling: Sampling) -> Times:
    """Time to take two instants and record a collective's span between them, with everything a timeline tells of it."""
    recorder = Recorder(0)
    code = measure_span.__code__
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        begun_ns = perf_counter_ns()
        for seq in range(_SPANS):
            start_ns = perf_counter_ns()
            end_ns = perf_counter_ns()
            meeting = ("all_reduce", "ring", "world", seq, 8, "float32", start_ns)
            info: RawCollective = (meeting, start_ns, 0, code, 1)
            recorder.append(("comm", "comm", "all_reduce", start_ns, end_ns, info))
        samples.append((perf_counter_ns() - begun_ns) / _SPANS)
    return Times.of(samples[sampling.warmup :])


def measure_import(sampling: Sampling) -> Times:
    """Time that `import overlap` takes in a fresh interpreter after `import trio, numpy`."""
    with _python() as python:
        return Times.of([int(python("-c", _IMPORT)) for _ in range(sampling.few)])


def measure_startup(sampling: Sampling) -> Times:
    """Time of a world of 32 ranks from start to end, each with a compute thread and one collective."""
    samples = []
    with imposed(Settings()):
        for _ in range(sampling.few):
            begun_ns = perf_counter_ns()
            run(_up_and_down, ranks=RANKS_UP)
            samples.append(perf_counter_ns() - begun_ns)
    return Times.of(samples)


async def _up_and_down(rank: Rank) -> None:
    await rank.all_reduce(rank.compute(np.ones, 2))


def measure_run(sampling: Sampling) -> Times:
    """Time of `overlap run --ranks 4` on a script whose ranks do nothing, from the new process to its end."""
    samples = []
    with _python() as python, TemporaryDirectory() as folder:
        script = Path(folder, "trivial.py")
        script.write_text(_TRIVIAL, encoding="utf-8")
        for _ in range(sampling.few):
            begun_ns = perf_counter_ns()
            python("-m", "overlap", "run", "--ranks", str(RANKS_RUN), str(script))
            samples.append(perf_counter_ns() - begun_ns)
    return Times.of(samples)


@contextmanager
def _python() -> Iterator[Callable[..., str]]:
    """Give a function that runs the interpreter and returns what it prints, with everything compiled beforehand."""
    with TemporaryDirectory() as bytecode, imposed(Settings()):
        environ = environment(bytecode=bytecode)

        def python(*args: str) -> str:
            ended = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environ, check=False)
            if ended.returncode:
                last = ended.stderr.strip().splitlines()[-1:]
                raise OverlapError(f"{sys.executable} {' '.join(args[:3])} failed: {''.join(last)}")
            return ended.stdout

        python("-m", "overlap", "run", "--help")
        yield python


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Something of ours that has a cost.

    Attributes:
        name: A stable name.
        word: What the command line calls it; two costs may share a word.
        text: What it is.
        measure: Measures doing it once.
        in_all: Whether it is measured along with everything else, or only by its word.
    """

    name: str
    word: str
    text: str
    measure: Callable[[Sampling], Times]
    in_all: bool = True


_PROVE = "prove a ring all-reduce, {} ranks"
_COST = f"cost a ring, {schedules.RANKS} ranks"
_COMPILE = f"generate, prove, project, {schedules.RANKS_COMPILED} ranks"


COSTS = (
    Cost(name="issue", word="issue", text="issue an all_reduce", measure=measure_issue),
    Cost(name="span", word="span", text="record a span", measure=measure_span),
    Cost(name="import", word="import", text="import overlap, beyond trio and numpy", measure=measure_import),
    Cost(name="startup", word="startup", text=f"{RANKS_UP} ranks up and down", measure=measure_startup),
    Cost(name="run", word="startup", text=f"overlap run, {RANKS_RUN} ranks that do nothing", measure=measure_run),
    Cost(name="prove", word="schedule", text=_PROVE.format(schedules.RANKS), measure=schedules.measure_proof),
    Cost(name="compile", word="schedule", text=_COMPILE, measure=schedules.measure_compiling),
    Cost(name="cost", word="schedule", text=f"{_COST}, no contention", measure=schedules.measure_costing),
    Cost(name="cost/loads", word="schedule", text=f"{_COST}, link loads", measure=schedules.measure_costing_loads),
    Cost(name="look_up", word="schedule", text="look up a cached plan", measure=schedules.measure_look_up),
    # Last: what so much memory leaves behind in the allocator would be in the times of the others.
    Cost(
        name="prove/4096",
        word="schedule",
        text=_PROVE.format(schedules.RANKS_ONCE),
        measure=schedules.measure_proof_once,
        in_all=False,
    ),
)
