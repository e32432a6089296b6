"""Each rank makes its own group only.

https://github.com/pytorch/pytorch/issues/25390
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
pairs = [[start, start + 1] for start in range(0, size - 1, 2)]
mine = None
for pair in pairs:
    if rank in pair or "--right" in sys.argv:
        made = dist.new_group(pair)  # wrong
        mine = made if rank in pair else mine
if mine is not None:
    dist.all_reduce(torch.ones(2), group=mine)
