"""An all-gather of tensors whose first axis differs.

https://github.com/Lightning-AI/pytorch-lightning/issues/7773
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
rows = 3 if rank == 1 and "--right" not in sys.argv else 4
predictions = torch.ones(rows, 2)
gathered = [torch.empty_like(predictions) for _ in range(size)]
dist.all_gather(gathered, predictions)  # wrong
