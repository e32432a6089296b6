"""One bucket: takes gradients, packs them into one flat array, and issues their mean over the group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ...timeline.span import RoleName
from ..memory_work import MemoryWork
from .gradients import check_gradient, find_gradient_error, is_finite
from .hooked import BucketHook
from .plan import BucketPlan, Hook

if TYPE_CHECKING:
    from ..tree import Array, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketContext:
    """The parts of a model that all its buckets use."""

    rank: Rank  # This rank
    group: Group  # The ranks whose gradients are averaged
    hook: Hook | None  # Takes the place of the collective
    exact: bool  # Whether every gradient is added up in the order of ranks
    work: MemoryWork  # Issues computes that move memory


class Bucket(ABC):
    """A bucket of one model on one rank: planned once, sent in each step.

    Args:
        context: The parts that all buckets of the model use.
        plan: The gradients in the bucket.
        priority: Priority of its operations; lower is more urgent.
        buffer: Memory for all gradients, side by side, reused in each step; None: new memory in each step.
        counts: Number of elements of the mean that each rank needs; None: every rank needs all.

    Attributes:
        plan: The gradients in the bucket.
        unpacked_gradients: Gradients of this step that were handed over and are not packed yet, by name.
        is_sent: Whether the gradients of this step have been sent.
        site: The line of the program that handed a gradient over last.
        views: The places of the gradients in the buffer, by name; empty without a buffer.
        bucket_hook: The hook that computes the mean in place of a collective; None: no hook.
    """

    plan: BucketPlan
    unpacked_gradients: dict[str, object]
    is_sent: bool

    def __init__(
        self,
        context: BucketContext,
        plan: BucketPlan,
        *,
        priority: int,
        buffer: Array | None,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.plan, self.unpacked_gradients, self.is_sent = plan, dict[str, object](), False
        self.site: Site | None = None
        self._sites: dict[str, Site] = {}
        self.views: dict[str, Array] = {} if buffer is None else plan.views(buffer)
        self.bucket_hook: BucketHook | None = None
        if context.hook is not None:
            self.bucket_hook = BucketHook(
                context.hook, context.rank, context.group, plan, priority=priority, counts=counts
            )
        self._context, self._group, self._work = context, context.group, context.work
        self._priority, self._buffer = priority, buffer
        # Then the gradient need not be copied.
        self._has_single_gradient = len(plan.slots) == 1 and context.hook is None
        self._added: set[str] = set()  # parameters with gradients in the buffer that have not been sent
        self._shape_only = None  # in a world without data: an array that stands for all gradients
        if not self._work.real:
            self._shape_only = context.rank.empty(plan.size, plan.dtype) if buffer is None else buffer

    @property
    def is_full(self) -> bool:
        """Whether all gradients of this step were handed over."""
        return len(self.unpacked_gradients) == len(self.plan.slots)

    def _buffer_free_future(self) -> object:
        """Return a future that ends when the buffer may be written; None if the order of computes ensures that.

        Computes that write the buffer take the future as an argument, so they start after its end.
        """
        return None

    @abstractmethod
    def means_and_slices(self) -> Iterator[tuple[Future[Array], list[tuple[str, slice]]]]:
        """Yield each mean of the step that was sent last (a future) and a list of (parameter, slice of the mean)."""

    def store_gradient(self, name: str, gradient: object, site: Site) -> None:
        """Store a gradient of this step.

        Args:
            name: Name of the parameter; it must have had no gradient in this step.
            gradient: The gradient, or a future of it.
            site: The line of the program that passed it, for errors.
        """
        self.unpacked_gradients[name], self._sites[name] = gradient, site

    def add(self, name: str, gradient: object, step: int) -> None:
        """Issue the addition of a gradient to the buffer; the sum is sent with the gradients of a later micro-batch.

        The bucket must have a buffer.

        Args:
            name: Name of the parameter.
            gradient: The gradient, or a future of it.
            step: Step of the model, from 1, for errors.
        """
        add, slot = partial(self._add_gradient_to_buffer, name, name in self._added, step, self.site), self.views[name]
        self._added.add(name)
        self._work.compute(add, self._buffer_free_future(), gradient, name="add", moved_bytes=3 * slot.nbytes)

    def _add_gradient_to_buffer(
        self, name: str, added: bool, step: int, site: Site | None, _waited_for: object, gradient: Array
    ) -> None:
        """Add a gradient to its place in the buffer; the first one of a step, not `added`, overwrites the place.

        `_waited_for` is not used. Raises a `UsageError` if the gradient does not fit its parameter.
        """
        view = self.views[name]
        check_gradient(name, gradient, view.shape, view.dtype, step, site)
        if self._work.real:
            _write_gradient(view, gradient, add=added)

    def _issue_packing(self, step: int, inputs: object, convert: Callable[[Array], object]) -> Future[Any]:
        """Issue the packing of this step's gradients, zeros for missing ones; return a future of `convert(flat)`.

        The packing waits for the futures in `inputs`, whose results are not used.
        """
        sites, added = self._sites, frozenset(self._added)
        self._sites = {}
        # None where no gradient was handed over: the packing uses zeros, or the sum that is in the buffer.
        gradients = [self.unpacked_gradients.pop(name, None) for name in self.plan.names]
        self._added.clear()
        self.is_sent = True
        pack = partial(self._pack_gradients, step, sites, added, convert)
        moved_bytes = 0 if self._has_single_gradient and not added else 2 * self.plan.nbytes
        return self._work.compute(pack, inputs, *gradients, name="pack", role="pack", moved_bytes=moved_bytes)

    def _issue_mean(
        self, packed: Future[Any], step: int, collective: Callable[..., Future[Array]], name: str, **options: Any
    ) -> Future[Array]:
        """Issue the mean over the group, by the hook if there is one, else by `collective`; return its future.

        The future may be of this rank's part of the mean alone. In a group of one without a hook it is `packed` itself.
        `name` is the operation's in the timeline, without the number of the bucket. A hook does not get the `options`.
        """
        if self.bucket_hook is not None:
            return self.bucket_hook.start_hook(packed, step, self.site)
        if self._group.size == 1:
            return packed
        return collective(
            packed,
            op="mean",
            exact=self._context.exact,
            priority=self._priority,
            name=RoleName(f"{name} {self.plan.index}", "bucket"),
            call_site=self.site,
            **options,
        )

    # -- on the compute stream -------------------------------------------------------------------------------------

    def _pack_gradients(
        self,
        step: int,
        sites: Mapping[str, Site],
        added: frozenset[str],
        convert: Callable[[Array], object],
        _waited_for: object,
        *gradients: Array | None,
    ) -> object:
        """Check the gradients of one step, pack them into one flat array, and return what `convert` makes of this.

        A gradient is None if none was handed over: then zeros are packed, or the sum in the buffer for parameters in
        `added`. In a world without data, `convert` gets an array without data. `_waited_for` is not used.

        Raises:
            UsageError: A gradient has another shape than its parameter, or does not fit its dtype.
            NonFiniteError: A gradient is not finite.
        """
        for slot, gradient in zip(self.plan.slots, gradients, strict=True):
            if slot.name in sites:
                check_gradient(slot.name, gradient, slot.shape, self.plan.dtype, step, sites[slot.name])
        if self._shape_only is not None:
            return convert(self._shape_only)
        flat = self._flat_view_of_gradient(gradients[0]) if self._has_single_gradient and not added else None
        if flat is None:
            flat = self._copy_into_buffer(added, gradients)
        self._check_finite(flat, step)
        return convert(flat)

    def _flat_view_of_gradient(self, gradient: Array | None) -> Array | None:
        """Return the bucket's only gradient as a flat view, which can be sent without a copy; None if it needs one."""
        if not isinstance(gradient, np.ndarray) or not gradient.flags.c_contiguous or gradient.dtype != self.plan.dtype:
            return None
        # A gradient that is already in the buffer is sent as the buffer.
        if any(_is_same_memory(gradient, view) for view in self.views.values()):
            return None
        return gradient.reshape(-1)

    def _copy_into_buffer(self, added: frozenset[str], gradients: Iterable[Array | None]) -> Array:
        """Return a flat array with all gradients: the buffer, or new memory if the bucket has none.

        A gradient None stands for zeros. Gradients of parameters in `added` are added to the sum in the buffer.
        """
        buffer, views = self._buffer, self.views
        if buffer is None:
            buffer = np.empty(self.plan.size, self.plan.dtype)
            views = self.plan.views(buffer)
        for name, gradient in zip(self.plan.names, gradients, strict=True):
            if gradient is not None and self._buffer is None:
                views[name][...] = gradient
            elif gradient is not None:
                _write_gradient(views[name], gradient, add=name in added)
            elif name not in added:
                views[name].fill(0)
        return buffer

    def _check_finite(self, flat: Array, step: int) -> None:
        """Refuse gradients that are not finite, with a `NonFiniteError` that names the first of them."""
        if not is_finite(flat):
            raise find_gradient_error(self.plan.views(flat), rank=self._context.rank.rank, step=step, site=self.site)


def scale_gradient(gradient: Array, factors: Iterable[float | None]) -> Array:
    """Return a flat gradient times all factors; None counts as 1."""
    for factor in factors:
        # A new array each time: the mean itself must stay for other uses.
        if factor not in (None, 1.0):
            gradient = gradient * gradient.dtype.type(factor)
    return gradient


def _write_gradient(view: Array, gradient: Array, *, add: bool) -> None:
    """Write a gradient to its place in the buffer, or with `add` add it; skip the copy if it was computed there."""
    if add:
        np.add(view, gradient, out=view, casting="unsafe")
    elif not _is_same_memory(gradient, view):
        view[...] = gradient


def _is_same_memory(gradient: Array, view: Array) -> bool:
    """Whether a gradient is the very memory of its place in the bucket, so that it need not be copied there."""
    return (
        gradient.__array_interface__["data"] == view.__array_interface__["data"]
        and gradient.strides == view.strides
        and gradient.dtype == view.dtype
    )
