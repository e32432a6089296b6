"""DiLoCo: each rank makes steps of its own on its own data, and then all add up how far they have gone."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--left", type=int, default=0, help="steps after the last sum")
parser.add_argument("--lr", type=float, default=0.1, help="of the last rank")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, common = nn.Linear(4, 2), nn.Linear(4, 2)
common.load_state_dict(model.state_dict())
torch.manual_seed(rank)  # for the data
inner = torch.optim.SGD(model.parameters(), lr=args.lr if rank == size - 1 else 0.1)
outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def step():
    inner.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    inner.step()


for _ in range(2):
    for _ in range(3):
        step()
    for mine, ours in zip(model.parameters(), common.parameters(), strict=True):
        ours.grad = (ours - mine).detach()
        dist.all_reduce(ours.grad, op=dist.ReduceOp.AVG)
    outer.step()
    model.load_state_dict(common.state_dict())
for _ in range(args.left):
    step()
