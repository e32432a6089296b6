"""Trees of arrays as JSON and arrays by name, and back. Never pickle. Pure.

A tree is an array, a number, a text, a bool or None, or a list, tuple or dict of trees; keys are texts or integers.
What exports its memory, such as a CPU tensor, is an array, and comes back as one of numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.memory.foreign import as_input

Tree: TypeAlias = Any
"""An array, a number, a text, a bool or None, or a list, tuple or dict of trees."""


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
