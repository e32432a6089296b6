"""The part that all methods for c10d's operations share: keywords of c10d, records of torch's profiler, no tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

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

    def of(method: _Method) -> _Method:
        taken = method.__code__.co_varnames[: method.__code__.co_argcount]
        renamed = {theirs: ours for theirs, ours in _KEYWORDS.items() if theirs not in taken and ours in taken}

        @wraps(method)
        def call(self: Any, *args: Any, **more: Any) -> Any:
            if more:
                more = {renamed.get(key, key): value for key, value in more.items()}
            if not _profiler_enabled():
                return method(self, *args, **more)
            return _recorded(f"c10d::{record}", f"overlap:{name}", self, lambda: method(self, *args, **more), args)

        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        return cast(_Method, call)

    return of


def _recorded(call: str, operation: str, group: Any, method: Callable[[], Any], args: Iterable[Any]) -> Any:
    with torch._C._profiler._RecordFunctionFast(call, list(_tensors(args)), _described(group, operation)):
        span = record_function(operation)
        span.__enter__()
        try:
            work = method()
        except BaseException:
            span.__exit__(None, None, None)
            raise
        over: torch.futures.Future[None] = torch.futures.Future()
        span._call_end_callbacks_on_future(over)
        work.when_done(lambda: over.set_result(None))
        return work


def _described(group: Any, operation: str) -> Mapping[str, object]:
    """Return the fields of a record, under the names that Kineto gives to those of other backends."""
    return {
        "Collective name": operation.partition(":")[2],
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Process Group Ranks": str(list(group._group.ranks)),
        "Group size": group.size(),
        "Seq": group._get_sequence_number_for_group(),
    }


def _tensors(args: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors and lists of tensors among arguments; lists of lists as their inner lists."""
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple) and each:
            if isinstance(each[0], torch.Tensor):
                yield list(each)
            else:
                yield from _tensors(each)
