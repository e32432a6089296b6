"""Hooks that send gradients as bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import ml_dtypes
import numpy as np

from ...errors import UsageError
from .operations import (
    Floats,
    Values,
    add_padding,
    check_floats,
    mean,
    mean_of_pieces,
    run_aside,
    scale_for,
    scale_values,
    shared_largest,
    unscale_values,
)

if TYPE_CHECKING:
    from ..buckets.plan import GradientBucket

_LARGEST = np.uint32(0x7F7F)  # of the finite ones, as bits
_INFINITE = np.uint32(0x7F800000)  # and NaN: as bits of float32, without the sign, at least this


def bfloat16(
    rounding: Literal["nearest", "stochastic"] = "nearest",
) -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that halves the bytes sent; additions are in float32.

    Args:
        rounding: "nearest" (ties to even) rounds every gradient once, and their mean. "stochastic" rounds up or down by
            chance, such that the expectation is the value itself, both times: it loses no small gradient on average, as
            NEURON_RT_STOCHASTIC_ROUNDING_EN=1 on Trainium. Infinities and NaN stay; nothing finite becomes infinite.
            The chances are `bucket.rng`'s: the same in every run, others on each rank.

    Raises:
        UsageError: For another rounding.
    """
    if rounding not in ("nearest", "stochastic"):
        raise UsageError(f"rounding: expected 'nearest' or 'stochastic', got {rounding!r}")

    async def hook(bucket: GradientBucket) -> Values:
        """Return the mean of a bucket that travels as bfloat16, in the bucket's dtype."""
        check_floats(bucket, "bfloat16")
        values, random = bucket.buffer, bucket.rng
        if rounding == "nearest":
            sent = await run_aside(bucket, _round_to_nearest, values, name="to bfloat16")
            means = await mean(bucket, sent)
        else:
            sent = await run_aside(
                bucket, lambda: add_padding(bucket, round_randomly(values, random)), name="to bfloat16"
            )
            means = await mean_of_pieces(bucket, sent, partial(_stochastic_mean, random=random))
        return await run_aside(bucket, _cast_values, means[: values.size], values.dtype, name="from bfloat16")

    return hook


def round_randomly(values: Values, random: np.random.Generator) -> Values:
    """Round to one of the two neighbours in bfloat16, to the nearer one more often: the mean error is 0.

    Args:
        values: (n,) floats.
        random: Draws 16 bits for each.

    Returns:
        (n,) bfloat16. Values that it can hold stay; finite values beyond its range become its largest.
    """
    # A random number below the last bit that stays carries into it with the probability of the cut bits.
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    chance = np.frombuffer(random.bytes(2 * bits.size), np.uint16)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = np.minimum((magnitude + chance) >> np.uint32(16), _LARGEST)
    rounded |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    result: Values = rounded.astype(np.uint16).view(ml_dtypes.bfloat16)
    special = np.flatnonzero(magnitude >= _INFINITE)
    result[special] = values[special].astype(ml_dtypes.bfloat16)
    return result


def _stochastic_mean(pieces: Values, random: np.random.Generator) -> Values:
    """Return the mean of pieces that was added in float32, rounded at random to bfloat16."""
    total: Floats = pieces[0].astype(np.float32)
    for piece in pieces[1:]:
        total += piece.astype(np.float32)
    total /= np.float32(len(pieces))
    return round_randomly(total, random)


def _round_to_nearest(values: Values) -> Values:
    return values.astype(ml_dtypes.bfloat16)


def _cast_values(values: Values, dtype: np.dtype[np.generic]) -> Values:
    return values.astype(dtype)


_TOP = float(np.finfo(np.float16).max)


def float16() -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that halves the bytes sent and keeps 11 bits of each gradient; additions are in float32.

    A bucket has one scale, a power of two, which all ranks take from the largest gradient among them: that is one more
    collective, of 8 bytes, before the gradients can travel. Nothing ever overflows, so there is no step to skip;
    infinities and NaN stay. Gradients below 2**-29 of the largest lose bits, those below 2**-40 are lost.
    """

    async def hook(bucket: GradientBucket) -> Values:
        """Return the mean of a bucket that travels as float16 with one scale, in the bucket's dtype."""
        check_floats(bucket, "float16")
        largest = await shared_largest(bucket)
        sent = await run_aside(bucket, _scale_values, bucket.buffer, largest, name="to float16")
        means = await mean(bucket, sent)
        return await run_aside(bucket, _unscale_values, means, largest, bucket.buffer.dtype, name="from float16")

    return hook


def _scale_values(values: Values, largest: Values) -> Values:
    """Return the values as float16, scaled so that the largest one of all ranks fits."""
    return scale_values(values, scale_for(largest, _TOP)).astype(np.float16)


def _unscale_values(values: Values, largest: Values, dtype: np.dtype[np.generic]) -> Values:
    """Return received values without their scale, in the bucket's dtype."""
    return unscale_values(values.astype(np.float32), scale_for(largest, _TOP), dtype)
