"""Pipeline parallel: each rank has some of the model's layers, and runs a schedule over microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..runtime.stream import Stream
from .layers import Cost, Half, Layer, first_half, issue_forward, second_half, splits
from .memory_work import MemoryWork, users_frame
from .models import TrainableModel
from .passing import StagePassing
from .returned import check_loss
from .schedules import Action, ActionKind
from .settings import check_count, resolve_group
from .tree import Path, RunningSum, has_no_data, last_future, leaves, pick, rebuild

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .passing import Boundary
    from .schedules import PipelineSchedule

Batch: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | Sequence[object] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A batch with an issued schedule; its last actions may not have run yet."""

    # On the rank with the last stage, the future of each microbatch's loss; empty elsewhere.
    losses: Sequence[Future[object]]
    # Mean gradients over the batch by stage of this rank: a tree like its weights, or a future of one.
    gradients: Mapping[int, object]
    group: Group  # The ranks of the pipeline
    last: int  # The rank of the group that has the last stage

    async def loss(self) -> float:
        """Return the mean loss of the batch; collective over the ranks of the pipeline."""
        mine = None
        if self.group.rank == self.last:
            mine = np.array([np.mean([np.float64(cast("float", await each)) for each in self.losses])])
        loss = self.group.broadcast(mine, root=self.last, name="loss", call_site=users_frame())
        return float((await loss)[0])


class Pipeline:
    """Stages of a model on the ranks of a group, run by a schedule.

    Every rank issues its actions in the order of the schedule, and stays `ahead` actions ahead of its computes: so the
    input of an action travels while earlier actions compute, and a rank holds at most `ahead` activations more than the
    schedule says. Nothing waits at the end of a batch: the next one is issued behind it.

    Gradients are added up over the microbatches in the order of the schedule. The gradients of a stage are complete,
    and handed to the `model`, with its last backward, while earlier stages still compute.

    Args:
        rank: This rank.
        schedule: For as many ranks as the group has; see `schedules.make`.
        layers: The layers of this rank by stage: `schedule.stages_of(group.rank)` says which. Each is one layer,
            which may be a `Sequential` of others.
        params: Their weights by stage: trees of arrays.
        loss: From the last stage's output and the microbatch's target to the gradient of that output, and the loss:
            means over the microbatch. It runs on the compute stream, behind the last forward. Or an object that
            issues it, such as `VocabularyLoss`.
        boundary: Shape and dtype of one microbatch between stages, or a dict or tuple of such pairs if a tree of
            arrays passes; a list of as many as lie between stages, if they differ.
        group: The ranks of the pipeline, such as `mesh["pp"]`; by default all.
        model: Keeps the weights, by the names "stage.name" that a dict of `params` gives them, and takes their
            gradients. By default they stay as they are, and `run` returns the gradients.
        loss_cost: The cost of the loss on the virtual clock.
        ahead: How many actions are issued before earlier ones have been computed.

    Raises:
        UsageError: If the schedule is for another number of ranks, or splits a backward that a layer has in one
            piece; if layers or weights are missing for a stage of this rank; if a number is invalid.

    Attributes:
        schedule: The order of actions.
        params: The weights by stage; without a `model`, put new ones there.
    """

    rank: Rank
    group: Group
    schedule: PipelineSchedule
    layers: dict[int, Layer]
    params: dict[int, object]
    model: TrainableModel | None
    loss: Callable[..., tuple[object, object]] | IssuedLoss
    loss_cost: dict[str, float]
    stream: Stream
    work: MemoryWork

    def __init__(
        self,
        rank: Rank,
        schedule: PipelineSchedule,
        layers: Mapping[int, Layer],
        params: Mapping[int, object],
        *,
        loss: Callable[..., tuple[object, object]] | IssuedLoss,
        boundary: Boundary | Sequence[Boundary],
        group: Group | None = None,
        model: TrainableModel | None = None,
        loss_cost: Cost | None = None,
        ahead: int = 2,
    ) -> None:
        self.rank, self.group, self.schedule = rank, resolve_group(rank, group), schedule
        self._check_schedule()
        self._check_stages("layers", layers)
        self._check_stages("params", params)
        self._check_halves(layers)
        check_count("ahead", ahead, least=0)
        self.layers, self.params, self.model = dict(layers), dict(params), model
        self.names: dict[int, dict[str, Path]] = {stage: leaves(each) for stage, each in params.items()}
        self.loss, self.loss_cost = loss, dict(loss_cost or {})
        self.boundaries: list[Boundary] = self._boundary_list(boundary)
        self.stream, self.work = rank.stream("pipeline"), MemoryWork(rank)
        self._ahead = ahead
        self._under_way: deque[Future[object]] = deque()

    async def run(self, x: Batch = None, target: Batch = None) -> Passed:
        """Issue the schedule for one batch; returns when all but the last actions have been computed.

        Args:
            x: On the rank with the first stage, the batch, cut along axis 0 into equal microbatches, or a list of them;
                ignored elsewhere.
            target: On the rank with the last stage, the targets of the loss, cut likewise; ignored elsewhere.

        Raises:
            UsageError: If a batch is missing where it is needed, or does not divide into microbatches.
        """
        passing = BatchPass(self, self._split_batch("x", x, 0), self._split_batch("target", target, -1))
        for action in self.schedule.rows[self.group.rank]:
            while len(self._under_way) > self._ahead:
                await self._under_way.popleft()
            issued = last_future(await passing.issue(action))
            if issued is not None:
                self._under_way.append(issued)
        return Passed(
            losses=passing.losses,
            gradients=passing.gradients,
            group=self.group,
            last=self.schedule.owners[-1],
        )

    def _split_batch(self, argument: str, batch: Batch, stage: int) -> Sequence[object]:
        """Return the microbatches of a batch on the rank of a stage, 0 or -1; none on other ranks."""
        if self.schedule.owners[stage] != self.group.rank:
            return ()
        count = self.schedule.microbatches
        if batch is None:
            which = "last" if stage else "first"
            raise UsageError(
                f"{argument}: rank {self.group.rank} of group '{self.group.name}' has the {which} stage; got None; "
                "pass the batch there"
            )
        if isinstance(batch, np.ndarray):
            if not batch.ndim or len(batch) % count:
                raise UsageError(
                    f"{argument}: shape {batch.shape} does not divide into {count} microbatches; "
                    "pad it, or choose another number"
                )
            return [batch[i * len(batch) // count : (i + 1) * len(batch) // count] for i in range(count)]
        if len(batch) != count:
            raise UsageError(
                f"{argument}: {len(batch)} microbatches were given; schedule {self.schedule.name} has {count}"
            )
        return batch

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_schedule(self) -> None:
        if self.schedule.ranks != self.group.size:
            raise UsageError(
                f"schedule: {self.schedule.name} is for {self.schedule.ranks} ranks, "
                f"group '{self.group.name}' has {self.group.size}; make one for as many"
            )

    def _check_stages(self, argument: str, given: Mapping[int, object]) -> None:
        """Refuse layers or weights of other stages than the schedule has on this rank."""
        mine = self.schedule.stages_of(self.group.rank)
        if set(given) != set(mine):
            got = ", ".join(map(str, given)) or "none"
            raise UsageError(
                f"{argument}: rank {self.group.rank} of group '{self.group.name}' has the stages "
                f"{', '.join(map(str, mine))}; got {got}"
            )

    def _check_halves(self, layers: Mapping[int, Layer]) -> None:
        """Refuse layers whose backward cannot be split, if the schedule splits it."""
        whole = [stage for stage, layer in layers.items() if not splits(layer)]
        if self.schedule.splits_backward and whole:
            raise UsageError(
                f"layers: the backward of stage {whole[0]} is one piece; schedule {self.schedule.name} needs "
                "backward_input and backward_weights"
            )

    def _boundary_list(self, boundary: Boundary | Sequence[Boundary]) -> list[Boundary]:
        """Return the boundaries between neighbouring stages; a single one holds for all."""
        between = self.schedule.stages - 1
        if isinstance(boundary, list):
            if len(boundary) != between:
                raise UsageError(f"boundary: {len(boundary)} were given; {between} lie between {between + 1} stages")
            return boundary
        return [cast("Boundary", boundary)] * between


@runtime_checkable
class IssuedLoss(Protocol):
    """A loss that issues its computes and collectives, such as `VocabularyLoss`."""

    def issue(self, scores: object, target: object) -> Future[object]:
        """Issue the gradient and the loss; return a future of both."""


class BatchPass:
    """A batch that is being issued.

    Args:
        pipeline: Pipeline of the batch.
        xs: Microbatches, where the first stage is.
        targets: Targets of the loss, where the last stage is.

    Attributes:
        losses: Losses of the microbatches that have passed the last stage here.
        gradients: Gradients of the stages whose last backward has been issued.
    """

    def __init__(self, pipeline: Pipeline, xs: Sequence[object], targets: Sequence[object]) -> None:
        self.losses: list[Future[object]] = []
        self.gradients: dict[int, object] = {}
        self._pipeline, self._schedule = pipeline, pipeline.schedule
        self._xs, self._targets = xs, targets
        self._weights: dict[int, object] = {}
        self._sums: dict[int, RunningSum] = {}
        self._kept: dict[tuple[int, int], object] = {}  # of microbatches between their F and their B or I, by stage
        self._halves: dict[tuple[int, int], Half] = {}  # and between I and W
        self._passing = StagePassing(pipeline.group, pipeline.schedule, pipeline.boundaries, pipeline.stream)

    async def issue(self, action: Action) -> object:
        """Issue one action; return a tree with the future of the last compute. Waits only where a layer does."""
        stage, kind, i = action
        if kind is ActionKind.FORWARD:
            return await self._issue_forward(stage, i)
        if kind is ActionKind.WEIGHT_GRADIENT:
            return self._add_gradients(
                stage, second_half(self._layer(stage), self._weights[stage], self._halves.pop((stage, i)))
            )
        dy, kept = self._passing.receive(ActionKind.BACKWARD, stage, i), self._kept.pop((stage, i))
        if kind is ActionKind.BACKWARD:
            dx, dw = self._layer(stage).backward(self._weights[stage], kept, dy)
            self._passing.deliver(ActionKind.BACKWARD, stage - 1, i, dx)
            return self._add_gradients(stage, dw)
        dx, self._halves[stage, i] = first_half(self._layer(stage), self._weights[stage], kept, dy)
        self._passing.deliver(
            ActionKind.BACKWARD, stage - 1, i, self._detach_gradient(dx) if self._passing.stays(stage - 1) else dx
        )
        return dx

    async def _issue_forward(self, stage: int, i: int) -> object:
        """Issue the forward of a microbatch at a stage, and deliver its output; the last stage starts backward."""
        if stage not in self._weights:
            self._weights[stage] = self._newest_weights(stage)
        x = self._passing.receive(ActionKind.FORWARD, stage, i) if stage else self._xs[i]
        y, self._kept[stage, i] = await issue_forward(self._layer(stage), self._weights[stage], x)
        if stage == self._schedule.stages - 1:
            return self._start_backward(stage, i, y)
        self._passing.deliver(ActionKind.FORWARD, stage + 1, i, y)
        return y

    def _start_backward(self, stage: int, i: int, y: object) -> object:
        """Issue the loss of a microbatch, and deliver its gradient to the last stage."""
        both = self._issue_loss(y, self._targets[i])
        self._passing.deliver(ActionKind.BACKWARD, stage, i, both[0])
        self.losses.append(both[1])
        return both

    def _issue_loss(self, y: object, target: object) -> Future[Any]:
        """Issue the loss function; return a future of the scaled gradient of the output, and the loss."""
        pipeline, loss = self._pipeline, self._pipeline.loss
        if isinstance(loss, IssuedLoss):
            return pipeline.work.compute(self._scale_loss_gradient, loss.issue(y, target), name="loss", role="program")
        return pipeline.rank.compute(
            lambda y, target: self._check_and_scale_loss(loss, y, loss(y, target)),
            y,
            target,
            name="loss",
            call_site=users_frame(),
            **pipeline.loss_cost,  # type: ignore[arg-type]
        )

    def _check_and_scale_loss(self, loss: Callable[..., object], y: object, results: object) -> tuple[object, object]:
        check_loss(loss, y, results)
        return self._scale_loss_gradient(cast("tuple[object, object]", results))

    def _scale_loss_gradient(self, results: tuple[object, object]) -> tuple[object, object]:
        """Return the gradient divided by the number of microbatches, so that these are only added up, and the loss."""
        dy, loss = results
        return rebuild(
            dy, {name: self._divide_by_microbatches(pick(dy, path)) for name, path in leaves(dy).items()}
        ), loss

    def _divide_by_microbatches(self, dy: object) -> object:
        """Return a gradient divided by the number of microbatches; unchanged if it has no data."""
        array, count = cast("NDArray[Any]", dy), self._schedule.microbatches
        return array if has_no_data(array) or count == 1 else array / np.asarray(count, array.dtype)

    def _layer(self, stage: int) -> Layer:
        return self._pipeline.layers[stage]

    # -- weights and their gradients -----------------------------------------------------------------------------

    def _newest_weights(self, stage: int) -> object:
        """Return a stage's newest weights, as a tree: of the model if there is one, else `params`."""
        pipeline = self._pipeline
        like, model = pipeline.params[stage], pipeline.model
        if model is None:
            return like
        return rebuild(like, {name: model[_parameter_name(stage, name)] for name in pipeline.names[stage]})

    def _add_gradients(self, stage: int, dw: object) -> object:
        """Add to the gradients of a stage and return the sum; after the last microbatch, hand it over to the model."""
        pipeline = self._pipeline
        if stage not in self._sums:
            self._sums[stage] = RunningSum(pipeline.work, pipeline.params[stage])
        summed = self._sums[stage].add(dw)
        if self._sums[stage].count == self._schedule.microbatches:
            self.gradients[stage] = summed
            if pipeline.model is not None:
                for name, path in pipeline.names[stage].items():
                    pipeline.model.reduce(_parameter_name(stage, name), pick(summed, path))
        return summed

    def _detach_gradient(self, dx: object) -> object:
        """Return a future of a gradient alone, so that the other results of its compute are freed."""
        return (
            self._pipeline.work.compute(_return_argument, dx, name="turn", role="program")
            if isinstance(dx, Future)
            else dx
        )


def _parameter_name(stage: int, name: str) -> str:
    return f"{stage}.{name}" if name else str(stage)


def _return_argument(value: object) -> object:
    """Return the argument, for a compute that only copies a future."""
    return value
