"""Training loops over wires that nobody paces: each in real time, and simulated with its computes as they were.

A simulation is told what each compute took, and when it began after the one before it; everything else it has to know
itself: which computes wait for which communication, what that takes, and what of it is hidden. `python -m
tests.benchmarks.unpaced NAME` is the real run, in a process of its own or in several.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np

import topology
from overlap import OverlapError, Rank, Virtual, parallel, run
from overlap.config import overriding
from overlap.simulation import Profile
from overlap.timeline.files.tracefile import read_trace
from overlap.timeline.spans import Timeline

__all__ = ["PLACES", "PROGRAMS", "pair"]

RANKS, STEPS, WARMUP = 2, 30, 3
_EXAMPLES = Path(__file__).parents[2] / "examples"
_LIMIT_S = 100.0

_Program: TypeAlias = "tuple[Callable[..., Awaitable[object]], tuple[object, ...]]"
_Weights: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

PLACES = {
    "one process": ("--ranks", str(RANKS)),
    "two processes, shared memory": ("--processes", str(RANKS), "--ranks-per-process", "1"),
    "two processes, sockets": ("--processes", str(RANKS), "--ranks-per-process", "1", "--transport", "efa"),
}
"""Where ranks are, and the options of `overlap run` for that."""


def pair(name: str, place: str, trace: Path) -> tuple[float, float]:
    """Return the seconds of a step, measured and simulated.

    Args:
        name: Of the program.
        place: Where its ranks are.
        trace: A file to write to.

    Raises:
        OverlapError: If the real run fails.
    """
    options = [*PLACES[place], "--trace", os.fspath(trace)]
    command = [sys.executable, "-m", "overlap", "run", *options, "-m", __name__, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if ended.returncode:
        raise OverlapError(f"{name}, {place}: {ended.stderr}")
    measured = read_trace(trace)
    profile = Profile.of(measured, source=os.fspath(trace), each_call=True)
    return _step_s(measured), _step_s(_simulated(name, place, profile))


def _simulated(name: str, place: str, profile: Profile) -> Timeline:
    nodes = 1 if place == "one process" else RANKS
    cluster = topology.Cluster.of(topology.cluster("local").machine, nodes=nodes, ranks=RANKS)
    timelines: list[Timeline] = []
    with overriding(watcher=timelines.append), redirect_stdout(io.StringIO()), PROGRAMS[name]() as (program, args):
        run(program, *args, ranks=RANKS, cluster=cluster, clock=Virtual(profile=profile))
    return timelines[0]


def _step_s(timeline: Timeline) -> float:
    """Return the median from the end of a step's last compute to that of the next one's, on rank 0."""
    ends: dict[int, int] = {}
    for span in timeline.for_rank(0):
        if span.kind == "compute" and span.step is not None:
            ends[span.step] = max(span.end_ns, ends.get(span.step, 0))
    in_order = [ends[step] for step in sorted(ends)][WARMUP:]
    return median(after - before for before, after in pairwise(in_order)) / 1e9


# -- the programs ------------------------------------------------------------------------------------------------


def _forward(w: _Weights, x: _Weights) -> _Weights:
    out: _Weights = np.maximum(x @ w, 0)
    return out


def _difference(out: _Weights, target: _Weights) -> _Weights:
    return (out - target) / np.float32(out.size)


def _backward(w: _Weights, x: _Weights, out: _Weights, grad: _Weights) -> tuple[_Weights, _Weights]:
    grad = grad * (out > 0)
    return grad @ w.T, x.T @ grad


async def _front_page(rank: Rank) -> None:
    """Train as the README does."""
    params = {f"layer {i}": 0.06 * rank.rng.standard_normal((512, 512), np.float32) for i in range(8)}
    model = parallel.DataParallel(rank, params, optimizer=parallel.Adam(1e-3))
    data, target = rank.rng.standard_normal((2, 512, 512), np.float32)
    for step in range(STEPS):
        with rank.step(step):
            x: Any = data
            seen = {}
            for name in params:
                out = rank.compute(_forward, model[name], x)
                seen[name], x = (x, out), out
            grad: Any = rank.compute(_difference, x, target)
            for name in reversed(params):
                back = rank.compute(_backward, model[name], *seen[name], grad)
                grad = back[0]
                model.reduce(name, back[1])
            model.step()
    await model.finish()


@contextmanager
def _readme() -> Iterator[_Program]:
    yield _front_page, ()


@contextmanager
def _digits() -> Iterator[_Program]:
    from overlap.data import digits

    with _examples():
        yield import_module("04_digits").train, (digits().split()[0],)


@contextmanager
def _gpt() -> Iterator[_Program]:
    with _examples():
        example = import_module("11_data_parallel")
        yield example.train, (example.standard_library(), STEPS)


@contextmanager
def _examples() -> Iterator[None]:
    sys.path.insert(0, os.fspath(_EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(os.fspath(_EXAMPLES))


PROGRAMS: dict[str, Callable[[], Any]] = {"README": _readme, "04_digits": _digits, "11_data_parallel": _gpt}
"""What is compared."""


if __name__ == "__main__":
    with PROGRAMS[sys.argv[1]]() as (program, args):
        run(program, *args)
