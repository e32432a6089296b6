"""DistributedDataParallel through a loss: a process dies, and the others go on at the same step, in a smaller world.

The processes that live agree on the next world: its ranks, and whose state is the newest. The newest state then goes to
all of them, so no step is lost or doubled. Nothing is restarted, and nothing is read from a disk.

You will see the second of three processes die in step 20, and the others end with equal weights. It needs PyTorch:
pip install torch

    overlap run --survive --processes 3 examples/25_pytorch_survives.py
"""

import os
import signal

import torch
import torch.distributed as dist
from models.classifier import Classifier, tensors
from torch import nn

import overlap.torch

STEPS = 60


class Training:
    """The state that goes on, and the steps on one rank."""

    def __init__(self) -> None:
        self.module = Classifier()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.2, momentum=0.9)
        self.step, self.member = 0, os.environ["OVERLAP_NODE_RANK"]  # which changes after a loss

    def share(self, source: int) -> None:
        """Give all ranks the newest state."""
        state = [(self.module.state_dict(), self.optimizer.state_dict(), self.step)]
        dist.broadcast_object_list(state, src=source)
        weights, momenta, self.step = state[0]
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(momenta)

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Train to the end, or to the first loss."""
        rank, size = dist.get_rank(), dist.get_world_size()
        model = nn.parallel.DistributedDataParallel(self.module)
        for step in range(self.step, STEPS):
            if (self.member, step, size) == ("1", 20, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rank::size]), y[rank::size]).backward()
            self.optimizer.step()
            self.step = step + 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    training, (learnt, test), source = Training(), tensors(), 0
    while training.step < STEPS:
        dist.init_process_group("overlap", init_method="overlap://")
        training.share(source)
        try:
            training.run(*learnt)
        except RuntimeError as error:  # of DistributedDataParallel; others raise torch's DistBackendError, which is one
            world = overlap.torch.next_world(error, step=training.step)
            source = world.source
            print(f"process {training.member}: on with {world.members} after step {world.step}", flush=True)
    weights = sum(p.double().sum().item() for p in training.module.parameters())
    print(
        f"process {training.member}: {training.module.right(*test):.1%} of the test images, {weights:.9f}", flush=True
    )
    dist.destroy_process_group()
