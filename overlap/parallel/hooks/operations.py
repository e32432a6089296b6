"""Operations of hooks: computes beside the backward pass, exchange of pieces, scales of narrow types."""

from __future__ import annotations

from collections.abc import Callable
from math import frexp, isfinite, ldexp
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...timeline.span import RoleName

if TYPE_CHECKING:
    from ..buckets.plan import GradientBucket

Floats: TypeAlias = NDArray[np.float32]
Values: TypeAlias = NDArray[Any]
T = TypeVar("T")

_STREAM = "hooks"


async def run_aside(bucket: GradientBucket, fn: Callable[..., T], *args: object, passes: int = 2, name: str) -> T:
    """Compute beside the backward pass; arrays among the arguments are read-only meanwhile.

    They are there, and not futures: all buckets of a rank share one stream, in which none may wait for another's wires.

    Args:
        bucket: The bucket of the hook.
        fn: A plain function.
        args: Its arguments.
        passes: Number of walks over memory of the bucket's size: the cost on the virtual clock.
        name: For the timeline.
    """

    def quietly(*args: object) -> T:
        """Call the function without numpy's warnings."""
        with np.errstate(all="ignore"):  # an infinite gradient is the program's business, not a warning of ours
            return fn(*args)

    return await bucket.rank.compute(
        quietly,
        *args,
        name=RoleName(name, "library"),
        bytes_moved=passes * bucket.buffer.nbytes,
        stream=_STREAM,
        call_site=bucket.place,
    )


def check_floats(bucket: GradientBucket, hook: str) -> None:
    """Refuse a bucket of gradients that are no floating-point numbers.

    Raises:
        UsageError: Naming the hook and the bucket.
    """
    if bucket.buffer.dtype.kind != "f" and bucket.buffer.dtype.name != "bfloat16":
        raise UsageError(
            f"hook: {hook} expected gradients of floats, got {bucket.buffer.dtype} in bucket {bucket.index}; "
            "leave out the hook"
        )


def add_padding(bucket: GradientBucket, values: Values) -> Values:
    """Return the values with zeros behind, so that ranks get equal pieces; as they are if `counts` allows others."""
    missing = -len(values) % bucket.group.size if bucket.counts is None else 0
    return values if not missing else np.concatenate([values, np.zeros(missing, values.dtype)])


async def mean_of_pieces(bucket: GradientBucket, narrowed: Values, add: Callable[[Values], Values]) -> Values:
    """Send each rank its piece of all narrowed buckets, let it add them up, and gather the results.

    Nothing is ever added in a narrow type. Every rank gets the same bits. Where each rank needs its piece alone,
    nothing is gathered.

    Args:
        bucket: Which one.
        narrowed: This rank's values as they travel, cut for the ranks of the group.
        add: Makes the mean of a piece, as it travels, of (ranks, piece) pieces.
    """
    group, priority, counts = bucket.group, bucket.priority, bucket.counts
    table = None if counts is None else [list(counts)] * group.size
    pieces = await group.all_to_all(
        narrowed, counts=table, priority=priority, name=RoleName("pieces", "bucket"), call_site=bucket.place
    )
    shape = group.size, len(narrowed) // group.size if counts is None else counts[group.rank]
    mean = await run_aside(bucket, lambda: add(pieces.reshape(shape)), name="add pieces")
    return (
        mean
        if counts is not None
        else await group.all_gather(mean, priority=priority, name=RoleName("means", "bucket"), call_site=bucket.place)
    )


async def mean(bucket: GradientBucket, narrowed: Values) -> Values:
    """Return the mean of the values of all ranks, or this rank's part of it; narrow types are added in float32."""
    if bucket.counts is None:
        return await bucket.group.all_reduce(
            narrowed, op="mean", priority=bucket.priority, name=RoleName("all_reduce", "bucket"), call_site=bucket.place
        )
    return await bucket.group.reduce_scatter(
        narrowed, op="mean", counts=bucket.counts, priority=bucket.priority, call_site=bucket.place
    )


_POWERS = 126  # float32 has 2**126 and 2**-126 among its normal numbers


async def shared_largest(bucket: GradientBucket) -> Values:
    """Find the largest magnitude in the bucket on any rank: (1,) float64; one collective of 8 bytes."""
    largest = await run_aside(bucket, _largest_magnitude, bucket.buffer, passes=1, name="largest")
    return await bucket.group.all_reduce(
        largest, op="max", priority=bucket.priority, name=RoleName("largest of all", "bucket"), call_site=bucket.place
    )


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


def scale_values(values: Values, scale: float) -> Floats:
    """Return the values as float32, times a power of two."""
    return values.astype(np.float32) * np.float32(scale)


def unscale_values(values: Floats, scale: float, dtype: np.dtype[np.generic]) -> Values:
    """Return scaled values without the scale, in the type of the bucket; `values` may be overwritten."""
    values *= np.float32(1.0 / scale)
    return values.astype(dtype, copy=False)


def _largest_magnitude(values: Values) -> Values:
    """Return the largest absolute value, (1,) float64: infinite if one is NaN, 0 of no values."""
    if not values.size:
        return np.zeros(1)
    largest = max(float(values.max()), -float(values.min()))
    return np.array([largest if not np.isnan(largest) else np.inf])
