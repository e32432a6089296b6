"""Pipeline parallelism: each rank has some of the model's layers, and runs a schedule over microbatches."""

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
from .layers import Cost, Half, Layer, has_split_backward, issue_first_half, issue_forward
from .memory_work import MemoryWork, users_frame
from .models import TrainableModel
from .passing import StagePassing
from .returned import check_loss_result
from .schedules import Action, ActionKind
from .settings import check_count, resolve_group
from .tree import Path, RunningSum, has_no_data, item_at_path, last_future, paths_by_name, rebuild

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .passing import Boundary
    from .schedules import PipelineSchedule

Batch: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | Sequence[object] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The results of a batch whose schedule has been issued; its last actions may not have run yet."""

    # On the rank with the last stage, the future of each microbatch's loss; empty on other ranks.
    losses: Sequence[Future[object]]
    # For each stage of this rank, the mean gradients over the batch: a tree like its weights, or a future of one.
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
    """The stages of a model on the ranks of a group, run by a schedule.

    Every rank issues its actions (such as the forward of one microbatch at one stage) in the order of the schedule, up
    to `ahead` actions before their computes have run. So the input of an action travels while earlier actions compute,
    and a rank holds at most `ahead` activations more than the schedule says. Nothing waits at the end of a batch: the
    next batch is issued at once.

    Gradients are added up over the microbatches in the order of the schedule. After the last backward of a stage its
    gradients are complete, and are handed to the `model` at once, while other stages still compute.

    Args:
        rank: This rank.
        schedule: A schedule for as many ranks as the group has; see `schedules.make`.
        layers: The layer of each stage of this rank, see `schedule.stages_of(group.rank)`. A layer may be a
            `Sequential` of others.
        params: The weights of each stage of this rank: trees of arrays.
        loss: Function of the output of the last stage and the target of the microbatch. It returns the gradient of the
            output, and the loss, both as means over the microbatch, and runs on the compute stream after the last
            forward. Or an object that issues such a function itself, such as `VocabularyLoss`.
        boundary: Shape and dtype of the array that passes between stages for one microbatch; if a tree of arrays
            passes, a dict or tuple of such pairs. If the boundaries differ, a list: item n is that between the stages n
            and n + 1.
        group: The ranks of the pipeline, such as `mesh["pp"]`; None: all.
        model: Has the weights, under names such as "0.w" (stage 0, weight "w" of its `params`), and takes their
            gradients. None: the weights stay as they are, and `run` returns the gradients.
        loss_cost: The cost of the loss on the virtual clock.
        ahead: Number of actions that may be under way when the next one is issued.

    Raises:
        UsageError: The schedule is for another number of ranks, or splits a backward that a layer has in one piece;
            layers or weights are missing for a stage of this rank; or a number is invalid.

    Attributes:
        schedule: The order of actions.
        params: The weights by stage. Without a `model`, assign new weights there after each batch.
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
        if schedule.ranks != self.group.size:
            raise UsageError(
                f"schedule: {schedule.name} is for {schedule.ranks} ranks, "
                f"group '{self.group.name}' has {self.group.size}; make one for {self.group.size}"
            )
        self._check_stages("layers", layers)
        self._check_stages("params", params)
        self._check_split_backward(layers)
        check_count("ahead", ahead, least=0)
        self.layers, self.params, self.model = dict(layers), dict(params), model
        self.names: dict[int, dict[str, Path]] = {stage: paths_by_name(each) for stage, each in params.items()}
        self.loss, self.loss_cost = loss, dict(loss_cost or {})
        self.boundaries: list[Boundary] = self._list_boundaries(boundary)
        self.stream, self.work = rank.stream("pipeline"), MemoryWork(rank)
        self._ahead = ahead
        self._under_way: deque[Future[object]] = deque()

    async def run(self, x: Batch = None, target: Batch = None) -> Passed:
        """Issue the schedule for one batch; return when at most `ahead` + 1 actions are still under way.

        Args:
            x: On the rank with the first stage, the batch, which is cut along axis 0 into equal microbatches, or a list
                of microbatches; ignored on other ranks.
            target: On the rank with the last stage, the targets of the loss, cut likewise; ignored on other ranks.

        Returns:
            The losses and gradients of the batch, as futures.

        Raises:
            UsageError: A batch is missing where it is needed, or does not divide into microbatches.
        """
        batch_pass = BatchPass(
            self, self._microbatches_of_stage("x", x, 0), self._microbatches_of_stage("target", target, -1)
        )
        for action in self.schedule.rows[self.group.rank]:
            while len(self._under_way) > self._ahead:
                await self._under_way.popleft()
            # None if the action left no future, because its results exist already.
            issued = last_future(await batch_pass.issue_action(action))
            if issued is not None:
                self._under_way.append(issued)
        return Passed(
            losses=batch_pass.losses,
            gradients=batch_pass.gradients,
            group=self.group,
            last=self.schedule.owners[-1],
        )

    def _microbatches_of_stage(self, argument: str, batch: Batch, stage: int) -> Sequence[object]:
        """Return the microbatches on the rank of a stage (0 for the first, -1 for the last); none on other ranks.

        Raises a `UsageError` if the batch is missing where it is needed, or does not divide into microbatches.
        """
        if self.schedule.owners[stage] != self.group.rank:
            return ()
        count = self.schedule.microbatches
        if batch is None:
            # The stage is 0 or -1.
            which = "last" if stage else "first"
            raise UsageError(
                f"{argument}: rank {self.group.rank} of group '{self.group.name}' has the {which} stage; got None; "
                "pass the batch there"
            )
        if isinstance(batch, np.ndarray):
            if not batch.ndim:
                raise UsageError(f"{argument}: expected an array to cut into {count} microbatches, got a single number")
            if len(batch) % count:
                raise UsageError(
                    f"{argument}: the first dimension of shape {batch.shape} is no multiple of {count} microbatches; "
                    f"pad it to {count * -(-len(batch) // count)}, or choose a number of them that divides it"
                )
            return [batch[i * len(batch) // count : (i + 1) * len(batch) // count] for i in range(count)]
        if len(batch) != count:
            raise UsageError(
                f"{argument}: expected {count} microbatches, those of schedule {self.schedule.name}, got {len(batch)}"
            )
        return batch

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_stages(self, argument: str, given: Mapping[int, object]) -> None:
        """Refuse layers or weights, by stage, of other stages than the schedule has on this rank."""
        mine = self.schedule.stages_of(self.group.rank)
        if set(given) != set(mine):
            got = ", ".join(map(str, given)) or "none"
            raise UsageError(
                f"{argument}: expected the stages {', '.join(map(str, mine))} of rank {self.group.rank} of group "
                f"'{self.group.name}', got {got}"
            )

    def _check_split_backward(self, layers: Mapping[int, Layer]) -> None:
        """Refuse layers whose backward cannot be split, if the schedule splits it."""
        whole = [stage for stage, layer in layers.items() if not has_split_backward(layer)]
        if self.schedule.splits_backward and whole:
            raise UsageError(
                f"layers: the backward of stage {whole[0]} is one piece; schedule {self.schedule.name} needs "
                "backward_input and backward_weights"
            )

    def _list_boundaries(self, boundary: Boundary | Sequence[Boundary]) -> list[Boundary]:
        """Return the boundary between the stages n and n + 1 for each n; a single boundary is repeated.

        Raises a `UsageError` if a list has another length.
        """
        between = self.schedule.stages - 1
        if isinstance(boundary, list):
            if len(boundary) != between:
                raise UsageError(f"boundary: expected {between} for {between + 1} stages, got {len(boundary)}")
            return boundary
        return [cast("Boundary", boundary)] * between


@runtime_checkable
class IssuedLoss(Protocol):
    """A loss that issues its computes and collectives, such as `VocabularyLoss`."""

    def issue(self, scores: object, target: object) -> Future[object]:
        """Issue the loss of one microbatch; return a future of the pair (gradient of the output, loss).

        Args:
            scores: Output of the last stage, or a future of it.
            target: Target of the microbatch.
        """


class BatchPass:
    """The state of a batch whose actions are being issued, on one rank.

    Args:
        pipeline: Pipeline of the batch.
        xs: The microbatches on the rank with the first stage; empty on other ranks.
        targets: Targets of the loss on the rank with the last stage; empty on other ranks.

    Attributes:
        losses: Futures of the losses of microbatches, on the rank with the last stage, as far as they have been issued.
        gradients: By stage, the gradients of stages whose last backward has been issued.
    """

    def __init__(self, pipeline: Pipeline, xs: Sequence[object], targets: Sequence[object]) -> None:
        self.losses: list[Future[object]] = []
        self.gradients: dict[int, object] = {}
        self._pipeline, self._schedule = pipeline, pipeline.schedule
        self._xs, self._targets = xs, targets
        self._weights: dict[int, object] = {}  # by stage
        self._sums: dict[int, RunningSum] = {}  # gradients so far, by stage
        # By stage and microbatch: the values for backward, between F and B or I; the second half, between I and W.
        self._values_for_backward: dict[tuple[int, int], object] = {}
        self._halves: dict[tuple[int, int], Half] = {}
        self._passing = StagePassing(pipeline.group, pipeline.schedule, pipeline.boundaries, pipeline.stream)

    async def issue_action(self, action: Action) -> object:
        """Issue one action; return a result or tree whose last future, if any, ends with the action.

        Waits only where a layer does.
        """
        stage, kind, i = action
        if kind is ActionKind.FORWARD:
            return await self._issue_forward(stage, i)
        if kind is ActionKind.WEIGHT_GRADIENT:
            return self._add_gradients(stage, self._halves.pop((stage, i))(self._weights[stage]))
        # B and I both need the gradient of the output, and the values that forward left.
        dy, kept = (
            self._passing.receive_or_take(ActionKind.BACKWARD, stage, i),
            self._values_for_backward.pop((stage, i)),
        )
        if kind is ActionKind.BACKWARD:
            dx, dw = self._layer(stage).backward(self._weights[stage], kept, dy)
            self._passing.send_or_store(ActionKind.BACKWARD, stage - 1, i, dx)
            return self._add_gradients(stage, dw)
        dx, self._halves[stage, i] = issue_first_half(self._layer(stage), self._weights[stage], kept, dy)
        passed = dx
        if isinstance(dx, Future) and self._passing.is_own_stage(stage - 1):
            # A future of the gradient alone: `dx` would keep all results of its compute in memory.
            passed = self._pipeline.work.compute(lambda gradient: gradient, dx, name="turn", role="program")
        self._passing.send_or_store(ActionKind.BACKWARD, stage - 1, i, passed)
        return dx

    async def _issue_forward(self, stage: int, i: int) -> object:
        """Issue the forward of microbatch `i`, pass the output on to the next stage, and return it.

        The last stage issues the loss instead, and stores the loss's gradient for its own backward; the result is then
        a future of (gradient, loss).
        """
        if stage not in self._weights:
            self._weights[stage] = self._newest_weights(stage)
        x = self._passing.receive_or_take(ActionKind.FORWARD, stage, i) if stage else self._xs[i]
        y, self._values_for_backward[stage, i] = await issue_forward(self._layer(stage), self._weights[stage], x)
        if stage == self._schedule.stages - 1:
            gradient_and_loss = self._issue_loss(y, self._targets[i])
            self._passing.send_or_store(ActionKind.BACKWARD, stage, i, gradient_and_loss[0])
            self.losses.append(gradient_and_loss[1])
            return gradient_and_loss
        self._passing.send_or_store(ActionKind.FORWARD, stage + 1, i, y)
        return y

    def _issue_loss(self, y: object, target: object) -> Future[Any]:
        """Issue the loss of a microbatch; return a future of the pair (scaled gradient of the output, loss)."""
        pipeline, loss = self._pipeline, self._pipeline.loss
        if isinstance(loss, IssuedLoss):
            return pipeline.work.compute(self._scale_loss_gradient, loss.issue(y, target), name="loss", role="program")
        return pipeline.rank.compute(
            # The arguments of the lambda are the results of the futures with these names.
            lambda y, target: self._check_and_scale_loss(loss, y, loss(y, target)),
            y,
            target,
            name="loss",
            call_site=users_frame(),
            **pipeline.loss_cost,  # type: ignore[arg-type]
        )

    def _check_and_scale_loss(self, loss: Callable[..., object], y: object, results: object) -> tuple[object, object]:
        """Check that `results` are the gradient of `y` and the loss; return the scaled gradient, and the loss."""
        check_loss_result(loss, y, results)
        return self._scale_loss_gradient(cast("tuple[object, object]", results))

    def _scale_loss_gradient(self, results: tuple[object, object]) -> tuple[object, object]:
        """Return (gradient / number of microbatches, loss): the sum over microbatches is then the mean gradient."""
        dy, loss = results
        return rebuild(
            dy, {name: self._divide_by_microbatches(item_at_path(dy, path)) for name, path in paths_by_name(dy).items()}
        ), loss

    def _divide_by_microbatches(self, dy: object) -> object:
        """Return a gradient divided by the number of microbatches; unchanged if it has no data."""
        array, count = cast("NDArray[Any]", dy), self._schedule.microbatches
        return array if has_no_data(array) or count == 1 else array / np.asarray(count, array.dtype)

    def _layer(self, stage: int) -> Layer:
        return self._pipeline.layers[stage]

    # -- weights and their gradients -----------------------------------------------------------------------------

    def _newest_weights(self, stage: int) -> object:
        """Return a stage's newest weights, as a tree: the model's if there is a model, else those in `params`."""
        pipeline = self._pipeline
        like, model = pipeline.params[stage], pipeline.model
        if model is None:
            return like
        return rebuild(like, {name: model[_parameter_name(stage, name)] for name in pipeline.names[stage]})

    def _add_gradients(self, stage: int, dw: object) -> object:
        """Add a microbatch's gradients to a stage's sum; after the last microbatch, hand the sum over to the model.

        Returns the sum so far, or a future of it.
        """
        pipeline = self._pipeline
        if stage not in self._sums:
            self._sums[stage] = RunningSum(pipeline.work, pipeline.params[stage])
        summed = self._sums[stage].add(dw)
        if self._sums[stage].count == self._schedule.microbatches:
            self.gradients[stage] = summed
            if pipeline.model is not None:
                for name, path in pipeline.names[stage].items():
                    pipeline.model.reduce(_parameter_name(stage, name), item_at_path(summed, path))
        return summed


def _parameter_name(stage: int, name: str) -> str:
    """Return the model's name of a stage's weight, such as "0.w"; "0" if the weights are a single array, named ""."""
    return f"{stage}.{name}" if name else str(stage)
