"""DDP with post-local SGD: ranks take updates of their own, and average their weights from time to time."""

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(group_size=2)[0], start_localSGD_iter=2)
model.register_comm_hook(state, post_localSGD_hook)
opt = PostLocalSGDOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), averagers.PeriodicModelAverager(period=4, warmup_steps=2)
)
torch.manual_seed(dist.get_rank())
for _ in range(8):
    opt.zero_grad()
    model(torch.randn(3, 4)).pow(2).mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
