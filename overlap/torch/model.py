"""Modules under training: gradients leave in buckets while backward goes on, and forward waits late.

A hook of each parameter sees its gradient come; when a bucket is full, it leaves. `step` waits for nothing: a hook of
each module waits, right before its forward, for the weights that it needs.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from ..errors import UsageError
from ..hints import plainly_named
from ..parallel.buckets.plan import BucketPlan, plan_by_size
from ..parallel.buckets.queue import BucketQueue
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from . import private
from .backend import find_rank
from .issuing import users_frame
from .order import BucketOrder
from .tensors import as_array

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Unused = Literal["error", "zeros"]


class ParameterBucket:
    """Parameters with gradients that travel together.

    Attributes:
        plan: Indices of the parameters, and offsets of their gradients.
        parameters: The parameters, in the order of the plan.
        arrived: Names of the parameters whose gradients have come in this step.
        priority: Lower for parameters that forward needs earlier.
        due: Whether a step has been made whose update has not.
    """

    plan: BucketPlan
    parameters: list[nn.Parameter]
    priority: int

    def __init__(self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int) -> None:
        self.plan, self.parameters, self.priority = plan, parameters, priority
        self.arrived: set[str] = set()
        self.due: bool = False

    @property
    def full(self) -> bool:
        """Whether all gradients of this step have arrived."""
        return len(self.arrived) == len(self.parameters)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a flat tensor that belong to the parameters, in their shapes."""
        return [
            flat[slot.start : slot.stop].view(parameter.shape)
            for slot, parameter in zip(self.plan.slots, self.parameters, strict=True)
        ]


B = TypeVar("B", bound=ParameterBucket)


@plainly_named
class TrainedModule(nn.Module, Generic[B]):  # type: ignore[misc]
    """A wrapper that trains a module on several ranks; called as the module itself.

    Attributes:
        module: The wrapped module.
        rank: The rank that it runs on.
        group: Ranks that train it together.
        optimizer: Optimizer of the weights that this rank updates; learning-rate schedules are given this.
    """

    optimizer: torch.optim.Optimizer
    module: nn.Module
    rank: Rank
    _needs_one_order = False  # whether all ranks must use the modules in one order

    def __init__(
        self, module: nn.Module, *, rank: Rank | None, group: Group | None, bucket_bytes: int | None, unused: Unused
    ) -> None:
        super().__init__()
        if unused not in ("error", "zeros"):
            raise UsageError(f"unused: expected 'error' or 'zeros', got {unused!r}")
        self.module, self.rank = module, find_rank(rank)
        self.group: Group = group or self.rank.world
        self._unused, self._syncs = unused, True
        self._names = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        if not self._names:
            raise UsageError("module: it has no parameter that requires a gradient; call it without a wrapper")
        self._broadcast_weights()
        self._stream = self.rank.stream(f"gradients of {self.group.name}", window=16)
        self._queue: BucketQueue[B] = BucketQueue(self._plan_buckets(bucket_bytes))
        self._bucket_order = BucketOrder(self.rank, self.group)
        self._called: set[nn.Module] | None = set()
        for name, parameter in self._names.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._on_gradient(name))
        for part in module.modules():
            part.register_forward_pre_hook(lambda part, _: self._before_forward(part))
        self._needs = {part: self._own_buckets(part) for part in module.modules()}

    # -- for each of the two kinds ---------------------------------------------------------------------------------

    @abstractmethod
    def _bucket(self, plan: BucketPlan, parameters: list[nn.Parameter], priority: int) -> B:
        """Make a bucket."""

    @abstractmethod
    def _send(self, bucket: B) -> None:
        """Issue the operation of a full bucket's gradients."""

    @abstractmethod
    def _wait_for_weights(self, bucket: B) -> None:
        """Wait until the weights of a bucket have made the last step."""

    @abstractmethod
    def _wait_for_update(self) -> None:
        """Wait until the optimizer has made the last step; issue nothing, for a rank may do so alone."""

    def _end_step(self) -> None:
        """Act on the last gradient of a step."""

    # -- the loop ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; each part waits for the weights that it needs."""
        return self.module(*args, **kwargs)

    def step(self) -> None:
        """Send the gradients of a step, and update the weights as they arrive. Never waits.

        Raises:
            UsageError: If a parameter has had no gradient, and `unused` does not allow that; or if one requires a
                gradient that did not when the model was made.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UsageError(
                    f"step: {name} requires a gradient, and did not when the model was made; let it "
                    "require one before, and stop that afterwards"
                )
        for bucket in self._queue.waiting:
            if not bucket.full:
                self._fill_missing(bucket)
        for bucket in self._queue.rest():
            self._send(bucket)
        self._queue.begin()
        self._bucket_order.end_step(len(self._buckets))
        self._end_step()
        for bucket in self._buckets:
            bucket.arrived.clear()
            bucket.due = True
        self._assign_uncalled()

    def finish(self) -> nn.Module:
        """Wait until all weights have made the last step; return the module."""
        self._agree()
        for bucket in self._buckets:
            self._wait_for_weights(bucket)
        return self.module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on this rank within a block; the next backward outside sends their sum."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights after the last step, as the module does."""
        return self.finish().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, as the module does."""
        return self.finish().load_state_dict(*args, **kwargs)

    @property
    def _buckets(self) -> list[B]:
        """The buckets, in the order in which they travel."""
        return self._queue.buckets

    # -- below -------------------------------------------------------------------------------------------------------

    def _broadcast_weights(self) -> None:
        """Give all ranks the weights and buffers of the group's first rank."""
        tensors = [tensor.data for tensor in [*self._names.values(), *self.module.buffers()]]
        flat = [tensor.contiguous() for tensor in tensors]
        site = users_frame()
        futures = [
            self.group.broadcast(view, out=view, name=RoleName("first weights", "library"), call_site=site)
            for view in map(as_array, flat)
        ]
        for future, tensor, source in zip(futures, tensors, flat, strict=True):
            future.result()
            if source is not tensor:
                tensor.copy_(source)
        self.group.barrier(
            name=RoleName("first weights", "library"), call_site=site
        ).result()  # the first rank hears if others differ

    def _with_current_state(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer with hooks: its state is that of the last step when it is read or replaced."""
        optimizer.register_state_dict_pre_hook(lambda _: self._wait_for_update())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._wait_for_update())
        return optimizer

    def _plan_buckets(self, bucket_bytes: int | None) -> list[B]:
        """Divide the parameters, in reverse order, into buckets of one dtype."""
        kinds = {name: (tuple(p.shape), as_array(p).dtype) for name, p in self._names.items()}
        positions = {name: position for position, name in enumerate(kinds)}
        return [
            self._bucket(plan, [self._names[name] for name in plan.names], min(positions[name] for name in plan.names))
            for plan in plan_by_size(kinds, reversed(list(kinds)), bucket_bytes)
        ]

    def _own_buckets(self, module: nn.Module) -> list[B]:
        """Return the buckets of the parameters that belong to a module itself, not to a part of it."""
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        return list({id(b): b for name, b in self._queue.home.items() if id(self._names[name]) in own}.values())

    def _before_forward(self, module: nn.Module) -> None:
        """Wait for the weights that a module needs, right before its forward."""
        self._agree()
        if self._called is not None:
            self._called.add(module)
        for bucket in self._needs[module]:
            self._bucket_order.note_use(bucket.plan.index)
            self._wait_for_weights(bucket)

    def _agree(self) -> None:
        """Use the order of the group's first rank for buckets, from the second step on."""
        plans = sorted((bucket.plan for bucket in self._buckets), key=lambda plan: plan.index)
        order = self._bucket_order.agree([plan.names for plan in plans], same=self._needs_one_order)
        if order is not None:
            self._queue = BucketQueue(sorted(self._buckets, key=lambda bucket: order.index(bucket.plan.index)))

    def _assign_uncalled(self) -> None:
        """Let called modules wait for weights of parts that are not called, after the first step.

        Such as nn.MultiheadAttention, which uses the weights of its projection without calling it.
        """
        if self._called is None:
            return
        called, self._called = self._called, None
        parents = {child: parent for parent in self.module.modules() for child in parent.children()}
        for part in self.module.modules():
            owner = part
            while owner not in called and owner in parents:
                owner = parents[owner]
            if owner is not part:
                self._needs[owner] = list({id(b): b for b in self._needs[owner] + self._own_buckets(part)}.values())

    def _on_gradient(self, name: str) -> None:
        """Note the gradient of a parameter; send the buckets that are full and next in order."""
        bucket = self._queue.home[name]
        if bucket.due:
            raise UsageError(
                f"{name}: it was used before its update, by a module that neither owns it nor is called above its "
                "owner; call model.finish() before such a forward"
            )
        if name in bucket.arrived:
            raise UsageError(
                f"{name}: its gradient has left already in this step; run all backwards of a step but the last in "
                "`with model.no_sync():`, or add their losses up"
            )
        if self._syncs:
            bucket.arrived.add(name)
            if bucket.full:
                self._bucket_order.note_full(bucket.plan.index)
                for ready in self._queue.due():
                    self._send(ready)

    def _fill_missing(self, bucket: B) -> None:
        """Fill a bucket with zeros for parameters without a gradient, or refuse to."""
        missing = [name for name in bucket.plan.names if name not in bucket.arrived]
        if self._unused == "error":
            raise UsageError(f"step: {', '.join(missing)} had no gradient; pass unused='zeros' if that is meant")
        for name in missing:
            if self._names[name].grad is None:
                self._names[name].grad = torch.zeros_like(self._names[name])
        bucket.arrived.update(missing)


def frozen_settings(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer that shares state and parameters, and has the settings of this moment.

    An update may be made after a learning-rate schedule has gone on: it must not use the settings of the next step.
    """
    frozen = copy.copy(optimizer)
    frozen.param_groups = [dict(group) for group in optimizer.param_groups]
    private.note_step(optimizer)
    return frozen
