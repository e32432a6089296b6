"""A save that is killed at each of its touches of the file system, one after the other: what is found then is whole."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import itertools, os, signal, sys
import numpy as np
import overlap

FOLDER = os.environ["OVERLAP_STATE_DIR"]

async def saves(rank):
    await rank.state.latest()
    for step in (2, 3):
        await rank.state.save(step, [np.full(1000, 10 * step + rank.rank)])

async def first(rank):
    await rank.state.save(1, [np.full(1000, 10 + rank.rank)])

async def latest(rank):
    state = await rank.state.latest()
    assert set(state.tree[0].tolist()) == {10 * state.step + rank.rank}
    return state.step

def die_at(touch):
    touches = itertools.count(1)
    def look(event, arguments):
        if any(FOLDER in str(argument) for argument in arguments) and next(touches) == touch:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)

def forked(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]

for touch in itertools.count(1):
    assert forked(lambda: overlap.run(first, ranks=2)) == 0
    def killed():
        die_at(touch)
        overlap.run(saves, ranks=2)
    ended = forked(killed)
    steps = overlap.run(latest, ranks=2)
    print(touch, ended, *steps, flush=True)
    for folder in os.listdir(FOLDER):
        for file in os.listdir(f"{FOLDER}/{folder}"):
            os.unlink(f"{FOLDER}/{folder}/{file}")
        os.rmdir(f"{FOLDER}/{folder}")
    if ended == 0:
        break
"""


@pytest.mark.slow
def test_a_save_that_is_killed_anywhere_leaves_it_or_the_one_before(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=240,
        env={"PYTHONPATH": str(ROOT), "OVERLAP_STATE_DIR": str(tmp_path / "state"),
             "OVERLAP_FLIGHT_DIR": str(tmp_path / "records")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert [row[1] for row in rows] == [9] * (len(rows) - 1) + [0]
    steps = [row[2] for row in rows]
    assert all(row[2] == row[3] for row in rows)  # the same on both ranks
    assert (steps[0], steps[-1], set(steps)) == (1, 3, {1, 2, 3})
    assert len(rows) > 20
