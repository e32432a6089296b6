"""Gains that `overlap why` promises, against what the changed programs of PyTorch on the CPU really gain.

Each program runs with its loss and without, in turn and unprofiled; the promise comes from one recording of the former.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import overlap
from overlap.cli.bench.sampling import Sampling, Times
from overlap.units import format_ns
from tests.benchmarks.figures import few

from .figures import Figure

WITHIN = 0.1
"""Part of the real gain by which a promise may be off."""


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Yield for each program the promised gain over the real one, and whether it is within a tenth."""
    import torch

    programs: Any = import_module("tests.explain.programs")  # whose import needs torch
    without = {
        programs.python: patch.object(programs, "LONG_S", 0.0),
        programs.data: patch.object(programs, "LONG_S", 0.0),
        programs.collector: patch.object(programs, "gc", SimpleNamespace(collect=lambda: None)),
    }
    model = torch.nn.Linear(8, 8)
    for program, changed in without.items():
        with TemporaryDirectory() as folder:
            path = Path(folder, "before.json.gz")
            programs.record(path, program)
            found = overlap.why(path)
        times = [(_timed(program, model), _changed(program, model, changed)) for _ in range(few(sampling) + 1)][1:]
        gain = Times.of_samples([before - after for before, after in times])
        item = next((item for item in found.advice if item.gain_least_ns is not None), None)
        if item is None or item.gain_least_ns is None or item.gain_most_ns is None:
            yield f"  {program.__name__}: no gain promised; really {format_ns(gain.median_ns)} a step"
            continue
        least, most = item.gain_least_ns, item.gain_most_ns
        text = f"promised gain of '{program.__name__}' over the real one"
        ratio = (least + most) / 2 / gain.median_ns
        yield Figure(name=f"gain_{program.__name__}", text=text, value=ratio, unit="ratio", aim=None, times=gain)
        holds = least * (1 - WITHIN) <= gain.median_ns <= most * (1 + WITHIN)
        yield (
            f"  promised {format_ns(least)} to {format_ns(most)}, really {format_ns(gain.median_ns)} "
            f"({format_ns(gain.p10_ns)} to {format_ns(gain.p90_ns)}): {'within' if holds else 'NOT within'} 10 %"
        )


def _timed(program: Callable[[Any], object], model: object) -> int:
    begun_ns = perf_counter_ns()
    program(model)
    return perf_counter_ns() - begun_ns


def _changed(program: Callable[[Any], object], model: object, changed: Any) -> int:
    with changed:
        return _timed(program, model)
