"""What a rank keeps for itself, such as the state of a hook, as arrays by name for a checkpoint, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Own: TypeAlias = "Mapping[str, Array]"
"""Arrays of one rank, by name."""

_FORM = "form"
_PLAIN = (bool, int, float, str, type(None))


def unsavable(state: object) -> str:
    """Return the type of something in a state that no checkpoint can have; empty if there is nothing."""
    if isinstance(state, Mapping):
        named = [type(key).__name__ for key in state if not isinstance(key, str)]
        return next(iter(named), "") or next(filter(None, map(unsavable, state.values())), "")
    if isinstance(state, (list, tuple)):
        return next(filter(None, map(unsavable, state)), "")
    return "" if isinstance(state, (*_PLAIN, np.ndarray)) else type(state).__name__


def packed(name: str, state: object) -> dict[str, Array]:
    """Return the arrays in a state, named after `name`, and one of bytes that tells where they are in it.

    Args:
        name: Of all of it.
        state: Arrays, numbers, texts, and dicts and lists of such; tuples come back as lists.
    """
    arrays: list[Array] = []
    form = json.dumps(_form(state, arrays)).encode()
    found = {f"{name}:{index}": array for index, array in enumerate(arrays)}
    return found | {f"{name}:{_FORM}": np.frombuffer(form, np.uint8)}


def unpacked(name: str, own: Own) -> Any:
    """Return the state that `packed` has been given, with the arrays themselves; None if there is none."""
    form = own.get(f"{name}:{_FORM}")
    return None if form is None else _filled(json.loads(form.tobytes()), name, own)


def _form(state: object, arrays: list[Array]) -> object:
    if isinstance(state, Mapping):
        return {"dict": {key: _form(value, arrays) for key, value in state.items()}}
    if isinstance(state, (list, tuple)):
        return [_form(value, arrays) for value in state]
    if isinstance(state, np.ndarray):
        arrays.append(state)
        return {"array": len(arrays) - 1}
    return state


def _filled(form: object, name: str, own: Own) -> object:
    if isinstance(form, list):
        return [_filled(each, name, own) for each in form]
    if isinstance(form, dict):
        if "array" in form:
            return own[f"{name}:{form['array']}"]
        return {key: _filled(each, name, own) for key, each in form["dict"].items()}
    return form
