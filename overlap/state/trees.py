"""Conversion of trees of arrays to JSON and arrays by name, and back. Never pickle. Pure.

A tree is an array, a number, a text, a bool or None, or a list, tuple or dict of trees; keys are texts or integers.
Objects that export their memory, such as CPU tensors, count as arrays, and come back as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.forms import dtype_of
from ..runtime.memory.foreign import as_input_array

Tree: TypeAlias = Any
"""An array, a number, a text, a bool or None, or a list, tuple or dict of trees."""


def pack_tree(tree: Tree, dtypes: Collection[str], prefix: str = "") -> tuple[dict[str, Array], object]:
    """Return the arrays of a tree by name ("0", "1", ...), and the form of the tree, for JSON.

    The form is a dict with one entry: the kind of the node, and its items, value, or [name of the array, dtype].

    Args:
        tree: The tree.
        dtypes: Names of the dtypes that arrays may have. Arrays of other dtypes are returned as bytes, uint8, with one
            more axis.
        prefix: Text before the names.

    Raises:
        UsageError: A value or key cannot be saved; the error names its place in the tree.
    """
    arrays: dict[str, Array] = {}

    def pack_node(node: Tree, path: str) -> object:
        """Return the form of a part of the tree, and add its arrays; `path` is its place in the tree, for errors."""
        if node is None or (isinstance(node, (bool, int, float, str)) and not isinstance(node, np.generic)):
            return {"value": node}
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, (str, int)) or isinstance(key, bool):
                    raise UsageError(f"tree{path}: expected texts or integers as keys, got {key!r}")
            return {"dict": [[key, pack_node(node[key], f"{path}[{key!r}]")] for key in node]}
        if isinstance(node, (list, tuple)):
            items = [pack_node(item, f"{path}[{index}]") for index, item in enumerate(node)]
            return {"list" if isinstance(node, list) else "tuple": items}
        try:
            array = as_input_array(node)
        except UsageError:
            raise UsageError(
                f"tree{path}: cannot keep {type(node).__name__}; expected arrays, numbers, texts or None, "
                "in lists, tuples and dicts"
            ) from None
        name, dtype = f"{prefix}{len(arrays)}", array.dtype
        arrays[name] = array
        if not dtype.isnative or dtype.name not in dtypes:
            arrays[name] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(*array.shape, dtype.itemsize)
        # The short name of numpy, such as "<f4"; types of ml_dtypes have none.
        dtype_name = dtype.str if dtype.kind != "V" and np.dtype(dtype.str) == dtype else dtype.name
        return {"scalar" if isinstance(node, np.generic) else "array": [name, dtype_name]}

    form = pack_node(tree, "")
    return arrays, form


def unpack_tree(form: Mapping[str, Any], read: Callable[[str], Array]) -> Tree:
    """Return the tree of a form that `pack_tree` made.

    Args:
        form: The second result of `pack_tree`.
        read: Function that returns an array, given its name.
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
            array = stored.view(dtype)
            # Elements of a dtype that files cannot hold were stored as bytes, on one more axis.
            if stored.dtype != dtype:
                array = array.reshape(stored.shape[:-1])
            return array if kind == "array" else array[()]
    return value
