"""A test of an unchanged PyTorch program with many ranks in one process; PyTorch and a CPU are enough.

The program is this file. You will see that it is well with 8 ranks, and what is said when the branch of one rank is
wrong. As a test of pytest: `def test_it(ranks): assert ranks.program("train.py", ranks=8).same("model weights")`.

    python examples/23_testing_pytorch.py
    overlap test examples/23_testing_pytorch.py --ranks 8 --seeds 20 --same -- train
    overlap test examples/23_testing_pytorch.py --ranks 8 -- train wrong
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap.testing import Ranks


def evaluate(model: nn.Module) -> torch.Tensor:
    """Add up the error of all ranks: a collective, so all of them must come."""
    error = model(torch.ones(4, 16)).pow(2).sum().detach()
    dist.all_reduce(error)
    return error


def train() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        if rank == 0 or "wrong" not in sys.argv:
            evaluate(model)
    dist.destroy_process_group()


if __name__ == "__main__" and "train" in sys.argv:
    train()
elif __name__ == "__main__":
    run = Ranks().program(__file__, ["train"], ranks=8, seeds=3)
    print(f"right: same weights on all ranks: {bool(run.same('model weights'))}, {run.exposed:.0%} exposed")
    print(Ranks().program(__file__, ["train", "wrong"], ranks=8, check=False).verdict)
