"""One scale for a bucket on all ranks: a power of two that brings its largest gradient near a narrow type's top."""

from __future__ import annotations

from math import frexp, isfinite, ldexp
from typing import TYPE_CHECKING

import numpy as np

from .beside import Floats, Values, beside

if TYPE_CHECKING:
    from ..buckets import GradientBucket

_POWERS = 126  # float32 has 2**126 and 2**-126 among its normal numbers


async def shared_largest(bucket: GradientBucket) -> Values:
    """Find the largest magnitude in the bucket on any rank: (1,) float64; one collective of 8 bytes."""
    mine = await beside(bucket, _largest, bucket.buffer, passes=1, name="largest")
    return await bucket.group.all_reduce(mine, op="max", priority=bucket.priority, name="largest of all")


def scale_for(largest: Values, top: float) -> float:
    """Return the power of two by which `largest` is scaled to at most `top`, and to more than half of it.

    1.0 where there is nothing to scale (0) or nothing to save (infinite, or NaN). Multiplying by it rounds nothing.
    """
    value = float(largest[0])
    if value == 0 or not isfinite(value):
        return 1.0
    (share, exponent), (share_of_top, top_exponent) = frexp(value), frexp(top)
    power = top_exponent - exponent - (share > share_of_top)
    return ldexp(1.0, max(-_POWERS, min(power, _POWERS)))


def scaled(values: Values, scale: float) -> Floats:
    """Return float32 times a power of two."""
    return values.astype(np.float32) * np.float32(scale)


def unscaled(values: Floats, scale: float, dtype: np.dtype[np.generic]) -> Values:
    """Return what was scaled as it was, in the type of the bucket; `values` may be overwritten."""
    values *= np.float32(1.0 / scale)
    return values.astype(dtype, copy=False)


def _largest(values: Values) -> Values:
    if not values.size:
        return np.zeros(1)
    largest = max(float(values.max()), -float(values.min()))
    return np.array([largest if not np.isnan(largest) else np.inf])
