"""FSDP1 whose whole state is read by all ranks, which takes communication amid what FSDP1 measures."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)),
    auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.randn(4, 8)).pow(2).mean().backward()
optimizer.step()
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    model.state_dict()
    FullyShardedDataParallel.optim_state_dict(model, optimizer)
dist.destroy_process_group()
