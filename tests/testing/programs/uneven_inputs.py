"""DDP with `join`: ranks have different numbers of inputs."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
with model.join():
    for _ in range(3 + dist.get_rank()):
        opt.zero_grad()
        model(torch.ones(3, 4)).pow(2).mean().backward()
        opt.step()
dist.barrier()
dist.destroy_process_group()
