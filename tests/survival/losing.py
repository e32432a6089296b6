"""Program for a test of `--survive`: five processes lose one in a step, one before a step is agreed, one at a join.

Each of 20 steps subtracts 1 from a weight. Process 0 ends in step 10 of epoch 0; process 1 when the others have
prepared the first step of epoch 1, which it has not; process 2 when it would join epoch 2. The argument is a FIFO, by
which process 1 learns that the others have prepared that step.
"""

import os
import signal
import sys

import numpy as np

import overlap
from overlap.parallel import SGD, DataParallel
from overlap.survival.agreement import StepProgress
from overlap.survival.epochs import SurvivingRun

STEPS = 20
OTHERS = 3  # that prepare the first step of epoch 1, besides process 1

member = 0  # number of this process
epoch = begin = 0  # in which it trains, and the step before
prepare, open_world = StepProgress.prepare, SurvivingRun._open_world


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_or_end(progress, step, *means):
    """Prepare a step; in the first step of epoch 1, process 1 ends once the others have prepared it."""
    first = epoch == 1 and step == begin + 1
    if first and member == 1:
        fifo = os.open(sys.argv[1], os.O_RDWR)  # a writer as well, so no read ends early
        for _ in range(OTHERS):
            assert os.read(fifo, 1)
        end()
    prepare(progress, step, *means)
    if first:
        os.write(os.open(sys.argv[1], os.O_WRONLY), b".")


def join_or_end(run):
    if run.world.epoch == 2 and member == 2:
        end()
    return open_world(run)


def backward(step, weight):
    if member == 0 and step == 10:
        end()
    return np.ones_like(weight)


async def main(rank):
    global member, epoch, begin
    epoch, begin, member = rank.epoch.number, rank.epoch.step, rank.epoch.members[rank.rank]
    model = DataParallel(rank, {"weight": np.zeros(8, np.float32)}, optimizer=SGD(lr=1.0))
    print(f"epoch {epoch} members {list(rank.epoch.members)} step {rank.epoch.step} pid {os.getpid()}", flush=True)
    while model.steps < STEPS:
        model.reduce("weight", rank.compute(backward, model.steps + 1, model["weight"]))
        await model.step()
    weights = await model.finish()
    return set(weights["weight"].tolist())


if __name__ == "__main__":
    StepProgress.prepare, SurvivingRun._open_world = prepare_or_end, join_or_end
    print(f"weights {overlap.run(main)}", flush=True)
