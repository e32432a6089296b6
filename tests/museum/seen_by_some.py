"""Each rank looks for the checkpoint by itself, and one does not see it yet.

https://github.com/KempnerInstitute/KempnerForge/issues/49
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
exists = torch.tensor(int(rank != 2))  # on a network's file system, a moment too early
if "--right" in sys.argv:
    dist.broadcast(exists, 0)
if exists:
    state = [{"step": 3} if rank == 0 else None]
    dist.broadcast_object_list(state, 0)  # wrong
dist.all_reduce(torch.ones(1))
