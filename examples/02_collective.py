"""A collective is issued, not called: it returns a future at once, and `await` gives the result.

You will see the input of each rank, and its results: the sum of all, and all inputs in rank order.
"""

import numpy as np

import overlap


async def main(rank: overlap.Rank) -> str:
    mine = np.array([1, 10]) * (rank.rank + 1)
    total = rank.all_reduce(mine)  # both travel from here on
    everything = rank.all_gather(mine)
    gave = mine.tolist()
    return f"rank {rank.rank} gave {gave}, sum {(await total).tolist()}, gathered {(await everything).tolist()}"


if __name__ == "__main__":
    print(*overlap.run(main, ranks=3), sep="\n")
