"""Parameters as trees: nested dicts, lists and tuples of arrays, told apart by names such as "blocks.0.weight"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.generic]"
Tree: TypeAlias = "Mapping[str, Tree] | Mapping[str, Array] | list[Tree] | list[Array] | tuple[Tree, ...] | Array"


def flatten(params: object) -> dict[str, Array]:
    """Return the arrays of a tree by name, in its order: keys and indices on the way to an array, joined by ".".

    >>> list(flatten({"embed": np.zeros(2), "blocks": [{"w": np.zeros(3)}, {"w": np.zeros(3)}]}))
    ['embed', 'blocks.0.w', 'blocks.1.w']

    Raises:
        UsageError: If it is no tree of arrays of floats or complex numbers, is empty, or gives two arrays one name.
    """
    if not isinstance(params, (Mapping, list, tuple)):
        raise UsageError(f"params: expected a dict, list or tuple of arrays, got {type(params).__name__}")
    found: dict[str, Array] = {}
    for name, leaf in _leaves(params, ""):
        if not isinstance(leaf, np.ndarray):
            raise UsageError(f"params: {name!r} is of type {type(leaf).__name__}; every leaf must be a numpy array")
        if leaf.dtype.kind in "biuOSUMm":
            raise UsageError(
                f"params: {name!r} is {leaf.dtype}; a gradient is a mean, so parameters are floats or complex numbers: "
                "keep what is not trained out of params"
            )
        if name in found:
            raise UsageError(f"params: two arrays are called {name!r}; keys may not contain what makes names equal")
        found[name] = leaf
    if not found:
        raise UsageError("params: there is no array in it")
    return found


def rebuild(like: object, leaves: Mapping[str, object]) -> object:
    """Return a tree of the form of `like` with the values of `leaves`, which are named as `flatten` names arrays.

    Raises:
        UsageError: If a name is missing.
    """
    return _rebuilt(like, leaves, "")


def _leaves(tree: object, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in _items(tree):
        if isinstance(value, (Mapping, list, tuple)):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _items(tree: object) -> Iterator[tuple[object, object]]:
    return iter(tree.items()) if isinstance(tree, Mapping) else enumerate(cast("list[object]", tree))


def _rebuilt(like: object, leaves: Mapping[str, object], name: str) -> object:
    if not isinstance(like, (Mapping, list, tuple)):
        if name not in leaves:
            raise UsageError(f"leaves: {name!r} is missing")
        return leaves[name]
    prefix = f"{name}." if name else ""
    parts = {key: _rebuilt(value, leaves, f"{prefix}{key}") for key, value in _items(like)}
    if isinstance(like, Mapping):
        return parts
    values = list(parts.values())
    if isinstance(like, tuple) and hasattr(like, "_fields"):  # a named tuple takes its fields
        return cast("Callable[..., object]", type(like))(*values)
    return tuple(values) if isinstance(like, tuple) else values
