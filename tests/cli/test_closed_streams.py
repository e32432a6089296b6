"""What the shell has closed, or what is full, never crashes a command and never hides its exit code."""

import os
import subprocess
import sys
from itertools import product

import pytest

from overlap.cli import main

from .conftest import ROOT

GOOD = """
import overlap

async def main(rank):
    await rank.barrier()
    return rank.rank

print(overlap.run(main, ranks=2))
"""
BAD = GOOD.replace("return rank.rank", "raise ValueError('no')")

COMMANDS = {
    "run good.py": 0,
    "run bad.py": 1,
    "run --trace t.json good.py": 0,
    "run --processes 2 good.py": 0,
    "run --processes 2 bad.py": 1,
    "run --processes 2 --trace t.json good.py": 0,
    "timeline none.json": 2,
    "--help": 0,
    "topology --help": 0,
}
STREAMS = (">&-", "2>&-", "<&- >&- 2>&-")
EVERYDAY = (
    ("run --trace t.json good.py", "2>&-"),
    ("run --processes 2 bad.py", ">&-"),
    ("--help", ">&-"),
    ("run bad.py", STREAMS[-1]),
    ("run --processes 2 --trace t.json good.py", STREAMS[-1]),
)
"""What shows the rest: all closed in one process and in several, and each stream by itself for what prints to it."""
FULL = ("run --processes 2 bad.py",)


def often(values, everyday):
    """Return parameters, of which the rest is slow."""
    return [value if value in everyday else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs a command line as the shell would: (exit code, stdout, stderr)."""
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OVERLAP_", "PYTHONUNBUF"))}

    def run(line):
        command = f"exec {sys.executable} -m overlap {line}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=plain | {"PYTHONPATH": ROOT}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize("case", often(product(COMMANDS, STREAMS), EVERYDAY), ids=" ".join)
def test_closed_streams_change_nothing_but_what_is_seen(shell, tmp_path, case):
    command, streams = case
    code, out, err = shell(f"{command} {streams}")
    assert (code, "Traceback" in out) == (COMMANDS[command], False)
    if streams != "2>&-":
        assert out == ""
    if streams != ">&-":
        assert err == ""
    if streams == ">&-":
        assert ("ValueError: no" in err) is ("bad.py" in command)
        assert "AttributeError" not in err
    assert (tmp_path / "t.json").exists() is ("t.json" in command)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("command", often(COMMANDS, FULL))
def test_where_stderr_is_full_nobody_is_told_and_the_code_is_the_same(shell, tmp_path, command):
    code, out, err = shell(f"{command} 2>/dev/full")
    assert (code, err) == (COMMANDS[command], "")
    assert ("[0" in out) is ("good.py" in command)
    assert (tmp_path / "t.json").exists() is ("t.json" in command)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_where_both_are_full_the_output_is_lost_and_the_code_says_so(shell):
    assert shell("run good.py >/dev/full 2>/dev/full") == (1, "", "")


@pytest.mark.slow
def test_a_missing_stream_is_not_the_next_file_that_is_opened(shell):
    """Or what is printed would go into a pipe between the processes."""
    code, _, err = shell("run --processes 2 good.py <&- >&-")
    assert (code, err) == (0, "")


def test_streams_that_are_there_stay(capsys):
    before = sys.stdin, sys.stdout, sys.stderr
    assert main(["nosuch"]) == 2
    assert (sys.stdin, sys.stdout, sys.stderr) == before
    assert "'nosuch' is not a command" in capsys.readouterr().err
