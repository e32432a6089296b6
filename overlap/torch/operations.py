"""The part that all methods for c10d's operations share: keywords of c10d, records of torch's profiler, no tracing."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from sys import modules
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
import typing_extensions
from torch.autograd.profiler import record_function

from ..runtime.group import Group
from ..runtime.state import DONE
from . import private
from .tensors import PLAIN

_NO_TIME = timedelta(0)

_Method = TypeVar("_Method", bound=Callable[..., Any])

# The names of c10d's second form of a method, which takes one tensor, and names that are no Python style.
_KEYWORDS = {
    "tensor": "tensors",
    "input_tensor": "input_tensors",
    "output_tensor": "output_tensors",
    "input": "input_tensors",
    "output": "output_tensors",
    "input_list": "input_tensors",
    "dstRank": "dst",
    "srcRank": "src",
}


def operation(record: str, name: str) -> Callable[[_Method], _Method]:
    """Make a method an operation of c10d.

    It takes c10d's keywords, and torch's compiler calls it without a look inside. While torch's profiler records the
    calling thread, it appears twice, as operations of gloo do: the call as "c10d::RECORD", with the shapes of its
    tensors, group and number; and "overlap:NAME", which begins in that call and lasts until the operation has ended.

    Args:
        record: Name of the operator of c10d, "allreduce_" for example.
        name: Name of the operation, "all_reduce" for example.
    """

    def decorate(method: _Method) -> _Method:
        """Return the method with c10d's keywords and recording."""
        parameters = method.__code__.co_varnames[: method.__code__.co_argcount]
        renamed = {
            theirs: ours for theirs, ours in _KEYWORDS.items() if theirs not in parameters and ours in parameters
        }

        @wraps(method)
        def call_by_our_names(self: Any, *args: Any, **more: Any) -> Any:
            """Call the method with our names of keywords, recorded while torch's profiler runs."""
            if more:
                more = {renamed.get(key, key): value for key, value in more.items()}
            if not private.profiler_enabled():
                return method(self, *args, **more)
            return _call_recorded(f"c10d::{record}", f"overlap:{name}", self, lambda: method(self, *args, **more), args)

        decorated: Any = exclude_from_compiler(call_by_our_names, plain=method)
        decorated.collective = name not in ("send", "recv")
        return cast(_Method, decorated)

    return decorate


def exclude_from_compiler(method: _Method, *, plain: Callable[..., Any] | None = None) -> _Method:
    """Exclude a method from torch's compiler, which would trace it where C++ calls it in compiled frames.

    `plain` is the same method without recording, for calls without keywords.
    """
    untraced_method: list[Callable[..., Any]] = []

    @wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        """Call the method: directly where nothing compiles, else through a wrapper that the compiler skips."""
        if not _skipped and "torch._dynamo" in modules and private.skip_code(cast(Any, call).__code__):
            _skipped.append(True)
        if private.compiler_callback() is None:
            if plain is not None and not (keywords or private.profiler_enabled()):
                return plain(*args)
            return method(*args, **keywords)
        if not untraced_method:
            untraced_method.append(torch.compiler.disable(method))
        return untraced_method[0](*args, **keywords)

    return cast(_Method, call)


@exclude_from_compiler
def call_and_wait(method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a method of a collective, and wait for its operation, whose error this raises."""
    work = method(*args, **keywords)
    work.wait()
    return work


_skipped: list[bool] = []
"""Has an entry once torch's compiler does not trace `call`, whose code all methods share."""


def _call_recorded(call: str, operation: str, group: Any, method: Callable[[], Any], args: Iterable[Any]) -> Any:
    """Call a method with two records of torch's profiler: one of the call, and one until the operation ends."""
    lists = list(_tensors(args))
    with private.record_call(call, lists, _record_fields(group, operation, lists)):
        span = record_function(operation)
        span.__enter__()
        try:
            work = method()
        except BaseException:
            span.__exit__(None, None, None)
            raise
        ended: torch.futures.Future[None] = torch.futures.Future()
        private.end_with(span, ended)
        if work is private.finished_work:
            ended.set_result(None)
        else:
            work.record_end(lambda: ended.set_result(None))
        return work


def _record_fields(group: Any, operation: str, lists: Sequence[Any]) -> Mapping[str, object]:
    """Return the fields of a record, under Kineto's names for other backends."""
    fields: dict[str, object] = {
        "Collective name": operation.partition(":")[2],
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Process Group Ranks": str(list(group._group.ranks)),
        "Group size": group.size(),
        "Seq": group._get_sequence_number_for_group(),
    }
    if lists:  # c10d's operations take their outputs first
        fields["In msg nelems"] = sum(x.numel() for x in lists[-1])
        fields["Out msg nelems"] = sum(x.numel() for x in lists[0])
        fields["dtype"] = str(lists[0][0].dtype).removeprefix("torch.")
    return fields


def _tensors(args: Iterable[Any]) -> Iterator[list[torch.Tensor]]:
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield [argument]
        elif isinstance(argument, list | tuple) and argument:
            if isinstance(argument[0], torch.Tensor):
                yield list(argument)
            else:
                yield from _tensors(argument)


CallKey = tuple[object, ...]
"""The name of a call that may come again, with all that its operation depends on."""


class KnownCalls:
    """Calls that were made before: they are issued straight from the memory of their tensors."""

    _group: Group
    _timeout: timedelta
    _seq: int
    _work: Callable[[Any, object], Any]

    def _issue_again(
        self, key: CallKey, x: torch.Tensor | None, out: torch.Tensor | None, opts: Any, tensors: object,
        name: str | None = None,
    ) -> Any:  # fmt: skip
        """Return the Work of a call that was made before; None if it must be issued like a first one.

        The memory of the input `x` is that of the result `out`, or apart from it. All is in this one function, for a
        short latency.
        """
        source = target = 0
        for tensor in (x,) if out is x else (x, out):  # elements in order in memory
            if tensor is not None and not (  # `is_plain`, inlined
                type(tensor) in PLAIN
                and tensor.is_cpu
                and tensor.layout is torch.strided
                and tensor.is_contiguous()
                and not (tensor.is_conj() or tensor.is_neg())
            ):
                return None
        if x is not None:
            source = x.data_ptr()
            if not source and x.nbytes:  # freed
                return None
        if out is x:
            target = source
        elif out is not None:
            target = out.data_ptr()
            if not target and out.nbytes:
                return None
            if x is not None and source < target + out.nbytes and target < source + x.nbytes:
                return None
        frame, is_library = sys._getframe(1), _IS_LIBRARY
        while is_library.get(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code not in is_library:
            frame = users_frame()
        timeout, waits = getattr(opts, "timeout", None), not getattr(opts, "asyncOp", True)
        if timeout is None or timeout <= _NO_TIME:
            timeout = self._timeout
        handle = self._group._ports.reissue(
            key, (source, target, (x, out), waits), name, timeout.total_seconds(), frame
        )
        if handle is None:
            return None
        self._seq += 1
        if waits and handle.state is DONE and private.finished_work is not None:
            return private.finished_work
        return self._work(handle, tensors)


# And the modules that wrap functions of torch: deprecated ones, and contexts. And graphs that its compiler has made.
_LIBRARIES = (
    "<eval_with_key>",
    *(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))),
    *(str(module.__file__) for module in (typing_extensions, warnings, contextlib)),
)
# By code object: whether it is torch's or ours. It grows no further than the functions of the program.
_IS_LIBRARY: dict[CodeType, bool] = {}


def users_frame() -> FrameType:
    """Return the innermost frame of the program: neither torch's nor ours; the outermost one if all are."""
    frame = sys._getframe(1)
    is_library = _IS_LIBRARY
    while True:
        code = frame.f_code
        is_inside = is_library.get(code)
        if is_inside is None:
            is_inside = is_library[code] = code.co_filename.startswith(_LIBRARIES)
        if not is_inside or frame.f_back is None:
            return frame
        frame = frame.f_back


def frame_line(frame: FrameType) -> str:
    """Return the line that a frame is at, as "file:line"."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
