"""The suite keeps its own promises: few cases every day, all of them in CI, and nothing skipped in silence."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .interpreters import Python

ROOT = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize(("b", "c"), [(b, c) for b in range(4) for c in range(3)])
def test_all(a, b, c):
    pass

@pytest.mark.everyday(12)
@pytest.mark.parametrize("a", range(20))
def test_more(a):
    pass

@pytest.mark.parametrize("a", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_enough(a):
    pass

@pytest.mark.faults
@pytest.mark.parametrize("a", range(5))
def test_long(a):
    pass
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


def collected(folder: Path, *options: str) -> dict[str, set[str]]:
    """Return the cases of each test that these options collect."""
    code, output = run(folder, CASES, "--collect-only", "-q", *options)
    assert code == 0, output
    found: dict[str, set[str]] = {}
    for name, case in re.findall(r"test_it.py::(\w+)\[(.*)\]", output):
        found.setdefault(name, set()).add(case)
    return found


@pytest.mark.parametrize("profile", ["everyday", "thorough", "fresh"])
def test_no_property_fails_because_the_computer_is_busy(profile: str) -> None:
    chosen = settings.get_profile(profile)
    assert chosen.deadline is None
    assert HealthCheck.too_slow in chosen.suppress_health_check


def test_every_day_a_test_has_two_of_its_cases_or_as_many_as_it_says(tmp_path: Path) -> None:
    everyday = collected(tmp_path, "-p", "no:randomly")
    assert {name: len(cases) for name, cases in everyday.items()} == {"test_all": 2, "test_more": 12, "test_enough": 2}
    assert [len(set(values)) for values in zip(*everyday["test_all"], strict=True)] == [2, 1, 2, 1, 2]
    assert collected(tmp_path, "--randomly-seed", "7") == everyday, "whatever the order"


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("expression", "long"),
    [("not slow", False), ("slow or not slow", False), ("not slow or faults", True), ("faults", True), ("", True)],
)
def test_what_takes_minutes_runs_only_where_its_marker_is_named(tmp_path: Path, expression: str, long: bool) -> None:
    assert ("test_long" in collected(tmp_path, "-m", expression)) is long


@pytest.mark.slow
def test_the_other_cases_are_slow_and_none_is_lost(tmp_path: Path) -> None:
    everyday, slow = collected(tmp_path), collected(tmp_path, "-m", "slow")
    everything = collected(tmp_path, "-m", "not faults")
    assert {name: len(cases) for name, cases in everything.items()} == {
        "test_all": 60,
        "test_more": 20,
        "test_enough": 4,
    }
    for name, cases in everything.items():
        assert (everyday[name] | slow[name], everyday[name] & slow[name]) == (cases, set())
    assert "test_long" not in slow


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


@pytest.mark.slow
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


def test_a_process_whose_end_is_not_yet_told_may_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent has waited for it, so its pid names nothing any more."""
    with Python("-m", "this", cwd=tmp_path) as python:
        assert python.communicate(timeout=60)[0].startswith("The Zen of Python")
        monkeypatch.setattr(python, "poll", lambda: None)
        python.kill()
