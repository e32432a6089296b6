"""Tensor parallel x data parallel: two replicas, each of two ranks that have half of all heads and units.

What the halves of a layer return is added up over `tp`, and everything waits for that; so each batch goes through in
two parts, and one computes while the other is added up. Gradients are averaged over `dp`, under the layers below.

You will see the loss fall, and how much of the communication was hidden.

    python examples/13_tensor_and_data.py 300     steps; 60 by default
"""

import sys

import numpy as np
from models.cut import layers_of
from models.gpt import GPT, batch, cross_entropy, mean_gradients, standard_library, tensor_rank_part
from models.overlap_ratio import describe_overlap

import overlap
from overlap import parallel
from overlap.timeline import Recorder


async def train(rank: overlap.Rank, text: np.ndarray, steps: int) -> Recorder:
    mesh, gpt = rank.mesh(dp=rank.world_size // 2, tp=2), GPT(share=1 / 2)
    weights = tensor_rank_part(gpt.weights(), mesh.coordinates["tp"], 2)
    model = parallel.DataParallel(rank, weights, optimizer=parallel.AdamW(3e-3), group=mesh["dp"], bucket_bytes=1 << 17)
    layers = layers_of(gpt, rank, mesh["tp"])
    for step in range(steps):
        mine = batch(text, step, texts=16, length=64, rank=mesh["dp"].rank, ranks=mesh["dp"].size)
        with rank.step(step):
            (xs, ys), saved = (np.split(each, 2) for each in mine), {}
            for name, layer in layers.items():
                passed = [layer.forward(model[name], each) for each in xs]
                xs, saved[name] = zip(*passed, strict=True)
            scored = [rank.compute(cross_entropy, *each) for each in zip(xs, ys, strict=True)]
            dys, losses = [both[0] for both in scored], [both[1] for both in scored]
            for name, layer in reversed(layers.items()):
                backs = [layer.backward(model[name], *each) for each in zip(saved[name], dys, strict=True)]
                dys, dws = zip(*backs, strict=True)
                model.reduce(name, rank.compute(mean_gradients, *dws))
            await model.step()
        if rank.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {(await losses[0] + await losses[1]) / 2:.2f}")
    await model.finish()
    return rank.recorder


if __name__ == "__main__":
    print(describe_overlap(overlap.run(train, standard_library(), int(sys.argv[1]) if sys.argv[1:] else 60, ranks=4)))
