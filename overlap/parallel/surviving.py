"""Steps of a data parallel model that all ranks apply, or none, even if a process is lost during the step.

A step is prepared on a rank when the means of all gradients are there. It is agreed when all ranks have prepared it;
only then the optimizer changes the first weight. When a process is lost, each surviving rank applies the rest of an
agreed step, from the means: they stay in the buckets until the next backward, so nothing is copied. The means of a step
that was not agreed are dropped with the epoch, the world before the loss. The price: one small all_reduce in each step,
and no gradient travels during the next forward, as with `clip_norm`.
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
from .checkpoints.names import describe_difference
from .memory_work import MemoryWork
from .parameters import Parameters

if TYPE_CHECKING:
    from .tree import Array

_STREAM = "overlap.survival"

_Update: TypeAlias = tuple[AveragedBucket, slice, Callable[[], bool]]
"""A bucket, a part of it, and the function that updates the part in one step; it returns whether the mean is finite."""


class SurvivingSteps:
    """The steps of one model on one rank in one epoch (a world between two losses): `rank.epoch.survivor`.

    Args:
        rank: The rank.
        work: Issues the computes.
        group: All ranks of the world.
        parameters: The weights and the optimizer's state.
        hook: Must be None: the state that a hook has on a lost rank would be lost.
        exact: Whether gradients are added up in the order of ranks. The all_reduce of the agreement is then exact, too,
            so that a new world has to compare one set of algorithms before its first step, and not two.

    Attributes:
        rank: The rank.
        parameters: The weights and the optimizer's state, which the model of the next epoch takes over.

    Raises:
        UsageError: There is a hook, the group is not all ranks, or the rank has such a model already.
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

    def issue_agreement(
        self, buckets: Sequence[AveragedBucket], factors: Sequence[Future[object]], step: int
    ) -> Future[object]:
        """Issue the agreement on a step; return a future that updates of weights must wait for.

        A compute prepares the step when the means of all gradients are there. Then an all_reduce, whose value is not
        used, ends when all ranks have prepared the step. Then a compute records that the step is agreed.

        Args:
            buckets: All buckets of the model; their means are under way.
            factors: Futures of the numbers that gradients are multiplied with, such as that of `clip_norm`.
            step: Number of the step.
        """
        parts = [(bucket, part) for bucket in buckets for part in bucket.parts]
        means = [mean for bucket in buckets for mean in bucket.mean_futures]
        name = RoleName("agree on step", "library")
        compute = partial(self._work.compute, name=name, stream=_STREAM)
        prepared = compute(partial(self._prepare_step, step, parts), *means, *factors)
        stream = self.rank.stream(_STREAM)
        all_prepared = self._group.all_reduce(prepared, op="min", exact=self._exact, stream=stream, name=name)
        return compute(lambda _: self._progress.agree(step), all_prepared)

    def _prepare_step(self, step: int, parts: Sequence[tuple[AveragedBucket, slice]], *values: object) -> Array:
        """Record that this rank has prepared a step, with the updates that apply it; return (step,) as an array.

        The values are the mean of each part, then the factors.
        """
        means, factors = values[: len(parts)], values[len(parts) :]
        updates = [
            (bucket, part, partial(bucket.update_part, step, part, mean, *factors))  # type: ignore[arg-type]
            for (bucket, part), mean in zip(parts, means, strict=True)
        ]
        self._progress.prepare(step, updates)
        # An input for the all_reduce: any value serves.
        return metadata([step], np.int64)

    # -- after a loss --------------------------------------------------------------------------------------------------

    def report(self) -> int:
        """Return the greatest step that this rank knows to be agreed; no further step is agreed after this call."""
        return self._progress.report()

    def advance(self, step: int) -> None:
        """Apply the parts of an agreed step that this rank has not applied yet, and begin the next epoch with it.

        Raises:
            OverlapError: A mean of the step is not finite.
        """
        self._progress, updates = self._progress.begin_next_epoch(step)
        for bucket, part, update in updates:
            if bucket.applied_steps.get(part.start) != step and not update():
                raise OverlapError(
                    f"the mean gradient of step {step} is not finite, in a bucket with {bucket.plan.names[0]!r}; "
                    "scale the loss down"
                )


def make_surviving_steps(
    rank: Rank, work: MemoryWork, group: Group, parameters: Parameters, *, hook: Hook | None, exact: bool
) -> tuple[SurvivingSteps | None, Parameters]:
    """Return the `SurvivingSteps` of a new model under `--survive`, and the parameters that it must use.

    Without `--survive`: None, and `parameters`. After a process was lost: the parameters of the earlier model, with the
    optimizer's state. The new steps become `rank.epoch.survivor`.

    Args:
        rank: The rank.
        work: Issues the computes.
        group: The ranks of the model; under `--survive` all ranks of the world.
        parameters: Parameters of the new model.
        hook: The hook of the model; None under `--survive`.
        exact: Whether gradients are added up in the order of ranks.

    Raises:
        UsageError: The model cannot survive a loss, or differs from the model before the loss.
    """
    if not rank.epoch.survives:
        return None, parameters
    earlier = rank.epoch.survivor
    if rank.epoch.step:
        if not isinstance(earlier, SurvivingSteps) or not earlier.parameters.has_same_layout(parameters):
            difference = ""
            if isinstance(earlier, SurvivingSteps):
                difference = describe_difference(earlier.parameters.tensors(), parameters.tensors())
            raise UsageError(
                f"params: not those of the model that had made {rank.epoch.step} steps before a process was lost"
                f"{difference and f' ({difference})'}; make the same model again"
            )
        parameters = earlier.parameters
    return SurvivingSteps(rank, work, group, parameters, hook=hook, exact=exact), parameters
