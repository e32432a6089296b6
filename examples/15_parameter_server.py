"""A parameter server: rank 0 has the weights, and serves the first to come; no rank waits for the slowest.

Workers send gradients and get weights back, in their own time. Each has a reply on its way while it computes, so its
weights are a gradient of its own old, and some of the others': the price of asynchronous training.

You will see the loss of one worker fall, how many gradients each had taken in, and how much communication was hidden.
The loss may jump for some steps, because gradients are of old weights.

    python examples/15_parameter_server.py 300     steps of each worker; 60 by default
"""

import sys
from functools import partial

import numpy as np
from models.gpt import GPT, batch, flatten_weights, standard_library
from models.overlap_ratio import describe_overlap

import overlap
from overlap import parallel
from overlap.timeline import Recorder


async def serve(rank: overlap.Rank, weights: np.ndarray, gradients: int) -> None:
    adam, taken = parallel.Adam(1e-3), [0] * rank.world_size
    state = adam.fresh(weights.size, weights.dtype)
    for step in range(1, gradients + 1):
        asked = rank.recv((weights.shape, weights.dtype), None)  # from any rank
        gradient = await asked
        await rank.compute(partial(adam.update, weights, gradient, state, step), name="update")
        rank.send(weights.copy(), asked.src)
        taken[asked.src] += 1
    print("gradients taken from each worker:", *taken[1:])


async def train(rank: overlap.Rank, text: np.ndarray, steps: int) -> Recorder:
    gpt, workers = GPT(), rank.world_size - 1
    weights = reply = start = flatten_weights(gpt.weights())
    if rank.rank == 0:
        await serve(rank, start, workers * steps)
        return rank.recorder
    for step in range(steps):
        both = rank.compute(gpt.flat_gradient, weights, *batch(text, workers * step + rank.rank, texts=4, length=64))
        rank.send(both[0], 0)
        weights, reply = reply, rank.recv((start.shape, start.dtype), 0)
        if rank.rank == 1 and step % 10 == 9:
            print(f"step {step + 1}: loss {await both[1]:.2f}")
    return rank.recorder


if __name__ == "__main__":
    print(describe_overlap(overlap.run(train, standard_library(), int(sys.argv[1]) if sys.argv[1:] else 60, ranks=4)))
