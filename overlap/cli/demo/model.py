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


def image_windows(images: Floats) -> Floats:
    """Cut images, shape (n, 64), into the surroundings of each pixel, shape (n, 64, 9); the margin is paper."""
    padded = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.ascontiguousarray(around).reshape(-1, PIXELS, 9)


def parameter_count(widths: Sequence[int]) -> int:
    """Return how many weights and biases dense layers of these widths have."""
    return sum((wide + 1) * out for wide, out in pairwise(widths))


class Block:
    """Dense layers with all parameters in one flat array, and all gradients in another.

    Each layer is followed by a rectifier, except the last one of the last block.

    Args:
        widths: Width of the input, and of the output of each layer.
        last: Whether it is the last block.
    """

    def __init__(self, widths: Sequence[int], *, last: bool) -> None:
        self._widths = widths
        self._linear = len(widths) - 2 if last else None  # the layer without a rectifier

    def initial_weights(self, random: np.random.Generator) -> Floats:
        """Return parameters to begin with: float32, shape (count,), weights and biases, layer by layer."""
        parameters = np.zeros(parameter_count(self._widths), np.float32)
        for weights, _ in self._layer_views(parameters):  # He et al. 2015: keeps the variance through rectifiers
            weights[...] = random.standard_normal(weights.shape) * np.sqrt(2 / len(weights))
        return parameters

    def _layer_views(self, flat: Floats) -> list[tuple[Floats, Floats]]:
        """Return each layer's weights, shape (inputs, outputs), and its biases, as views of a flat array."""
        views, start = [], 0
        for wide, out in pairwise(self._widths):
            middle, end = start + wide * out, start + (wide + 1) * out
            views.append((flat[start:middle].reshape(wide, out), flat[middle:end]))
            start = end
        return views

    def forward(self, parameters: Floats, x: Floats) -> tuple[Floats, list[Floats]]:
        """Return the output, shape (rows, out), and the arrays that backward needs.

        Args:
            parameters: Flat.
            x: Input of any shape; its size is a multiple of the first width.
        """
        activations = [x.reshape(-1, self._widths[0])]
        for index, (weights, biases) in enumerate(self._layer_views(parameters)):
            y = activations[-1] @ weights
            y += biases
            if index != self._linear:
                np.maximum(y, 0, out=y)
            activations.append(y)
        return activations[-1], activations

    def backward(self, parameters: Floats, activations: list[Floats], dy: Floats) -> tuple[Floats, Floats]:
        """Return the gradient of the input, flat, and of the parameters.

        Args:
            parameters: Flat.
            activations: Arrays that `forward` has returned for it.
            dy: Gradient of the output, of any shape with as many elements.
        """
        flat = np.empty_like(parameters)
        layers, gradients = self._layer_views(parameters), self._layer_views(flat)
        dy = dy.reshape(activations[-1].shape)
        for index in reversed(range(len(layers))):
            if index != self._linear:
                # the rectifier passes on gradients where its output is positive
                dy = dy * (activations[index + 1] > 0)
            np.matmul(activations[index].T, dy, out=gradients[index][0])
            np.sum(dy, axis=0, out=gradients[index][1])
            dy = dy @ layers[index][0].T
        return dy, flat


class Classifier:
    """Blocks in a row.

    Attributes:
        blocks: By name, in the order of the forward pass.
        weights: Theirs, by name.
    """

    def __init__(self, widths: Sequence[Sequence[int]] = WIDTHS) -> None:
        random = np.random.default_rng(0)
        self.blocks: dict[str, Block] = {
            f"block {i}": Block(block, last=block is widths[-1]) for i, block in enumerate(widths)
        }
        self.weights: dict[str, Floats] = {name: block.initial_weights(random) for name, block in self.blocks.items()}

    def logits(self, images: Floats) -> Floats:
        """Return the logits of images, given as `image_windows`; shape (n, 10), largest for the likeliest class."""
        x = images
        for name, block in self.blocks.items():
            x, _ = block.forward(self.weights[name], x)
        return x

    def digest(self) -> str:
        """Return the SHA-256 of every bit of every parameter."""
        return hashlib.sha256(b"".join(each.tobytes() for each in self.weights.values())).hexdigest()


def cross_entropy(scores: Floats, labels: Labels) -> tuple[Floats, float]:
    """Return the gradient of the scores, and the loss: the mean cross-entropy, in nats."""
    rows = np.arange(len(labels))
    log_probabilities = scores - scores.max(axis=1, keepdims=True)
    log_probabilities -= np.log(np.exp(log_probabilities).sum(axis=1, keepdims=True))
    loss = float(-log_probabilities[rows, labels].mean())
    gradient = np.exp(log_probabilities)
    gradient[rows, labels] -= 1
    gradient /= len(labels)
    return gradient, loss
