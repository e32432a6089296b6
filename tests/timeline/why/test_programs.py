"""Programs on the CPU with a planted loss: it is the largest, at its line."""

import subprocess
import sys
from pathlib import Path

import pytest

import overlap

PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    pytest.importorskip("torch", reason="torch is not installed")
    folder = tmp_path_factory.mktemp("recordings")
    subprocess.run([sys.executable, str(PROGRAMS), str(folder)], check=True, timeout=120, capture_output=True)
    return folder


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    ("name", "cause", "place"),
    [("data", "data", "__getitem__"), ("python", "python", "slow_line"), ("collector", "gc", "collector")],
)
def test_a_planted_loss_is_the_largest_and_has_its_line(recordings, name, cause, place):
    found = overlap.why(recordings / f"{name}.json.gz")
    loss = next(each for each in found.causes if each.cause != "compute")
    assert loss.cause == cause
    assert f"({place})" in loss.places[0]
    assert "programs.py" in loss.places[0]
    assert found.advice[0].cause == cause


def test_a_loop_over_rows_is_named_first(recordings):
    found = overlap.why(recordings / "rows.json.gz")
    assert "for many small operators" in found.verdict
    assert "(rows)" in found.advice[0].place
    assert "aten::linear" in found.advice[0].evidence


def test_a_program_that_computes_gets_no_advice(recordings):
    found = overlap.why(recordings / "nothing.json.gz")
    assert found.causes[0].cause == "compute"
    assert not found.advice
