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
"""By keyword argument of other libraries: the argument of overlap; "" for `async_op`, as every call returns at once."""

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
"""By attribute of other libraries: the attribute of overlap."""

_ASYNCIO = "a rank runs on Trio, where functions of asyncio do not work: `trio.sleep(s)` in place of `asyncio.sleep(s)`"


def find_similar_name(name: str, candidates: Iterable[str], words: Mapping[str, str] = _OTHER_WORDS) -> str | None:
    """Return the known name that an unknown name probably means; None if no known name is similar.

    Args:
        name: The unknown name.
        candidates: Known names.
        words: By name of other libraries: the name here.
    """
    names = list(candidates)
    if words.get(name) in names:
        return words[name]
    return next(iter(get_close_matches(name, names, n=1)), None)


def missing_name_error(name: str) -> AttributeError:
    """Return the AttributeError for a name that `overlap` lacks; it says if `parallel` or `testing` has the name."""
    message = f"module {__package__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        for namespace in ("parallel", "testing"):
            if name in import_module(f".{namespace}", __package__).__all__:
                message += f"; did you mean {__package__}.{namespace}.{name}?"
    return AttributeError(message, name=name, obj=sys.modules[__package__])


def find_shadowed_package(path: Sequence[str] | None = None) -> str | None:
    """Return a sentence on a file or folder that Python would import in place of `topology` or `transports`, or None.

    Args:
        path: Folders to search; None: `sys.path`.
    """
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("topology", "transports"):
        spec = PathFinder.find_spec(name, path)
        ours = os.path.join(home, name, "__init__.py")
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) != ours:
            place = os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin
            is_clone = os.path.isdir(os.path.join(os.path.dirname(place), __package__))
            advice = "move the program out of that clone of overlap" if is_clone else "rename it"
            return f"{place} hides the package {name}, which overlap needs: {advice}"
    return None


def find_hint(error: BaseException) -> str | None:
    """Return a sentence on the common mistake that has probably caused an error; None if no known one fits.

    Mistakes: a keyword argument or attribute with a slightly wrong name, or with that of another library; functions of
    asyncio in a rank.
    """
    if isinstance(error, TypeError) and (found := _UNEXPECTED.search(str(error))) and "mean" not in str(error):
        if found[2] == "async_op":
            return "every call returns a future at once; there is no async_op"
        suggestion = find_similar_name(found[2], _arguments_of_function(error, found[1].rpartition(".")[2]))
        return f"did you mean {suggestion}=?" if suggestion else None
    if isinstance(error, AttributeError) and type(error.obj).__module__.partition(".")[0] == __package__:
        known = (each for each in dir(error.obj) if not each.startswith("_"))
        name = error.name or "_"
        suggestion = None if name.startswith("_") else find_similar_name(name, known, _OTHER_ATTRIBUTES)
        # A future lists the attributes of arrays as well, so that `name` itself may be among the known names.
        return f"did you mean {suggestion}?" if suggestion and suggestion != name else None
    if isinstance(error, RuntimeError) and str(error) == "no running event loop":
        return _ASYNCIO
    return None


def _arguments_of_function(error: BaseException, function: str) -> Iterable[str]:
    """Return the argument names of a function, or method, that the innermost frame of an error knows; [] if none."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for value in [*frames[-1].f_locals.values(), *frames[-1].f_globals.values()] if frames else []:
        named = value if getattr(value, "__name__", None) == function else getattr(type(value), function, None)
        if callable(named):
            return [each.name for each in inspect.signature(named).parameters.values()]
    return []


def hide_class_name(kind: type[T]) -> type[T]:
    """Set the qualified name of a class's public methods to the method's name alone, and return the class.

    Python's errors show the qualified name, and users do not know the class.
    """
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            value.__qualname__ = name
    return kind


def suggest_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an unknown keyword argument raises a TypeError that suggests a known one, as in Python 3.13."""
    names = [each.name for each in inspect.signature(call).parameters.values()]
    usual = frozenset(names)

    @wraps(call)
    def call_checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, or raise a `TypeError` that suggests the known name for an unknown argument."""
        for name in kwargs.keys() - usual:
            meant = find_similar_name(name, names)
            more = f"; did you mean {meant}=?" if meant else f"; known are {', '.join(names)}"
            raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}{more}")
        return call(*args, **kwargs)

    return call_checked
