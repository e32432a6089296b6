"""A save that is killed: at each of its touches of the file system, and at random moments. What is found is whole."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import itertools, os, random, shutil, signal, sys, time
import numpy as np
import overlap
from overlap import parallel

FOLDER = os.environ["OVERLAP_STATE_DIR"]

KIND, MOMENTS = sys.argv[1], int(sys.argv[2])
SIZE = 1000 if not MOMENTS else 1 << 20

async def save(rank, checkpoints, step):
    if KIND == "state":
        return await rank.state.save(step, [np.full(SIZE, 10 * step + rank.rank)])
    model = parallel.DataParallel(rank, {"w": np.full(SIZE, 10.0 * step)}, optimizer=parallel.SGD(0.1))
    model.steps = step  # as if it had made them
    await checkpoints.save(model)
    await checkpoints.finish()

async def restore(rank, checkpoints):
    if KIND == "state":
        state = await rank.state.latest()
        assert state is None or set(state.tree[0].tolist()) == {10 * state.step + rank.rank}
        return state and state.step
    model = parallel.DataParallel(rank, {"w": np.zeros(SIZE)}, optimizer=parallel.SGD(0.1))
    restored = await checkpoints.restore(model)
    assert set((await model.finish())["w"].tolist()) == {10.0 * model.steps}
    return restored and restored.step

def make(rank):
    return parallel.Checkpoints(rank, whole=KIND == "whole")

async def saves(rank):
    checkpoints = make(rank)
    await restore(rank, checkpoints)
    for step in (2, 3):
        await save(rank, checkpoints, step)

async def first(rank):
    await save(rank, make(rank), 1)

async def latest(rank):
    return await restore(rank, make(rank))

def die_at(touch):
    touches = itertools.count(1)
    def look(event, arguments):
        if any(FOLDER in str(argument) for argument in arguments) and next(touches) == touch:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)

def forked(work, after_s=None):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]

began = time.monotonic()
forked(lambda: [overlap.run(first, ranks=2), overlap.run(saves, ranks=2)])
took_s = time.monotonic() - began
for folder in os.listdir(FOLDER):
    shutil.rmtree(f"{FOLDER}/{folder}")
for touch in range(1, MOMENTS + 1) if MOMENTS else itertools.count(1):
    assert forked(lambda: overlap.run(first, ranks=2)) == 0
    def killed():
        if not MOMENTS:
            die_at(touch)
        overlap.run(saves, ranks=2)
    ended = forked(killed, random.Random(touch).uniform(0, took_s) if MOMENTS else None)
    steps = overlap.run(latest, ranks=2)
    print(touch, ended, *steps, flush=True)
    for folder in os.listdir(FOLDER):
        shutil.rmtree(f"{FOLDER}/{folder}")
    if ended == 0 and not MOMENTS:
        break
"""


def run(tmp_path, kind, moments=0):
    """Return for each kill its number, how the process ended, and the step that each of two ranks finds then."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(moments)], capture_output=True, text=True, check=False, timeout=240,
        env={"PYTHONPATH": str(ROOT), "OVERLAP_STATE_DIR": str(tmp_path / "state"),
             "OVERLAP_FLIGHT_DIR": str(tmp_path / "records")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert all(row[2] == row[3] for row in rows)  # the same on both ranks
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "checkpoints", "whole"])
def test_a_save_that_is_killed_anywhere_leaves_it_or_the_one_before(tmp_path, kind):
    rows = run(tmp_path, kind)
    assert [row[1] for row in rows] == [9] * (len(rows) - 1) + [0]
    steps = [row[2] for row in rows]
    assert (steps[0], steps[-1], set(steps)) == (1, 3, {1, 2, 3})
    assert len(rows) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "checkpoints"])
def test_a_save_that_is_killed_at_any_moment_leaves_it_or_the_one_before(tmp_path, kind):
    rows = run(tmp_path, kind, moments=50)
    assert len(rows) == 50
    assert {row[2] for row in rows} <= {1, 2, 3}
    assert any(row[1] == 9 for row in rows)
