"""Buckets of data parallel models: every rank gets the mean of all gradients and updates all weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ...runtime.future import Future
from ...runtime.stream import Stream
from ..parameters import Parameters
from .bucket import Bucket, BucketContext, scale_gradient
from .gradients import blame_rank
from .plan import BUCKET_BYTES, BucketPlan

if TYPE_CHECKING:
    from ..tree import Array

# Parts of a large last gradient: only the last quarter of its update is exposed; more parts would cost latency.
_PARTS = 4


class AveragedBucket(Bucket):
    """A bucket of which every rank receives the whole mean.

    The bucket has one buffer for all steps: gradients are packed into it, and their mean replaces them there. One is
    enough, because the compute stream runs in order: the gradients of a step are packed after the update of the
    previous step, and that update has waited for the mean in the buffer.

    Args:
        context: The parts that all buckets of the model use.
        plan: The gradients in the bucket.
        priority: Priority of its operations.
        stream: Stream of its operations.
        parameters: The weights of the model.
        comes_last: Whether the bucket is sent last, so that nothing hides its update. If it holds a single large
            gradient, this is then cut into parts, and only the update of the last part is exposed.

    Attributes:
        parts: Slices of the buffer, each of which is sent as an operation of its own.
        mean_futures: The mean over the group of each part, as a future, for the step that was sent last.
        applied_steps: The step that was last applied to each part, by the part's first element. A part that was never
            updated has no entry.
    """

    def __init__(
        self,
        context: BucketContext,
        plan: BucketPlan,
        *,
        priority: int,
        stream: Stream,
        parameters: Parameters,
        comes_last: bool = False,
    ) -> None:
        self._flat: Array = context.rank.empty(plan.size, plan.dtype, common=True)
        super().__init__(context, plan, priority=priority, buffer=self._flat)
        self.mean_futures: list[Future[Array]] = []
        self.applied_steps: dict[int, int] = {}
        self._stream, self._parameters, self._runs = stream, parameters, parameters.runs_of_bucket(plan)
        self._sent_step = self._updated_step = 0  # step that was sent last, and step that was updated last
        cut = comes_last and self._has_single_gradient and self._group.size > 1
        self.parts: list[slice] = _part_slices(plan) if cut else [slice(0, plan.size)]
        # The update reads the mean anyway, so looking for NaN in it is free. If one is found, the ranks exchange over
        # `_blame_stream` whose gradient it was.
        self._checks_mean = self._has_single_gradient and context.rank.clock == "real"
        self._blame_stream = self._group.on(context.rank.stream(f"blame of {self._group.name}"))
        self._unchecked_gradient: Array | None = None  # this rank's gradient, if it has not been checked

    def send(self, step: int) -> None:
        """Issue the packing of the gradients, with zeros for missing ones, and the mean of each part.

        Args:
            step: Step of the model, from 1.
        """
        assert not self.is_update_due, "an update reads the buffer first"
        views = [self._flat[part] for part in self.parts]  # views for this step: the last step's may be locked
        packed = self._issue_packing(step, None, partial(self._parts_of_gradients, views))
        self.mean_futures = [
            self._issue_mean(packed[index], step, self._group.all_reduce, "bucket", out=view, stream=self._stream)
            for index, view in enumerate(views)
        ]
        self._sent_step = step

    @property
    def is_update_due(self) -> bool:
        """Whether gradients were sent whose update has not been issued."""
        return self._updated_step != self._sent_step

    def issue_update(self, *factors: object) -> Future[dict[str, Array]]:
        """Issue the update by the mean of the step that was sent last, times all `factors`; return its future.

        Args:
            factors: Futures of numbers that the gradient is multiplied with; None counts as 1.

        Returns:
            A future of the weights of the whole model by name, which ends when all parts of this bucket are updated.
        """
        # set at the issue, not when the update has run: it must not be issued twice
        self._updated_step = self._sent_step
        moved_bytes = self._parameters.bytes_moved_by_update(self.plan) / len(self.parts)
        for part, arrived in zip(self.parts, self.mean_futures, strict=True):
            apply = partial(self._update_or_blame_rank, self._sent_step, part)
            newest = self._work.compute(apply, arrived, *factors, name="update", role="update", moved_bytes=moved_bytes)
        return newest  # the updates of all parts run in order on the compute stream, so the last one ends last

    def means_and_slices(self) -> Iterator[tuple[Future[Array], list[tuple[str, slice]]]]:
        """Yield, for each part, the future of its mean and a list of (parameter, slice of the mean).

        A bucket that travels in several parts has one parameter, so each part holds elements of that one.
        """
        slots = [(slot.name, slice(slot.start, slot.stop)) for slot in self.plan.slots]
        for part, mean in zip(self.parts, self.mean_futures, strict=True):
            yield mean, slots if len(self.parts) == 1 else [(slots[0][0], slice(0, part.stop - part.start))]

    # -- on the compute stream -------------------------------------------------------------------------------------

    def _parts_of_gradients(self, views: list[Array], flat: Array) -> list[Array]:
        """Return the parts of the packed gradients: `views` of the buffer if they lie there, else slices of `flat`."""
        return views if flat is self._flat else [flat[part] for part in self.parts]

    def _check_finite(self, flat: Array, step: int) -> None:
        """Refuse gradients that are not finite; skip the check where `update_part` checks their mean instead.

        That check needs the gradient to find out whose it was, so the gradient is remembered until the mean has come.
        """
        # In the buffer, the mean overwrites the gradient.
        stays = flat is not self._flat or self._group.size == 1
        self._unchecked_gradient = flat if self._checks_mean and stays else None
        if self._unchecked_gradient is None:
            super()._check_finite(flat, step)

    def _update_or_blame_rank(self, step: int, part: slice, reduced: Array, *factors: float | None) -> dict[str, Array]:
        """Update the weights of one part by the mean `reduced` times `factors`; return the model's weights by name.

        In a world without data nothing changes. The part is a slice of the bucket; of the factors, None counts as 1.

        Raises:
            NonFiniteError: On all ranks: a rank had a gradient that is not finite.
            UsageError: On all ranks: all gradients were finite, and their sum is not.
        """
        if not self._work.real:
            return self._parameters.views
        if not self.update_part(step, part, reduced, *factors):
            # The mean is checked only where the bucket has one gradient.
            [(name, view)] = self.views.items()
            blame_rank(self._blame_stream, name, self._unchecked_gradient, view, step, self.site)
        if part.stop == self.plan.size:
            self._unchecked_gradient = None
        return self._parameters.views

    def update_part(self, step: int, part: slice, reduced: Array, *factors: float | None) -> bool:
        """Update the weights of one part, and record the step in `applied_steps`.

        Arguments: see `_update_or_blame_rank`.

        Returns:
            False if the mean was found not to be finite: then the part is updated incompletely, or not at all. True
            otherwise; only a bucket with a single gradient is checked here.
        """
        runs = self._runs
        if len(self.parts) > 1:
            # A bucket that travels in parts has one parameter, and so one run: (slice of weights, slice of bucket).
            begin = runs[0][0].start
            runs = [(slice(begin + part.start, begin + part.stop), slice(0, part.stop - part.start))]
        gradient = scale_gradient(reduced, factors)
        finite = self._parameters.apply_gradient(self.plan.dtype, runs, gradient, step, check=self._checks_mean)
        self.applied_steps[part.start] = step
        return finite


def _part_slices(plan: BucketPlan) -> list[slice]:
    """Return the slices of a bucket that travel one by one: up to `_PARTS`, of `BUCKET_BYTES` or more each."""
    count = max(1, min(_PARTS, plan.nbytes // BUCKET_BYTES))
    ends = [plan.size * (index + 1) // count for index in range(count)]
    return [slice(start, stop) for start, stop in pairwise([0, *ends])]
