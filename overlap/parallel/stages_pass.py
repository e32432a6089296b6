"""One batch on its way through a rank's stages: what each action of the schedule takes, computes and gives on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .called_from import users_frame
from .layers import Half, Layer, first_half, forward_of, second_half
from .memory_work import MemoryWork
from .pending import RunningSum, filled, has_no_data, pick
from .schedules import Action, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runtime.request import Like
    from ..runtime.stream import Stream
    from .pending import Path
    from .schedules import PipelineSchedule


class Model(Protocol):
    """Who keeps the weights of a pipeline and updates them: `DataParallel`, for one."""

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it."""

    def reduce(self, name: str, grad: object) -> None:
        """Take a gradient over."""


@runtime_checkable
class IssuedLoss(Protocol):
    """A loss that issues what it takes, such as `VocabularyLoss`."""

    def issue(self, scores: object, target: object) -> Future[object]:
        """Issue the gradient and the loss; return a future of both."""


class Around(Protocol):
    """What a pass needs of its pipeline."""

    rank: Rank
    group: Group
    schedule: PipelineSchedule
    layers: dict[int, Layer]
    params: dict[int, object]
    model: Model | None
    names: dict[int, dict[str, Path]]
    boundaries: list[Like]
    loss: Callable[..., tuple[object, object]] | IssuedLoss
    loss_cost: dict[str, float]
    stream: Stream
    work: MemoryWork


class Pass:
    """A batch that is being issued.

    Args:
        pipeline: Whose it is.
        xs: Microbatches, where the first stage is.
        targets: What the loss compares with, where the last stage is.

    Attributes:
        losses: Of the microbatches that have passed the last stage here.
        gradients: Of the stages whose last backward has been issued.
    """

    def __init__(self, pipeline: Around, xs: Sequence[object], targets: Sequence[object]) -> None:
        self.losses: list[Future[object]] = []
        self.gradients: dict[int, object] = {}
        self._pipeline, self._schedule = pipeline, pipeline.schedule
        self._xs, self._targets = xs, targets
        self._weights: dict[int, object] = {}
        self._sums: dict[int, tuple[int, RunningSum]] = {}
        self._kept: dict[tuple[int, int], object] = {}  # of microbatches between their F and their B or I, by stage
        self._halves: dict[tuple[int, int], Half] = {}  # and between I and W
        self._here: dict[tuple[Kind, int, int], object] = {}  # what one stage of this rank has made for another

    async def issue(self, action: Action) -> object:
        """Issue one action; return a tree that holds the future of what comes last. Waits only where a layer does."""
        stage, kind, i = action
        if kind is Kind.FORWARD:
            return await self._forward(stage, i)
        if kind is Kind.WEIGHT_GRADIENT:
            return self._add(stage, second_half(self._layer(stage), self._weights[stage], self._halves.pop((stage, i))))
        dy, kept = self._take(Kind.BACKWARD, stage, i), self._kept.pop((stage, i))
        if kind is Kind.BACKWARD:
            dx, dw = self._layer(stage).backward(self._weights[stage], kept, dy)
            self._give(Kind.BACKWARD, stage - 1, i, dx)
            return self._add(stage, dw)
        dx, self._halves[stage, i] = first_half(self._layer(stage), self._weights[stage], kept, dy)
        self._give(Kind.BACKWARD, stage - 1, i, self._alone(dx) if self._stays(stage - 1) else dx)
        return dx

    async def _forward(self, stage: int, i: int) -> object:
        if stage not in self._weights:
            self._weights[stage] = self._newest(stage)
        x = self._take(Kind.FORWARD, stage, i) if stage else self._xs[i]
        y, self._kept[stage, i] = await forward_of(self._layer(stage), self._weights[stage], x)
        if stage == self._schedule.stages - 1:
            return self._begin_backward(stage, i, y)
        self._give(Kind.FORWARD, stage + 1, i, y)
        return y

    def _begin_backward(self, stage: int, i: int, y: object) -> object:
        both = self._issue_loss(y, self._targets[i])
        self._here[Kind.BACKWARD, stage, i] = both[0]
        self.losses.append(both[1])
        return both

    def _issue_loss(self, y: object, target: object) -> Future[Any]:
        pipeline, loss = self._pipeline, self._pipeline.loss
        if isinstance(loss, IssuedLoss):
            return pipeline.rank.compute(
                self._shared, loss.issue(y, target), name="loss", seconds=0.0, call_site=users_frame()
            )
        return pipeline.rank.compute(
            lambda y, target: self._shared(loss(y, target)),
            y,
            target,
            name="loss",
            call_site=users_frame(),
            **pipeline.loss_cost,  # type: ignore[arg-type]
        )

    def _shared(self, both: tuple[object, object]) -> tuple[object, object]:
        """Return the gradient for the mean over the batch, so that microbatches only have to be added up."""
        dy, loss = both
        array = cast("NDArray[Any]", dy)
        count = self._schedule.microbatches
        return (array if has_no_data(array) or count == 1 else array / np.asarray(count, array.dtype)), loss

    def _layer(self, stage: int) -> Layer:
        return self._pipeline.layers[stage]

    # -- weights and their gradients -----------------------------------------------------------------------------

    def _newest(self, stage: int) -> object:
        """Return a stage's weights, from who keeps them."""
        pipeline = self._pipeline
        like, model = pipeline.params[stage], pipeline.model
        if model is None:
            return like
        return filled(like, {name: model[_joined(stage, name)] for name in pipeline.names[stage]})

    def _add(self, stage: int, dw: object) -> object:
        """Add up a stage's gradients; with those of the last microbatch they are complete."""
        pipeline = self._pipeline
        count, running = self._sums.get(stage) or (0, RunningSum(pipeline.work, pipeline.params[stage]))
        summed = running.add(dw)
        self._sums[stage] = count + 1, running
        if count + 1 == self._schedule.microbatches:
            self.gradients[stage] = summed
            if pipeline.model is not None:
                for name, path in pipeline.names[stage].items():
                    pipeline.model.reduce(_joined(stage, name), pick(summed, path))
        return summed

    # -- from stage to stage ---------------------------------------------------------------------------------------

    def _take(self, kind: Kind, stage: int, i: int) -> object:
        """Return what a stage of this rank gets: a future of what another rank sends, or what is here."""
        if (kind, stage, i) in self._here:
            return self._here.pop((kind, stage, i))
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        pipeline = self._pipeline
        return pipeline.group.recv(
            pipeline.boundaries[min(source, stage)],
            self._schedule.owners[source],
            self._tag(kind, stage, i),
            stream=pipeline.stream,
            name=f"{Action(source, kind, i)} to {stage}",
        )

    def _give(self, kind: Kind, stage: int, i: int, value: object) -> None:
        """Hand over what a stage needs: to its rank, or to this one for later."""
        if stage < 0:
            return
        pipeline, owner = self._pipeline, self._schedule.owners[stage]
        if self._stays(stage):
            self._here[kind, stage, i] = value
            return
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        name = f"{Action(source, kind, i)} to {stage}"
        x = cast("NDArray[Any]", value)
        pipeline.group.send(x, owner, self._tag(kind, stage, i), stream=pipeline.stream, name=name)

    def _stays(self, stage: int) -> bool:
        """Whether a stage is on this rank."""
        return stage >= 0 and self._schedule.owners[stage] == self._pipeline.group.rank

    def _alone(self, dx: object) -> object:
        """Return a gradient that may lie here for long without what it came with, which its own weights' turn frees."""
        return self._pipeline.work.compute(_itself, dx, name="turn", moved_bytes=0) if isinstance(dx, Future) else dx

    def _tag(self, kind: Kind, stage: int, i: int) -> int:
        """Return a tag that only this message of a batch has: messages of a pair need not come in the order sent."""
        return (i * self._schedule.stages + stage) * 2 + (kind is Kind.BACKWARD)


def _joined(stage: int, name: str) -> str:
    return f"{stage}.{name}" if name else str(stage)


def _itself(value: object) -> object:
    return value
