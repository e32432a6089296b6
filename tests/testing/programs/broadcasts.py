"""Parameters of equal shape that each rank broadcasts in the order of a set, and gradients in one piece."""

import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("query", "key", "value")})
names = {name for name, _ in model.named_parameters()}
for name in names if "set" in sys.argv else sorted(names):
    dist.broadcast(model.get_parameter(name).data, 0)  # broadcast
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randn(3, 4)
    optimizer.zero_grad()
    (model["query"](x) * model["key"](x) * model["value"](x)).mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, own in zip(gradients, flat.split(16), strict=True):
        gradient.copy_(own.view(4, 4) / size)
    optimizer.step()
