"""Private parts of torch: every use of a name that a new version of torch may change.

==============================================  ======================================================================
name                                            without it
==============================================  ======================================================================
`get_eval_frame_callback` of `torch._C._dynamo` torch's compiler traces methods of the backend like those of a program
`skip_code` of `torch._dynamo.eval_frame`       likewise, where it comes to them by itself
`torch.autograd._profiler_enabled`              torch's profiler does not show our operations
`torch._C._profiler._RecordFunctionFast`        it does not show them as operations of c10d, only under our names
`record_function._call_end_callbacks_on_future` it shows them as if they ended with their calls
`Variable._execution_engine.queue_callback`     `record` shows the end of a backward pass when the next one begins
`_C._distributed_c10d._create_work_from_future` calls that have ended when they return make a Work each
`ReduceOp.__getstate__`                         reductions that multiply first are refused, unless torch has `factor`
==============================================  ======================================================================

`tests/pytorch/test_private.py` takes each of them away. Tests of many ranks in one process stand on further names, for
which `overlap.testing.pytorch.check_torch` looks; `runtime.memory.foreign` reads `Tensor._version`, and does without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from inspect import unwrap
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist


def _return_none() -> None:
    """Return None, as torch does where nothing compiles or records."""


def _find_private(path: str, otherwise: Any = None) -> Any:
    """Return the attribute of torch at a path such as "_C._profiler"; the default if it is missing."""
    owner: Any = torch
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return otherwise if owner is None else owner


# Bound once, for every call of an operation asks both.
compiler_callback: Callable[[], object] = _find_private("_C._dynamo.eval_frame.get_eval_frame_callback", _return_none)
"""Return what compiles frames of this thread; None if nothing does."""
profiler_enabled: Callable[[], object] = _find_private("autograd._profiler_enabled", _return_none)
"""Return whether torch's profiler records this thread."""


def _make_finished_work() -> Any:
    """Return a Work that has ended well, which costs no call of Python; None if torch makes none."""
    make, ended = _find_private("_C._distributed_c10d._create_work_from_future"), torch.futures.Future[None]()
    ended.set_result(None)
    return None if make is None else make(ended)


finished_work: Any = _make_finished_work()
"""The Work of calls that have ended when they return, and that only torch's own functions see."""


WAITING_CALLS: frozenset[CodeType] = frozenset(unwrap(function).__code__ for function in (dist.send, dist.recv))
"""Functions of torch that begin a message and wait for it at once."""


def skip_code(code: CodeType) -> bool:
    """Exclude a function from torch's compiler; False if the compiler is not loaded, or has no such function."""
    # A module that takes a second to import, perhaps in another thread now: then nothing is compiled yet.
    compiler: Any = getattr(sys.modules.get("torch._dynamo"), "eval_frame", None)
    if not hasattr(compiler, "skip_code"):
        return False
    compiler.skip_code(code)
    return True


def record_call(call: str, lists: Sequence[Any], described: Mapping[str, object]) -> AbstractContextManager[object]:
    """Record a call of c10d in torch's profile within a ``with``."""
    record = _find_private("_C._profiler._RecordFunctionFast")
    return nullcontext() if record is None else record(call, lists, described)


def end_with(span: Any, over: torch.futures.Future[None]) -> None:
    """End a span of torch's profile when a future is complete."""
    if hasattr(span, "_call_end_callbacks_on_future"):
        span._call_end_callbacks_on_future(over)
    else:
        span.__exit__(None, None, None)


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass under way; RuntimeError: none is. Torch has no public way."""
    queue = _find_private("autograd.Variable._execution_engine.queue_callback")
    if queue is not None:
        queue(callback)


def group_options(timeout: timedelta) -> Any:
    """Return options of a group, as torch reads them."""
    return _find_private("_C._distributed_c10d.Backend.Options")("overlap", timeout)


def replace_in_c10d(name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed by one that gets the original before the arguments."""
    original = getattr(dist.distributed_c10d, name, None)
    if original is None:
        return
    replaced = wraps(original)(partial(replacement, original))
    for module in (dist, dist.distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, replaced)


def get_factor(op: Any) -> Any:
    """Return the factor by which each rank multiplies before a reduction; None if it cannot be found."""
    if hasattr(op, "factor"):  # versions later than 2.7
        return op.factor
    state = op.__getstate__()  # of any object, if the operator has none of its own
    return state[1] if isinstance(state, tuple) else None
