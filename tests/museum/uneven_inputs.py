"""One rank has a batch less than the others.

https://github.com/pytorch/pytorch/issues/33148
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = 3 if rank != 1 or "--right" in sys.argv else 2
for _ in range(batches):
    loss = model(torch.ones(2, 4)).sum()
    optimizer.zero_grad()
    loss.backward()  # wrong
    optimizer.step()
