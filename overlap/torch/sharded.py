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
from .model import OptimizerMaker, ParameterBucket, TrainedModule, Unused, as_of_now
from .tensors import Array, view_of


class _Shared(ParameterBucket):
    """A bucket of which each rank keeps and updates an equal part.

    Attributes:
        whole: Its weights side by side, filled up to a multiple of the ranks; the parameters are views of it.
        shard: This rank's part, which the optimizer is given.
        mean: Mean of the gradients of that part, of the step that was sent last.
        gathered: Brings the whole to every rank, if it is under way.
        gradients: As `whole`; where the gradients of a step are put together.
        present: Whether `whole` has memory.
        users: Modules in whose forward it is needed now.
        lent: Whether the program has been given the whole, and may have written it.
    """

    def __init__(self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int, place: int, ranks: int) -> None:
        super().__init__(plan, parameters, priority)
        self.rows = -(-plan.size // ranks)
        self.whole = torch.zeros(self.rows * ranks, dtype=parameters[0].dtype)
        for view, parameter in zip(self.views(self.whole), parameters, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.dtype = plan.dtype
        self.mine = slice(place * self.rows, (place + 1) * self.rows)
        self.shard = nn.Parameter(self.whole[self.mine].clone())
        self.gathered: Future[Any] | None = None
        self.gradients: torch.Tensor | None = None
        self.mean = self.shard
        self.nothing = torch.full((), float("nan"), dtype=self.whole.dtype)
        self.present, self.users, self.loaned = True, 0, False
        self.update: Future[Any] | None = None

    def free(self) -> None:
        """Free the memory of the whole weights; references stay, and the parameters read as NaN until `room`."""
        if self.present and self.gathered is None and not self.users:
            self.copy_own_part()
            self.present = False
            for parameter in self.parameters:
                parameter.data = self.nothing.expand(parameter.shape)
            self._resize(0)

    def copy_own_part(self) -> None:
        """Copy this rank's part from the whole weights, if the program had them on loan and may have written them."""
        if self.loaned:
            self.loaned = False
            self.shard.data.copy_(self.whole[self.mine])

    def room(self) -> Array:
        """Allocate the memory of the whole weights again, and return it."""
        if not self.present:
            self.present = True
            self._resize(self.whole.numel() * self.whole.element_size())
            for parameter, view in zip(self.parameters, self.views(self.whole), strict=True):
                parameter.data = view
        return view_of(self.whole)

    def _resize(self, n_bytes: int) -> None:
        """Give the whole so much memory."""
        # The weights are the same again when a backward pass reads its references to them, which torch cannot know:
        # that pass would refuse a new version of them.
        with private.keeping_version(self.whole):
            self.whole.untyped_storage().resize_(n_bytes)


class Sharded(TrainedModule[_Shared]):
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
        self.optimizer: torch.optim.Optimizer = self._kept(optimizer([bucket.shard for bucket in self._buckets]))
        if stage == 3:
            for each in module.modules():
                each.register_forward_hook(lambda each, _args, out: self._after(each, out))

    def _bucket(self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int) -> _Shared:
        return _Shared(plan, parameters, priority, self.group.rank, self.group.size)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _send(self, bucket: _Shared) -> None:
        if bucket.gradients is None:
            bucket.gradients = torch.zeros(bucket.whole.numel(), dtype=bucket.whole.dtype)
        for view, parameter in zip(bucket.views(bucket.gradients), bucket.parameters, strict=True):
            view.copy_(parameter.grad)
            parameter.grad = None
        bucket.mean = torch.empty(bucket.rows, dtype=bucket.whole.dtype)
        bucket.update = self.group.reduce_scatter(
            view_of(bucket.gradients),
            "mean",
            view_of(bucket.mean),
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
        """Update every part when its mean has arrived, and gather the whole weights, in the order of forward."""
        optimizer = as_of_now(self.optimizer)
        for bucket in self._order:
            bucket.copy_own_part()
            update = partial(self._apply, bucket, bucket.mean, optimizer)
            bucket.update = self.rank.compute(
                update, bucket.update, name=RoleName("update", "update"), call_site=users_frame()
            )
        for bucket in self._order:
            if self.stage < 3:
                self._gather(bucket)
            else:
                bucket.free()

    def _apply(self, bucket: _Shared, mean: torch.Tensor, optimizer: torch.optim.Optimizer, _: object) -> Array:
        """Update this rank's part, on the compute stream; returns it."""
        bucket.shard.grad = mean
        optimizer.step()  # passes over parameters without a gradient
        bucket.shard.grad = None
        return view_of(bucket.shard)

    def _updated(self) -> None:
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

    def _gather(self, bucket: _Shared) -> None:
        part = bucket.update if bucket.update is not None else view_of(bucket.shard)
        bucket.gathered = self.group.all_gather(
            part,
            bucket.room(),
            stream=self._stream,
            priority=bucket.priority,
            name=RoleName(f"weights {bucket.plan.index}", "bucket"),
            call_site=users_frame(),
        )
        bucket.update = None
        bucket.due = bucket.due and self.stage < 3

    def _ready(self, bucket: _Shared) -> None:
        bucket.copy_own_part()
        if self.stage == 3 and (bucket.due or not bucket.present):
            if bucket.gathered is not None:  # was gathered ahead in the last backward, and not needed there
                bucket.gathered.result()
            self._gather(bucket)
        if bucket.gathered is not None:
            bucket.gathered.result()
            bucket.gathered = None
        bucket.due = False

    def _before(self, module: nn.Module) -> None:
        super()._before(module)
        needed = self._needs[module]
        if self.stage == 3 and needed:
            for bucket in needed:
                bucket.users += 1
            self._ahead(needed[-1], 1)

    def _ahead(self, bucket: _Shared, direction: int) -> None:
        """Let the buckets be gathered that are needed next."""
        place = self._order.index(bucket)
        for step in range(1, self._depth + 1):
            if 0 <= place + direction * step < len(self._order):
                following = self._order[place + direction * step]
                if not following.present and not (direction < 0 and following.full):
                    self._gather(following)

    def _after(self, module: nn.Module, out: Any) -> None:
        """Give back the weights that forward has used, and ask for them again before backward."""
        for tensor in [each for each in _tensors(out) if each.requires_grad][:1]:
            tensor.register_hook(lambda _: self._before_backward(module))
        for bucket in self._needs[module]:
            bucket.users -= 1
            self._free(bucket)

    def _free(self, bucket: _Shared) -> None:
        """Give memory back, from the second step on: in the first one it is not known which modules are called."""
        if self._called is None:
            bucket.free()

    def _before_backward(self, module: nn.Module) -> None:
        needed = self._needs[module]
        for bucket in needed:
            self._ready(bucket)
        if needed:
            self._ahead(needed[0], -1)


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        return [each for value in out.values() for each in _tensors(value)]
    return [each for value in out for each in _tensors(value)] if isinstance(out, (list, tuple)) else []
