"""What may be handed over as the gradient of a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    import numpy as np


def check_gradient(name: str, gradient: object, shape: tuple[int, ...], dtype: np.dtype[np.generic], step: int) -> None:
    """Refuse what cannot be the gradient of a parameter.

    Args:
        name: Of the parameter.
        gradient: What was handed over, or what the future of it has become.
        shape: Of the parameter.
        dtype: Of the parameter.
        step: Of the model, from 1.

    Raises:
        UsageError: If it is no array, has another shape, or is complex where the parameter is not.
    """
    found = getattr(gradient, "shape", None)
    if found == shape and (dtype.kind == "c" or getattr(getattr(gradient, "dtype", None), "kind", "") != "c"):
        return
    its = f"reduce: the gradient of {name!r} in step {step}"
    if found is None:
        raise UsageError(f"{its} is of type {type(gradient).__name__}, not an array")
    if found != shape:
        raise UsageError(f"{its} has shape {found}, the parameter {shape}")
    raise UsageError(f"{its} is {getattr(gradient, 'dtype', '')}, the parameter {dtype}")
