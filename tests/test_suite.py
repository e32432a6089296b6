"""The suite keeps its own promises: few cases in which each pair of values meets, and nothing skipped in silence."""

import re
import shutil
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]
VALUES = (range(5), range(4), range(3))
CROSSED = f"""
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", {list(VALUES[0])})
@pytest.mark.parametrize(("b", "c"), {list(product(*VALUES[1:]))})
def test_all(a, b, c):
    assert a < 9
"""
SKIPPED = """
import pytest

def test_one():
    pytest.skip({reason!r})
"""

SKIPPED_WHOLLY = """
import pytest
pytest.skip("nobody said so", allow_module_level=True)
"""


def run(folder: Path, program: str, *options: str) -> tuple[int, str]:
    """Run tests as these here are run, but in one process; return exit code and output."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(program)
    places = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider", "-n", "0")
    command = [sys.executable, "-m", "pytest", *places, *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def cases(output: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, found)) for found in re.findall(r"test_all\[(\d)-(\d)-(\d)\]", output)}


def pairs(found: set[tuple[int, ...]]) -> set[object]:
    return {pair for case in found for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("profile", ["everyday", "thorough", "fresh"])
def test_no_property_fails_because_the_computer_is_busy(profile: str) -> None:
    chosen = settings.get_profile(profile)
    assert chosen.deadline is None
    assert HealthCheck.too_slow in chosen.suppress_health_check


@pytest.mark.slow
def test_few_cases_let_each_pair_of_values_meet(tmp_path: Path) -> None:
    code, output = run(tmp_path, CROSSED, "--collect-only", "-q", "-p", "no:randomly")
    kept = cases(output)
    _, output = run(tmp_path, CROSSED, "--collect-only", "-q", "-m", "")
    everything = cases(output)
    assert (code, len(everything)) == (0, 60)
    assert pairs(kept) == pairs(everything)
    assert 20 <= len(kept) <= 25, "5 x 4 pairs need as many cases"
    _, output = run(tmp_path, CROSSED, "--collect-only", "-q", "--randomly-seed", "7")
    assert cases(output) == kept, "whatever the order"


@pytest.mark.parametrize(
    ("reason", "option", "code"),
    [
        ("mpi4py is not installed: pip install mpi4py", "--no-unexpected-skips", 1),
        pytest.param("mpi4py is not installed: pip install mpi4py", "-q", 0, marks=pytest.mark.slow),
        pytest.param("torch is not installed: pip install torch", "--no-unexpected-skips", 0, marks=pytest.mark.slow),
    ],
)
def test_ci_fails_where_something_is_skipped_that_should_not_be(
    tmp_path: Path, reason: str, option: str, code: int
) -> None:
    found, output = run(tmp_path, SKIPPED.format(reason=reason), option)
    assert found == code, output
    assert ("should not be skipped: " in output) is (code == 1)


@pytest.mark.slow
def test_nor_does_a_file_that_skips_itself_pass_in_silence(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_it():\n    assert {0}\n")
    code, output = run(tmp_path, SKIPPED_WHOLLY, "--no-unexpected-skips", "-n", "1")
    assert (code, "should not be skipped: test_it.py: nobody said so" in output) == (1, True), output


def test_a_test_that_hangs_is_ended_with_the_place_where_it_does(tmp_path: Path) -> None:
    program = "import threading\n\ndef test_it():\n    threading.Event().wait()\n"
    code, output = run(tmp_path, program, "-o", "faulthandler_timeout=0.5")
    assert code != 0
    assert re.search(r'test_it.py", line 4 in test_it', output), output


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["kills", "soak"])
def test_what_takes_minutes_by_nature_is_not_ended(tmp_path: Path, mark: str) -> None:
    program = f"import time, pytest\n\n@pytest.mark.{mark}\ndef test_it():\n    time.sleep(1)\n"
    code, output = run(tmp_path, program, "-m", mark, "-o", "faulthandler_timeout=0.5")
    assert code == 0, output
