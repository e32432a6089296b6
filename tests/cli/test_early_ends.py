"""Commands that cannot write, get no memory or are ended early: a sentence, an exit code, no traceback."""

import os
import re
import signal
import subprocess
import sys
from itertools import product

import pytest

import overlap
from overlap import cli, uncaught
from overlap.cli import main

from .conftest import ROOT

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")

# -- what the shell has closed, or what is full, never crashes a command and never hides its exit code -----------------

GOOD_PROGRAM = """
import overlap

async def main(rank):
    await rank.barrier()
    return rank.rank

print(overlap.run(main, ranks=2))
"""
BAD_PROGRAM = GOOD_PROGRAM.replace("return rank.rank", "raise ValueError('no')")

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
OF_FULL_STREAMS = ("run --processes 2 bad.py",)


def often(values, everyday):
    """Return parameters, of which the rest is slow."""
    return [value if value in everyday else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs a command line as the shell would: (exit code, stdout, stderr)."""
    (tmp_path / "good.py").write_text(GOOD_PROGRAM)
    (tmp_path / "bad.py").write_text(BAD_PROGRAM)
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
@needs_full
@pytest.mark.parametrize("command", often(COMMANDS, OF_FULL_STREAMS))
def test_where_stderr_is_full_nobody_is_told_and_the_code_is_the_same(shell, tmp_path, command):
    code, out, err = shell(f"{command} 2>/dev/full")
    assert (code, err) == (COMMANDS[command], "")
    assert ("[0" in out) is ("good.py" in command)
    assert (tmp_path / "t.json").exists() is ("t.json" in command)


@needs_full
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


# -- long commands that are ended early: a sentence, an exit code, and nothing that Python itself has to say -----------

# Commands that say at once how far they are, and again after each piece of work.
TALKING = """
import sys
from overlap.cli import main
from overlap.cli.simulate import simulation
simulation._FIRST_S = simulation._AGAIN_S = 0
sys.exit(main(sys.argv[1:]))
"""


ENDLESS = """
import overlap

async def main(rank):
    for _ in range(10**6):
        await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code", "said"), [
    (signal.SIGINT, 130, "overlap: interrupted"),
    (signal.SIGTERM, 143, "overlap: ended by SIGTERM"),
])  # fmt: skip
def test_it_ends_with_a_sentence(ending, code, said, tmp_path):
    (tmp_path / "train.py").write_text(ENDLESS)
    command = [sys.executable, "-c", TALKING, "simulate", "--cluster", "trn1.2xlarge", str(tmp_path / "train.py")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        first = child.stderr.readline()
        child.send_signal(ending)
        rest = child.stderr.read()
        child.stdout.read()
    assert first.startswith("overlap: ")
    assert child.returncode == code, rest
    told = [line for line in rest.splitlines() if "simulating" not in line]
    assert told[0] == said, rest
    assert "never awaited" not in rest
    assert "Traceback" not in rest


# -- where `ulimit -v` leaves no memory for a report, one line says so -------------------------------------------------

LINE = "overlap: out of memory: allow each process more (ulimit -v), or start fewer ranks"


def refuse(*_):
    raise MemoryError


def test_a_command_that_cannot_be_loaded_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "import_module", refuse)
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == f"{LINE} (MemoryError: )\n"


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "overlap.launch.report", None)  # as if it imported what is not installed
    assert cli.main(["nothing"]) == 1
    assert capsys.readouterr().err.startswith(
        "overlap: import of overlap.launch.report halted; None in sys.modules: inst"
    )


def test_an_error_of_a_program_is_shown_where_a_package_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "overlap.launch.report", None)
    uncaught._print_uncaught_error(ValueError, ValueError("own"), None)
    assert capsys.readouterr().err == "ValueError: own\n"


def test_memory_that_our_own_code_lacks_is_reported_without_its_frames(monkeypatch, capsys):
    monkeypatch.setattr("overlap.front.resolve_config", refuse)
    with pytest.raises(MemoryError) as caught:
        overlap.run(lambda rank: None, ranks=2)
    uncaught._print_uncaught_error(MemoryError, caught.value, caught.tb)
    err = capsys.readouterr().err
    assert "front.py" not in err
    assert "MemoryError" in err
    monkeypatch.setattr(uncaught, "_print_error_or_traceback", refuse)
    uncaught._print_uncaught_error(MemoryError, caught.value, caught.tb)
    assert capsys.readouterr().err == f"{LINE} (MemoryError: )\n"


# -- A file that cannot be written at the end is told of; what was found is shown all the same, and the code is 1 ------

NO_SPACE = "cannot write /dev/full: No space left on device; name another file\n"
ONE_BARRIER = "import overlap\nasync def main(rank): await rank.barrier()\noverlap.run(main)"


@needs_full
def test_a_run_whose_trace_cannot_be_written_is_not_said_to_be_none(ran, script):
    code, out, err = ran("run", "--trace", "/dev/full", script(ONE_BARRIER + "\nprint('done')"))
    assert (code, out) == (0, "done\n")
    assert f"train.py:3: TraceWarning: trace: {NO_SPACE}" in err
    assert "did not call" not in err


@needs_full
def test_neither_does_it_hide_why_the_program_failed(ran, script):
    code, _, err = ran("run", "--trace", "/dev/full", script(ONE_BARRIER.replace("await rank.barrier()", "1 / 0")))
    assert code == 1
    assert re.search(r"\nZeroDivisionError: division by zero\noverlap: rank \d failed at train.py:2: ", err)
    assert err.endswith(f"\n  trace: {NO_SPACE}")


@needs_full
@pytest.mark.slow
def test_nor_does_it_of_several_processes(ran, script):
    code, out, err = ran("run", "--processes", "2", "--trace", "/dev/full", script(ONE_BARRIER + "\nprint('done')"))
    assert (code, sorted(out.splitlines())) == (0, ["[process 0] done", "[process 1] done"])
    assert f"TraceWarning: trace: {NO_SPACE}" in err
