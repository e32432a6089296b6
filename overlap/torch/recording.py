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
    """Record in the timeline when a module computes, next to the communication.

    The innermost submodules are recorded, as spans such as "forward 0.linear" and "backward 0.linear". Each call of the
    module in training mode begins a step, which ends with the next call or with the world. The span of a backward ends
    where that of the next submodule begins. Recording takes some microseconds for each submodule. Write the timeline
    with `OVERLAP_TRACE=run.json`, and look at it with `overlap timeline`.

    Args:
        module: Any module, even one inside DistributedDataParallel.
        optimizer: An optimizer whose steps are recorded, too; None: none.
        rank: The rank in whose timeline the spans are; None: that of `init_process_group("overlap")`.

    Returns:
        A function that ends the recording.

    Raises:
        UsageError: There is no world.
    """
    recording = _ModuleRecording(find_rank(rank))
    handles = [module.register_forward_pre_hook(lambda *_: recording.begin_step(module.training))]
    for name, part in module.named_modules():
        if not any(True for _ in part.children()):
            handles += recording.watch_submodule(name or type(part).__name__, part)
    if optimizer is not None:
        handles += recording.watch_optimizer(optimizer)

    def end_recording() -> None:
        for handle in handles:
            handle.remove()
        recording.end_step()

    return end_recording


class _ModuleRecording:
    """Records spans of modules in the timeline of a rank.

    One start time is enough for all forwards, because they run one after the other.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._now = rank, rank.now_ns
        self._began_ns = 0  # start of the present forward, or step of the optimizer
        self._backward: tuple[str, int] | None = None  # name and start of the backward that runs
        self._last_ns = 0  # last time at which a backward was seen to compute
        self._step: Any = None  # the context of the present step
        self._steps = 0  # number of steps so far

    def begin_step(self, training: bool) -> None:
        """End the present step; in training mode begin the next one, to which later operations belong."""
        self.end_step()
        if training and torch.is_grad_enabled():
            self._step = self._rank.step(self._steps)
            # entered by hand, because `end_step` leaves it in another call of a hook
            self._step.__enter__()
            self._steps += 1

    def end_step(self) -> None:
        """End the present step, if there is one: later operations belong to no step."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def watch_submodule(self, name: str, part: nn.Module) -> list[Any]:
        """Record the forward and the backward of one submodule; return the handles that remove its hooks."""

        def record_forward(_part: object, _inputs: object, out: Any) -> None:
            """Record the forward that has ended, and let the backward of its output begin a span later."""
            self._rank.record(f"forward {name}", self._began_ns, self._now())
            made_by = getattr(out if isinstance(out, torch.Tensor) else None, "grad_fn", None)
            if made_by is not None:
                made_by.register_prehook(lambda _: self._begin_backward(f"backward {name}"))

        # hooks are functions, not methods of this object: a copy of the module would copy this object, too
        begin = part.register_forward_pre_hook(lambda *_: self._set_span_start())
        handles = [begin, part.register_forward_hook(record_forward)]
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(lambda _: self._set_last_compute_time()))
        return handles

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Record the steps of an optimizer; return the handles that remove its hooks."""

        def record_step(*_: object) -> None:
            self._rank.record(type(optimizer).__name__, self._began_ns, self._now())

        before = optimizer.register_step_pre_hook(lambda *_: self._set_span_start())
        return [before, optimizer.register_step_post_hook(record_step)]

    def _set_span_start(self) -> None:
        """Set the start of a forward, or of a step of the optimizer, to the present time."""
        self._began_ns = self._now()

    def _begin_backward(self, name: str) -> None:
        """Begin the span of a submodule's backward, and end the span before it."""
        # the first span of this backward pass
        if self._backward is None:
            private.call_after_backward(self._end_backward)
        self._set_last_compute_time()
        self._record_backward_part()
        self._backward = (name, self._last_ns)

    def _set_last_compute_time(self) -> None:
        """Set the last time at which a backward was seen to compute to the present time."""
        self._last_ns = self._now()

    def _end_backward(self) -> None:
        """Record the last span of a backward pass, which has ended."""
        self._record_backward_part()
        self._backward = None

    def _record_backward_part(self) -> None:
        """Record the span of the backward that was running, up to its last compute; nothing if none was."""
        if self._backward is not None:
            name, since_ns = self._backward
            self._rank.record(name, since_ns, max(since_ns, self._last_ns))
