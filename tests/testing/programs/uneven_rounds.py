"""Two contexts of uneven inputs: in each, rank 1 makes one update more than rank 0."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = [torch.randn(4, 8) for _ in range(3 + dist.get_rank())]
for _ in range(2):
    with model.join():
        for batch in batches:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
other = DistributedDataParallel(torch.nn.Linear(8, 2))
zero = ZeroRedundancyOptimizer(other.parameters(), torch.optim.Adam, lr=0.01)
with Join([other, zero]):
    for batch in batches:
        zero.zero_grad()
        other(batch).pow(2).mean().backward()
        zero.step()
dist.destroy_process_group()
