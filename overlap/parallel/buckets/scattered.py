"""Buckets of ZeRO: the mean gradient is scattered, each rank updates its part of the weights, and gathers all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...runtime.future import Future
from ...timeline.span import RoleName
from ..memory_work import do_nothing
from ..optimizers import Optimizer
from ..parameters import FlatWeights, Stage
from .bucket import Bucket, BucketContext, scale_gradient
from .plan import BucketPlan

if TYPE_CHECKING:
    from ..tree import Array


def share_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """Return the number of elements of each rank; the first ranks have one more if the size does not divide.

    >>> share_sizes(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(size // ranks + (rank < size % ranks) for rank in range(ranks))


class ScatteredBucket(Bucket):
    """A bucket with the parameters, gradients and optimizer state that a stage of ZeRO keeps on this rank.

    Updates run on a separate compute stream, "optimizer", so that the update of a layer runs while backward goes on
    with other layers. An issued collective locks its arrays long before it uses them. Until then computes must write to
    the same memory; so each operation gets a new view, and only that view is locked.

    Args:
        context: The parts that all buckets of the model use.
        plan: The gradients in the bucket.
        priority: Priority of the bucket's operations.
        stage: Stage of ZeRO.
        optimizer: Updates this rank's part.
        shared: Whether the ranks of one host have one copy of gathered parameters.

    Attributes:
        weights: This rank's part of the parameters, with the optimizer's state of the part. In stages 1 and 2 it is a
            view of `whole`.
        whole: All parameters of the bucket, in stages 1 and 2; None in stage 3.
        grad: All gradients in stage 1; this rank's part of the mean in stages 2 and 3.
        mean_part: Future of this rank's part of the mean gradient of the step that was sent last.
        newest_part: Future of this rank's part of the newest parameters. Before the first update: of the first weights,
            which in stages 1 and 2 are all parameters.
        unused_gathers: Futures of gathers whose results the program did not use, and which may still read this rank's
            part.
    """

    def __init__(
        self,
        context: BucketContext,
        plan: BucketPlan,
        *,
        priority: int,
        stage: Stage,
        optimizer: Optimizer,
        shared: bool,
    ) -> None:
        rank, group = context.rank, context.group
        counts = share_sizes(plan.size, group.size)
        buffer = rank.empty(plan.size, plan.dtype) if stage == 1 else None
        super().__init__(context, plan, priority=priority, buffer=buffer, counts=counts)
        stop = sum(counts[: group.rank + 1])
        part = slice(stop - counts[group.rank], stop)
        self.whole: Array | None = rank.empty(plan.size, plan.dtype) if stage < 3 else None
        flat = None if self.whole is None else self.whole[part]
        self.weights: FlatWeights = FlatWeights(rank, plan, optimizer, part=part, flat=flat)
        self.grad: Array = rank.empty(counts[group.rank], plan.dtype) if buffer is None else buffer
        self.mean_part: Future[Array] | None = None
        self.newest_part: Future[Array]
        self.unused_gathers: list[Future[Any]] = []
        self._optimizer, self._shared = optimizer, shared
        self._counts = None if len(set(counts)) == 1 else counts  # None: equal parts
        self._accumulates = False  # whether `grad` holds a mean that has not been in an update
        self._views = None if self.whole is None else self._read_only_views(self.whole)
        self._scatters = rank.stream(f"scatters of {group.name}")
        self._gathers = rank.stream(f"gathers of {group.name}")

    # -- operations ------------------------------------------------------------------------------------------------

    def issue_first_copy(self, first: Array | Future[Array]) -> None:
        """Issue the copy of the first parameters into this rank's memory, and set `newest_part` to its future.

        Args:
            first: All first parameters of the bucket, flat.
        """
        self.newest_part = self._work.compute(
            self.copy_first_parameters,
            first,
            name="first weights",
            moved_bytes=2 * self.plan.nbytes,
            stream="optimizer",
        )

    @property
    def newest_view(self) -> Array:
        """A new view of the parameters on this rank: all of them in stages 1 and 2, else this rank's part."""
        return self.weights.flat[:] if self.whole is None else self.whole[:]

    def _buffer_free_future(self) -> object:
        """Return the future of the last update, which runs on another stream and may still read the buffer."""
        return self.newest_part

    def send(self, step: int, after: Future[Array] | None, *, accumulates: bool) -> None:
        """Issue the packing of the gradients, with zeros for missing ones, and the scatter of their mean.

        Args:
            step: Step of the model, from 1.
            after: A future that the packing waits for; None: no wait.
            accumulates: Whether, in stages 2 and 3, more micro-batches follow before the update: their means are added
                up.
        """
        added, self._accumulates = self._accumulates, accumulates
        packed = self._issue_packing(step, [after, self._buffer_free_future()], lambda flat: flat[:])
        if added or accumulates:
            self.mean_part = self._work.compute(
                partial(self._add_to_gradient, added),
                # `out=None`, new memory: `grad` holds the sum of earlier micro-batches.
                self._issue_scatter(step, packed, None),
                name="add",
                moved_bytes=3 * self.grad.nbytes,
                stream="optimizer",
            )
        else:
            # In stages 2 and 3 (no buffer), `grad` is memory for this rank's part of the mean. In stage 1 `grad` is the
            # buffer of all gradients, which the scatter reads.
            keeps_part = self._buffer is None and self._work.real
            self.mean_part = self._issue_scatter(step, packed, self.grad[:] if keeps_part else None)

    def _issue_scatter(self, step: int, packed: Future[Array], out: Array | None) -> Future[Array]:
        """Issue the mean over the group; return a future of this rank's part, in `out` or, if None, in new memory."""
        scatter = self._group.reduce_scatter
        return self._issue_mean(
            packed, step, scatter, "scatter bucket", out=out, counts=self._counts, stream=self._scatters
        )

    def issue_update(self, step: int, factors: Sequence[Future[object]]) -> None:
        """Issue the optimizer's step on this rank's part, with the mean that was sent last times these factors.

        The update waits for the gathers in `unused_gathers`, and empties that list. `newest_part` becomes its future.

        Args:
            step: Step of the model, from 1.
            factors: Futures of numbers that the gradient is multiplied with.
        """
        self.newest_part = self._work.compute(
            partial(self._update_rank_part, step),
            self.mean_part,
            list(factors),
            # These gathers still read this rank's part: the update must not write it before they have ended.
            *self.unused_gathers,
            name="update",
            role="update",
            moved_bytes=2 * sum(array.nbytes for array in self.weights.arrays()) + self.weights.flat.nbytes,
            stream="optimizer",
        )
        self.is_sent = False
        self.unused_gathers.clear()

    def gather_parameters(self, *, behind_computes: bool = False) -> Future[Array]:
        """Issue the gather of all parameters after the newest update; return a future of the flat parameters.

        Args:
            behind_computes: Whether the gather starts only when all computes that were issued so far on the default
                compute stream have run.
        """
        part = self.newest_part
        if behind_computes:
            # A compute that changes nothing: it runs when all computes before it have run.
            run = self._work.compute(lambda: self.weights.flat[:], name="room")
            if not part.done:  # wait for both
                run = self._work.compute(lambda _, part: part, run, part, name="room", stream="room")
            part = run
        return self._issue_gather(part)

    def issue_end_of_gather(self, parameters: Future[dict[str, Array]]) -> Future[None]:
        """Return a future that is done when the gather of these parameters is, but does not keep them in memory."""
        return self._work.compute(do_nothing, parameters, name="room")

    def _issue_gather(self, part: Array | Future[Array]) -> Future[Array]:
        """Issue the gather of all parameters, flat, from this rank's part, or a future of it."""
        # In a group of one, this rank's part is all parameters.
        if isinstance(part, Future) and self._group.size == 1:
            return part
        return self._group.all_gather(
            part,
            out=None if self.whole is None or not self._work.real else self.whole[:],
            counts=self._counts,
            shared=self._shared,
            priority=self._priority,
            stream=self._gathers,
            name=RoleName(f"gather bucket {self.plan.index}", "bucket"),
            call_site=self.site,
        )

    def parameters_by_name(self, whole: Future[Array]) -> Future[dict[str, Array]]:
        """Issue a compute that returns gathered parameters by name, after all computes issued so far."""
        return self._work.compute(self._gathered_views, whole, name="open")

    def means_and_slices(self) -> Iterator[tuple[Future[Array], list[tuple[str, slice]]]]:
        """Yield the future of this rank's part of the mean, and a list of (parameter, slice of that part)."""
        assert self.mean_part is not None, "the step has sent it"
        yield self.mean_part, [(slot.name, place) for slot, place in self.weights.slots_in_part()]

    # -- on compute streams ----------------------------------------------------------------------------------------

    def copy_first_parameters(self, flat: Array) -> Array:
        """Copy the initial parameters into this rank's memory, and return that memory.

        In a world without data (shapes only) nothing is copied.

        Args:
            flat: All parameters of the bucket; in stage 3 only this rank's part of them is copied.
        """
        newest = self.newest_view
        if self._work.real:
            newest[:] = flat[self.weights.part] if self.whole is None else flat
        return newest

    def _add_to_gradient(self, added: bool, part: Array) -> Array:
        """Write this rank's part of the mean into `grad`, or add it if `added`; return `grad`."""
        if not self._work.real:
            return self.grad
        kept = self.grad[:]
        if added:
            kept += part
        else:
            kept[:] = part
        return kept

    def _update_rank_part(self, step: int, gradient: Array, factors: Sequence[float | None], *_: Array) -> Array:
        """Let the optimizer make a step on this rank's part of the parameters; return the part.

        In a world without data nothing changes. Of the factors of the gradient, None counts as 1. The last arguments
        are results of gathers that had to end first, and are not used.
        """
        flat = self.weights.flat[:]
        if self._work.real and flat.size:
            self._optimizer.update(flat, scale_gradient(gradient, factors), self.weights.state, step)
        return flat

    def _gathered_views(self, whole: Array) -> dict[str, Array]:
        """Return the gathered parameters by name, read-only.

        In stages 1 and 2 the gather has written into `self.whole`: then the views of that are returned.
        """
        return self._read_only_views(whole) if self._views is None else self._views

    def _read_only_views(self, flat: Array) -> dict[str, Array]:
        views = self.plan.views(flat)
        for view in views.values():
            view.setflags(write=False)
        return views
