"""Programs of accelerate and transformers on our backend: `torchrun -m tests.pytorch.accelerated NAME FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import overlap.torch

dist.init_process_group("overlap")


class Model(nn.Module):
    """A model that returns its loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the outputs."""
        y = self.layer(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def examples() -> list[dict[str, torch.Tensor]]:
    """Return sixteen examples."""
    made = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=made), "labels": torch.randn(1, generator=made)} for _ in range(16)]


def by_accelerate(folder: str) -> nn.Module:
    """Train by an Accelerator, and gather a metric."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    loader: Any = torch.utils.data.DataLoader(examples(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
    ranks = accelerator.gather(torch.tensor([float(accelerator.process_index)]))
    assert ranks.tolist() == [0.0, 1.0]
    whole: nn.Module = accelerator.unwrap_model(model)
    return whole


def by_trainer(folder: str) -> nn.Module:
    """Train by a Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=4, max_steps=2, report_to=[], save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    model = Model()
    Trainer(model=model, args=arguments, train_dataset=examples()).train()  # type: ignore[arg-type]
    return model


def main(name: str, folder: str) -> None:
    """Train, and print what it came to."""
    issued = overlap.torch.world().rank.recorder  # type: ignore[union-attr]
    model = {"accelerate": by_accelerate, "trainer": by_trainer}[name](folder)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    before = torch.cat([parameter.detach().reshape(-1) for parameter in Model().parameters()])
    reduced = sum(span.name == "all_reduce" for span in issued.spans())
    same, trained = torch.equal(*both), not torch.equal(weights, before)
    print(f"rank {dist.get_rank()}: {dist.get_backend()}, {same=}, {trained=}, {reduced=}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
