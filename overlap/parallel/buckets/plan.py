"""Plans of buckets, the gradients that travel together, and the argument of hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...defaults import FIRST_BUCKET_BYTES
from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank

if TYPE_CHECKING:
    from ..tree import Array, Site

BUCKET_BYTES = 25 << 20
"""As in PyTorch DDP (torch/nn/parallel/distributed.py): a small first bucket starts early, and 25 MiB after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one gradient in its bucket: elements `start` to `stop`, of that shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """One bucket: gradients of one dtype, side by side in one flat buffer."""

    index: int  # In the order in which buckets travel
    dtype: np.dtype[np.generic]  # Dtype of the gradients
    slots: tuple[Slot, ...]  # In the order in which they are expected

    @property
    def size(self) -> int:
        """Number of elements of all gradients."""
        return self.slots[-1].stop

    @property
    def nbytes(self) -> int:
        """Number of bytes of all gradients."""
        return self.size * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the gradients."""
        return tuple(slot.name for slot in self.slots)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the gradients in a flat array of the bucket's size by name, each in its shape."""
        return {slot.name: flat[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots}


def plan_buckets(
    gradients: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]],
    order: Iterable[str],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
    alone_bytes: int | None = FIRST_BUCKET_BYTES,
) -> tuple[BucketPlan, ...]:
    """Divide gradients into buckets.

    A bucket is full with the gradient that makes it `bucket_bytes` (the first one: `first_bytes`) or more. A gradient
    of `alone_bytes` or more has a bucket of its own: company would only delay it.

    Args:
        gradients: Shape and dtype of each, by name.
        order: Names, in the order in which backward has them.
        bucket_bytes: When a bucket is full.
        first_bytes: When the first one is.
        alone_bytes: From which size on a gradient travels alone; None for never.

    Returns:
        The buckets, in the order of their last gradients.
    """
    closed: list[tuple[np.dtype[np.generic], list[str]]] = []
    open_: dict[np.dtype[np.generic], list[str]] = {}

    def nbytes(names: Sequence[str]) -> int:
        """Return the bytes of some gradients."""
        return sum(prod(gradients[name][0]) * gradients[name][1].itemsize for name in names)

    for name in order:
        dtype = gradients[name][1]
        if alone_bytes is not None and nbytes([name]) >= alone_bytes:
            closed.append((dtype, [name]))
            continue
        names = open_.setdefault(dtype, [])
        names.append(name)
        if nbytes(names) >= (bucket_bytes if closed else min(first_bytes, bucket_bytes)):
            closed.append((dtype, open_.pop(dtype)))
    closed += open_.items()
    return tuple(_plan_bucket(index, dtype, names, gradients) for index, (dtype, names) in enumerate(closed))


def plan_by_size(
    gradients: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]], order: Iterable[str], size: int | None
) -> tuple[BucketPlan, ...]:
    """Divide gradients into buckets that are full with `size` bytes; None: by the default rule of `plan_buckets`."""
    if size is None:
        return plan_buckets(gradients, order)
    return plan_buckets(gradients, order, bucket_bytes=size, alone_bytes=None)


def plan_by_dtype(
    gradients: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]], order: Iterable[str]
) -> tuple[BucketPlan, ...]:
    """Put all gradients of a dtype into one bucket."""
    limit = 1 << 62
    return plan_buckets(gradients, order, bucket_bytes=limit, first_bytes=limit, alone_bytes=None)


def _plan_bucket(
    index: int,
    dtype: np.dtype[np.generic],
    names: Sequence[str],
    gradients: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]],
) -> BucketPlan:
    slots, start = [], 0
    for name in names:
        shape = gradients[name][0]
        slots.append(Slot(name=name, start=start, stop=start + prod(shape), shape=shape))
        start += prod(shape)
    return BucketPlan(index=index, dtype=dtype, slots=tuple(slots))


@dataclass(slots=True, kw_only=True, eq=False)
class GradientBucket:
    """One bucket of one step, on one rank: the argument of a hook."""

    rank: Rank  # The rank that it runs on
    # The ranks whose mean it returns. Operations on it take a stream of the bucket's own, so hooks of several buckets
    # may wait and go on in any order.
    group: Group
    index: int  # Index of the bucket, the same on all ranks
    step: int  # Step of the model, from 1
    names: tuple[str, ...]  # Names of the parameters in it
    shapes: tuple[tuple[int, ...], ...]  # Shapes of the parameters, in that order
    buffer: Array  # This rank's gradient: flat, 1-D. The hook may overwrite it; the next step writes it again.
    # How many elements of the mean each rank needs, one rank's behind another's, where none needs all: a hook may
    # return the elements of its rank alone. None if each needs all.
    counts: tuple[int, ...] | None = None
    priority: int = 0  # For its operations; lower is more urgent
    place: Site | None = None  # The line of the program that handed a gradient over last, for `call_site`
    # The hook's own, kept from step to step as long as the bucket lives.
    state: dict[str, Any] = field(default_factory=dict)
    rng: np.random.Generator  # Numbers that differ between ranks, buckets and steps, and are the same from run to run


Hook: TypeAlias = "Callable[[GradientBucket], Awaitable[Array | Future[Array]]]"
"""From a bucket to the mean of its gradient over the group: flat, of the same dtype, and size unless `counts` says."""
