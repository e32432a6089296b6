"""Cross entropy of logits of which each rank has a part."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
for _ in range(3):
    x = distribute_tensor(torch.randn(4, 16, requires_grad=True), mesh, [Shard(1)])
    target = torch.randint(16, (4,))
    with loss_parallel():
        loss = F.cross_entropy(x, target, reduction="mean")
        loss.backward()
dist.barrier()
dist.destroy_process_group()
