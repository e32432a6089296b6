"""Program for tests of `--survive`: data parallel training that prints its history; its reference in one process."""

import hashlib
import os
import sys
from functools import partial

import numpy as np

import overlap
from overlap.parallel import AdamW, DataParallel
from overlap.runtime.epoch import Epoch

SIZES = {"first": 100_000, "middle": 20_000, "last": 1_000}


def backward(name, step, rank, weight):
    draw = np.random.default_rng((SIZES[name], step, rank))
    return 0.1 * weight + draw.standard_normal(weight.size, np.float32)


async def train(rank, steps, *, show=print):
    """Train up to so many steps; return a digest of the weights."""
    epoch = rank.epoch
    params = {name: np.full(size, 0.5, np.float32) for name, size in SIZES.items()}
    model = DataParallel(rank, params, optimizer=AdamW(lr=0.01), exact=True, bucket_bytes=200_000)
    show(f"epoch {epoch.number} members {list(epoch.members)} step {epoch.step} pid {os.getpid()}", flush=True)
    while model.steps < steps:
        for name in reversed(SIZES):
            model.reduce(name, rank.compute(partial(backward, name, model.steps, rank.rank), model[name]))
        await model.step()
        show(f"step {model.steps}", flush=True)
    weights = await model.finish()
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in SIZES)).hexdigest()


def reference(history, steps):
    """Return the digests of a run in one process with a history of (members, step of their beginning)."""
    memory = {member: Epoch(survives=True) for member in history[0][0]}
    ends = [begin for _, begin in history[1:]] + [steps]

    async def main(rank, members, begin, end):
        epoch = rank.epoch = memory[members[rank.rank]]
        epoch.step = begin
        if epoch.survivor is not None:
            epoch.survivor.report()
            epoch.survivor.advance(begin)
        return await train(rank, end, show=lambda *_, **__: None)

    for (members, begin), end in zip(history, ends, strict=True):
        digests = overlap.run(main, members, begin, end, ranks=len(members))
    return digests


if __name__ == "__main__":
    print(f"digests {overlap.run(train, int(sys.argv[1]))}", flush=True)
