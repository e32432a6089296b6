"""Waiting for each thing, and waiting for nothing: the naive training loop beside the one of this library.

Both train 32 layers of 4096 x 4096 on the 64 cores of a modelled trn2.48xlarge, in virtual time, without data. The
first awaits every compute, then averages the gradients; the second hands them over and goes on.

You will see the time of a step, the part of it that is communication no compute hides, and how near that is to the best
there can be: as long as compute alone, or communication alone.
"""

import numpy as np

import overlap
from overlap import parallel
from overlap.timeline import Breakdown, Timeline, breakdowns

WIDTH, TOKENS, STEPS = 4096, 2048, 16
FORWARD, BACKWARD = {"flops": 2.0 * TOKENS * WIDTH**2}, {"flops": 4.0 * TOKENS * WIDTH**2}
NAMES = [f"layer {i}" for i in range(32)]


def same(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x  # only shapes matter here


async def naive(rank: overlap.Rank, w: dict, x: np.ndarray) -> None:
    for _ in range(STEPS):
        for name in NAMES:
            await rank.compute(same, w[name], x, **FORWARD)
        gradients = {name: await rank.compute(same, x, w[name], **BACKWARD) for name in reversed(NAMES)}
        for name, gradient in gradients.items():
            mean = await rank.all_reduce(gradient, op="mean")
            await rank.compute(same, mean, w[name], bytes_moved=3 * mean.nbytes)


async def overlapped(rank: overlap.Rank, w: dict, x: np.ndarray) -> None:
    model = parallel.DataParallel(rank, w, optimizer=parallel.SGD(0.1))
    for _ in range(STEPS):
        for name in NAMES:
            rank.compute(same, model[name], x, **FORWARD)
        for name in reversed(NAMES):
            model.reduce(name, rank.compute(same, model[name], w[name], **BACKWARD))
        model.step()
    await model.finish()


async def measured(rank: overlap.Rank, loop) -> Breakdown:
    await loop(rank, {name: rank.empty((WIDTH, WIDTH)) for name in NAMES}, rank.empty((TOKENS, WIDTH)))
    return breakdowns(Timeline.collect([rank.recorder], world_size=rank.world_size))[0]


if __name__ == "__main__":
    clock = overlap.Virtual(efficiency=0.4, shapes_only=True, alike=1)  # all ranks do the same: one runs for all
    print("loop        step (ms)  exposed (ms)  of the ideal")
    for loop in (naive, overlapped):
        times = overlap.run(measured, loop, cluster="trn2.48xlarge", clock=clock)[0]
        ms, near = 1 / STEPS / 1e6, max(times.compute_ns, times.comm_ns) / times.wall_ns
        print(f"{loop.__name__:10}  {times.wall_ns * ms:9.3f}  {times.exposed_ns * ms:12.3f}  {near:12.1%}")
