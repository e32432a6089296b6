"""Plans of buckets, the gradients that travel together, and the argument of hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
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
"""25 MiB, after a smaller first bucket that starts early, as in PyTorch DDP (torch/nn/parallel/distributed.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one gradient in a bucket: elements `start` to `stop` (exclusive), of shape `shape`."""

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
        """Return a view of each gradient in a flat array of the bucket's size, by name, with the gradient's shape."""
        return {slot.name: flat[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots}


Forms: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
"""Shape and dtype of each gradient, by name."""


def plan_buckets(
    gradients: Forms,
    order: Iterable[str],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
    alone_bytes: int | None = FIRST_BUCKET_BYTES,
) -> tuple[BucketPlan, ...]:
    """Divide gradients into buckets.

    A bucket has gradients of one dtype. It is full as soon as they have `bucket_bytes` or more; the first bucket is
    full with `first_bytes`. A gradient of `alone_bytes` or more gets a bucket of its own, because other gradients would
    only delay it.

    Args:
        gradients: Shape and dtype of each gradient, by name.
        order: Names, in the order in which backward computes the gradients.
        bucket_bytes: Size from which on a bucket is full.
        first_bytes: Size from which on the first bucket is full.
        alone_bytes: Size from which on a gradient travels alone; None: no gradient does.

    Returns:
        The buckets in the order in which they became full; then, for each dtype, the bucket that did not become full,
        in the order of their first gradients. `index` counts in this order.
    """
    # Buckets that are full, and the one that is being filled of each dtype, as names.
    closed: list[tuple[np.dtype[np.generic], list[str]]] = []
    open_: dict[np.dtype[np.generic], list[str]] = {}

    def nbytes(names: Sequence[str]) -> int:
        """Return the bytes of some gradients."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in map(gradients.__getitem__, names))

    for name in order:
        _, dtype = gradients[name]
        if alone_bytes is not None and nbytes([name]) >= alone_bytes:
            closed.append((dtype, [name]))
            continue
        names = open_.setdefault(dtype, [])
        names.append(name)
        if nbytes(names) >= (bucket_bytes if closed else min(first_bytes, bucket_bytes)):
            closed.append((dtype, open_.pop(dtype)))
    # Buckets that did not become full.
    closed += open_.items()
    plans = []
    for index, (dtype, names) in enumerate(closed):
        shapes = [gradients[name][0] for name in names]
        bounds = pairwise(accumulate(map(prod, shapes), initial=0))
        slots = [
            Slot(name=name, start=start, stop=stop, shape=shape)
            for name, shape, (start, stop) in zip(names, shapes, bounds, strict=True)
        ]
        plans.append(BucketPlan(index=index, dtype=dtype, slots=tuple(slots)))
    return tuple(plans)


def plan_buckets_by_size(gradients: Forms, order: Iterable[str], size: int | None) -> tuple[BucketPlan, ...]:
    """Divide gradients into buckets that are full with `size` bytes; a large gradient may share a bucket with others.

    The first bucket is full with `FIRST_BUCKET_BYTES` if that is less.

    Args:
        gradients: Shape and dtype of each gradient, by name.
        order: Names, in the order in which backward computes the gradients.
        size: Bytes from which on a bucket is full; None: the default rule of `plan_buckets`.
    """
    if size is None:
        return plan_buckets(gradients, order)
    return plan_buckets(gradients, order, bucket_bytes=size, alone_bytes=None)


def plan_buckets_by_dtype(gradients: Forms, order: Iterable[str]) -> tuple[BucketPlan, ...]:
    """Return one bucket for each dtype, with all gradients of that dtype in the given order."""
    # More bytes than any model has: no bucket becomes full.
    limit = 1 << 62
    return plan_buckets(gradients, order, bucket_bytes=limit, first_bytes=limit, alone_bytes=None)


@dataclass(slots=True, kw_only=True, eq=False)
class GradientBucket:
    """One bucket of one step, on one rank: the argument of a hook."""

    rank: Rank  # The rank that the hook runs on
    # The ranks whose gradients are averaged. Operations of this group use a stream that only this bucket has, so the
    # hooks of several buckets may issue and wait in any order.
    group: Group
    index: int  # Index of the bucket, the same on all ranks
    step: int  # Step of the model, from 1
    names: tuple[str, ...]  # Names of the parameters in it
    shapes: tuple[tuple[int, ...], ...]  # Shapes of the parameters, in that order
    buffer: Array  # This rank's gradients: flat, 1-D. The hook may overwrite them; the next step packs new ones.
    # Number of elements of the mean that each rank needs: the first `counts[0]` elements are for rank 0 of the group,
    # the next `counts[1]` for rank 1, and so on. A hook may then return the elements of its rank alone. None: each rank
    # needs all elements.
    counts: tuple[int, ...] | None = None
    priority: int = 0  # Priority for the hook's operations; lower is more urgent
    # The line of the program that handed a gradient over last: pass it to operations as `call_site`.
    place: Site | None = None
    # Values that the hook stores from step to step, as long as the bucket exists.
    state: dict[str, Any] = field(default_factory=dict)
    rng: np.random.Generator  # Numbers that differ between ranks, buckets and steps, and are the same from run to run


Hook: TypeAlias = "Callable[[GradientBucket], Awaitable[Array | Future[Array]]]"
"""Async function that returns the mean of a bucket over its group: a flat array of the buffer's dtype and size.

With `counts`, this rank's elements are enough. A future of the array may be returned as well.
"""
