"""Each training strategy twice in virtual time: once it waits for communication, once it overlaps it.

The programs are in `models/strategies.py`. Ranks are cores of modelled instances; arrays have no data.
You will see the time of a step in both, and how many times as fast overlap makes it.

    python examples/21_with_and_without.py zero pipeline     these; by default all
"""

import sys

from models import strategies

import overlap
from overlap.timeline import Timeline, breakdowns

STRATEGIES = {
    "data_parallel": "trn1.32xlarge x2",
    "zero": "trn1.32xlarge",
    "tensor_parallel": "trn1.32xlarge",
    "pipeline": "trn1.32xlarge",
}
FEW, MANY = 2, 5  # steps of two runs: their difference has neither the beginning nor the end


async def recorded(rank: overlap.Rank, name: str, steps: int, overlapped: bool) -> object:
    await getattr(strategies, name)(rank, steps, overlapped)
    return rank.recorder


def wall_ns(name: str, steps: int, overlapped: bool) -> int:
    clock = overlap.Virtual(efficiency=0.4, shapes_only=True)
    recorders = overlap.run(recorded, name, steps, overlapped, cluster=STRATEGIES[name], clock=clock)
    return breakdowns(Timeline.collect(recorders, world_size=len(recorders)))[0].wall_ns


def step_ms(name: str, overlapped: bool) -> float:
    few, many = (wall_ns(name, steps, overlapped) for steps in (FEW, MANY))
    return (many - few) / (MANY - FEW) / 1e6


if __name__ == "__main__":
    print("strategy         without (ms)  with (ms)  times as fast")
    for name in sys.argv[1:] or STRATEGIES:
        without, overlapping = step_ms(name, False), step_ms(name, True)
        print(f"{name:15}  {without:12.3f}  {overlapping:9.3f}  {without / overlapping:13.2f}")
