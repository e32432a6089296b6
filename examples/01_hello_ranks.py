"""Ranks are async functions that run side by side in one process.

You will see one line from each rank, in rank order, whichever was ready first.
"""

import overlap


async def main(rank: overlap.Rank) -> str:
    squares = rank.compute(sum, [n * n for n in range(rank.rank + 1)])  # queued on this rank's compute stream
    return f"hello from rank {rank.rank} of {rank.world_size}: the squares up to {rank.rank} add up to {await squares}"


if __name__ == "__main__":
    print(*overlap.run(main, ranks=4), sep="\n")
