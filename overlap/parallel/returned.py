"""Checks of the results of the program's functions: losses, layers, and gradients, before they are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from ..diagnostics import defined_at
from ..errors import UsageError
from ..runtime.future import Future

_SHOWN = 4  # items of a tree in a message


def describe(value: object) -> str:
    """Return a value as messages tell it, such as "float32 (10, 64)" or "{'w': float32 (4,)}".

    >>> describe((1.5, np.zeros((2, 3), np.float32)))
    '(float, float32 (2, 3))'
    """
    if isinstance(value, Mapping):
        return f"{{{_join_items([f'{key!r}: {describe(each)}' for key, each in value.items()])}}}"
    if isinstance(value, (tuple, list)):
        return f"({_join_items([describe(each) for each in value])}{',' * (len(value) == 1)})"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype.name} {value.shape}"
    if isinstance(value, Future):
        return "a future"
    return "None" if value is None else type(value).__name__


def _join_items(items: list[str]) -> str:
    return ", ".join([*items[:_SHOWN], *["..."] * (len(items) > _SHOWN)])


def name_and_line(function: Callable[..., object]) -> str:
    """Return the name of a function and the line of its definition, such as "loss_fn (train.py:12)"."""
    return f"{getattr(function, '__name__', type(function).__name__)}{defined_at(function)}"


def is_pair(value: object) -> bool:
    """Whether a value is a tuple, or a list, of two."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def check_pair(argument: str, function: Callable[..., object], expected: str, value: object) -> None:
    """Refuse a result that is no tuple of two.

    Raises:
        UsageError: Naming the function.
    """
    if not is_pair(value):
        raise unexpected_result(argument, function, expected, value)


def check_passed(forward: bool, stage: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], value: object) -> None:
    """Refuse an output or gradient that has not the shape and dtype of the boundary between stages.

    Raises:
        UsageError: Naming the stage.
    """
    if isinstance(value, np.ndarray) and value.shape == shape and value.dtype == dtype:
        return
    if isinstance(value, (np.ndarray, Mapping, tuple)):
        returned = describe(value) if forward else f"{describe(value)} as the gradient of its input"
        raise UsageError(
            f"boundary: stage {stage}'s {'forward' if forward else 'backward'} returned {returned}, "
            f"boundary= says {dtype.name} {shape}; correct one of them"
        )


def check_loss(loss: Callable[..., object], y: object, value: object) -> None:
    """Refuse a result of a loss function that is not the gradient of the output `y`, and the loss.

    Raises:
        UsageError: Naming the function.
    """
    if is_pair(value):
        dy, _ = cast("tuple[object, object]", value)
        if isinstance(dy, (Mapping, tuple, list)):
            return
        shape = getattr(dy, "shape", None)
        if shape is not None and shape == getattr(y, "shape", shape):
            return
    expected = f"(gradient, loss), in this order, with the gradient of the output {describe(y)}"
    raise unexpected_result("loss", loss, expected, value)


def unexpected_result(argument: str, function: Callable[..., object], expected: str, value: object) -> UsageError:
    """Return the error for a function whose result is of another form than expected."""
    return UsageError(f"{argument}: {name_and_line(function)} returned {describe(value)}; expected {expected}")
