"""Hints for common mistakes: names that are almost right, and functions of another event loop."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.machinery import PathFinder
from traceback import walk_tb
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_UNEXPECTED = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")

_OTHER_WORDS = {
    "nranks": "ranks",
    "num_ranks": "ranks",
    "n": "ranks",
    "world_size": "ranks",
    "timeout": "timeout_s",
    "operation": "op",
    "reduce_op": "op",
    "dest": "dst",
    "source": "src",
    "async_op": "",
}
"""Keyword arguments of other libraries, and ours; "" where there is none, because every call returns at once."""

_OTHER_ATTRIBUTES = {
    "size": "world_size",
    "nranks": "world_size",
    "get_world_size": "world_size",
    "Get_size": "world_size",
    "id": "rank",
    "index": "rank",
    "get_rank": "rank",
    "Get_rank": "rank",
    "new_group": "group",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
    "wait": "result",
}
"""Attributes of other libraries, and ours."""

_ASYNCIO = "a rank runs on Trio, where functions of asyncio do not work: `trio.sleep(s)` in place of `asyncio.sleep(s)`"


def close_name(name: str, candidates: Iterable[str], words: Mapping[str, str] = _OTHER_WORDS) -> str | None:
    """Return the known name that was probably meant, or None.

    Args:
        name: The name that is not known.
        candidates: Names that are.
        words: Names of other libraries, each with ours.
    """
    names = list(candidates)
    if words.get(name) in names:
        return words[name]
    return next(iter(get_close_matches(name, names, n=1)), None)


def missing_name_error(name: str) -> AttributeError:
    """Return the error of a name that `overlap` does not have, and of the namespace that has it, if one does."""
    message = f"module {__package__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        for namespace in ("parallel", "testing"):
            if name in import_module(f".{namespace}", __package__).__all__:
                message += f"; did you mean {__package__}.{namespace}.{name}?"
    return AttributeError(message, name=name, obj=sys.modules[__package__])


def find_shadowed_package(path: Sequence[str] | None = None) -> str | None:
    """Return a sentence on the file or folder that Python would import in place of a package of ours; None without one.

    Args:
        path: Folders to import from; None: all of Python.
    """
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("topology", "transports"):
        spec = PathFinder.find_spec(name, path)
        ours = os.path.join(home, name, "__init__.py")
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) != ours:
            place = os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin
            return f"{place} hides the package {name}, which overlap needs: rename it"
    return None


def find_hint(error: BaseException) -> str | None:
    """Return a sentence on the common mistake that has probably caused an error; None: no such mistake."""
    if isinstance(error, TypeError) and (found := _UNEXPECTED.search(str(error))) and "mean" not in str(error):
        if found[2] == "async_op":
            return "every call returns a future at once; there is no async_op"
        suggestion = close_name(found[2], _arguments_of_function(error, found[1].rpartition(".")[2]))
        return f"did you mean {suggestion}=?" if suggestion else None
    if isinstance(error, AttributeError) and type(error.obj).__module__.partition(".")[0] == __package__:
        known = (each for each in dir(error.obj) if not each.startswith("_"))
        name = error.name or "_"
        suggestion = None if name.startswith("_") else close_name(name, known, _OTHER_ATTRIBUTES)
        # a future has every name of an array
        return f"did you mean {suggestion}?" if suggestion and suggestion != name else None
    if isinstance(error, RuntimeError) and str(error) == "no running event loop":
        return _ASYNCIO
    return None


def _arguments_of_function(error: BaseException, function: str) -> Iterable[str]:
    """Return the argument names of a function that the innermost frame of an error has a name for; [] without."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for value in [*frames[-1].f_locals.values(), *frames[-1].f_globals.values()] if frames else []:
        named = value if getattr(value, "__name__", None) == function else getattr(type(value), function, None)
        if callable(named):
            return [each.name for each in inspect.signature(named).parameters.values()]
    return []


def hide_class_name(kind: type[T]) -> type[T]:
    """Rename the public methods of a class without its name, because errors show it and users do not know it."""
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            value.__qualname__ = name
    return kind


def suggest_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """Return the function with errors that suggest a name for an unknown keyword argument, as in Python 3.13."""
    names = [each.name for each in inspect.signature(call).parameters.values()]
    usual = frozenset(names)

    @wraps(call)
    def call_checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, or raise a `TypeError` that suggests the known name for an unknown argument."""
        for name in kwargs.keys() - usual:
            meant = close_name(name, names)
            more = f"; did you mean {meant}=?" if meant else f"; known are {', '.join(names)}"
            raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}{more}")
        return call(*args, **kwargs)

    return call_checked
