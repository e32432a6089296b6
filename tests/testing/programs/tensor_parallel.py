"""A model in two halves, on pairs of ranks, with a mean of gradients over the pairs; with a mistake by its name."""

import sys

import torch
import torch.distributed as dist
from torch import nn

mistakes = sys.argv[1:]  # inputs, group, divisor, scale
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
width = min(2, size)
tensor = [dist.new_group(range(i, i + width)) for i in range(0, size, width)][rank // width]
data = [dist.new_group(range(i, size, width)) for i in range(width)][rank % width]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=tensor)
        return gradient


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=tensor)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        up, down = torch.randn(16, 8) / 4, torch.randn(4, 16) / 4
        self.up = nn.Parameter(up.chunk(width)[rank % width].clone())
        self.down = nn.Parameter(down.chunk(width, 1)[rank % width].clone())
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Add.apply(Copy.apply(x) @ self.up.T @ self.down.T) * self.scale  # forward


model = Halves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank if "inputs" in mistakes else rank // width)
for _ in range(3):
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=tensor if "group" in mistakes else data)  # reduction
        parameter.grad /= size if "divisor" in mistakes else dist.get_world_size(data)
    if "scale" in mistakes:  # each rank of a pair has all of its gradient
        dist.all_reduce(model.scale.grad, op=dist.ReduceOp.AVG, group=tensor)  # second reduction
        model.scale.grad /= width
    optimizer.step()
