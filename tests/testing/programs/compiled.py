"""A compiled function and a compiled model, and how many graphs each rank has compiled."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

graphs = []


def count_and_run(graph, inputs):
    graphs.append(graph)
    return graph.forward


@torch.compile(backend=count_and_run, fullgraph=True)
def double(x):
    return x * 2 + 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * x


dist.init_process_group("gloo")
x = double(torch.ones(3))
model = torch.compile(DistributedDataParallel(Scaled()), backend=count_and_run)
for _ in range(2):
    model(x).sum().backward()
work = dist.all_reduce(x, async_op=True)
if "wrong" in sys.argv:
    double(x)
work.wait()
print(len(graphs), x.tolist())
