"""Training through a loss: a process dies, and the others go on at the same step, in a smaller world.

You will see the first of three processes die after step 20, and the other two end with equal weights. After the loss
they agree on the next world, and their `main` is called again there; the new model has the weights, the optimizer's
state and the steps of the old one. Nothing is restarted.

    overlap run --survive --processes 3 examples/28_survives.py
"""

import os
import signal
import zlib

import numpy as np

import overlap
from overlap.data import digits
from overlap.parallel import AdamW, DataParallel

STEPS, BATCH = 60, 96  # images of all ranks in a step
training, test = digits().split()


def softmax(images, weights):
    scores = np.exp(images @ weights - (images @ weights).max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def gradient(chosen, weights):
    error = softmax(training.images[chosen], weights) - np.eye(10, dtype=np.float32)[training.labels[chosen]]
    return training.images[chosen].T @ error / np.float32(len(chosen))


async def main(rank):
    params = {"w": np.zeros((training.images.shape[1], 10), np.float32)}
    model = DataParallel(rank, params, optimizer=AdamW(lr=0.01))
    if rank.epoch.number and rank.rank == 0:
        print(f"processes {rank.epoch.members} go on after step {model.steps}", flush=True)
    while model.steps < STEPS:
        weights = await model["w"]
        if (rank.epoch.number, rank.rank, model.steps) == (0, 0, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        chosen = (BATCH * model.steps + np.arange(rank.rank, BATCH, rank.world_size)) % len(training.images)
        model.reduce("w", rank.compute(gradient, chosen, weights))
        await model.step()
    weights = (await model.finish())["w"]
    right = np.mean(softmax(test.images, weights).argmax(axis=1) == test.labels)
    print(f"rank {rank.rank} of {rank.world_size}: weights {zlib.crc32(weights):08x}, {right:.1%} right", flush=True)


overlap.run(main)
