"""DDP that sums some gradients at the end of the backward pass, in one operation that C++ issues and waits for."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
delayed = [("2.weight", layers[2].weight), ("2.bias", layers[2].bias)]
model = DistributedDataParallel(
    layers, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=layers[0].weight, bucket_cap_mb=0.01
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
