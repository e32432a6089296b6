"""The strategies on one model and one batch: the time of a step, exposed communication, and memory of a rank.

A stack of perceptrons with 537 million weights learns 64 x 1024 tokens a step on the 64 cores of a trn2.48xlarge,
without data. You will see, for each strategy, the time of a step, how much of it is communication that no compute
hides, and the memory of weights, gradients and Adam's means on a rank. Activations come on top.
"""

from functools import partial

from models.perceptrons import BLOCKS, HIDDEN, build_layers, issue_step, make_pipeline

import overlap
from overlap import parallel
from overlap.timeline import Breakdown, Timeline, breakdowns

TOKENS, MICROBATCHES = 64 * 1024, 16
STRATEGIES: dict[str, tuple[dict[str, int], parallel.Stage | None]] = {
    "data parallel": ({"dp": 64}, None),
    "ZeRO-1": ({"dp": 64}, 1),
    "ZeRO-2": ({"dp": 64}, 2),
    "ZeRO-3": ({"dp": 64}, 3),
    "tensor x data": ({"dp": 16, "tp": 4}, None),
    "1F1B x data": ({"pp": 4, "dp": 16}, None),
}


async def train(rank: overlap.Rank, axes: dict[str, int], stage: parallel.Stage | None, steps: int) -> tuple:
    mesh = rank.mesh(**{"pp": 1, "dp": 1, "tp": 1} | axes)
    pp, dp, tp = mesh["pp"], mesh["dp"], mesh["tp"]
    parts = MICROBATCHES if pp.size > 1 else min(tp.size, 2)
    tokens, blocks = TOKENS // dp.size // parts, BLOCKS // pp.size
    layers, weights = build_layers(rank, tp, tokens, range(blocks * pp.rank, blocks * (pp.rank + 1)))
    params = {pp.rank: weights} if pp.size > 1 else weights
    strategy = partial(parallel.Sharded, stage=stage) if stage else parallel.DataParallel
    model = strategy(rank, params, optimizer=parallel.Adam(1e-3), group=dp)
    stages = make_pipeline(rank, model, layers, weights, tokens, pp, MICROBATCHES)
    for _ in range(steps):
        if pp.size == 1:
            issue_step(rank, model, layers, tokens, parts)
        else:
            await stages.run([rank.empty((tokens, HIDDEN))] * parts, [None] * parts)
            model.step()
    await model.finish()
    return rank.recorder, model.memory().total


def measure(axes: dict[str, int], stage: parallel.Stage | None, steps: int) -> tuple[Breakdown, float]:
    clock = overlap.Virtual(efficiency=0.4, shapes_only=True)
    recorder, nbytes = overlap.run(train, axes, stage, steps, cluster="trn2.48xlarge", clock=clock)[0]
    return breakdowns(Timeline.collect([recorder], world_size=64))[0], nbytes


if __name__ == "__main__":
    print("strategy       step (ms)  exposed (ms)  memory (GiB)")
    for name, strategy in STRATEGIES.items():
        (one, nbytes), (two, _) = measure(*strategy, steps=1), measure(*strategy, steps=2)
        step_ms, exposed_ms = (two.wall_ns - one.wall_ns) / 1e6, (two.exposed_ns - one.exposed_ns) / 1e6
        print(f"{name:13}  {step_ms:9.3f}  {exposed_ms:12.3f}  {nbytes / 2**30:12.3f}")
