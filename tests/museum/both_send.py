"""Both ranks send before they receive.

https://github.com/NVIDIA/nccl/issues/479
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
mine, other = torch.ones(4), torch.empty(4)
if rank > 1:
    sys.exit()
if rank == 1 and "--right" in sys.argv:
    dist.recv(other, 1 - rank)
    dist.send(mine, 1 - rank)
else:
    dist.send(mine, 1 - rank)  # wrong
    dist.recv(other, 1 - rank)
