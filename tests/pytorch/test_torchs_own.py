"""torch's own tests of backends pass on ours, wherever gloo passes them; its programs give gloo's results."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("expecttest", reason="not installed: expecttest, which torch's own tests need")

from .suite import listed

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.torch


def ran(*args: object) -> str:
    """Run a module in a fresh interpreter, as forks must not have threads of torch; returns what it prints."""
    command = [sys.executable, "-m", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_gloo_passes(size: int) -> None:
    tests = [name for name, where in listed("gloo_passes.txt").items() if where in ("", f"on {size} ranks")]
    told = ran("tests.pytorch.suite", "overlap", size)
    assert f"overlap, {size} ranks: {len(tests)} of {len(tests)} passed" in told


def test_no_test_is_left_out() -> None:
    """What `told_gloo.txt` says how to run is run."""
    assert set(listed("told_gloo.txt")) <= set(listed("gloo_passes.txt"))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_programs_give_the_results_of_gloo(size: int) -> None:
    told = ran("tests.pytorch.compare", size).splitlines()
    assert told
    assert [line for line in told if not line.endswith(": equal")] == []
