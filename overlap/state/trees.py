"""Trees of arrays as JSON and arrays by name, and back. Never pickle. Pure.

A tree is an array, a number, a text, a bool or None, or a list, tuple or dict of trees; keys are texts or integers.
What exports its memory, such as a CPU tensor, is an array, and comes back as one of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.forms import dtype_of
from ..runtime.memory.foreign import as_input

Tree: TypeAlias = Any
"""An array, a number, a text, a bool or None, or a list, tuple or dict of trees."""


def pack_tree(tree: Tree, dtypes: Collection[str], prefix: str = "") -> tuple[dict[str, Array], object]:
    """Return the arrays of a tree by name, and the form of the tree as JSON, with their names and dtypes in it.

    Args:
        tree: The tree.
        dtypes: Names of the dtypes that arrays may have; the elements of others become bytes, on a further axis.
        prefix: Begins the names.

    Raises:
        UsageError: A value cannot be kept; names its place.
    """
    arrays: dict[str, Array] = {}

    def pack(node: Tree, path: str) -> object:
        """Return a part of the tree as JSON."""
        if node is None or (isinstance(node, (bool, int, float, str)) and not isinstance(node, np.generic)):
            return {"value": node}
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, (str, int)) or isinstance(key, bool):
                    raise UsageError(f"tree{path}: expected texts or integers as keys, got {key!r}")
            return {"dict": [[key, pack(node[key], f"{path}[{key!r}]")] for key in node]}
        if isinstance(node, (list, tuple)):
            items = [pack(item, f"{path}[{index}]") for index, item in enumerate(node)]
            return {"list" if isinstance(node, list) else "tuple": items}
        try:
            array = as_input(node)
        except UsageError:
            raise UsageError(
                f"tree{path}: cannot keep {type(node).__name__}; expected arrays, numbers, texts or None, "
                "in lists, tuples and dicts"
            ) from None
        name, dtype = f"{prefix}{len(arrays)}", array.dtype
        arrays[name] = array
        if not dtype.isnative or dtype.name not in dtypes:
            arrays[name] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(*array.shape, dtype.itemsize)
        # numpy's short name, or that of a type of ml_dtypes
        dtype_name = dtype.str if dtype.kind != "V" and np.dtype(dtype.str) == dtype else dtype.name
        return {"scalar" if isinstance(node, np.generic) else "array": [name, dtype_name]}

    form = pack(tree, "")
    return arrays, form


def unpack_tree(form: Mapping[str, Any], read: Callable[[str], Array]) -> Tree:
    """Return the tree of a form that `pack_tree` made.

    Args:
        form: The form.
        read: Returns an array by its name.
    """
    ((kind, value),) = form.items()
    match kind:
        case "dict":
            return {key: unpack_tree(item, read) for key, item in value}
        case "list":
            return [unpack_tree(item, read) for item in value]
        case "tuple":
            return tuple(unpack_tree(item, read) for item in value)
        case "array" | "scalar":
            stored, dtype = read(value[0]), dtype_of(value[1])
            array = stored.view(dtype).reshape(stored.shape if stored.dtype == dtype else stored.shape[:-1])
            return array if kind == "array" else array[()]
    return value
