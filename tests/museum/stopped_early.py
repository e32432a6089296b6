"""The main process stops early, and the others go on.

https://github.com/speechbrain/speechbrain/pull/2051
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for epoch in range(4):
    gradient = torch.ones(4)
    dist.all_reduce(gradient)  # wrong
    patience_is_over = epoch == 1 and (rank == 0 or "--right" in sys.argv)
    if patience_is_over:
        break
