"""One program in one process and in many: only the command changes.

You will see one line from each rank: where it lives, the mean of all gradients, and from which node each came.

    python examples/05_many_processes.py                                            one process, four ranks
    overlap run --processes 2 examples/05_many_processes.py                         two processes, four ranks
    overlap run --processes 2 --cluster "local x2" examples/05_many_processes.py    the same, as on two hosts

On two machines that share the environment variable OVERLAP_SECRET, one of these on each:

    overlap run --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 05_many_processes.py
    overlap run --nnodes 2 --node-rank 1 --rdzv-endpoint 10.0.0.1:29500 05_many_processes.py
"""

import numpy as np

import overlap


async def main(rank: overlap.Rank) -> str:
    gradient = rank.compute(np.full, 3, rank.rank + 1.0)  # stands for a backward pass
    mean = rank.all_reduce(gradient, op="mean")  # between the ranks of a process in memory, between processes by socket
    nodes = rank.all_gather(np.array([rank.node]))
    place = f"rank {rank.rank} of {rank.world_size} is rank {rank.local_rank} of node {rank.node}"
    return f"{place}: mean gradient {(await mean).tolist()}, from nodes {(await nodes).tolist()}"


if __name__ == "__main__":
    print(*overlap.run(main, ranks=4), sep="\n")
