"""A program that some launcher starts: sums up ranks, and prints what came out."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import overlap.torch  # noqa: F401 - it registers the backend


def main(index: int, method: str, rank: int = -1, size: int = -1) -> None:
    """Be one rank, of those that a launcher has started or of those of `spawn`."""
    dist.init_process_group("overlap", init_method=method, rank=index if size > 0 else rank, world_size=size)
    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.tolist()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1].startswith("file://"):
        mp.spawn(main, (sys.argv[1], -1, 2), nprocs=2)
    else:
        main(0, sys.argv[1])
