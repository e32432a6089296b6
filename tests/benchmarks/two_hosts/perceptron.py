"""What is trained between the hosts: equal dense layers with rectifiers, plain numpy, gradients in place."""

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

LAYERS, WIDTH = 8, 1024
BATCH = 256  # rows for each rank
RATE = 0.01


def batch(rank: int) -> tuple[Floats, Floats]:
    """Return what a rank learns from: inputs and outputs, shape (BATCH, WIDTH)."""
    random = np.random.default_rng((1, rank))
    return random.standard_normal((BATCH, WIDTH), np.float32), random.standard_normal((BATCH, WIDTH), np.float32)


class Perceptron:
    """The same weights on every rank.

    Attributes:
        weights: Of each layer, shape (WIDTH, WIDTH).
        gradients: Of each layer; `backward` writes there.
        rectified: Gradient of what the rectifier was given that `backward` was called for last, shape (BATCH, WIDTH).
        means: Of each layer's gradients on all ranks; whoever communicates writes there.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        scale = np.float32((2 / WIDTH) ** 0.5)
        self.weights = [random.standard_normal((WIDTH, WIDTH), np.float32) * scale for _ in range(LAYERS)]
        self.gradients, self.means = ([np.zeros((WIDTH, WIDTH), np.float32) for _ in range(LAYERS)] for _ in range(2))
        self._seen: list[Floats] = []
        self.rectified = np.zeros((BATCH, WIDTH), np.float32)

    def forward(self, x: Floats, y: Floats) -> Floats:
        """Return the gradient, by what comes out for `x`, of the mean square of its difference from `y`."""
        self.enter(x)
        for layer in range(LAYERS):
            self.through(layer)
        return self.differ(y)

    def enter(self, x: Floats) -> None:
        """Begin a forward pass."""
        self._seen = [x]

    def through(self, layer: int) -> None:
        """Compute what comes out of a layer, right after the one before it."""
        out = self._seen[-1] @ self.weights[layer]
        np.maximum(out, 0, out=out)
        self._seen.append(out)

    def differ(self, y: Floats) -> Floats:
        """End a forward pass: return the gradient of the mean square of the difference from `y`."""
        gradient = self._seen[-1] - y
        gradient *= np.float32(2 / gradient.size)
        return gradient

    def backward(self, layer: int, dy: Floats) -> Floats:
        """Return the gradient of a layer's weights, given that of its output."""
        np.multiply(dy, self._seen[layer + 1] > 0, out=self.rectified)
        return np.matmul(self._seen[layer].T, self.rectified, out=self.gradients[layer])

    def propagate(self, layer: int) -> Floats:
        """Return the gradient of a layer's input, right after `backward` of that layer."""
        back: Floats = self.rectified @ self.weights[layer].T
        return back

    def update(self, layer: int, gradient: Floats) -> None:
        """Take a step down the gradient."""
        self.weights[layer] -= np.float32(RATE) * gradient

    def digest(self) -> bytes:
        """Return the SHA-256 of every bit of every weight."""
        return hashlib.sha256(b"".join(weights.tobytes() for weights in self.weights)).digest()
