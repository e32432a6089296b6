"""A PyTorch module by hand: hooks of its parameters issue their all-reduces while backward still runs.

Tensors are read and written in place, by the thread that computes backward: an operation may be issued anywhere.

You will see the loss fall on handwritten digits, the share of right answers on images that training has not seen, and
how much of the communication was hidden. It needs PyTorch: pip install torch

    python examples/17_pytorch_module.py 300     steps; 60 by default
"""

import sys

import torch
from models.classifier import Classifier, digit_tensors
from models.overlap_ratio import describe_overlap

import overlap
from overlap.timeline import Recorder


async def train(rank: overlap.Rank, x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[Recorder, Classifier]:
    module, pending = Classifier(), []
    for p in module.parameters():
        await rank.broadcast(p.data, out=p.data)  # ranks share PyTorch's random numbers, so they begin differently
        p.register_post_accumulate_grad_hook(lambda p: pending.append(rank.all_reduce(p.grad, op="mean", out=p.grad)))
    for step in range(steps):
        with rank.step(step):
            loss = rank.compute(module.backward, x[rank.rank :: rank.world_size], y[rank.rank :: rank.world_size])
            await loss
            for reduced in pending:
                await reduced
            pending.clear()
            await rank.compute(module.update, 0.4)
        if rank.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {await loss:.2f}")
    return rank.recorder, module


if __name__ == "__main__":
    torch.set_num_threads(1)
    learnt, test = digit_tensors()
    recorders, modules = zip(
        *overlap.run(train, *learnt, int(sys.argv[1]) if sys.argv[1:] else 60, ranks=4), strict=True
    )
    print(f"accuracy {modules[0].right(*test):.1%} of {len(test[0])} test images\n{describe_overlap(recorders)}")
