"""DistributedDataParallel through a loss: a process dies, and the others go on at the same step, in a smaller world.

You will see the second of three processes die in step 20, and the others end with equal weights. They agree on the next
world, and all take the newest state in it; nothing is restarted. It needs PyTorch: pip install torch

    overlap run --survive --processes 3 examples/25_pytorch_survives.py
"""

import os
import signal

import torch
import torch.distributed as dist
from models.classifier import Classifier, digit_tensors
from torch import nn

import overlap.torch

STEPS = 60
torch.set_num_threads(1)
module, step, source = Classifier(), 0, 0
optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
(x, y), test = digit_tensors()


def share() -> int:
    """Give all ranks the state of one of them; return its number of steps."""
    state = [(module.state_dict(), optimizer.state_dict(), step)]
    dist.broadcast_object_list(state, src=source)
    weights, momenta, steps = state[0]
    module.load_state_dict(weights)
    optimizer.load_state_dict(momenta)
    return steps


while step < STEPS:
    dist.init_process_group("overlap", init_method="overlap://")
    step, rank, size = share(), dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(module)
    try:
        while step < STEPS:
            if (rank, size, step) == (1, 3, 20):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rank::size]), y[rank::size]).backward()
            optimizer.step()
            step += 1
    except RuntimeError as error:  # torch's DistBackendError is one; a backward raises no other
        world = overlap.torch.next_world(error, step=step)
        source = world.source
        print(f"processes {world.members} go on after step {world.step}", flush=True)
weights = sum(p.double().sum().item() for p in module.parameters())
print(f"rank {rank} of {size}: weights {weights:.9f}, {module.right(*test):.1%} of {len(test[0])} images", flush=True)
dist.destroy_process_group()
