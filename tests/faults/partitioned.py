"""Program for tests of a network between hosts that fails: training until the file `enough` exists, by its history.

Each process prints its result: members, number of steps, weight, and the worlds that it was in with their first steps.
"""

import os

import numpy as np

import overlap
from overlap.parallel import SGD, DataParallel

SHOWN = 20  # steps of an epoch until it is reported
MEMBER = os.environ.get("OVERLAP_NODE_RANK")  # in the first world; later ones number their processes anew


def mean_gradient(members, step):
    """Return the gradient of a step in a world: exact in float32 for the steps and members of these tests."""
    return np.float32(sum(1 + member for member in members) * 12 * (1 + step % 3) / len(members))


def is_over():
    return os.path.exists("enough")


async def main(rank):
    epoch = rank.epoch
    worlds = epoch.memory.setdefault("worlds", [])
    worlds.append((epoch.members, epoch.step))
    own = 1 + epoch.members[rank.rank]
    model = DataParallel(rank, {"w": np.zeros(64, np.float32)}, optimizer=SGD(lr=1.0))
    enough = 0.0
    while not enough:
        flag = float(is_over())
        gradient = np.full(64, own * 12 * (1 + model.steps % 3), np.float32)
        model.reduce("w", rank.compute(lambda w, gradient=gradient: gradient, model["w"]))
        await model.step()
        if model.steps == epoch.step + SHOWN:
            print(f"goes on in epoch {epoch.number}", flush=True)
        enough = (await rank.all_reduce(np.array([flag]), "max"))[0]
    weights = await model.finish()
    assert len(set(weights["w"])) == 1
    return epoch.members, model.steps, float(weights["w"][0]), worlds


if __name__ == "__main__":
    print(f"result {overlap.run(main)[0]} of process {MEMBER}", flush=True)
