"""A perceptron in PyTorch, and the handwritten digits that it learns."""

import torch
from torch import Tensor, nn

from overlap.data import Digits, digits


class Classifier(nn.Sequential):
    """64 pixels to 10 digits, by way of two layers of 256 units."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def backward(self, x: Tensor, y: Tensor) -> float:
        """Compute new gradients; return the loss."""
        self.zero_grad()
        loss = nn.functional.cross_entropy(self(x), y)
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Go a step downhill."""
        for p in self.parameters():
            p -= rate * p.grad

    @torch.no_grad()
    def right(self, x: Tensor, y: Tensor) -> float:
        """Return the share of right answers."""
        return (self(x).argmax(1) == y).float().mean().item()


def digit_tensors() -> list[tuple[Tensor, Tensor]]:
    """Return images and labels to learn from, and others to be asked about."""

    def of(part: Digits) -> tuple[Tensor, Tensor]:
        return torch.tensor(part.images), torch.tensor(part.labels)

    return [of(part) for part in digits().split()]
