"""A message is received with another size than it was sent with.

https://github.com/pytorch/pytorch/issues/113376
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(3), 1)])  # wrong
elif rank == 1:
    out = torch.empty(3 if "--right" in sys.argv else 4)
    work = dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, 0)])  # wrong too
for each in work if rank < 2 else []:
    each.wait()
