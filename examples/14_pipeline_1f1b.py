"""Pipeline parallel, 1F1B: each rank has a quarter of the layers, and eight microbatches pass through.

A schedule is data: the order in which each rank runs forwards (F) and backwards (B) of microbatches. The input of an
action travels while earlier ones compute.

You will see the schedule as time goes to the right, the loss fall, and how much of the communication was hidden. Idle
places ("." and "--") are the bubble that ranks cannot fill.

    python examples/14_pipeline_1f1b.py 300     steps; 40 by default
"""

import sys

import numpy as np
from models.gpt import GPT, batch, cross_entropy, standard_library
from models.overlap_ratio import describe_overlap

import overlap
from overlap import parallel
from overlap.parallel import schedules
from overlap.timeline import Recorder


async def train(rank: overlap.Rank, text: np.ndarray, steps: int) -> Recorder:
    gpt, schedule = GPT(blocks=3), schedules.make("1f1b", ranks=rank.world_size, microbatches=8)
    mine = [str(name) for name in np.array_split(list(gpt.layers), rank.world_size)[rank.rank]]
    layers = {name: parallel.Local(rank, gpt.layers[name].forward, gpt.layers[name].backward) for name in mine}
    weights = {rank.rank: {name: gpt.weights()[name] for name in mine}}
    stage = {rank.rank: parallel.Sequential(rank, layers)}
    model = parallel.DataParallel(rank, weights, optimizer=parallel.AdamW(3e-3), group=rank.group([rank.rank]))
    boundary = (2, gpt.length, gpt.channels), np.float32
    pipeline = parallel.Pipeline(rank, schedule, stage, weights, loss=cross_entropy, boundary=boundary, model=model)
    for step in range(steps):
        with rank.step(step):
            passed = await pipeline.run(*batch(text, step, texts=16, length=gpt.length))
            model.step()
        loss = await passed.loss()
        if rank.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss:.2f}")
    await model.finish()
    return rank.recorder


if __name__ == "__main__":
    print(schedules.make("1f1b", ranks=4, microbatches=8))
    print(describe_overlap(overlap.run(train, standard_library(), int(sys.argv[1]) if sys.argv[1:] else 40, ranks=4)))
