"""One step of training by hand, to see communication happen under compute.

You will see, on each rank, that the last layer's gradients are reduced while the first layer still computes. It is no
chance: the first layer does not finish before it is told so, and it is told after the reduction is over.
"""

import threading

import numpy as np

import overlap


def last_layer(rank: int) -> np.ndarray:
    return np.full(4, rank + 1.0)


def first_layer(rank: int, go_on: threading.Event) -> np.ndarray:
    go_on.wait()  # stands for a long computation
    return np.full(2, 10.0 * (rank + 1))


def state(future: overlap.Future) -> str:
    return "done" if future.done else "pending"


async def main(rank: overlap.Rank) -> list[str]:
    go_on = threading.Event()
    last = rank.compute(last_layer, rank.rank)
    last_reduced = rank.all_reduce(last, op="mean")  # its input does not exist yet: it starts when it does
    first = rank.compute(first_layer, rank.rank, go_on)
    first_reduced = rank.all_reduce(first, op="mean")

    story = [f"rank {rank.rank}"]
    mean = await last_reduced
    story.append(f"  last layer reduced to {mean.tolist()}")
    story.append(f"  meanwhile: first layer {state(first)}, its all-reduce {state(first_reduced)}")
    go_on.set()
    mean = await first_reduced
    story.append(f"  first layer {state(first)}, reduced to {mean.tolist()}")
    return story


if __name__ == "__main__":
    for story in overlap.run(main, ranks=2):
        print(*story, sep="\n")
