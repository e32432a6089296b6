"""Gradients travel as bfloat16: half the bytes, and weights that are as good.

A hook is an async function from a bucket to its mean gradient. This one rounds, lets the ranks add up bfloat16
in float32, and widens the result.

You will see, for both kinds of number on the wire, how many bytes a rank gave to the wire for a step, and the loss.

    python examples/16_bfloat16_on_the_wire.py 300     steps; 40 by default
"""

import sys

import numpy as np
from ml_dtypes import bfloat16 as short
from models.gpt import GPT, batch, cross_entropy, standard_library
from models.overlap_ratio import reduced_bytes

import overlap
from overlap import parallel


async def bfloat16(bucket: parallel.GradientBucket) -> np.ndarray:
    rounded = await bucket.rank.compute(bucket.buffer.astype, short, stream="round")
    return (await bucket.group.all_reduce(rounded, op="mean")).astype(bucket.buffer.dtype)


async def train(rank: overlap.Rank, text: np.ndarray, steps: int, hook: "parallel.Hook | None") -> tuple[int, float]:
    gpt = GPT()
    model = parallel.DataParallel(rank, gpt.weights(), optimizer=parallel.AdamW(3e-3), hook=hook)
    for step in range(steps):
        x, y = batch(text, step, texts=16, length=64, rank=rank.rank, ranks=rank.world_size)
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
    await model.finish()
    return reduced_bytes(rank.recorder) // steps, await loss


if __name__ == "__main__":
    for name, hook in (("float32", None), ("bfloat16", bfloat16)):
        results = overlap.run(train, standard_library(), int(sys.argv[1]) if sys.argv[1:] else 40, hook, ranks=4)
        print("{}: {:,} bytes a step, loss {:.4f}".format(name, *results[0]))
