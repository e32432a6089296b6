"""Data parallel for modules of torch: every rank has all weights, gradients are averaged while backward goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import UsageError
from ..parallel.buckets.plan import BucketPlan
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from .issuing import users_frame
from .model import OptimizerMaker, ParameterBucket, TrainedModule, Unused, frozen_settings
from .tensors import as_array


class _Averaged(ParameterBucket):
    """A bucket of gradients that all ranks get back as means."""

    flat: torch.Tensor | None = None  # where gradients are side by side; made when they first are
    reduced: Future[Any] | None = None
    means: list[torch.Tensor]


class DataParallel(TrainedModule[_Averaged]):
    """A module with gradients averaged over a group, without a barrier at the end of a step.

    The first weights are the weights of the group's first rank. After `backward`, call `step` instead of the
    optimizer's: it waits for nothing. The update of a weight is made right before the forward of the module that needs
    it, so gradients travel under the end of backward, and under the beginning of the next forward. Gradients belong to
    the model from backward to update: `parameter.grad` is None in between.

        model = overlap.torch.DataParallel(module, lambda parameters: torch.optim.Adam(parameters, 1e-3))
        for x, y in batches:
            loss_of(model(x), y).backward()
            model.step()
        trained = model.finish()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerMaker,
        *,
        rank: Rank | None = None,
        group: Group | None = None,
        bucket_bytes: int | None = None,
        clip_norm: float | None = None,
        unused: Unused = "error",
    ) -> None:
        """Take a module over, on every rank of the group.

        Args:
            module: With parameters on the CPU, the same ones on all ranks.
            optimizer: Makes an optimizer of parameters, such as `functools.partial(torch.optim.Adam, lr=1e-3)`.
            rank: This rank; by default the rank of `init_process_group("overlap")`.
            group: Ranks to average over; by default all.
            bucket_bytes: When a bucket is full; by default as in `overlap.parallel.DataParallel`.
            clip_norm: Limit of the norm of all gradients. No weight is updated before the last gradient has arrived.
            unused: Whether a parameter without a gradient is an "error", or counts as "zeros".

        Raises:
            UsageError: If there is no world, or an argument is invalid.
        """
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm: expected a positive number, got {clip_norm!r}")
        super().__init__(module, rank=rank, group=group, bucket_bytes=bucket_bytes, unused=unused)
        self.optimizer: torch.optim.Optimizer = self._with_current_state(optimizer(self._names.values()))
        self._clip_norm, self._clips = clip_norm, False
        self._updating = self.optimizer

    def _bucket(self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int) -> _Averaged:
        """Make a bucket of gradients that are averaged."""
        return _Averaged(plan, parameters, priority)

    def _send(self, bucket: _Averaged) -> None:
        """Issue the all-reduce of a full bucket, in place where its gradient is one contiguous array."""
        gradients: list[Any] = [parameter.grad for parameter in bucket.parameters]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            bucket.means, flat = gradients, gradients[0].view(-1)
        else:
            if bucket.flat is None:
                bucket.flat = self._shared_tensor(bucket.plan.size, gradients[0].dtype)
            flat, bucket.means = bucket.flat, bucket.views(bucket.flat)
            for mean, gradient in zip(bucket.means, gradients, strict=True):
                mean.copy_(gradient)
        for parameter in bucket.parameters:
            parameter.grad = None
        array = as_array(flat)
        bucket.reduced = self.group.all_reduce(
            array,
            "mean",
            array,
            priority=bucket.priority,
            stream=self._stream,
            name=RoleName(f"bucket {bucket.plan.index}", "bucket"),
            call_site=users_frame(),
        )

    def _shared_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor in memory that the other processes of this host read directly."""
        nbytes = size * torch.empty(0, dtype=dtype).element_size()
        return torch.from_numpy(self.rank.empty(nbytes, np.uint8, common=True)).view(dtype)

    def _end_step(self) -> None:
        """Save the optimizer's settings for the updates of this step, which are made later."""
        self._updating = frozen_settings(self.optimizer)
        self._clips = self._clip_norm is not None

    def _wait_for_update(self) -> None:
        """Wait until every weight has been updated."""
        self.finish()

    def _wait_for_weights(self, bucket: _Averaged) -> None:
        """Wait for the means of a bucket, and update its weights, once a step."""
        if not bucket.due:
            return
        if self._clips:
            self._clip()
        assert bucket.reduced is not None
        bucket.reduced.result()
        bucket.due = False
        for parameter, mean in zip(bucket.parameters, bucket.means, strict=True):
            parameter.grad = mean
        self._updating.step()  # passes over parameters without a gradient
        for parameter in bucket.parameters:
            parameter.grad = None

    def _clip(self) -> None:
        """Scale all gradients of the step, after the last mean has arrived."""
        self._clips = False
        means = []
        for bucket in self._buckets:
            assert bucket.reduced is not None
            bucket.reduced.result()
            means += bucket.means
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(mean) for mean in means]))
        factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for mean in means:
            mean.mul_(factor)
