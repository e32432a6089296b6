"""Trees of arrays as JSON and arrays by name, and back. Never pickle. Pure.

A tree is an array, a number, a text, a bool or None, or a list, tuple or dict of trees; keys are texts or integers.
What exports its memory, such as a CPU tensor, is an array, and comes back as one of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.forms import dtype_of
from ..runtime.memory.foreign import as_input

Tree: TypeAlias = Any
"""An array, a number, a text, a bool or None, or a list, tuple or dict of trees."""


def pack_tree(tree: Tree, dtypes: Collection[str], prefix: str = "") -> tuple[dict[str, Array], object]:
    """Return the arrays of a tree by name, and the form of the tree as JSON.

    Args:
        tree: The tree.
        dtypes: Names of the dtypes that arrays may have; the elements of others become bytes, on a further axis.
        prefix: Begins the names.

    Raises:
        UsageError: A value cannot be kept; names its place.
    """
    arrays: list[Array] = []
    named: dict[str, Array] = {}
    form = to_json_form(tree, arrays)
    for index, array in enumerate(arrays):
        if not array.dtype.isnative or array.dtype.name not in dtypes:
            elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            named[f"{prefix}{index}"] = elements.reshape(*array.shape, array.dtype.itemsize)
        else:
            named[f"{prefix}{index}"] = array
    return named, {"tree": form, "dtypes": [_dtype_name(array.dtype) for array in arrays]}


def unpack_tree(form: Mapping[str, Any], read: Callable[[str], Array], prefix: str = "") -> Tree:
    """Return the tree of the result of `pack_tree`, given a function that returns an array by its name."""
    arrays = []
    for index, name in enumerate(form["dtypes"]):
        stored, dtype = read(f"{prefix}{index}"), dtype_of(name)
        arrays.append(stored.view(dtype).reshape(stored.shape if stored.dtype == dtype else stored.shape[:-1]))
    return from_json_form(form["tree"], arrays)


def _dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return the name of a dtype in a header: numpy's short one, or that of a type of ml_dtypes."""
    return dtype.str if dtype.kind != "V" and np.dtype(dtype.str) == dtype else dtype.name


def to_json_form(tree: Tree, arrays: list[Array], path: str = "") -> object:
    """Return a tree as JSON, with a number in the place of each array, which is appended to `arrays`.

    Raises:
        UsageError: A value cannot be kept; names its place.
    """
    if tree is None or (isinstance(tree, (bool, int, float, str)) and not isinstance(tree, np.generic)):
        return {"value": tree}
    if isinstance(tree, dict):
        return {"dict": [[_check_key(key, path), to_json_form(tree[key], arrays, f"{path}[{key!r}]")] for key in tree]}
    if isinstance(tree, (list, tuple)):
        items = [to_json_form(item, arrays, f"{path}[{index}]") for index, item in enumerate(tree)]
        return {"list" if isinstance(tree, list) else "tuple": items}
    try:
        arrays.append(as_input(tree))
    except UsageError:
        raise UsageError(
            f"tree{path}: cannot keep {type(tree).__name__}; expected arrays, numbers, texts or None, "
            "in lists, tuples and dicts"
        ) from None
    return {"scalar" if isinstance(tree, np.generic) else "array": len(arrays) - 1}


def _check_key(key: object, path: str) -> str | int:
    """Return a key of a dict; refuse anything but texts and integers."""
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise UsageError(f"tree{path}: expected texts or integers as keys, got {key!r}")
    return key


def from_json_form(noted: Mapping[str, Any], arrays: Sequence[Array]) -> Tree:
    """Return the tree of a form that `to_json_form` made, with arrays in the places of their numbers."""
    ((kind, value),) = noted.items()
    match kind:
        case "dict":
            return {key: from_json_form(item, arrays) for key, item in value}
        case "list":
            return [from_json_form(item, arrays) for item in value]
        case "tuple":
            return tuple(from_json_form(item, arrays) for item in value)
        case "array":
            return arrays[value]
        case "scalar":
            return arrays[value][()]
    return value
