"""Buckets that ranks share (ZeRO): the mean is scattered, each rank updates its part, and weights are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...runtime.future import Future
from ...timeline.span import RoleName
from ..memory_work import nothing
from ..optimizers import Optimizer
from ..parameters import FlatWeights, Stage
from .bucket import Bucket, BucketContext, scale_gradient
from .plan import BucketPlan

if TYPE_CHECKING:
    from ..tree import Array


def shares(size: int, ranks: int) -> tuple[int, ...]:
    """Return the number of elements of each rank: equal parts of `size`, with one more for the first ranks."""
    return tuple(size // ranks + (rank < size % ranks) for rank in range(ranks))


class ScatteredBucket(Bucket):
    """A bucket's parameters, gradients and optimizer state, as far as a stage of ZeRO leaves them on this rank.

    Updates have a compute stream of their own, "optimizer": the update of a layer that is far behind backward runs
    while backward goes on. Computes write through views of their own: a collective that has been issued locks the
    arrays that it was given, long before it uses them.

    Args:
        context: The parts that all buckets of the model use.
        plan: Its gradients.
        priority: Of its operations.
        stage: Of ZeRO.
        optimizer: Updates this rank's part.
        shared: Whether ranks of one host have gathered parameters together.

    Attributes:
        weights: This rank's part of the parameters, in stages 1 and 2 a view of `whole`, and the optimizer's state.
        whole: All parameters, in stages 1 and 2.
        grad: All gradients in stage 1, this rank's part in stages 2 and 3.
        reduced: This rank's part of the mean gradient, of the step that was sent last.
        updated: This rank's part of the newest parameters; in stages 1 and 2 all parameters to begin with.
        unused: Gathers whose result was not asked for, but which may still read this rank's part.
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
        counts = shares(plan.size, group.size)
        buffer = rank.empty(plan.size, plan.dtype) if stage == 1 else None
        super().__init__(context, plan, priority=priority, buffer=buffer, counts=counts)
        stop = sum(counts[: group.rank + 1])
        part = slice(stop - counts[group.rank], stop)
        self.whole: Array | None = rank.empty(plan.size, plan.dtype) if stage < 3 else None
        flat = None if self.whole is None else self.whole[part]
        self.weights: FlatWeights = FlatWeights(rank, plan, optimizer, part=part, flat=flat)
        self.grad: Array = rank.empty(counts[group.rank], plan.dtype) if buffer is None else buffer
        self.reduced: Future[Array] | None = None
        self.updated: Future[Array]
        self.unused: list[Future[Any]] = []
        self._optimizer, self._shared = optimizer, shared
        self._counts = None if len(set(counts)) == 1 else counts
        self._accumulates = False  # whether `grad` holds a mean that has not been in an update
        self._views = None if self.whole is None else self._read_only_views(self.whole)
        self._scatters = rank.stream(f"scatters of {group.name}")
        self._gathers = rank.stream(f"gathers of {group.name}")

    # -- operations ------------------------------------------------------------------------------------------------

    def begin(self, first: Array | Future[Array]) -> None:
        """Issue the copy of the first parameters into place."""
        self.updated = self._work.compute(
            self.fill, first, name="first weights", moved_bytes=2 * self.plan.nbytes, stream="optimizer"
        )

    @property
    def newest(self) -> Array:
        """A new view of the parameters on this rank: all of them in stages 1 and 2, else this rank's part."""
        return self.weights.flat[:] if self.whole is None else self.whole[:]

    def _buffer_free(self) -> object:
        return self.updated

    def send(self, step: int, after: Future[Array] | None, *, keeps: bool) -> None:
        """Pack the gradients, as soon as `after` is done, and scatter their mean.

        Zeros stand for missing gradients.

        Args:
            step: Step of the model, from 1.
            after: A future to wait for.
            keeps: Whether, in stages 2 and 3, the mean is added to those of more micro-batches before the update.
        """
        added, self._accumulates = self._accumulates, keeps
        packed = self._issue_packing(step, [after, self._buffer_free()], lambda flat: flat[:])
        if added or keeps:
            self.reduced = self._work.compute(
                partial(self._add_to_gradient, added),
                self._issue_scatter(step, packed, None),
                name="add",
                moved_bytes=3 * self.grad.nbytes,
                stream="optimizer",
            )
        else:
            keeps_part = self._buffer is None and self._work.real
            self.reduced = self._issue_scatter(step, packed, self.grad[:] if keeps_part else None)

    def _issue_scatter(self, step: int, packed: Future[Array], out: Array | None) -> Future[Array]:
        """Issue the mean over the group, and return a future of this rank's part, in `out` if that is given."""
        scatter = self._group.reduce_scatter
        return self._issue_mean(
            packed, step, scatter, "scatter bucket", out=out, counts=self._counts, stream=self._scatters
        )

    def update(self, step: int, factors: Sequence[Future[object]]) -> None:
        """Let the optimizer make a step with the gradient that was sent last, times these factors."""
        self.updated = self._work.compute(
            partial(self._update_part, step),
            self.reduced,
            list(factors),
            *self.unused,
            name="update",
            role="update",
            moved_bytes=2 * sum(array.nbytes for array in self.weights.arrays()) + self.weights.flat.nbytes,
            stream="optimizer",
        )
        self.sent = False
        self.unused.clear()

    def gather(self, *, when: bool = False) -> Future[Array]:
        """Return all parameters, flat, after the newest update.

        Args:
            when: Start it only when all that has been issued on the compute stream so far has run.
        """
        part = self.updated
        if when:
            run = self._work.compute(lambda: self.weights.flat[:], name="room")
            part = run if part.done else self._work.compute(_second_argument, run, part, name="room", stream="room")
        return self._issue_gather(part)

    def drop_gathered(self, parameters: Future[dict[str, Array]]) -> Future[None]:
        """Return a future that is done when a gather is, and does not hold its result."""
        return self._work.compute(nothing, parameters, name="room")

    def _issue_gather(self, part: Array | Future[Array]) -> Future[Array]:
        """Issue the gather of all parameters, flat, from this rank's part; in a group of one, return the part."""
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
        """Issue a compute that returns gathered parameters by name, behind all computes that were issued before."""
        return self._work.compute(self._name_parameters, whole, name="open")

    def means(self) -> Iterator[tuple[Future[Array], list[tuple[str, slice]]]]:
        """Yield this rank's part of the mean, and the names and places of the parameters in it."""
        assert self.reduced is not None, "the step has sent it"
        yield self.reduced, [(slot.name, place) for slot, place in self.weights.places()]

    # -- on compute streams ----------------------------------------------------------------------------------------

    def fill(self, flat: Array) -> Array:
        """Copy all parameters, or this rank's part of them, into place."""
        newest = self.newest
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

    def _update_part(self, step: int, gradient: Array, factors: Sequence[float | None], *_: Array) -> Array:
        """Let the optimizer make a step on this rank's part, and return its parameters."""
        flat = self.weights.flat[:]
        if self._work.real and flat.size:
            self._optimizer.update(flat, scale_gradient(gradient, factors), self.weights.state, step)
        return flat

    def _name_parameters(self, whole: Array) -> dict[str, Array]:
        """Return the gathered parameters by name: of `whole` in stages 1 and 2, of the given array in stage 3."""
        if self._views is not None:
            return self._views
        return self._read_only_views(whole)

    def _read_only_views(self, flat: Array) -> dict[str, Array]:
        views = self.plan.views(flat)
        for view in views.values():
            view.setflags(write=False)
        return views


def _second_argument(_: object, part: Array) -> Array:
    """Return `part`: a compute of this function waits for both of its arguments."""
    return part
