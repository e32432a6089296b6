"""Rank 0 saves a checkpoint, and the others load it without a barrier."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
else:
    model.load_state_dict(torch.load("model.pt"))
dist.barrier()
dist.destroy_process_group()
