"""Send gradients as float16, scaled so that neither the largest overflows nor small ones are lost for nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np

from .beside import Values, beside, check_floats, mean
from .scaling import scale_for, scaled, shared_largest, unscaled

if TYPE_CHECKING:
    from ..buckets import GradientBucket

_TOP = float(np.finfo(np.float16).max)


def float16() -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that halves what travels and keeps 11 bits of each gradient; additions are in float32.

    A bucket has one scale, a power of two, which all ranks take from the largest gradient among them: that is one more
    collective, of 8 bytes, before the gradients can travel. Nothing ever overflows, so there is no step to skip; what
    is infinite or NaN stays so. Gradients below 2**-29 of the largest lose bits, those below 2**-40 are lost.
    """

    async def hook(bucket: GradientBucket) -> Values:
        check_floats(bucket, "float16")
        largest = await shared_largest(bucket)
        sent = await beside(bucket, _narrow, bucket.buffer, largest, name="to float16")
        means = await mean(bucket, sent)
        return await beside(bucket, _widen, means, largest, bucket.buffer.dtype, name="from float16")

    return hook


def _narrow(values: Values, largest: Values) -> Values:
    return scaled(values, scale_for(largest, _TOP)).astype(np.float16)


def _widen(values: Values, largest: Values, dtype: np.dtype[np.generic]) -> Values:
    return unscaled(values.astype(np.float32), scale_for(largest, _TOP), dtype)
