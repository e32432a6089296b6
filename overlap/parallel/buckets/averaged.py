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

_PARTS = 4  # of a large last gradient: a quarter of its update is exposed, and more parts would cost latency


class AveragedBucket(Bucket):
    """A bucket whose mean comes back to every rank.

    It has one buffer for good. That is enough, as all that writes it is a compute of this rank: the gradients of a step
    are packed after the update of the step before, which has waited for the mean in the buffer.

    Args:
        context: The parts that all buckets of the model use.
        plan: Its gradients.
        priority: Priority of its operations.
        stream: Stream of its operations.
        parameters: The weights of the model.
        comes_last: Whether nothing hides the update of this bucket: if it is one large gradient, it travels in parts.

    Attributes:
        parts: The parts of the buffer that travel by themselves.
        arrived: The mean over the group, part by part, of the step that was sent last.
        applied: The step that was applied last, by the start of each part.
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
        self.arrived: list[Future[Array]] = []
        self.applied: dict[int, int] = {}
        self._stream, self._parameters, self._runs = stream, parameters, parameters.runs(plan)
        self._step = self._updated = 0  # that was sent last, and updated last
        cut = comes_last and self._alone and self._group.size > 1
        self.parts: list[slice] = _plan_parts(plan) if cut else [slice(0, plan.size)]
        # A look at the mean is free, as the update reads it anyway; if it fails, threads of all ranks ask each other.
        self._checks_mean = self._alone and context.rank.clock == "real"
        self._asking = self._group.on(context.rank.stream(f"blame of {self._group.name}"))
        self._own_gradient: Array | None = None  # this rank's gradient, if it has not been looked at

    def send(self, step: int) -> None:
        """Pack the gradients and issue their mean, part by part, with zeros for missing gradients."""
        assert not self.update_due, "an update reads the buffer first"
        views = [self._flat[part] for part in self.parts]  # views for this step: the last step's may be locked
        packed = self._issue_packing(step, None, partial(self._split_parts, views))
        self.arrived = [
            self._issue_mean(packed[index], step, self._group.all_reduce, "bucket", out=view, stream=self._stream)
            for index, view in enumerate(views)
        ]
        self._step = step

    @property
    def update_due(self) -> bool:
        """Whether an update is due that has not been issued."""
        return self._updated != self._step

    def update(self, *factors: object) -> Future[dict[str, Array]]:
        """Issue the update by the mean of the step that was sent last, times `factors`: numbers or futures of them."""
        self._updated = self._step
        moved_bytes = self._parameters.moved_bytes(self.plan) / len(self.parts)
        for part, arrived in zip(self.parts, self.arrived, strict=True):
            apply = partial(self._update_or_blame, self._step, part)
            newest = self._work.compute(apply, arrived, *factors, name="update", role="update", moved_bytes=moved_bytes)
        return newest

    def means(self) -> Iterator[tuple[Future[Array], list[tuple[str, slice]]]]:
        """Yield the mean of each part, and the names and places of the parameters in it."""
        slots = [(slot.name, slice(slot.start, slot.stop)) for slot in self.plan.slots]
        for part, mean in zip(self.parts, self.arrived, strict=True):
            yield mean, slots if len(self.parts) == 1 else [(slots[0][0], slice(0, part.stop - part.start))]

    # -- on the compute stream -------------------------------------------------------------------------------------

    def _split_parts(self, views: list[Array], flat: Array) -> list[Array]:
        """Return the parts of the packed gradients: the given views if they are in the buffer, else views of `flat`."""
        return views if flat is self._flat else [flat[part] for part in self.parts]

    def _check_finite(self, flat: Array, step: int) -> None:
        """Refuse gradients that are not finite, unless they can be read later: then the mean is checked instead."""
        stays = flat is not self._flat or self._group.size == 1  # else the mean takes its place
        self._own_gradient = flat if self._checks_mean and stays else None
        if self._own_gradient is None:
            super()._check_finite(flat, step)

    def _update_or_blame(self, step: int, part: slice, reduced: Array, *factors: float | None) -> dict[str, Array]:
        """Update one part and return all weights; a mean that is not finite raises the error on all ranks."""
        if not self._work.real:
            return self._parameters.views
        if not self.update_part(step, part, reduced, *factors):
            [(name, view)] = self.views.items()
            blame_rank(self._asking, name, self._own_gradient, view, step, self.site)
        if part.stop == self.plan.size:
            self._own_gradient = None
        return self._parameters.views

    def update_part(self, step: int, part: slice, reduced: Array, *factors: float | None) -> bool:
        """Update the weights of one part; return False if its mean is checked here and is not finite."""
        runs = self._runs
        if len(self.parts) > 1:
            begin = runs[0][0].start
            runs = [(slice(begin + part.start, begin + part.stop), slice(0, part.stop - part.start))]
        gradient = scale_gradient(reduced, factors)
        finite = self._parameters.update(self.plan.dtype, runs, gradient, step, check=self._checks_mean)
        self.applied[part.start] = step
        return finite


def _plan_parts(plan: BucketPlan) -> list[slice]:
    """Return the parts in which a large last gradient travels: only the update of its last part is exposed."""
    count = max(1, min(_PARTS, plan.nbytes // BUCKET_BYTES))
    ends = [plan.size * (index + 1) // count for index in range(count)]
    return [slice(start, stop) for start, stop in pairwise([0, *ends])]
