"""Operations of two groups in another order on some ranks.

https://github.com/meta-pytorch/torchrec/pull/4149
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
shard, replicate = dist.new_group(range(size)), dist.new_group(range(size))
x, grads = torch.ones(size), torch.ones(8)


def forward():
    dist.all_to_all_single(torch.empty(size), x, group=shard)


def backward():
    dist.all_reduce(grads, group=replicate)  # wrong


late = rank >= size - 2 and "--right" not in sys.argv
for step in (backward, forward) if late else (forward, backward):
    step()
