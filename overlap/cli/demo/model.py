"""The classifier that the demo trains: plain numpy, and the same arithmetic whether communication overlaps or not.

An image becomes 64 windows of 3x3 pixels, one around each pixel. Two blocks of dense layers look at every window by
itself (which makes them convolutions), the third looks at all that they say. So the first blocks compute long and have
few parameters, the last one has nearly all parameters and computes little, as in most networks for images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.int64]

SIDE = 8
PIXELS = SIDE * SIDE
CLASSES = 10

WIDTHS = ((9, 192, 192), (192, 192, 16), (16 * PIXELS, 512, CLASSES))
"""Widths of the dense layers in each block. On two cores a step without overlap takes 0.5 s then: long beside the 50 ms
of processor time that communication costs the event loop. The block whose gradients come last, with nothing left to
hide them, has 6 % of the parameters."""


def windows(images: Floats) -> Floats:
    """Cut images, shape (n, 64), into the surroundings of each pixel, shape (n, 64, 9); the margin is paper."""
    padded = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.ascontiguousarray(around).reshape(-1, PIXELS, 9)


def parameter_count(widths: Sequence[int]) -> int:
    """Return how many weights and biases dense layers of these widths have."""
    return sum((wide + 1) * out for wide, out in pairwise(widths))


class Block:
    """Dense layers whose parameters are one contiguous array, and so are their gradients: one bucket to all-reduce.

    Each layer is followed by a rectifier, except the last one of the last block.

    Attributes:
        parameters: float32, shape (count,): weights and biases, layer by layer.
    """

    def __init__(self, widths: Sequence[int], random: np.random.Generator, *, last: bool) -> None:
        self._widths = widths
        self._linear = len(widths) - 2 if last else None  # the layer without a rectifier
        self.parameters = np.zeros(parameter_count(widths), np.float32)
        self._layers = self._views(self.parameters)
        for weights, _ in self._layers:  # He et al. 2015: keeps the variance through rectifiers
            weights[...] = random.standard_normal(weights.shape) * np.sqrt(2 / len(weights))
        self._mean, self._square = np.zeros_like(self.parameters), np.zeros_like(self.parameters)
        self._updates = 0
        self._shape: tuple[int, ...] = ()
        self._seen: list[Floats] = []  # the input of each layer, and the output of the last one

    def _views(self, bucket: Floats) -> list[tuple[Floats, Floats]]:
        """Return each layer's weights, shape (inputs, outputs), and its biases, as views of a bucket."""
        views, start = [], 0
        for wide, out in pairwise(self._widths):
            middle, end = start + wide * out, start + (wide + 1) * out
            views.append((bucket[start:middle].reshape(wide, out), bucket[middle:end]))
            start = end
        return views

    def forward(self, x: Floats) -> Floats:
        """Return the output for inputs of any shape whose size is a multiple of the first width; shape (rows, out)."""
        self._shape = x.shape
        self._seen = [x.reshape(-1, self._widths[0])]
        for index, (weights, biases) in enumerate(self._layers):
            y = self._seen[-1] @ weights
            y += biases
            if index != self._linear:
                np.maximum(y, 0, out=y)
            self._seen.append(y)
        return self._seen[-1]

    def backward(self, dy: Floats) -> tuple[Floats, Floats]:
        """Return the gradient of the input and of the parameters, given that of the output of the latest `forward`."""
        bucket = np.empty_like(self.parameters)
        gradients = self._views(bucket)
        dy = dy.reshape(self._seen[-1].shape)
        for index in reversed(range(len(self._layers))):
            x, y = self._seen[index], self._seen.pop()  # no longer needed: eight ranks' activations fill a laptop
            if index != self._linear:
                dy = dy * (y > 0)
            np.matmul(x.T, dy, out=gradients[index][0])
            np.sum(dy, axis=0, out=gradients[index][1])
            dy = dy @ self._layers[index][0].T
        return dy.reshape(self._shape), bucket

    def update(self, gradient: Floats) -> None:
        """Take one step of Adam (Kingma and Ba 2015), with rate 0.004 and decay 0.9 and 0.99: few steps must do."""
        self._updates += 1
        self._mean += np.float32(0.1) * (gradient - self._mean)
        self._square += np.float32(0.01) * (gradient * gradient - self._square)
        scale = np.sqrt(self._square / np.float32(1 - 0.99**self._updates))
        scale += np.float32(1e-8)
        self.parameters -= self._mean * np.float32(0.004 / (1 - 0.9**self._updates)) / scale


class Classifier:
    """Blocks in a row, and the cross-entropy of what they say.

    Attributes:
        blocks: In the order of the forward pass.
        loss: Mean cross-entropy of the latest `forward`, in nats.
    """

    def __init__(self, widths: Sequence[Sequence[int]] = WIDTHS, *, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.blocks = [Block(block, random, last=block is widths[-1]) for block in widths]
        self.loss = float("nan")

    def logits(self, images: Floats) -> Floats:
        """Return what the blocks say of images, given as `windows`; shape (n, 10), largest for the likeliest class."""
        x = images
        for block in self.blocks:
            x = block.forward(x)
        return x

    def forward(self, images: Floats, labels: Labels) -> Floats:
        """Run the forward pass and return the gradient of the loss by the logits, shape (n, 10)."""
        scores = self.logits(images)
        rows = np.arange(len(labels))
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        self.loss = float(-scores[rows, labels].mean())
        gradient = np.exp(scores)
        gradient[rows, labels] -= 1
        gradient /= len(labels)
        return gradient

    def digest(self) -> str:
        """Return the SHA-256 of every bit of every parameter."""
        return hashlib.sha256(b"".join(block.parameters.tobytes() for block in self.blocks)).hexdigest()
