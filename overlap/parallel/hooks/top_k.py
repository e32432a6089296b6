"""Send the largest gradients only, and keep the rest for later steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError
from ...timeline.span import RoleName
from .operations import Floats, Values, beside, check_floats

if TYPE_CHECKING:
    from ..buckets.plan import GradientBucket


def top_k(density: float = 0.01) -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that sends a share of a bucket's gradients, the largest, with error feedback.

    A rank adds the gradients that it does not send to its next ones (`bucket.state["error"]`, float32, as large as the
    bucket): nothing is lost. Karimireddy et al., "Error feedback fixes SignSGD", arXiv:1901.09847. With a learning rate
    that changes, errors of early steps count with the later rate.

    Cost: an entry travels as 8 bytes (place and value) to every other rank, so this pays below a density of about 1 /
    ranks. Finding the largest takes some 10 ns an element.

    Args:
        density: Share of the elements that is sent, above 0 and up to 1; at least one of a bucket.

    Raises:
        UsageError: For another density.
    """
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise UsageError(f"density: expected more than 0, up to 1, got {density!r}")

    async def hook(bucket: GradientBucket) -> Values:
        check_floats(bucket, "top_k")
        entries = max(1, round(density * bucket.buffer.size))
        error = bucket.state.setdefault("error", np.zeros(bucket.buffer.size, np.float32))
        # Not among the arguments, which are read-only: the function changes it.
        sent = await beside(bucket, partial(_largest, error, entries), bucket.buffer, passes=6, name="top k")
        everything = await bucket.group.all_gather(
            sent, priority=bucket.priority, name=RoleName("all_gather", "bucket"), call_site=bucket.place
        )
        return await beside(bucket, _added, everything, bucket.group.size, bucket.buffer, name="add top k")

    return hook


def _largest(error: Floats, entries: int, values: Values) -> Values:
    """Add the error to the values; return places and values of the largest, and leave the others in the error."""
    error += values.astype(np.float32, copy=False)
    where = np.argpartition(np.abs(error), error.size - entries)[error.size - entries :]  # NaN counts as the largest
    where.sort()
    sent = error[where]
    error[where] = 0
    return np.concatenate([where.astype(np.uint32), sent.view(np.uint32)])


def _added(everything: Values, ranks: int, like: Values) -> Values:
    total = np.zeros(like.size, np.float32)
    for where, values in everything.reshape(ranks, 2, -1):  # in the order of ranks; no place comes twice from one
        total[where] += values.view(np.float32)
    total /= np.float32(ranks)
    return total.astype(like.dtype, copy=False)
