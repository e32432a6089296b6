"""Steps of a data parallel model that are applied on all surviving ranks, or on none.

A step is prepared on a rank when the means of all its gradients are there; agreed when all ranks have prepared it; only
then the optimizer changes the first weight. After a loss each survivor applies the rest of the agreed step from the
means, which stay in the buckets until the next backward. So nothing is copied. The means of a step that is not agreed
end with its epoch. The price: one small all_reduce in each step, and no gradient travels under the next forward, as
with `clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..errors import OverlapError, UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.memory.arrays import metadata
from ..runtime.rank import Rank
from ..survival.agreement import StepProgress
from ..timeline.span import RoleName
from .buckets.averaged import AveragedBucket
from .buckets.plan import Hook
from .memory_work import MemoryWork
from .parameters import Parameters

if TYPE_CHECKING:
    from .tree import Array

_STREAM = "overlap.survival"

_Update: TypeAlias = tuple[AveragedBucket, slice, Callable[[], bool]]
"""Bucket, part of it, and the update of that part by the mean of one step; it returns whether the mean is finite."""


class SurvivingSteps:
    """The steps of one model on one rank in one epoch: `rank.epoch.survivor`.

    Args:
        work: Where updates run.
        group: All ranks of the world.
        hook: Must be None: what a hook remembers of a lost rank is lost.
        exact: Whether gradients are added up in the order of ranks. The agreement then is, too: so a new world compares
            one set of algorithms before its first step, and not two.

    Attributes:
        rank: The rank.
        parameters: The weights and the optimizer's state, which outlive the epoch.
    """

    rank: Rank
    parameters: Parameters

    def __init__(
        self, rank: Rank, work: MemoryWork, group: Group, parameters: Parameters, *, hook: Hook | None, exact: bool
    ) -> None:
        if hook is not None:
            raise UsageError("hook: what a hook keeps of a lost rank is lost; leave it out under --survive")
        if group.size != rank.world_size:
            raise UsageError(
                f"group: {group.name} is not all ranks; --survive goes on with models of all ranks only; "
                "leave out group="
            )
        earlier = rank.epoch.survivor
        if isinstance(earlier, SurvivingSteps) and earlier.rank is rank:
            raise UsageError(
                "--survive goes on with one DataParallel model in a program, and this is the second; "
                "put all parameters into one"
            )
        self.rank, self.parameters = rank, parameters
        self._work, self._group, self._exact = work, group, exact
        self._progress: StepProgress[_Update] = StepProgress(rank.epoch.step)
        rank.epoch.survivor = self

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and of the optimizer's state."""
        return sum(piece.data.nbytes for piece in self.parameters.pieces())

    # -- on the compute stream -----------------------------------------------------------------------------------------

    def agree(self, buckets: Sequence[AveragedBucket], factors: Sequence[Future[object]], step: int) -> Future[object]:
        """Issue the agreement on a step; updates of weights wait for the returned future.

        Three operations follow each other: this rank prepares the step when the means of all its gradients are there;
        an all_reduce, whose result has no other use, ends when all ranks have done so; then the step is agreed here.

        Args:
            buckets: All buckets of the model, whose gradients are under way.
            factors: Futures of further arguments of the updates, such as the factor of a clipped norm.
            step: Number of the step.
        """
        parts = [(bucket, part) for bucket in buckets for part in bucket.parts]
        means = [mean for bucket in buckets for mean in bucket.arrived]
        name = RoleName("agree on step", "library")
        compute = partial(self._work.compute, name=name, stream=_STREAM)
        prepared = compute(partial(self._prepare, step, parts), *means, *factors)
        stream = self.rank.stream(_STREAM)
        all_prepared = self._group.all_reduce(prepared, op="min", exact=self._exact, stream=stream, name=name)
        return compute(partial(self._record_agreed, step), all_prepared)

    def _prepare(self, step: int, parts: Sequence[tuple[AveragedBucket, slice]], *values: object) -> Array:
        """Keep the means and factors of a step, which is prepared on this rank; return its number."""
        means, factors = values[: len(parts)], values[len(parts) :]
        updates = [
            (bucket, part, partial(bucket.update_part, step, part, mean, *factors))  # type: ignore[arg-type]
            for (bucket, part), mean in zip(parts, means, strict=True)
        ]
        self._progress.prepare(step, updates)
        return metadata([step], np.int64)

    def _record_agreed(self, step: int, all_prepared: object) -> None:
        self._progress.agree(step)

    # -- after a loss --------------------------------------------------------------------------------------------------

    def report(self) -> int:
        """Return the greatest step that all ranks have prepared; nothing is applied after this call."""
        return self._progress.report()

    def advance(self, step: int) -> None:
        """Apply the rest of a step that all ranks have prepared."""
        self._progress, updates = self._progress.following(step)
        for bucket, part, update in updates:
            if bucket.applied.get(part.start) != step and not update():
                raise OverlapError(
                    f"the mean gradient of step {step} is not finite, in a bucket with {bucket.plan.names[0]!r}; "
                    "scale the loss down"
                )


def make_surviving_steps(
    rank: Rank, work: MemoryWork, group: Group, parameters: Parameters, *, hook: Hook | None, exact: bool
) -> tuple[SurvivingSteps | None, Parameters]:
    """Return the steps of a model under `--survive`, else None, and its parameters: earlier ones after a loss.

    Raises:
        UsageError: The model cannot go on after a loss, or is another one than before.
    """
    if not rank.epoch.survives:
        return None, parameters
    earlier = rank.epoch.survivor
    if rank.epoch.step:
        if not isinstance(earlier, SurvivingSteps) or not earlier.parameters.is_like(parameters):
            raise UsageError(
                f"params: not those of the model that has made {rank.epoch.step} steps before the loss; "
                "make the same model again"
            )
        parameters = earlier.parameters
    return SurvivingSteps(rank, work, group, parameters, hook=hook, exact=exact), parameters
