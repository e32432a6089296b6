"""The sweep over sockets: what is made of its rows, and that processes take turns with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import numpy as np
import pytest

from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times
from tests.benchmarks.children import Child, environment
from tests.benchmarks.versus import turns
from tests.benchmarks.versus.contenders import Contender
from tests.benchmarks.versus.layout import ProcessLayout
from tests.benchmarks.versus.turns import measure_in_turn

from .figures import line
from .sockets import Row, summary

CASES = [
    Case(operation=NAMES["all_reduce"], ranks=2, count=count, dtype=np.dtype(np.float32), in_place=True)
    for count in (4096, 16384)
]

# A rank of a library that measures nothing, and fails if it has no turn.
PROGRAM = """
import json, sys
from tests.benchmarks.versus.assignment import AssignmentInTurn
asked = AssignmentInTurn.from_json(sys.argv[1])
rows = [{"wrong": 0, "samples_ns": [[1000 * case.count] * 2] * 2} for case in asked.in_turn()]
assert len(rows) == len(asked.cases)
print(json.dumps({"version": "1", "rows": rows}))
"""


def times(median_ns: float) -> Times:
    return Times(median_ns=median_ns, p10_ns=median_ns, p90_ns=median_ns)


def contender(program: str) -> Contender:
    def start(ranks: int, command: Sequence[str], errors: IO[bytes]) -> list[Child]:
        heard = [errors, *[subprocess.DEVNULL] * (ranks - 1)]  # what two say at the same instant may be mixed
        return [Child([sys.executable, "-c", program, command[-1]], environment(), errors=each) for each in heard]

    return Contender(name="fake", module="json", packages="fake", program="x", start=start)


def test_of_a_sweep_the_worst_row_is_told_and_the_mean() -> None:
    ratios = (4.0, 0.5)
    rows = [Row(case=c, ours=times(100.0), theirs=times(100 * r), wrong=0) for c, r in zip(CASES, ratios, strict=True)]
    assert [line(figure) for figure in summary("sockets/2_unix", "2 processes, Unix", rows)] == [
        "2 processes, Unix: worst, all_reduce 64 KiB                 0.50x                     >= 1.3x    missed",
        "2 processes, Unix: best, all_reduce 16 KiB                  4.00x",
        "2 processes, Unix: geometric mean of 2                      1.41x                     >= 1.6x    missed",
    ]


def measured(program: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[object], list[str]]:
    """Return who had turns, what was yielded, and what was remarked."""
    had: list[str] = []
    remarks: list[str] = []

    class Watched(turns.Turns):
        def let(self, name: str) -> None:
            had.append(name)
            super().let(name)

    monkeypatch.setattr(turns, "Turns", Watched)
    how = Sampling(iters=2, warmup=0)
    told = list(measure_in_turn(CASES, how, ProcessLayout(processes=2), [contender(program)], say=remarks.append))
    return had, told, remarks


@pytest.mark.slow
def test_processes_take_turns_with_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    had, (*ours, theirs), remarks = measured(PROGRAM, monkeypatch)
    assert had == ["overlap", "fake"] * 2
    assert [row.wrong for row in ours if isinstance(row, Result)] == [0, 0]
    assert isinstance(theirs, list)
    [result] = theirs
    assert [each.median_ns for each in result.times] == [1000 * 4096 / 50, 1000 * 16384]
    assert remarks == []


@pytest.mark.slow
@pytest.mark.parametrize("before", [("1000 * case.count", "1 / 0"), ("import json", "1 / 0")], ids=["in", "before"])
def test_a_library_that_fails_at_its_turn_or_before_holds_up_nobody(
    before: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    had, (*ours, theirs), remarks = measured(PROGRAM.replace(*before), monkeypatch)
    assert had == ["overlap", "fake"] * 2
    assert len(ours) == 2
    assert theirs == []
    assert remarks == ["fake: failed: ZeroDivisionError: division by zero"]
