"""A checkpoint that is saved in a thread, by a group of its own, while the ranks go on to communicate."""

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("cpu:gloo")
group = dist.new_group() if sys.argv[1:] == ["own"] else None
state = {"weight": torch.full((3,), 7.0), "step": torch.tensor(dist.get_rank())}
saved = checkpoint.async_save(state, checkpoint_id="saved", process_group=group)
state["weight"].zero_()
time.sleep(1e-3 * dist.get_rank())
total = torch.ones(1)
for _ in range(3):
    dist.all_reduce(total)
while dist.get_rank() == 0 and not saved.done():
    pass
saved.result()
dist.barrier()
checkpoint.load(state, checkpoint_id="saved")
assert state["weight"].tolist() == [7, 7, 7]
dist.destroy_process_group()
