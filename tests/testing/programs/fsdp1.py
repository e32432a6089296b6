"""FSDP1 on original parameters, of some of which a rank has no part, and their full state."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(5, 16)).pow(2).mean().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
dist.destroy_process_group()
