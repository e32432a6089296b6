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
    largest_of_ranks,
    mean_of_pieces,
    mean_over_ranks,
    power_of_two_scale,
    run_on_hook_stream,
)

if TYPE_CHECKING:
    from ..buckets.plan import GradientBucket

_LARGEST = np.uint32(0x7F7F)  # bits of the largest finite bfloat16
_INFINITE = np.uint32(0x7F800000)  # infinity as bits of float32; NaN without the sign bit is greater


def bfloat16(
    rounding: Literal["nearest", "stochastic"] = "nearest",
) -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that sends gradients as bfloat16, which halves the bytes of float32; additions are in float32.

    Each gradient is rounded before it is sent, and the mean is rounded again.

    Args:
        rounding: "nearest" rounds to the nearest value, ties to even. "stochastic" rounds up or down at random, such
            that the expected result is the value itself, so small gradients are not lost on average; as
            NEURON_RT_STOCHASTIC_ROUNDING_EN=1 on Trainium. Infinities and NaN stay, and no finite value becomes
            infinite. Random numbers come from `bucket.rng`: the same in every run, different on each rank.

    Raises:
        UsageError: `rounding` is neither of the two.
    """
    if rounding not in ("nearest", "stochastic"):
        raise UsageError(f"rounding: expected 'nearest' or 'stochastic', got {rounding!r}")

    async def hook(bucket: GradientBucket) -> Values:
        """Return the mean of a bucket that travels as bfloat16, in the bucket's dtype."""
        check_floats(bucket, "bfloat16")
        values, random = bucket.buffer, bucket.rng
        if rounding == "nearest":
            sent = await run_on_hook_stream(bucket, np.ndarray.astype, values, ml_dtypes.bfloat16, name="to bfloat16")
            means = await mean_over_ranks(bucket, sent)
        else:
            sent = await run_on_hook_stream(
                bucket, lambda: add_padding(bucket, round_randomly(values, random)), name="to bfloat16"
            )
            means = await mean_of_pieces(bucket, sent, partial(_stochastic_mean, random=random))
        return await run_on_hook_stream(
            bucket, np.ndarray.astype, means[: values.size], values.dtype, name="from bfloat16"
        )

    return hook


def round_randomly(values: Values, random: np.random.Generator) -> Values:
    """Round at random to one of the two neighbours in bfloat16, more often to the nearer one: the mean error is 0.

    Args:
        values: (n,) floats.
        random: Generator from which 16 bits are drawn for each value.

    Returns:
        (n,) bfloat16. Values that are exact in bfloat16 stay; finite values beyond its range become its largest.
    """
    # bfloat16 is the upper half of a float32. A random 16-bit number, added to the lower half, carries into the upper
    # half with the probability (lower half) / 2**16.
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    chance = np.frombuffer(random.bytes(2 * bits.size), np.uint16)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = np.minimum((magnitude + chance) >> np.uint32(16), _LARGEST)
    rounded |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    result: Values = rounded.astype(np.uint16).view(ml_dtypes.bfloat16)
    # Infinities and NaN: the sum above has changed their bits.
    special = np.flatnonzero(magnitude >= _INFINITE)
    result[special] = values[special].astype(ml_dtypes.bfloat16)
    return result


def _stochastic_mean(pieces: Values, random: np.random.Generator) -> Values:
    """Return the mean of (ranks, elements) pieces of bfloat16, added in float32 and rounded at random to bfloat16."""
    total: Floats = pieces[0].astype(np.float32)
    for piece in pieces[1:]:
        total += piece.astype(np.float32)
    total /= np.float32(len(pieces))
    return round_randomly(total, random)


_TOP = float(np.finfo(np.float16).max)


def float16() -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that sends gradients as float16, which halves the bytes of float32; additions are in float32.

    11 bits of each gradient are kept. All gradients of a bucket are multiplied with one power of two, which follows
    from the largest gradient on any rank: to find it takes one more collective, of 8 bytes, before the gradients are
    sent. No finite gradient overflows, so no step has to be skipped; infinities and NaN stay. Gradients below 2**-29 of
    the largest lose bits, those below 2**-40 become 0.
    """

    async def hook(bucket: GradientBucket) -> Values:
        """Return the mean of a bucket that travels as float16 with one scale, in the bucket's dtype."""
        check_floats(bucket, "float16")
        largest = await largest_of_ranks(bucket)
        sent = await run_on_hook_stream(bucket, _scale_values, bucket.buffer, largest, name="to float16")
        means = await mean_over_ranks(bucket, sent)
        return await run_on_hook_stream(
            bucket, _unscale_values, means, largest, bucket.buffer.dtype, name="from float16"
        )

    return hook


def _scale_values(values: Values, largest: Values) -> Values:
    """Return the values as float16, scaled so that `largest`, (1,), the largest magnitude on any rank, fits."""
    return (values.astype(np.float32) * np.float32(power_of_two_scale(largest, _TOP))).astype(np.float16)


def _unscale_values(values: Values, largest: Values, dtype: np.dtype[np.generic]) -> Values:
    """Return received values divided by their scale, in the bucket's dtype; see `_scale_values`."""
    return (values.astype(np.float32) * np.float32(1.0 / power_of_two_scale(largest, _TOP))).astype(dtype, copy=False)
