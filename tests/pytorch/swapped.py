"""Two equal layers whose backward comes in another order on some ranks; a program for torchrun, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


class Two(nn.Module):
    """Layers of which nothing but their names tells them apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        for layer in (self.a, self.b):
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor, *, swaps: bool = False, factor: float = 0.0) -> torch.Tensor:
        """Return a loss whose gradient is 1 + factor for each weight of `a`, and 10 + factor for each of `b`."""
        layers = [(self.a, 1 + factor), (self.b, 10 + factor)]
        losses = [weight * layer(x).sum() for layer, weight in (reversed(layers) if swaps else layers)]
        return losses[0] + losses[1]  # backward begins with the layer that was called last


def trained(
    make: Callable[..., Any], rank: Any, *, steps: int, swaps: bool, factor: float, width: int = 8
) -> list[float]:
    """Return a weight of each layer after some steps."""
    model = make(Two(width), partial(torch.optim.SGD, lr=1.0), rank=rank, bucket_bytes=1)
    for _ in range(steps):
        model(torch.ones(1, width), swaps=swaps, factor=factor).backward()
        model.step()
    module = model.finish()
    return [module.a.weight[0, 0].item(), module.b.weight[0, 0].item()]


if __name__ == "__main__":
    import torch.distributed as dist

    import overlap.torch

    dist.init_process_group("overlap")
    swaps = dist.get_rank() == 1
    weights = trained(overlap.torch.DataParallel, None, steps=1, swaps=swaps, factor=0.0, width=512)
    found: list[list[float]] = [[], []]
    dist.all_gather_object(found, weights)
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()
