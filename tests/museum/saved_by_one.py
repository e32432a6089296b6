"""A barrier inside of what only rank 0 does.

https://github.com/alan-turing-institute/autocast/pull/386
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def save_checkpoint():
    dist.barrier()  # wrong


loss = torch.ones(1)
dist.all_reduce(loss)
if rank == 0 or "--right" in sys.argv:
    save_checkpoint()
dist.barrier()
dist.destroy_process_group()
