"""Training, and the weights of a run with a given history of members."""

import hashlib
from functools import partial

import numpy as np

import overlap
from overlap.parallel import AdamW, DataParallel
from overlap.runtime.epoch import Epoch

SIZES = {"first": 1003, "middle": 400, "last": 17}


def backward(name, step, rank, weight):
    draw = np.random.default_rng((SIZES[name], step, rank))
    return 0.1 * weight + draw.standard_normal(weight.size, np.float32)


async def train(model, steps, before_step=lambda rank: None):
    """Train up to so many steps; return a digest of the weights."""
    rank = model.rank
    while model.steps < steps:
        before_step(model)
        with rank.step(model.steps):
            for name in reversed(SIZES):
                function = partial(backward, name, model.steps, rank.rank)
                model.reduce(name, rank.compute(function, model[name], seconds=1e-3))
            await model.step()
    weights = await model.finish()
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in SIZES)).hexdigest()


def params():
    return {name: np.full(size, 0.5, np.float32) for name, size in SIZES.items()}


def reference(history, steps, members=None):
    """Return the digest of a data parallel run with a history of (number of ranks, step of their beginning).

    Args:
        members: Ranks of each world, by their numbers in the first one; by default the first ones go on.
    """
    members = members or [range(ranks) for ranks, _ in history]
    epochs = {member: Epoch(survives=True) for member in members[0]}
    ends = [begin for _, begin in history[1:]] + [steps]

    async def main(rank, world, begin, end):
        epoch = rank.epoch = epochs[world[rank.rank]]
        epoch.step = begin
        if epoch.survivor is not None:
            epoch.survivor.report()
            epoch.survivor.advance(begin)
        model = DataParallel(rank, params(), optimizer=AdamW(lr=0.01), exact=True)
        return await train(model, end)

    for world, (ranks, begin), end in zip(members, history, ends, strict=True):
        digests = overlap.run(main, world, begin, end, ranks=ranks, clock="virtual")
    assert len(set(digests)) == 1
    return digests[0]
