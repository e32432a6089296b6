"""Building blocks of hooks: computes that run in parallel to backward, exchange of pieces, scales of narrow types."""

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


async def run_on_hook_stream(
    bucket: GradientBucket, fn: Callable[..., T], *args: object, passes: int = 2, name: str
) -> T:
    """Run a function on the compute stream of hooks, in parallel to backward, and return its result.

    Arrays among the arguments are read-only while it runs. Pass values, not futures: the hooks of all buckets of a rank
    share this stream, and a compute that waited for its bucket's transfer would delay all other buckets.

    Args:
        bucket: The bucket of the hook.
        fn: A plain function.
        args: Its arguments.
        passes: Number of times that it reads or writes memory of the bucket's size: the cost on the virtual clock.
        name: Name for the timeline.
    """

    def call_without_warnings(*args: object) -> T:
        """Call the function without numpy's warnings."""
        with np.errstate(all="ignore"):  # an infinite gradient is the program's business, not a warning of ours
            return fn(*args)

    return await bucket.rank.compute(
        call_without_warnings,
        *args,
        name=RoleName(name, "library"),
        bytes_moved=passes * bucket.buffer.nbytes,
        stream=_STREAM,
        call_site=bucket.place,
    )


def check_floats(bucket: GradientBucket, hook: str) -> None:
    """Refuse a bucket of gradients that are no floating-point numbers.

    Raises:
        UsageError: The message names the hook, the bucket and its first parameters.
    """
    if bucket.buffer.dtype.kind != "f" and bucket.buffer.dtype.name != "bfloat16":
        names = ", ".join(bucket.names[:3]) + (", ..." if len(bucket.names) > 3 else "")
        raise UsageError(
            f"hook: {hook} expected gradients of floats, got {bucket.buffer.dtype} in bucket {bucket.index} ({names}); "
            "leave out the hook"
        )


def add_padding(bucket: GradientBucket, values: Values) -> Values:
    """Return the values followed by zeros, so that they divide into equal pieces for the ranks of the group.

    If the bucket has `counts`, pieces may differ in size, and the values are returned unchanged.
    """
    # Elements up to the next multiple of the size: -10 % 4 is 2.
    missing = -len(values) % bucket.group.size if bucket.counts is None else 0
    return values if not missing else np.concatenate([values, np.zeros(missing, values.dtype)])


async def mean_of_pieces(bucket: GradientBucket, narrowed: Values, add: Callable[[Values], Values]) -> Values:
    """Average a bucket whose values are sent in a narrow type, but added by `add`, which may use a wider one.

    Each rank receives one piece of the bucket from all ranks, averages these pieces, and the averaged pieces are
    gathered. Every rank gets the same bits. If the bucket has `counts`, each rank needs its piece alone, and nothing is
    gathered.

    Args:
        bucket: The bucket of the hook.
        narrowed: This rank's values in the type in which they are sent: one piece for each rank, side by side.
        add: Function from (ranks, elements) pieces to their mean, (elements,), both in the narrow type.

    Returns:
        The mean in the narrow type: all of it, or, if the bucket has `counts`, this rank's part.
    """
    group, priority, counts = bucket.group, bucket.priority, bucket.counts
    # counts[i][j]: elements that rank i sends to rank j. All ranks send the same numbers.
    table = None if counts is None else [list(counts)] * group.size
    pieces = await group.all_to_all(
        narrowed, counts=table, priority=priority, name=RoleName("pieces", "bucket"), call_site=bucket.place
    )
    shape = group.size, len(narrowed) // group.size if counts is None else counts[group.rank]
    mean = await run_on_hook_stream(bucket, lambda: add(pieces.reshape(shape)), name="add pieces")
    if counts is not None:
        return mean
    return await group.all_gather(mean, priority=priority, name=RoleName("means", "bucket"), call_site=bucket.place)


async def mean_over_ranks(bucket: GradientBucket, narrowed: Values) -> Values:
    """Return the mean of the values of all ranks, or, if the bucket has `counts`, this rank's part of it.

    Narrow types are added in float32.

    Args:
        bucket: The bucket of the hook, whose group, counts and priority are used.
        narrowed: This rank's values, flat, in the type in which they travel; the mean is of this type.
    """
    if bucket.counts is None:
        return await bucket.group.all_reduce(
            narrowed, op="mean", priority=bucket.priority, name=RoleName("all_reduce", "bucket"), call_site=bucket.place
        )
    return await bucket.group.reduce_scatter(
        narrowed, op="mean", counts=bucket.counts, priority=bucket.priority, call_site=bucket.place
    )


_POWERS = 126  # float32 has 2**126 and 2**-126 among its normal numbers


async def largest_of_ranks(bucket: GradientBucket) -> Values:
    """Return the largest magnitude in the bucket on any rank, (1,) float64. Cost: one collective of 8 bytes."""
    largest = await run_on_hook_stream(bucket, _largest_magnitude, bucket.buffer, passes=1, name="largest")
    return await bucket.group.all_reduce(
        largest, op="max", priority=bucket.priority, name=RoleName("largest of all", "bucket"), call_site=bucket.place
    )


def power_of_two_scale(largest: Values, top: float) -> float:
    """Return the power of two that scales `largest` to more than half of `top`, and to at most `top`.

    Values can be multiplied with it without rounding. It is 1.0 if `largest` is 0, infinite or NaN.

    Args:
        largest: (1,) The largest magnitude.
        top: The largest value of the narrow type.
    """
    value = float(largest[0])
    if value == 0 or not isfinite(value):
        return 1.0
    (share, exponent), (share_of_top, top_exponent) = frexp(value), frexp(top)
    # value = share * 2**exponent with 0.5 <= share < 1, and so for `top`. One power less if the share of `value` is
    # greater, as it would pass `top`.
    power = top_exponent - exponent - (share > share_of_top)
    return ldexp(1.0, max(-_POWERS, min(power, _POWERS)))


def _largest_magnitude(values: Values) -> Values:
    """Return the largest absolute value, (1,) float64; infinity if a value is NaN, 0 if there are no values."""
    if not values.size:
        return np.zeros(1)
    largest = max(float(values.max()), -float(values.min()))
    return np.array([largest if not np.isnan(largest) else np.inf])
