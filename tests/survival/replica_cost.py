"""Program for the benchmark of replicas: ZeRO 3 with 100 MB of state on each rank; prints the times of its steps.

Arguments: K, or 0 for no replicas. A compute sleeps, as the host does while a device computes.
"""

import sys
from itertools import pairwise
from time import perf_counter_ns, sleep

import numpy as np

import overlap
from overlap.parallel import AdamW, Sharded

STATE_BYTES = 100_000_000  # of a rank: weights, and two numbers of AdamW for each
RANKS, LAYERS, STEPS = 2, 8, 42
COMPUTE_S = 0.5
SIZE = STATE_BYTES // 12 * RANKS // LAYERS


def backward(weight):
    sleep(COMPUTE_S / LAYERS)
    return weight


async def main(rank, every):
    params = {f"w{layer}": np.ones(SIZE, np.float32) for layer in range(LAYERS)}
    model = Sharded(rank, params, optimizer=AdamW(lr=0.01), replicate=every or None)
    ends = []
    while model.steps < STEPS:
        for name in reversed(params):
            model.reduce(name, rank.compute(backward, model[name]))
        await model.step()
        await model.settle()
        ends.append(perf_counter_ns())
    if rank.rank == 0:
        survivor = rank.epoch.survivor
        print(f"bytes {survivor.nbytes if survivor else 0}", flush=True)
        print("steps", *(after - before for before, after in pairwise(ends)), flush=True)


if __name__ == "__main__":
    overlap.run(main, int(sys.argv[1]))
