"""Messages are received in another order of tags than they are sent.

https://github.com/pytorch/pytorch/issues/125079
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
x = torch.ones(4)
tags = [1, 2] if rank == 0 or "--right" in sys.argv else [2, 1]
for tag in tags:
    if rank == 0:
        dist.send(x, 1, tag=tag)  # wrong
    elif rank == 1:
        dist.recv(x, 0, tag=tag)
