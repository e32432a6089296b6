"""FSDP2, DTensor, pipelining, and a distributed checkpoint that is restored."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
data = torch.randn(3, 4 * 12, 8)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in data:
    optimizer.zero_grad()
    model(batch.chunk(size)[rank]).pow(2).mean().backward()
    optimizer.step()

matrix = torch.arange(64.0).reshape(8, 8)
product = distribute_tensor(matrix, mesh, [Shard(0)]) @ distribute_tensor(matrix, mesh, [Replicate()])
assert torch.equal(product.full_tensor(), matrix @ matrix)

saved = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
for parameter in model.parameters():
    parameter.detach().zero_()
dcp.load({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
assert all(torch.equal(value.full_tensor(), saved[name]) for name, value in model.state_dict().items())

if size > 1:
    stage = PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, size, loss_fn=lambda out, target: (out - target).pow(2).mean())
    first, last = (torch.ones(4 * size, 8),) if rank == 0 else (), rank == size - 1
    schedule.step(*first, **({"target": torch.zeros(4 * size, 8), "losses": []} if last else {}))
dist.destroy_process_group()
