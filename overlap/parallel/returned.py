"""Checks of what the program's functions return: layers, losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from ..diagnostics import definition_place
from ..errors import UsageError
from ..runtime.future import Future

_SHOWN = 4  # items of a tree in a message


def describe_value(value: object) -> str:
    """Return a short description of a value for messages, such as "float32 (10, 64)" or "{'w': float32 (4,)}".

    >>> describe_value((1.5, np.zeros((2, 3), np.float32)))
    '(float, float32 (2, 3))'
    """
    if isinstance(value, Mapping):
        return f"{{{_join_items([f'{key!r}: {describe_value(each)}' for key, each in value.items()])}}}"
    if isinstance(value, (tuple, list)):
        return f"({_join_items([describe_value(each) for each in value])}{',' * (len(value) == 1)})"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype.name} {value.shape}"
    if isinstance(value, Future):
        return "a future"
    return "None" if value is None else type(value).__name__


def _join_items(items: list[str]) -> str:
    return ", ".join([*items[:_SHOWN], *["..."] * (len(items) > _SHOWN)])


def is_pair(value: object) -> bool:
    """Whether a value is a tuple, or a list, of two."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def check_pair(argument: str, function: Callable[..., object], expected: str, value: object) -> None:
    """Refuse a result of a program's function that is no tuple or list of two.

    Args:
        argument: Name of the argument as which the program passed the function.
        function: The program's function.
        expected: Description of the expected result, for the error.
        value: The function's result.

    Raises:
        UsageError: Naming the function.
    """
    if not is_pair(value):
        raise unexpected_result_error(argument, function, expected, value)


def check_boundary_value(
    forward: bool, stage: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], value: object
) -> None:
    """Refuse an output or gradient whose shape or dtype is not that of the boundary between stages.

    Dicts and tuples are refused, too. Values of other types pass.

    Args:
        forward: Whether the value is an output; else it is a gradient.
        stage: Stage that has made the value.
        shape: Shape of the boundary.
        dtype: Dtype of the boundary.
        value: The output or gradient.

    Raises:
        UsageError: Naming the stage.
    """
    if isinstance(value, np.ndarray) and value.shape == shape and value.dtype == dtype:
        return
    if isinstance(value, (np.ndarray, Mapping, tuple)):
        returned = describe_value(value) if forward else f"{describe_value(value)} as the gradient of its input"
        raise UsageError(
            f"boundary: stage {stage}'s {'forward' if forward else 'backward'} returned {returned}, "
            f"boundary= says {dtype.name} {shape}; correct one of them"
        )


def check_loss_result(loss: Callable[..., object], y: object, value: object) -> None:
    """Refuse a result of a loss function that is not the gradient of the output `y`, and the loss.

    If the output or the gradient is a tree, shapes are not compared.

    Args:
        loss: The program's function.
        y: The output that was passed to the function.
        value: The function's result.

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
    expected = f"(gradient, loss), in this order, with the gradient of the output {describe_value(y)}"
    raise unexpected_result_error("loss", loss, expected, value)


def unexpected_result_error(argument: str, function: Callable[..., object], expected: str, value: object) -> UsageError:
    """Return the error for a function whose result is of another form than expected.

    The error names the function and the line of its definition, such as "loss_fn (train.py:12)".

    Args:
        argument: Name of the argument as which the program passed the function.
        function: The program's function.
        expected: Description of the expected result.
        value: The function's result.
    """
    name = getattr(function, "__name__", type(function).__name__)
    return UsageError(
        f"{argument}: {name}{definition_place(function)} returned {describe_value(value)}; expected {expected}"
    )
