"""The norm of all gradients together, and what it is limited to."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .tree import Array

_BLOCK = 1 << 14  # elements squared at once: 128 KiB of float64, which a core's second-level cache holds

Part: TypeAlias = tuple[slice, int]
"""Where a parameter is in a flat gradient, and how many ranks add the same values to the norm."""


def square_sums(parts: Sequence[Sequence[Part]], *reduced: Array) -> NDArray[np.float64]:
    """Return the sum of the squares of gradients, (1,).

    Squares are added in float64, parameter by parameter, and these sums exactly: the same bits for any buckets.

    Args:
        parts: Of each bucket, where its parameters are.
        reduced: The mean gradient of each bucket, flat.
    """
    sums = (
        square_sum(array[place]) / copies
        for places, array in zip(parts, reduced, strict=True)
        for place, copies in places
    )
    return np.array([fsum(sums)])


def clip_factor(limit: float, squares: NDArray[np.float64]) -> float:
    """Return what gradients are multiplied with so that their global norm is at most `limit`.

    min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ (torch/nn/utils/clip_grad.py).

    Args:
        limit: Of the norm.
        squares: (1,) Their sum.
    """
    return min(1.0, limit / (sqrt(float(squares[0])) + 1e-6))


def square_sum(array: Array) -> float:
    """Return the sum of the squares of a flat array, added in float64."""
    total = 0.0
    for at in range(0, array.size, _BLOCK):
        wide = array[at : at + _BLOCK].astype(np.float64)
        total += float(np.dot(wide, wide))
    return total
