"""The norm of all gradients together, and what it is limited to."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from typing import TYPE_CHECKING

import numpy as np

from .buckets import BucketPlan

if TYPE_CHECKING:
    from .tree import Array

__all__ = ["clip_factor", "square_sum"]

_BLOCK = 1 << 14  # elements squared at once: 128 KiB of float64, which a core's second-level cache holds


def clip_factor(limit: float, plans: Sequence[BucketPlan], *reduced: Array) -> float:
    """Return what gradients are multiplied with so that their global norm is at most `limit`.

    min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ (torch/nn/utils/clip_grad.py). Squares are added
    in float64, parameter by parameter, and these sums exactly: so the factor has the same bits for any buckets.

    Args:
        limit: Of the norm.
        plans: Of the buckets.
        reduced: The mean gradient of each bucket, flat.
    """
    sums = [
        square_sum(array[slot.start : slot.stop])
        for plan, array in zip(plans, reduced, strict=True)
        for slot in plan.slots
    ]
    return min(1.0, limit / (sqrt(fsum(sums)) + 1e-6))


def square_sum(array: Array) -> float:
    """Return the sum of the squares of a flat array, added in float64."""
    total = 0.0
    for at in range(0, array.size, _BLOCK):
        wide = array[at : at + _BLOCK].astype(np.float64)
        total += float(np.dot(wide, wide))
    return total
