"""Program for tests of `--survive`: data parallel training that prints its history; its reference in one process.

Arguments: the number of steps; or how many losses there will be, as "-3": it ends some steps after the last.
"""

import hashlib
import os
import sys
from functools import partial
from time import perf_counter_ns

import numpy as np

import overlap
from overlap.parallel import AdamW, DataParallel
from overlap.runtime.epoch import Epoch

SIZES = {"first": 100_000, "middle": 20_000, "last": 1_000}
FURTHER = 20  # steps after the last loss


def backward(name, step, rank, weight):
    draw = np.random.default_rng((SIZES[name], step, rank))
    return 0.1 * weight + draw.standard_normal(weight.size, np.float32)


async def train(rank, steps, *, show=print):
    """Train up to so many steps; return their number and a digest of the weights."""
    epoch = rank.epoch
    params = {name: np.full(size, 0.5, np.float32) for name, size in SIZES.items()}
    model = DataParallel(rank, params, optimizer=AdamW(lr=0.01), exact=True, bucket_bytes=200_000)
    show(f"epoch {epoch.number} members {list(epoch.members)} step {epoch.step} pid {os.getpid()}", flush=True)
    if steps <= 0:
        steps = epoch.step + FURTHER if epoch.number == -steps else sys.maxsize
    while model.steps < steps:
        for name in reversed(SIZES):
            model.reduce(name, rank.compute(partial(backward, name, model.steps, rank.rank), model[name]))
        await model.step()
        if model.steps == epoch.step + 1:
            for name in SIZES:
                await model[name]
            show(f"first step of epoch {epoch.number} at {perf_counter_ns()}", flush=True)
    weights = await model.finish()
    show(f"last step at {perf_counter_ns()}", flush=True)
    return model.steps, hashlib.sha256(b"".join(weights[name].tobytes() for name in SIZES)).hexdigest()


def reference(history: list[tuple[list[int], int]], steps: int) -> list[tuple[int, str]]:
    """Return the results of a run in one process with a history of (members, step of their beginning)."""
    memory = {member: Epoch(survives=True) for members, _ in history for member in members}
    ends = [begin for _, begin in history[1:]] + [steps]

    async def main(rank, members, begin, end):
        epoch = rank.epoch = memory[members[rank.rank]]
        epoch.step = begin
        if epoch.survivor is not None:
            epoch.survivor.report()
            epoch.survivor.advance(begin)
        return await train(rank, end, show=lambda *_, **__: None)

    for (members, begin), end in zip(history, ends, strict=True):
        results = overlap.run(main, members, begin, end, ranks=len(members))
    return results


if __name__ == "__main__":
    print(f"results {overlap.run(train, int(sys.argv[1]))}", flush=True)
