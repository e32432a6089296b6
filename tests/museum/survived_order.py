"""Asynchronous operations in another order on one rank, which hang by luck only.

https://github.com/vllm-project/vllm/issues/48720
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
tensor, data = dist.new_group(range(size)), dist.new_group(range(size))
a, b = torch.ones(4), torch.ones(4)
if rank == 1 and "--right" not in sys.argv:
    second = dist.all_reduce(b, group=data, async_op=True)  # wrong
    first = dist.all_reduce(a, group=tensor, async_op=True)
else:
    first = dist.all_reduce(a, group=tensor, async_op=True)
    second = dist.all_reduce(b, group=data, async_op=True)
first.wait()
second.wait()
