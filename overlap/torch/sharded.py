"""ZeRO for modules of torch: ranks share out optimizer state (stage 1), gradients (2) and parameters (3)."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UsageError
from ..parallel.buckets.plan import BucketPlan
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from . import private
from .issuing import users_frame
from .model import OptimizerMaker, ParameterBucket, TrainedModule, Unused, frozen_settings
from .tensors import Array, as_array


class _ShardedBucket(ParameterBucket):
    """A bucket of which each rank keeps and updates an equal part.

    Attributes:
        whole: Its weights side by side, filled up to a multiple of the ranks; the parameters are views of it.
        shard: This rank's part, which the optimizer is given.
        mean: Mean of the gradients of that part, of the step that was sent last.
        gathered: Brings the whole to every rank, if it is under way.
        gradients: As `whole`; where the gradients of a step are put together.
        present: Whether `whole` has memory.
        users: Modules in whose forward it is needed now.
        loaned: Whether the program has been given the whole, and may have written it.
    """

    def __init__(
        self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int, position: int, ranks: int
    ) -> None:
        super().__init__(plan, parameters, priority)
        self.rows = -(-plan.size // ranks)
        self.whole = torch.zeros(self.rows * ranks, dtype=parameters[0].dtype)
        for view, parameter in zip(self.views(self.whole), parameters, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.dtype = plan.dtype
        self.own_slice = slice(position * self.rows, (position + 1) * self.rows)
        self.shard = nn.Parameter(self.whole[self.own_slice].clone())
        self.gathered: Future[Any] | None = None
        self.gradients: torch.Tensor | None = None
        self.mean = self.shard
        self.nans = torch.full((), float("nan"), dtype=self.whole.dtype)
        self.present, self.users, self.loaned = True, 0, False
        self.update: Future[Any] | None = None

    def free(self) -> None:
        """Free the memory of the whole weights; references stay, and the parameters read as NaN until `allocate`."""
        if self.present and self.gathered is None and not self.users:
            self.copy_own_part()
            self.present = False
            for parameter in self.parameters:
                parameter.data = self.nans.expand(parameter.shape)
            self._resize(0)

    def copy_own_part(self) -> None:
        """Copy this rank's part from the whole weights, if the program had them on loan."""
        if self.loaned:
            self.loaned = False
            self.shard.data.copy_(self.whole[self.own_slice])

    def allocate(self) -> Array:
        """Allocate the memory of the whole weights again, and return it."""
        if not self.present:
            self.present = True
            self._resize(self.whole.numel() * self.whole.element_size())
            for parameter, view in zip(self.parameters, self.views(self.whole), strict=True):
                parameter.data = view
        return as_array(self.whole)

    def _resize(self, n_bytes: int) -> None:
        """Resize the memory of the whole weights."""
        # The weights are the same again when a backward pass reads its references to them, which torch cannot know:
        # that pass would refuse a new version of them.
        with private.preserve_version(self.whole):
            self.whole.untyped_storage().resize_(n_bytes)


class Sharded(TrainedModule[_ShardedBucket]):
    """A module that a group of ranks shares out; it is used as `DataParallel` is.

    ======  =====================================
    stage   a rank keeps 1/N of
    ======  =====================================
    1       optimizer state
    2       and gradients
    3       and parameters, between their uses, from the second step on; they are NaN then: read them after `finish`
    ======  =====================================

    Gradients are scattered while backward goes on. Each part is updated on the rank's compute stream, beside the
    program, and gathered from there under the computes before those that need it. The optimizer sees flat parts of
    buckets: optimizers that treat each element alike (SGD, Adam, AdamW) give the results of `DataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerMaker,
        *,
        stage: Literal[1, 2, 3] = 3,
        rank: Rank | None = None,
        group: Group | None = None,
        bucket_bytes: int | None = None,
        depth: int = 1,
        unused: Unused = "error",
    ) -> None:
        """Take a module over; its parameters become views of buckets.

        Args:
            module: With parameters on the CPU, the same ones on all ranks.
            optimizer: Makes an optimizer of parameters.
            stage: Stage of ZeRO.
            rank: This rank; by default the rank of `init_process_group("overlap")`.
            group: Ranks to share with; by default all.
            bucket_bytes: When a bucket is full; by default as in `overlap.parallel.DataParallel`.
            depth: In stage 3, how many buckets ahead of their use parameters are gathered.
            unused: Whether a parameter without a gradient is an "error", or counts as "zeros".

        Raises:
            UsageError: If there is no world, or an argument is invalid.
        """
        if stage not in (1, 2, 3):
            raise UsageError(f"stage: expected 1, 2 or 3, got {stage!r}")
        self.stage, self._depth = stage, depth
        self._needs_one_order = stage == 3
        super().__init__(module, rank=rank, group=group, bucket_bytes=bucket_bytes, unused=unused)
        self._order = sorted(self._buckets, key=lambda bucket: bucket.priority)
        self.optimizer: torch.optim.Optimizer = self._with_current_state(
            optimizer([bucket.shard for bucket in self._buckets])
        )
        if stage == 3:
            for part in module.modules():
                part.register_forward_hook(lambda part, _args, out: self._after_forward(part, out))

    def _bucket(self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int) -> _ShardedBucket:
        """Make a bucket of which this rank updates its own part."""
        return _ShardedBucket(plan, parameters, priority, self.group.rank, self.group.size)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _send(self, bucket: _ShardedBucket) -> None:
        """Issue the reduce-scatter of a full bucket's gradients."""
        if bucket.gradients is None:
            bucket.gradients = torch.zeros(bucket.whole.numel(), dtype=bucket.whole.dtype)
        for view, parameter in zip(bucket.views(bucket.gradients), bucket.parameters, strict=True):
            view.copy_(parameter.grad)
            parameter.grad = None
        bucket.mean = torch.empty(bucket.rows, dtype=bucket.whole.dtype)
        bucket.update = self.group.reduce_scatter(
            as_array(bucket.gradients),
            "mean",
            as_array(bucket.mean),
            priority=bucket.priority,
            stream=self._stream,
            name=RoleName(f"bucket {bucket.plan.index}", "bucket"),
            call_site=users_frame(),
        )
        if self.stage >= 2:
            bucket.gradients = None  # the operation keeps it until it has left
        if self.stage == 3:
            self._free(bucket)

    def _end_step(self) -> None:
        """Update every part when its mean has arrived, and gather the whole weights in the order of forward."""
        optimizer = frozen_settings(self.optimizer)
        for bucket in self._order:
            bucket.copy_own_part()
            update = partial(self._update_shard, bucket, bucket.mean, optimizer)
            bucket.update = self.rank.compute(
                update, bucket.update, name=RoleName("update", "update"), call_site=users_frame()
            )
        for bucket in self._order:
            if self.stage < 3:
                self._gather(bucket)
            else:
                bucket.free()

    def _update_shard(
        self, bucket: _ShardedBucket, mean: torch.Tensor, optimizer: torch.optim.Optimizer, _: object
    ) -> Array:
        """Update this rank's part, on the compute stream, and return it."""
        bucket.shard.grad = mean
        optimizer.step()  # passes over parameters without a gradient
        bucket.shard.grad = None
        return as_array(bucket.shard)

    def _wait_for_update(self) -> None:
        """Wait until every part has been updated."""
        for bucket in self._buckets:
            last = bucket.update if bucket.gathered is None else bucket.gathered
            if last is not None:
                last.result()

    # -- parameters --------------------------------------------------------------------------------------------------

    def finish(self) -> nn.Module:
        """Wait for the last step of all weights; return the module, with its weights on loan to the caller."""
        module = super().finish()
        for bucket in self._buckets:
            bucket.loaned = True
        return module

    def _gather(self, bucket: _ShardedBucket) -> None:
        """Issue the all-gather of a bucket's updated parts."""
        part = bucket.update if bucket.update is not None else as_array(bucket.shard)
        bucket.gathered = self.group.all_gather(
            part,
            bucket.allocate(),
            stream=self._stream,
            priority=bucket.priority,
            name=RoleName(f"weights {bucket.plan.index}", "bucket"),
            call_site=users_frame(),
        )
        bucket.update = None
        bucket.due = bucket.due and self.stage < 3

    def _wait_for_weights(self, bucket: _ShardedBucket) -> None:
        """Wait until the whole weights of a bucket are on this rank; in stage 3, gather them if necessary."""
        bucket.copy_own_part()
        if self.stage == 3 and (bucket.due or not bucket.present):
            if bucket.gathered is not None:  # was gathered ahead in the last backward, and not needed there
                bucket.gathered.result()
            self._gather(bucket)
        if bucket.gathered is not None:
            bucket.gathered.result()
            bucket.gathered = None
        bucket.due = False

    def _before_forward(self, module: nn.Module) -> None:
        """Wait for the weights of a module, and gather the next buckets ahead."""
        super()._before_forward(module)
        needed = self._needs[module]
        if self.stage == 3 and needed:
            for bucket in needed:
                bucket.users += 1
            self._gather_ahead(needed[-1], 1)

    def _gather_ahead(self, bucket: _ShardedBucket, direction: int) -> None:
        """Gather the buckets that are needed next, in forward (1) or backward (-1)."""
        position = self._order.index(bucket)
        for step in range(1, self._depth + 1):
            if 0 <= position + direction * step < len(self._order):
                following = self._order[position + direction * step]
                if not following.present and not (direction < 0 and following.full):
                    self._gather(following)

    def _after_forward(self, module: nn.Module, out: Any) -> None:
        """Free the weights that forward has used; a hook gathers them again before backward."""
        for tensor in [output for output in _tensors_in(out) if output.requires_grad][:1]:
            tensor.register_hook(lambda _: self._before_backward(module))
        for bucket in self._needs[module]:
            bucket.users -= 1
            self._free(bucket)

    def _free(self, bucket: _ShardedBucket) -> None:
        """Free the weights of a bucket, from the second step on: before, it is unknown which modules are called."""
        if self._called is None:
            bucket.free()

    def _before_backward(self, module: nn.Module) -> None:
        """Wait for the weights of a module again, and gather the weights of earlier modules."""
        needed = self._needs[module]
        for bucket in needed:
            self._wait_for_weights(bucket)
        if needed:
            self._gather_ahead(needed[0], -1)


def _tensors_in(out: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        return [tensor for value in out.values() for tensor in _tensors_in(value)]
    return [tensor for value in out for tensor in _tensors_in(value)] if isinstance(out, (list, tuple)) else []
