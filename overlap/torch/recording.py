"""Spans of torch's computes in the timeline: forward and backward of modules, and steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..runtime.rank import Rank
from . import private
from .backend import find_rank


def record(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank: Rank | None = None
) -> Callable[[], None]:
    """Show in the timeline when a module's parts compute, beside the communication.

    Parts without parts of their own are recorded, such as "forward 0.linear" and "backward 0.linear"; each call of the
    module while it trains begins a step, which ends with the next call or with the world. A backward ends where that of
    the next part begins; it costs some microseconds a part. Write the timeline with `OVERLAP_TRACE=run.json`, and look
    at it with `overlap timeline`.

    Args:
        module: Any, also one inside DistributedDataParallel.
        optimizer: To show its steps.
        rank: The rank of the timeline; by default the rank of `init_process_group("overlap")`.

    Returns:
        A function that ends the recording.

    Raises:
        UsageError: If there is no world.
    """
    recording = _ProcessRecording(find_rank(rank))
    handles = [module.register_forward_pre_hook(lambda *_: recording.begin_step(module.training))]
    for name, part in module.named_modules():
        if not any(True for _ in part.children()):
            handles += recording.watch(name or type(part).__name__, part)
    if optimizer is not None:
        handles += recording.watch_optimizer(optimizer)

    def end() -> None:
        for handle in handles:
            handle.remove()
        recording.end_step()

    return end


class _ProcessRecording:
    """The spans of one module on one rank. Forward and backward of a module run one after the other."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._now = rank, rank.now_ns
        self._began_ns = 0
        self._backward: tuple[str, int] | None = None  # the part of backward that runs, and since when
        self._last_ns = 0  # when it was last seen to compute
        self._step: Any = None
        self._steps = 0

    def begin_step(self, training: bool) -> None:
        """Begin another step: operations that are issued from now on belong to it."""
        self.end_step()
        if training and torch.is_grad_enabled():
            self._step = self._rank.step(self._steps)
            self._step.__enter__()
            self._steps += 1

    def end_step(self) -> None:
        """End the step: operations that are issued from now on belong to none."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def watch(self, name: str, part: nn.Module) -> list[Any]:
        """Record the forward and the backward of one part; return the handles of its hooks."""

        def before(*_: object) -> None:
            self._began_ns = self._now()

        def after(_part: object, _inputs: object, out: Any) -> None:
            self._rank.record(f"forward {name}", self._began_ns, self._now())
            made_by = getattr(out if isinstance(out, torch.Tensor) else None, "grad_fn", None)
            if made_by is not None:
                made_by.register_prehook(lambda _: self._begin_backward(f"backward {name}"))

        handles = [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(lambda _: self._record_compute()))
        return handles

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Record the steps of an optimizer; return the handles of its hooks."""

        def before(*_: object) -> None:
            self._began_ns = self._now()

        def after(*_: object) -> None:
            self._rank.record(type(optimizer).__name__, self._began_ns, self._now())

        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def _begin_backward(self, name: str) -> None:
        """Begin the backward of a part, which ends that of the part before."""
        if self._backward is None:
            private.after_backward(self._end_backward)
        self._record_compute()
        self._record_part()
        self._backward = (name, self._last_ns)

    def _record_compute(self) -> None:
        self._last_ns = self._now()

    def _end_backward(self) -> None:
        self._record_part()
        self._backward = None

    def _record_part(self) -> None:
        """Record the part of backward that was running, up to its last compute."""
        if self._backward is not None:
            name, since_ns = self._backward
            self._rank.record(name, since_ns, max(since_ns, self._last_ns))
