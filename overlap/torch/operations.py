"""Common parts of the methods for c10d's operations: c10d's keywords, records of torch's profiler, repeated calls."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from sys import modules
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, cast

import torch
import typing_extensions
from torch.autograd.profiler import record_function

from ..runtime.group import Group
from ..runtime.state import DONE
from . import private
from .tensors import PLAIN

W = TypeVar("W")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_NO_TIME = timedelta(0)

# c10d's names of arguments, and ours: names of its forms for one tensor, and names in another style.
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


def c10d_operation(operator: str, name: str) -> Callable[[_Method], _Method]:
    """Return a decorator for methods of `ProcessGroup` that are operations of c10d.

    * The method accepts c10d's names of keyword arguments.
    * Torch's compiler calls the method, and does not trace it.
    * While torch's profiler runs, each call writes two events, as with gloo. "c10d::OPERATOR" lasts as long as the
      call, and has the shapes of its tensors, its group and its number. "overlap:NAME" lasts until the operation has
      ended.

    Args:
        operator: Name of the operator of c10d, "allreduce_" for example.
        name: Name of the operation, "all_reduce" for example.
    """

    def decorate(method: _Method) -> _Method:
        """Return the decorated method."""
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
            call = partial(method, self, *args, **more)
            return _call_recorded(f"c10d::{operator}", f"overlap:{name}", self, call, args)

        decorated: Any = exclude_from_compiler(call_by_our_names, plain=method)
        # marks methods that `ProcessGroup` makes synchronous under TORCH_DISTRIBUTED_DEBUG=DETAIL
        decorated.is_collective = name not in ("send", "recv")
        return cast(_Method, decorated)

    return decorate


def exclude_from_compiler(method: _Method, *, plain: Callable[..., Any] | None = None) -> _Method:
    """Return a function that calls a method without torch's compiler, which would trace it within compiled code.

    Args:
        method: The method.
        plain: The same method without records for torch's profiler. It is called in place of `method` if there are no
            keyword arguments and the profiler does not run.
    """
    untraced_method: list[Callable[..., Any]] = []

    @wraps(method)
    def call_untraced(*args: Any, **keywords: Any) -> Any:
        """Call the method: directly if the compiler is not active, otherwise through a wrapper that it skips."""
        # once after torch's compiler was loaded: exclude the code of this function, which all methods share
        if not _skipped_code and "torch._dynamo" in modules:
            _let_compiler_skip(cast(Any, call_untraced).__code__)
        # the compiler is not active in this thread
        if private.compiler_callback() is None:
            if plain is not None and not (keywords or private.profiler_enabled()):
                return plain(*args)
            return method(*args, **keywords)
        if not untraced_method:
            # made at the first use, because it imports the compiler
            untraced_method.append(torch.compiler.disable(method))
        return untraced_method[0](*args, **keywords)

    return cast(_Method, call_untraced)


_skipped_code: list[CodeType] = []
"""The code of `call_untraced`, which all methods share, once torch's compiler skips it; empty before."""


def _let_compiler_skip(code: CodeType) -> None:
    """Exclude code from torch's compiler, and record it in `_skipped_code` if that was possible."""
    if private.skip_code(code):
        _skipped_code.append(code)


@exclude_from_compiler
def call_and_wait(method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a method of a collective, wait for its operation, and return the Work; raise the operation's error."""
    work = method(*args, **keywords)
    work.wait()
    return work


def _call_recorded(call: str, operation: str, group: Any, method: Callable[[], Any], args: Iterable[Any]) -> Any:
    """Call a method with two records of torch's profiler: `call` ends with it, and `operation` with the operation.

    The method's arguments are bound; `args` are those whose tensors the records describe.
    """
    lists = list(_tensor_lists(args))
    with private.record_call(call, lists, _fields_of_record(group, operation, lists)):
        span = record_function(operation)
        # entered by hand, because the span lasts longer than this block
        span.__enter__()
        try:
            work = method()
        except BaseException:
            span.__exit__(None, None, None)
            raise
        ended: torch.futures.Future[None] = torch.futures.Future()
        private.end_span_with(span, ended)
        if work is private.finished_work:
            ended.set_result(None)
        else:
            work.record_end(lambda: ended.set_result(None))
        return work


def _fields_of_record(group: Any, operation: str, lists: Sequence[Any]) -> Mapping[str, object]:
    """Return the fields of a record, by the names that torch's profiler uses for other backends.

    `lists` has the tensors of each argument; if it is empty, no sizes are recorded.
    """
    fields: dict[str, object] = {
        "Collective name": operation.partition(":")[2],
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Process Group Ranks": str(list(group._group.ranks)),
        "Group size": group.size(),
        "Seq": group._get_sequence_number_for_group(),
    }
    if lists:  # in c10d's operations the first argument is the output, the last one the input
        fields["In msg nelems"] = sum(x.numel() for x in lists[-1])
        fields["Out msg nelems"] = sum(x.numel() for x in lists[0])
        fields["dtype"] = str(lists[0][0].dtype).removeprefix("torch.")
    return fields


def _tensor_lists(args: Iterable[Any]) -> Iterator[list[torch.Tensor]]:
    """Yield a list of tensors for each argument that is a tensor or a list of tensors, and for each nested list."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield [argument]
        elif isinstance(argument, list | tuple) and argument:
            if isinstance(argument[0], torch.Tensor):
                yield list(argument)
            else:
                yield from _tensor_lists(argument)


CallKey = tuple[object, ...]
"""Key of a call, with everything that its operation depends on: equal keys mean equal calls with other tensors."""


class KnownCalls(Generic[W]):
    """Issues calls that were made before without checks and conversions, from the addresses of their tensors."""

    _group: Group
    _timeout: timedelta
    _seq: int
    _work: Callable[[Any, object], W]  # Makes the handle that torch waits for

    def _reissue_call(
        self, key: CallKey, x: torch.Tensor | None, out: torch.Tensor | None, opts: Any, tensors: object,
        name: str | None = None,
    ) -> W | None:  # fmt: skip
        """Issue a call like an earlier one with the same key, and return its Work; otherwise issue nothing: None.

        None also if a tensor is not plain (see `is_plain`), or if input and result overlap in part. Helpers are inlined
        here, for a short latency. The caller must be a method that the program, or torch, has called.

        The tensors `x`, the input, and `out`, which may be `x` itself, are None where this rank has none. `tensors` is
        the result of the Work. `name` is that of the operation in records; None: that of the first call.
        """
        source = target = 0
        for tensor in (x,) if out is x else (x, out):
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
            if not source and x.nbytes:  # the tensor's memory was freed
                return None
        if out is x:
            target = source
        elif out is not None:
            target = out.data_ptr()
            if not target and out.nbytes:
                return None
            # input and result overlap in part
            if x is not None and source < target + out.nbytes and target < source + x.nbytes:
                return None
        # `users_frame`, inlined
        frame, is_library = sys._getframe(1), _IS_LIBRARY
        while is_library.get(id(frame.f_code)) and frame.f_back is not None:
            frame = frame.f_back
        if id(frame.f_code) not in is_library:
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
        # torch's function waits at once, and does not return this Work to the program: one object serves all calls
        if waits and handle.state is DONE and private.finished_work is not None:
            return cast("W", private.finished_work)
        return self._work(handle, tensors)


# Prefixes of the files of torch and this package, of modules that wrap functions of torch (for deprecation, and as
# contexts), and of graphs that torch's compiler has made.
_LIBRARIES = (
    "<eval_with_key>",
    *(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))),
    *(str(module.__file__) for module in (typing_extensions, warnings, contextlib)),
)
_IS_LIBRARY: dict[int, bool] = {}
"""By id of a code object: whether it belongs to `_LIBRARIES`. Its hash would be made of all its constants each time."""
_known_codes: list[CodeType] = []
"""These code objects, one at most for each function of the program: they live on, so no other gets the id of one."""


def users_frame() -> FrameType:
    """Return the innermost frame outside of torch and this package; if there is none, the outermost frame."""
    frame = sys._getframe(1)
    is_library = _IS_LIBRARY
    while True:
        code = frame.f_code
        is_inside = is_library.get(id(code))
        if is_inside is None:
            _known_codes.append(code)
            is_inside = is_library[id(code)] = code.co_filename.startswith(_LIBRARIES)
        if not is_inside or frame.f_back is None:
            return frame
        frame = frame.f_back


def frame_line(frame: FrameType) -> str:
    """Return the present line of a frame, as "file:line"."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
