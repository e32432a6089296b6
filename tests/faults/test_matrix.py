"""Fault by moment by transport, and two hundred kills at random: who is blamed, and that nothing is left."""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from random import Random
from statistics import median

import pytest

from .job import Job

# -- fault by moment by transport: who is blamed, with which exit code, in what operation, and that nothing is left ----

# The everyday suite has a few of them; `python -m pytest -m faults` runs the rest.

NODES = ("--processes", "2", "--ranks-per-process", "2")
WIRES = {
    "memory": ("--ranks", "4"),
    "shared": NODES,
    "efa": (*NODES, "--transport", "efa"),
    "efa, 4 rails": (*NODES, "--rails", "4"),
}

RAISED = r"overlap: rank {rank} failed at train\.py:\d+: ValueError: on purpose"
EXITED = r"overlap: rank {rank} failed at train\.py:\d+: SystemExit: 3"
NODE = r"overlap: process 1 \(ranks 2-3, pid \d+\) "
GRADIENT = r"gradient #\d+ on group 'world' \(train\.py:\d+\)"

# fault, moment, transport, exit code, what stderr must say; those marked + are run every day
MATRIX = """
raise    starting    efa            1    NODE exited with code 1
raise    idle        efa            1    RAISED
raise    compute     efa            1    RAISED
raise    collective  efa            1    RAISED
raise    moving      efa            1    RAISED; unfinished there: GRADIENT
raise    in file     efa            1    RAISED
raise    ending      efa            1    RAISED
raise    finally     efa            1    RAISED
raise    after       efa            1    NODE exited with code 1
exit     starting    efa            3    NODE exited with code 3
exit     compute     efa            3    EXITED
exit     collective  efa            3    EXITED
exit     ending      efa            3    EXITED
vanish   starting    efa            1    NODE exited with code 0 without joining
vanish   idle        efa            1    NODE exited with code 0 before its world had ended
vanish   collective  efa            1  + NODE exited with code 0 before its world had ended
vanish   ending      efa            1    NODE exited with code 0 before its world had ended
SIGKILL  starting    efa            137  NODE was killed by SIGKILL
SIGKILL  idle        efa            137  NODE was killed by SIGKILL
SIGKILL  compute     efa            137  NODE was killed by SIGKILL
SIGKILL  collective  efa            137  NODE was killed by SIGKILL
SIGKILL  moving      efa            137  NODE was killed by SIGKILL
SIGKILL  in file     efa            137  NODE was killed by SIGKILL
SIGKILL  ending      efa            137  NODE was killed by SIGKILL
SIGKILL  after       efa            137  NODE was killed by SIGKILL
SIGSEGV  compute     efa            139  NODE was killed by SIGSEGV
SIGABRT  collective  efa            134  NODE was killed by SIGABRT
SIGTERM  idle        efa            143  SIGTERM
SIGTERM  moving      efa            143  SIGTERM
SIGINT   moving      efa            130  interrupted
SIGSTOP  starting    efa            137  NODE was stopped, as SIGSTOP does, and had to be killed
SIGSTOP  idle        efa            1    NODE hung, and had to be stopped
SIGSTOP  moving      efa            1    NODE hung, and had to be stopped
raise    moving      efa,_4_rails   1    RAISED; unfinished there: GRADIENT
vanish   moving      efa,_4_rails   1    NODE exited with code 0 before its world had ended
SIGKILL  moving      efa,_4_rails   137+ NODE was killed by SIGKILL
SIGSEGV  moving      efa,_4_rails   139  NODE was killed by SIGSEGV
raise    moving      shared         1    RAISED; unfinished there: GRADIENT
vanish   collective  shared         1    NODE exited with code 0 before its world had ended
SIGKILL  starting    shared         137  NODE was killed by SIGKILL
SIGKILL  idle        shared         137  NODE was killed by SIGKILL
SIGKILL  compute     shared         137  NODE was killed by SIGKILL
SIGKILL  collective  shared         137  NODE was killed by SIGKILL
SIGKILL  moving      shared         137+ NODE was killed by SIGKILL
SIGKILL  ending      shared         137  NODE was killed by SIGKILL
SIGSTOP  moving      shared         1    NODE hung, and had to be stopped
raise    compute     memory         1    RAISED
raise    moving      memory         1  + RAISED; unfinished there: GRADIENT
exit     collective  memory         3    EXITED
SIGTERM  moving      memory         143  SIGTERM
SIGKILL  moving      memory         -9   $
"""

# what is sent to the launcher, at which moment, the exit code, what stderr must say
LAUNCHER = """
SIGINT   moving      efa            130  interrupted
SIGINT   compute     efa            130  interrupted
SIGTERM  moving      efa            143  SIGTERM
SIGTERM  idle        efa,_4_rails   143  SIGTERM
SIGKILL  moving      efa            -9 + $
SIGKILL  idle        efa            -9   $
SIGINT   moving      memory         130  interrupted
"""


def rows(table: str) -> list[object]:
    """Read a table; the rows without a plus are behind the marker."""
    found = []
    for line in table.strip().splitlines():
        fault, moment, wire, code, said = line[:8], line[9:20], line[21:35], line[36:39], line[41:]
        name, marks = wire.strip().replace("_", " "), [] if line[39] == "+" else [pytest.mark.faults]
        known = (fault.strip(), moment.strip(), name)
        found.append(pytest.param(*known, int(code), said.strip(), marks=marks, id="-".join(known)))
    return found


def half_slow(rows: list) -> list:
    """Let the slow tests, which CI runs, have every second row."""
    chosen = sorted(f"[{row.id}]" for row in rows)[1::2]
    slow = {True: [pytest.mark.slow], False: []}
    return [pytest.param(*row.values, marks=[*row.marks, *slow[f"[{row.id}]" in chosen]], id=row.id) for row in rows]


def pattern(said: str, rank: int) -> str:
    for name, text in (("RAISED", RAISED), ("EXITED", EXITED), ("NODE ", NODE), ("GRADIENT", GRADIENT)):
        said = said.replace(name, text.replace("{rank}", str(rank)))
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("program.py"), tmp_path / "train.py")
    return tmp_path


def check(one: Job, code: int, said: str, rank: int) -> None:
    assert (one.end(), "struck" in one.out) == (code, True), one.err
    assert re.search(pattern(said, rank), one.err), one.err
    one.check_nothing_is_left()


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("fault", "moment", "wire", "code", "said"), half_slow(rows(MATRIX)))
def test_a_rank_is_hit(folder: Path, fault: str, moment: str, wire: str, code: int, said: str) -> None:
    hit = {"FAULT": fault, "MOMENT": moment, "VICTIM": "2"}
    with Job(folder, *WIRES[wire], program="train.py", **hit) as one:
        check(one, code, said, 2)


@pytest.mark.parametrize(("sent", "moment", "wire", "code", "said"), rows(LAUNCHER))
def test_the_launcher_is_hit(folder: Path, sent: str, moment: str, wire: str, code: int, said: str) -> None:
    hit = {"FAULT": "hit", "MOMENT": moment, "VICTIM": "2"}
    with Job(folder, *WIRES[wire], program="train.py", **hit) as one:
        one.until("struck")
        os.kill(one.process.pid, getattr(signal, sent))
        check(one, code, said, 2)


# -- two hundred kills at random moments: no hang, no orphan, every culprit named. `python -m pytest -m kills -s` ------

KILLS = 200
PLACES = ("private", "common", "shared")  # where gradients lie
LATEST_S = 1.0  # after the launcher has begun, or training has: every other job is hit there


def kill_one(folder: Path, chance: Random, number: int) -> tuple[float, str]:
    """Run a job and kill one of its nodes; return how long it took until the culprit was named, and its state.

    Gradients lie in private memory, in memory that nodes have in common, or there with results that they share: then
    the others are in the midst of reading the memory of the one that dies, or hold some of it.
    """
    nodes, each = chance.randint(2, 3), chance.randint(1, 2)
    options = ("--processes", str(nodes), "--ranks-per-process", str(each), "--rails", str(chance.choice((1, 1, 4))))
    place = PLACES[number // 2 % len(PLACES)]
    with Job(folder, *options, program="train.py", FAULT="hit", MOMENT="moving", VICTIM="0", PLACE=place) as one:
        begin_s = one.until("struck") if number % 2 else one.began_s
        due_s = begin_s + chance.uniform(0.0, LATEST_S)
        while time.monotonic() < due_s or len(one.nodes()) < nodes:
            one.pump(max(due_s, time.monotonic() + 0.01))
        pid = chance.choice([node for node in one.nodes() if is_node(node)])
        moving = "struck" in one.out
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        named_s = one.until(f"pid {pid}")
        assert one.end() == 137, one.err
        who = rf"overlap: process \d \(rank.* pid {pid}\) was killed by SIGKILL"
        assert re.search(who, one.err), one.err
        if moving:
            doing = r"\n  rank \d (was in|had last called) gradient #\d+ of group 'world' \(train.py:\d+\)"
            assert re.search(doing, one.err), one.err
        one.check_nothing_is_left()
        return named_s - killed_s, f"in training ({place} gradients)" if moving else "starting"


def is_node(pid: int) -> bool:
    """Whether a process of the launcher runs the program."""
    return b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.kills
def test_two_hundred_kills(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("program.py"), tmp_path / "train.py")
    chance = Random(int(os.environ.get("KILLS_SEED", "0")))
    took: dict[str, list[float]] = {}
    kills = range(int(os.environ.get("KILLS", str(KILLS))))
    for number in kills:
        try:
            took_s, state = kill_one(tmp_path, chance, number)
        except AssertionError as error:
            raise AssertionError(f"kill {number}: {error}") from error
        took.setdefault(state, []).append(took_s)
    for state, all_s in sorted(took.items()):
        print(f"{len(all_s)} kills {state}: named after {1000 * median(all_s):.0f} ms, at most {1000 * max(all_s):.0f}")
    meant = {f"in training ({PLACES[number // 2 % len(PLACES)]} gradients)" for number in kills if number % 2}
    assert meant
    assert meant <= set(took)
