"""Two hundred kills at random moments: no hang, no orphan, every culprit named. `python -m pytest -m kills -s`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from random import Random
from statistics import median

import pytest

from .job import job

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
    with job(folder, *options, program="train.py", FAULT="hit", MOMENT="moving", VICTIM="0", PLACE=place) as one:
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
