"""What signals ask of a process, with real processes: SIGTERM ends worlds in peace, SIGUSR1 lets them tell."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from overlap.timeline import read_trace
from tests.interpreters import ROOT, Python, environment, free_port

from .test_worlds import LIMIT_S

# Rank 0 never comes to "grad"; a line on stdout says when all others are there, or about to be.
PROGRAM = """
import os, signal, sys
import numpy as np
import overlap, trio

async def side():
    await trio.sleep_forever()

async def main(rank):
    with rank.step(3):
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(side)
                await rank.all_reduce(np.ones(4))
                if rank.rank == rank.local_rank == 0 or "each" in sys.argv:
                    print("up", os.getpid(), flush=True)
                while "busy" in sys.argv:
                    pass
                if rank.rank == 0:
                    await trio.sleep_forever()
                await rank.all_reduce(np.ones(4), name="grad")
        finally:
            print("finally", rank.rank, flush=True)

if __name__ == "__main__":
    overlap.run(main)
    print("not to be seen")
"""


def line_of(text: str, *, last: bool = False) -> int:
    lines = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if text in line]
    return lines[-1 if last else 0]


class Job:
    """A program that runs, alone or under our launcher."""

    def __init__(self, process: Python) -> None:
        self.process = process

    def pid_of_one_that_is_up(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline().split()[-1])

    def told(self, last: str) -> list[str]:
        """The lines on stderr up to one with these words."""
        assert self.process.stderr is not None
        lines: list[str] = []
        for line in self.process.stderr:
            lines.append(line.rstrip())
            if last in line:
                return lines
        raise AssertionError(f"{last!r} is not in {lines}")

    def ends(self, number: signal.Signals | None = None) -> tuple[int, list[str], str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, sorted(out.splitlines()), err


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, start_python: Callable[..., Python]) -> Start:
    """Return a function that starts a program."""

    def start(*command: str, program: str = PROGRAM, **variables: str) -> Job:
        (tmp_path / "train.py").write_text(program)
        return Job(start_python(*command, env=environment(**variables)))

    return start


# -- to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("command", [["train.py"], ["-m", "overlap", "run", "train.py"]])
def test_a_world_that_is_told_to_end_runs_finally_and_writes_its_trace(
    start: Start, tmp_path: Path, command: list[str], number: signal.Signals, code: int
) -> None:
    job = start(*command, OVERLAP_TRACE="run.json")
    job.pid_of_one_that_is_up()
    told = f"overlap: ended by {number.name} in step 3\n"
    if "-m" in command:
        told = f"overlap: trace in run.json; look at it with `overlap timeline run.json` or at ui.perfetto.dev\n{told}"
    assert job.ends(number) == (code, ["finally 0", "finally 1"], told)
    assert read_trace(tmp_path / "run.json").steps() == [3]


SAVES = """
import numpy as np
import overlap, trio
from overlap.parallel import Checkpoints, DataParallel, SGD

async def main(rank):
    if KIND == "state":
        await rank.state.save(41, [np.ones(3)])
    else:
        model = DataParallel(rank, {"w": np.ones(4, np.float32)}, optimizer=SGD(0.1))
        for _ in range(3):
            model.reduce("w", np.ones(4, np.float32))
            model.step()
        checkpoints = Checkpoints(rank, "kept")
        await checkpoints.save(model)
        await checkpoints.finish()
    with rank.step(42):
        if rank.rank == 0:
            print("up", __import__("os").getpid(), flush=True)
        await trio.sleep_forever()

if __name__ == "__main__":
    overlap.run(main, ranks=2)
"""


@pytest.mark.parametrize(("kind", "step"), [("state", 41), pytest.param("checkpoint", 3, marks=pytest.mark.slow)])
def test_what_is_saved_of_a_job_that_is_told_to_end_is_told(start: Start, tmp_path: Path, kind: str, step: int) -> None:
    (tmp_path / "saves.py").write_text(SAVES.replace("KIND", repr(kind)))
    job = start("saves.py", OVERLAP_STATE_DIR="state")
    job.pid_of_one_that_is_up()
    assert job.ends(signal.SIGTERM) == (143, [], f"overlap: ended by SIGTERM in step 42; step {step} is saved\n")


@pytest.mark.slow
def test_a_launcher_tells_what_is_saved_of_a_job_that_is_told_to_end(start: Start, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES.replace("KIND", "'state'"))
    job = start("-m", "overlap", "run", "--processes", "2", "--grace", str(LIMIT_S), "--state-dir", "state", "saves.py")
    job.pid_of_one_that_is_up()
    code, _, err = job.ends(signal.SIGTERM)
    assert code == 143
    assert err.splitlines()[-1] == "overlap: ended by SIGTERM; step 41 is saved"


@pytest.mark.slow
def test_a_program_that_keeps_the_loop_is_interrupted(start: Start, tmp_path: Path) -> None:
    job = start("train.py", "busy", OVERLAP_TRACE="run.json", OVERLAP_RANKS="1")
    job.pid_of_one_that_is_up()
    assert job.ends(signal.SIGTERM) == (143, ["finally 0"], "overlap: ended by SIGTERM in step 3\n")
    assert read_trace(tmp_path / "run.json").steps() == [3]


@pytest.mark.slow
def test_all_nodes_of_a_launcher_end_so(start: Start, tmp_path: Path) -> None:
    job = start("-m", "overlap", "run", "--processes", "2", "--trace", "run.json", "--grace", str(LIMIT_S), "train.py")
    job.pid_of_one_that_is_up()
    code, out, err = job.ends(signal.SIGTERM)
    assert (code, out) == (143, ["[process 0] finally 0", "[process 1] finally 1"])
    lines = [line for line in err.splitlines() if not line.startswith("overlap: waiting up to ")]
    trace = (
        "overlap: trace in run.json, of killed processes up to their last second; `overlap timeline run.json` shows it"
    )
    assert lines == [trace, "overlap: ended by SIGTERM"]
    assert read_trace(tmp_path / "run.json").ranks() == [0, 1]


@pytest.mark.slow
def test_a_node_that_somebody_else_tells_to_end_is_named(start: Start) -> None:
    job = start("-m", "overlap", "run", "--processes", "2", "train.py")
    os.kill(job.pid_of_one_that_is_up(), signal.SIGTERM)
    code, _, err = job.ends()
    assert code == 143
    assert re.fullmatch(
        r"overlap: process 0 \(rank 0, pid \d+\) was ended by SIGTERM, which its launcher had not sent\n"
        r"  rank 0 had last called all_reduce #0 of group 'world' \(train.py:14\)\n"
        r"(  rank 1 waits for it in grad #1 of group 'world' \(train.py:21\)\n)?",
        err,
    )


def test_other_processes_are_told_of_it(start: Start) -> None:
    there = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    there["MASTER_PORT"] = str(free_port())
    first, other = (start("train.py", RANK=rank, LOCAL_RANK=rank, **there) for rank in "01")
    first.pid_of_one_that_is_up()
    assert first.ends(signal.SIGTERM) == (143, ["finally 0"], "overlap: ended by SIGTERM in step 3\n")
    code, out, err = other.ends()
    assert (code, out) == (1, ["finally 1"])
    assert err.splitlines()[-1].endswith("rank 0 failed: SIGTERM: a signal ended its process")


def test_outside_a_world_the_program_of_a_launcher_ends_with_its_finally(start: Start) -> None:
    program = """
import os, time
try:
    print("up", os.getpid(), flush=True)
    time.sleep(600)
finally:
    print("finally")
"""
    job = start("-m", "overlap", "run", "train.py", program=program)
    job.pid_of_one_that_is_up()
    assert job.ends(signal.SIGTERM) == (143, ["finally"], "overlap: ended by SIGTERM\n")


CHILD = """
import multiprocessing, os, signal, time, warnings
import overlap

warnings.simplefilter("ignore")  # some Pythons warn of any fork beside threads

async def main(rank):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode

print(overlap.run(main, ranks=1))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_of_a_process_that_obeys_ends_as_it_always_did(start: Start) -> None:
    assert start("train.py", program=CHILD).ends() == (0, ["[-15]"], "")


HANDLED = """
import signal
import overlap

async def main(rank):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: print(signal.Signals(number).name))
overlap.run(main, ranks=1)
"""


def test_signals_that_the_program_handles_are_left_to_it(start: Start) -> None:
    assert start("train.py", program=HANDLED).ends() == (0, ["SIGTERM", "SIGUSR1"], "")


# -- to tell -----------------------------------------------------------------------------------------------------


def test_a_world_that_is_asked_tells_who_waits_and_where_its_tasks_are(start: Start) -> None:
    job = start("train.py", "each")
    pid = job.pid_of_one_that_is_up()
    job.pid_of_one_that_is_up()
    job.process.send_signal(signal.SIGUSR1)
    asked, *report = job.told("tasks:")
    assert asked == f"overlap: asked by SIGUSR1, process {pid}:"
    assert [line.split(":")[0] for line in report] == ["  rank 0", "  rank 1", "  tasks"]
    assert f"grad #1 of group 'world' (train.py:{line_of('grad')}); waits for rank 0" in report[1]
    side = f"      side at train.py:{line_of('sleep_forever')}"
    assert job.told(side)[0] == f"    rank 0 at train.py:{line_of('sleep_forever', last=True)}"
    assert job.told(side)[0] == f"    rank 1 at train.py:{line_of('grad')}"
    assert job.ends(signal.SIGTERM)[0] == 143


@pytest.mark.slow
def test_a_busy_program_tells_all_the_same(start: Start) -> None:
    job = start("train.py", "busy", OVERLAP_RANKS="1")
    pid = job.pid_of_one_that_is_up()
    job.process.send_signal(signal.SIGUSR1)
    lines = job.told("side at train.py:")
    assert lines[0] == f"overlap: asked by SIGUSR1, process {pid}:"
    busy = line_of("busy")
    assert re.fullmatch(rf"    rank 0 at train.py:({busy}|{busy + 1}), which keeps the event loop", lines[-2])
    assert job.ends(signal.SIGTERM)[0] == 143


@pytest.mark.slow
def test_a_launcher_passes_the_question_on_and_goes_on(start: Start) -> None:
    job = start("-m", "overlap", "run", "--processes", "2", "train.py", "each")
    pids = sorted(job.pid_of_one_that_is_up() for _ in range(2))
    job.process.send_signal(signal.SIGUSR1)
    side = f"side at train.py:{line_of('sleep_forever')}"
    lines = job.told(side) + job.told(side)
    asked = [re.fullmatch(r"\[process [01]\] overlap: asked by SIGUSR1, process (\d+):", line) for line in lines]
    assert sorted(int(found[1]) for found in asked if found) == pids
    assert job.ends(signal.SIGTERM)[0] == 143


ASKED_AT_ONCE = """
import os, signal
if os.environ.get("OVERLAP_LIFELINE_FD"):
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_process_that_is_still_starting_does_not_die_of_the_question(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ASKED_AT_ONCE)
    job = start(
        "-m", "overlap", "run", "--processes", "2", "train.py", program="", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}"
    )
    code, _, err = job.ends()
    assert (code, err.count("no world lives here in real time; its program is at")) == (0, 2)
