"""Programs on the CPU with a planted loss: it is the largest, at its line."""

import subprocess
import sys
from pathlib import Path

import pytest

import overlap

PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture
def recording(tmp_path):
    """Return a function that records a program in a process of its own, and asks why it is slow."""
    pytest.importorskip("torch", reason="torch is not installed")

    def why(program):
        command = [sys.executable, str(PROGRAMS), str(tmp_path), program]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        return overlap.why(tmp_path / f"{program}.json.gz")

    return why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause", "place"),
    [
        ("data", "data", "__getitem__"),
        pytest.param("python", "python", "slow_line", marks=pytest.mark.slow),
        pytest.param("collector", "gc", "collector", marks=pytest.mark.slow),
    ],
)
def test_a_planted_loss_is_the_largest_and_has_its_line(recording, name, cause, place):
    found = recording(name)
    loss = next(each for each in found.causes if each.cause != "compute")
    assert loss.cause == cause
    assert f"({place})" in loss.places[0]
    assert "programs.py" in loss.places[0]
    assert found.advice[0].cause == cause


@pytest.mark.slow
def test_a_loop_over_rows_is_named_first(recording):
    found = recording("rows")
    assert "for many small operators" in found.verdict
    assert "(rows)" in found.advice[0].place
    assert "aten::linear" in found.advice[0].evidence


@pytest.mark.slow
def test_a_program_that_computes_gets_no_advice(recording):
    found = recording("nothing")
    assert found.causes[0].cause == "compute"
    assert not found.advice
