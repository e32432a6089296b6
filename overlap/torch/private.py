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
`Reducer._set_forward_pass_work_handle`         `join` of DDP without `divide_by_initial_world_size` never ends
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
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist


def _return_none() -> None:
    """Return None; used in place of functions of torch that this version lacks."""


def _find_private(path: str, otherwise: Any = None) -> Any:
    """Return the attribute of torch at a path such as "_C._profiler", or `otherwise` if it is missing."""
    owner: Any = torch
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return otherwise if owner is None else owner


# Looked up once, because every call of an operation calls both.
compiler_callback: Callable[[], object] = _find_private("_C._dynamo.eval_frame.get_eval_frame_callback", _return_none)
"""Return the function that compiles frames of this thread; None: torch's compiler is not active."""
profiler_enabled: Callable[[], object] = _find_private("autograd._profiler_enabled", _return_none)
"""Return whether torch's profiler records this thread."""


def _make_finished_work() -> Any:
    """Return a Work of torch's own class that has succeeded; None if this torch cannot make one.

    Its methods are C++ code, which is faster than the methods of our `Work`.
    """
    make, ended = _find_private("_C._distributed_c10d._create_work_from_future"), torch.futures.Future[None]()
    ended.set_result(None)
    return None if make is None else make(ended)


finished_work: Any = _make_finished_work()
"""The Work that all calls return that have ended already, and whose Work only torch's own functions see."""


WAITING_CALLS: tuple[CodeType, ...] = tuple(unwrap(function).__code__ for function in (dist.send, dist.recv))
"""Functions of torch that begin a message and wait for it at once. Not a set: to hash code takes all its constants."""


def skip_code(code: CodeType) -> bool:
    """Exclude a function, by its code, from torch's compiler; return whether that was possible.

    False if the compiler is not loaded, or has no way to do it.
    """
    # The import of the module takes a second. While another thread imports it, the attribute is missing, and nothing is
    # compiled yet.
    compiler: Any = getattr(sys.modules.get("torch._dynamo"), "eval_frame", None)
    if not hasattr(compiler, "skip_code"):
        return False
    compiler.skip_code(code)
    return True


def record_call(call: str, lists: Sequence[Any], described: Mapping[str, object]) -> AbstractContextManager[object]:
    """Return a context in which torch's profiler records a call of c10d.

    Args:
        call: Name of the record.
        lists: For each argument, the list of its tensors.
        described: Further fields of the record, by the names that Kineto, torch's profiler, uses.
    """
    record = _find_private("_C._profiler._RecordFunctionFast")
    return nullcontext() if record is None else record(call, lists, described)


def end_span_with(span: Any, over: torch.futures.Future[None]) -> None:
    """End a span of torch's profile when the future `over` is complete; at once if this version of torch cannot."""
    if hasattr(span, "_call_end_callbacks_on_future"):
        span._call_end_callbacks_on_future(over)
    else:
        span.__exit__(None, None, None)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass under way; torch has no public function for that.

    Raises:
        RuntimeError: No backward pass is under way.
    """
    queue = _find_private("autograd.Variable._execution_engine.queue_callback")
    if queue is not None:
        queue(callback)


def group_options(timeout: timedelta) -> Any:
    """Return an options object of torch with the time limit of a group."""
    return _find_private("_C._distributed_c10d.Backend.Options")("overlap", timeout)


def replace_in_c10d(name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed; nothing if this torch has no such function.

    Args:
        name: Name of the function.
        replacement: Called with the original function, and then the arguments of the call.
    """
    original = getattr(dist.distributed_c10d, name, None)
    if original is None:
        return
    replaced = wraps(original)(partial(replacement, original))
    for module in (dist, dist.distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, replaced)


def keep_works_of_forwards() -> None:
    """Patch DDP's `Reducer` so that it keeps alive the Python Work of a forward pass.

    DDP makes such a Work under `join(divide_by_initial_world_size=False)`, and passes it to C++, which keeps only its
    own part of the object. Without the Python part, the backward pass would wait for ever.
    """
    reducers: Any = _find_private("_C._distributed_c10d.Reducer")
    set_work: Any = getattr(reducers, "_set_forward_pass_work_handle", None)
    works: WeakKeyDictionary[object, object] = WeakKeyDictionary()

    def set_and_keep(reducer: object, work: object, *args: object, **options: object) -> None:
        works[reducer] = work
        set_work(reducer, work, *args, **options)

    if set_work is not None:
        reducers._set_forward_pass_work_handle = set_and_keep


def get_factor(op: Any) -> Any:
    """Return the factor by which each rank multiplies its input before a sum; None if it cannot be found.

    Args:
        op: A PREMUL_SUM of torch.
    """
    if hasattr(op, "factor"):  # versions later than 2.7
        return op.factor
    state = (
        op.__getstate__()
    )  # (kind, factor); if torch's class has no such method, that of `object`, which is no tuple
    return state[1] if isinstance(state, tuple) else None
