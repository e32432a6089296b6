"""From the death of a process to the end of the next step of the others: random kills of real processes.

Each job trains a small model with `--survive`, loses one process after the other, and its weights are compared with
those of a run in one process that was given the same history of members.
"""

import os
import random
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns

from overlap.cli.bench.sampling import Sampling, Times
from overlap.units import format_ns
from tests.benchmarks.figures import over
from tests.faults.job import Job
from tests.survival import training
from tests.survival.test_training import history_of

from .figures import Figure, time_of

KILLS = 200
_AIM_NS, _WORST_AIM_NS = 500_000_000, 2_000_000_000
_UNUSED_RUNS, _UNUSED_STEPS = 10, 100
_LONGEST_S = 0.1  # between a first step and the next kill
_SETS = {
    "4 x 1, shared memory": (4, 1, []),
    "2 x 2, shared memory": (2, 2, []),
    "4 x 1, sockets": (4, 1, ["--shared-memory", "0"]),
    "2 x 2, sockets": (2, 2, ["--shared-memory", "0"]),
}


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Kill as many processes as there are to be samples."""
    draw = random.Random(0)
    pauses: dict[str, list[int]] = {name: [] for name in _SETS}
    wrong = dict.fromkeys(_SETS, 0)
    names = list(_SETS)
    while (done := sum(map(len, pauses.values()))) < sampling.iters:
        name = min(names, key=lambda each: len(pauses[each]))
        found, differs = _job(draw, *_SETS[name], most=sampling.iters - done)
        pauses[name] += found
        wrong[name] += differs
    for name, found in pauses.items():
        if found:
            yield time_of(f"survive/{name}", f"{name}: death to next step, {len(found)} kills", Times.of_samples(found),
                          _AIM_NS, wrong=wrong[name])  # fmt: skip
    yield from _unused()
    every = [each for found in pauses.values() for each in found]
    yield time_of("survive/worst", f"the slowest of {len(every)}", Times.of_samples([max(every)]), _WORST_AIM_NS)
    yield f"sorted, the last ten: {', '.join(format_ns(each) for each in sorted(every)[-10:])}"


def _unused() -> Iterator[Figure | str]:
    """Train without losses, with `--survive` and without, in turns: no gradient travels under the next forward then."""
    found: dict[str, list[int]] = {"--no-survive": [], "--survive": []}
    for turn in range(_UNUSED_RUNS):
        for option in sorted(found, reverse=turn % 2 == 1):
            found[option].append(_step_ns(option))
    times = {option: Times.of_samples(samples) for option, samples in found.items()}
    for option, each in times.items():
        yield time_of(f"survive/unused {option}", f"2 x 1, no loss, {option}: a step", each)
    yield f"a step with --survive takes {over(times['--survive'], times['--no-survive']):.2f} times as long as without"


def _step_ns(option: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        with Job(
            Path(folder), option, "--processes", "2", program=training.__file__, arguments=[str(_UNUSED_STEPS)]
        ) as job:
            if job.end() != 0:
                raise AssertionError(f"{option}: {job.err[-2000:]}")
    first, last = (
        max(map(int, re.findall(rf"{at} at (\d+)", job.out))) for at in ("first step of epoch 0", "last step")
    )
    return (last - first) // (_UNUSED_STEPS - 1)


def _job(draw: random.Random, processes: int, each: int, options: list[str], *, most: int) -> tuple[list[int], int]:
    """Return the nanoseconds of each pause of one job, and how many weights were wrong."""
    victims = draw.sample(range(processes), min(most, draw.randint(1, processes - 1)))
    arguments = ["--processes", str(processes), "--ranks", str(processes * each), *options]
    with tempfile.TemporaryDirectory() as folder:
        with Job(
            Path(folder), "--survive", *arguments, program=training.__file__, arguments=[f"-{len(victims)}"]
        ) as job:
            deaths = [_kill(job, draw, epoch, victim) for epoch, victim in enumerate(victims)]
            if job.end() != 0:
                raise AssertionError(f"{arguments}, victims {victims}: {job.out[-2000:]} {job.err[-2000:]}")
    pauses = [_end_of_first_step(job, epoch + 1) - death for epoch, death in enumerate(deaths)]
    history = history_of(job.out, each)
    expected = training.reference(history, history[-1][1] + training.FURTHER)
    right = len(set(expected)) == 1 and job.out.count(f"results {expected[:each]}") == processes - len(victims)
    return pauses, int(not right)


def _kill(job: Job, draw: random.Random, epoch: int, victim: int) -> int:
    job.until(f"first step of epoch {epoch} at")
    until_ns = perf_counter_ns() + int(draw.uniform(0, _LONGEST_S) * 1e9)
    while perf_counter_ns() < until_ns:
        job.pump(job.began_s)  # returns at once
    found = re.search(rf"\[process {victim}\] epoch 0 .* pid (\d+)", job.out)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    return perf_counter_ns()


def _end_of_first_step(job: Job, epoch: int) -> int:
    """Return when the last survivor had made its first step of an epoch."""
    return max(map(int, re.findall(rf"first step of epoch {epoch} at (\d+)", job.out)))
