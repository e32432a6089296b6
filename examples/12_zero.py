"""ZeRO: the loop of data parallel, with a model that the ranks share out.

Stage 2 leaves each rank a quarter of the gradients and of Adam's means, stage 3 also of the weights: these are gathered
a bucket ahead of their use, and freed after it.

You will see the loss fall, the memory of each stage on a rank beside the formula, and the overlap. Both stages
end with the same loss, to the last bit: they only differ in where numbers live.

    python examples/12_zero.py 300     steps; 40 by default
"""

import sys

import numpy as np
from models.gpt import GPT, batch, cross_entropy, standard_library
from models.overlap_ratio import describe_overlap

import overlap
from overlap import parallel
from overlap.timeline import Recorder


async def train(rank: overlap.Rank, text: np.ndarray, steps: int, stage: parallel.Stage) -> Recorder:
    gpt = GPT()
    model = parallel.Sharded(rank, gpt.weights(), optimizer=parallel.AdamW(3e-3), stage=stage, bucket_bytes=1 << 17)
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
    if rank.rank == 0:
        print(f"stage {stage}, step {steps}: loss {await loss!r}\n{model.memory().beside(model.expected_memory())}")
    await model.finish()
    return rank.recorder


if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 40
    for stage in (2, 3):
        print(describe_overlap(overlap.run(train, standard_library(), steps, stage, ranks=4)))
