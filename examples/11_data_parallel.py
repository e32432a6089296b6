"""Data parallel with buckets: a character-level GPT learns the source text of Python's own library.

The loop names layers, and their gradients travel in buckets while the layers below compute. Nothing in it waits, except
that the program is two steps ahead of its computes at most.

You will see the loss fall (guessing has 4.56), and how much of the communication was hidden.

    python examples/11_data_parallel.py 300     steps; 60 by default
"""

import sys

import numpy as np
from models.gpt import GPT, batch, cross_entropy, standard_library
from models.overlap_ratio import describe_overlap

import overlap
from overlap import parallel
from overlap.timeline import Recorder


async def train(rank: overlap.Rank, text: np.ndarray, steps: int) -> Recorder:
    gpt = GPT()
    model = parallel.DataParallel(rank, gpt.weights(), optimizer=parallel.AdamW(3e-3), bucket_bytes=1 << 17)
    for step in range(steps):
        x, y = batch(text, step, texts=16, length=64, rank=rank.rank, ranks=rank.world_size)
        with rank.step(step):
            saved = {}
            for name, layer in gpt.layers.items():
                out = rank.compute(layer.forward, model[name], x)
                x, saved[name] = out[0], out[1]
            both = rank.compute(cross_entropy, x, y)
            grad, loss = both[0], both[1]
            for name, layer in reversed(gpt.layers.items()):
                back = rank.compute(layer.backward, model[name], saved[name], grad)
                grad = back[0]
                model.reduce(name, back[1])
            await model.step()
        if rank.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {await loss:.2f}")
    await model.finish()
    return rank.recorder


if __name__ == "__main__":
    print(describe_overlap(overlap.run(train, standard_library(), int(sys.argv[1]) if sys.argv[1:] else 60, ranks=4)))
