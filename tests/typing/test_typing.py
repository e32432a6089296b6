"""Type checkers know the results of a user's program, and its mistakes."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import overlap
from overlap.runtime.calls.shapes import Op

PROGRAM = Path(__file__).with_name("program.py")
MISTAKES = """
import numpy as np
import overlap
F32 = np.zeros(4, np.float32)
async def main(rank: overlap.Rank, steps: int) -> int:
    await rank.all_reduce(F32, op=1)  # wrong: no name
    await rank.all_reduce(F32, urgency=1)  # wrong: no such option
    await rank.permute(F32)  # wrong: no pairs
    await rank.all_reduce({"w": F32}, shared=True)  # wrong: trees are not shared
    (await rank.reduce(F32)).sum()  # wrong: it may be None
    text: str = await rank.broadcast_object(1)  # wrong: it is an integer
    total: np.ndarray[tuple[int], np.dtype[np.int64]] = await rank.all_reduce(F32)  # wrong: it is of float32
    return steps
overlap.run(main)  # wrong: no steps
overlap.run(main, "3")  # wrong: steps is an integer
names: list[str] = overlap.run(main, 3)  # wrong: integers
"""


def test_the_program_runs():
    assert runpy.run_path(str(PROGRAM))["run"]() == [{"steps": 3}, {"steps": 3}]


def test_editors_offer_every_operator():
    assert set(get_args(get_args(Op)[0])) == set(overlap.OPS)


@pytest.mark.slow
def test_a_strict_type_checker_knows_each_result():
    assert errors_in(PROGRAM) == {}


@pytest.mark.slow
def test_a_strict_type_checker_finds_each_mistake(tmp_path):
    program = tmp_path / "mistakes.py"
    program.write_text(MISTAKES)
    wrong = {number for number, line in enumerate(MISTAKES.splitlines(), 1) if "# wrong" in line}
    assert errors_in(program).keys() == wrong


def errors_in(program: Path) -> dict[int, str]:
    """Return the errors of a program by its lines, as mypy finds them without the settings of this project."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", str(program)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode in (0, 1), said.stdout + said.stderr
    errors = [line for line in said.stdout.splitlines() if ": error: " in line]
    return {int(line.removeprefix(str(program)).split(":")[1]): line for line in errors}
