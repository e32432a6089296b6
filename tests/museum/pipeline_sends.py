"""Stages of a pipeline that send forward and backward before they receive.

https://github.com/pytorch/pytorch/issues/172668
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
after, before = (rank + 1) % size, (rank - 1) % size
activation, received = torch.ones(4), torch.empty(4)
for _ in range(2):
    if rank % 2 and "--right" in sys.argv:
        dist.recv(received, before)
        dist.send(activation, after)
    else:
        dist.send(activation, after)  # wrong
        dist.recv(received, before)
