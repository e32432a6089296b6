"""Program for tests of `--survive`: ZeRO that loses rank 1 in step 17, with checkpoints ("save") or without."""

import os
import signal
import sys

import numpy as np

import overlap
from overlap import parallel


async def main(rank):
    model = parallel.Sharded(rank, {"w": np.zeros(1000, np.float32)}, optimizer=parallel.AdamW(lr=0.1))
    checkpoints = parallel.Checkpoints(rank) if sys.argv[1] == "save" else None
    if checkpoints is not None:
        restored = await checkpoints.restore(model)
        print(f"epoch {rank.epoch.number} goes on from {restored and restored.step}", flush=True)
    while model.steps < 30:
        if model.steps == 17 and rank.epoch.number == 0 and rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model.reduce("w", rank.compute(lambda w: w - 1, model["w"]))
        await model.step()
        if checkpoints is not None and model.steps % 5 == 0:
            await checkpoints.save(model)
            await checkpoints.finish()
    await model.finish()
    return model.steps


print(f"steps {overlap.run(main)}", flush=True)
