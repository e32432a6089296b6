"""One bucket at work: gradients come in, their mean over the group comes back, the weights are updated."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..runtime.stream import Stream
from .buckets import BucketPlan, GradientBucket, Hook
from .memory_work import MemoryWork
from .parameters import Parameters

if TYPE_CHECKING:
    from .tree import Array

__all__ = ["Reduction"]


class Reduction:
    """A bucket of one model on one rank: planned once, started each step.

    It has one buffer for good. That is enough, as everything that writes it is a compute of this rank: the gradients of
    a step are packed after the update of the step before, which has waited for what was on the wire.

    Attributes:
        plan: What is in it.
        handed: Gradients of this step that have not been packed, by name.
        reduced: The mean over the group, of the step that was sent last.
    """

    def __init__(
        self,
        rank: Rank,
        group: Group,
        plan: BucketPlan,
        parameters: Parameters,
        work: MemoryWork,
        *,
        stream: Stream,
        hook: Hook | None,
        priority: int,
    ) -> None:
        self.plan, self.handed = plan, dict[str, object]()
        self.reduced: Future[Array] | None = None
        self._rank, self._parameters, self._work, self._hook = rank, parameters, work, hook
        self._runs = parameters.runs(plan)
        self._buffer = buffer = rank.empty(plan.size, plan.dtype)
        self._views = {slot.name: buffer[slot.start : slot.stop].reshape(slot.shape) for slot in plan.slots}
        self._group, self._stream, self._priority = group, stream, priority
        if hook is not None:
            self._group = group.on(rank.stream(f"{stream.name}, bucket {plan.index}"))
        self._state: dict[str, object] = {}
        self._step = 0  # that was sent last
        self._updated = 0  # and that was updated last
        self._newest: Future[dict[str, Array]] | None = None

    @property
    def full(self) -> bool:
        """Whether all gradients of this step are there."""
        return len(self.handed) == len(self.plan.slots)

    def send(self, step: int) -> None:
        """Pack the gradients and send them."""
        self.newest()
        gradients = [self.handed[name] for name in self.plan.names]
        self.handed.clear()
        index = self.plan.index
        buffer = self._buffer[:]  # a view for this step: the one of the step before may still be locked
        pack = partial(self._pack, buffer, step)
        packed = self._work.compute(pack, *gradients, name="pack", moved_bytes=2 * self.plan.nbytes)
        if self._hook is not None:
            self.reduced = self._rank.spawn(self._run_hook, self._hook, packed, step, name=f"hook of bucket {index}")
        elif self._group.size == 1:
            self.reduced = packed
        else:
            self.reduced = self._group.all_reduce(
                packed,
                op="mean",
                out=buffer,
                priority=self._priority,
                stream=self._stream,
                name=f"bucket {index}",
            )
        self._step = step

    def newest(self) -> Future[dict[str, Array]] | None:
        """Issue the update of the step that was sent last, unless it has been; return the weights after it."""
        if self._updated != self._step:
            self._updated = self._step
            moved_bytes = self._parameters.moved_bytes(self.plan)
            self._newest = self._work.compute(
                self._update, self._step, self.reduced, name="update", moved_bytes=moved_bytes
            )
        return self._newest

    # -- on the compute stream, and in tasks -------------------------------------------------------------------

    def _pack(self, buffer: Array, step: int, *gradients: Array) -> Array:
        for slot, gradient in zip(self.plan.slots, gradients, strict=True):
            if getattr(gradient, "shape", None) != slot.shape:
                raise UsageError(
                    f"reduce: the gradient of {slot.name!r} in step {step} has shape "
                    f"{getattr(gradient, 'shape', None)}, the parameter {slot.shape}"
                )
            if self._parameters.real and gradient is not self._views[slot.name]:
                self._views[slot.name][...] = gradient
        return buffer

    async def _run_hook(self, hook: Hook, packed: Future[Array], step: int) -> Array:
        buffer = await packed
        mine = GradientBucket(
            rank=self._rank,
            group=self._group,
            index=self.plan.index,
            step=step,
            names=self.plan.names,
            buffer=buffer,
            priority=self._priority,
            state=self._state,
            rng=np.random.default_rng((step, self.plan.index, self._rank.rank)),
        )
        made = await hook(mine)
        reduced = await made if isinstance(made, Future) else made
        if reduced.shape != buffer.shape or reduced.dtype != buffer.dtype:
            raise UsageError(
                f"hook: bucket {self.plan.index} is {buffer.dtype} {buffer.shape}, what the hook made of it is "
                f"{reduced.dtype} {reduced.shape}"
            )
        return reduced

    def _update(self, step: int, reduced: Array) -> dict[str, Array]:
        self._parameters.update(self.plan.dtype, self._runs, reduced, step)
        return self._parameters.views
