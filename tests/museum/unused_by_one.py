"""A part of the model that one rank does not use in a step.

https://github.com/pytorch/pytorch/issues/43259
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
hidden = body(torch.ones(2, 4))
loss = hidden.sum() if rank == 1 and "--right" not in sys.argv else head(hidden).sum()
loss.backward()
for parameter in body.parameters():
    dist.all_reduce(parameter.grad)
optimizer.step()  # wrong
