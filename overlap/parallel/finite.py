"""Finds a gradient that is not finite before it is added to anything, and says whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import TYPE_CHECKING

import numpy as np

from ..errors import NonFiniteError
from ..runtime.checking import first_not_finite
from ..timeline.spans import call_site

if TYPE_CHECKING:
    from .tree import Array

__all__ = ["check_finite"]


def check_finite(
    buffer: Array, views: Mapping[str, Array], *, rank: int, step: int, place: tuple[CodeType, int] | None
) -> None:
    """Look at the gradients of a bucket.

    Cost: one pass over what has just been written, as a dot product with itself; only if that is not finite (or its
    type knows none) element by element.

    Args:
        buffer: All of them, flat.
        views: Each of them by name.
        rank: World rank, for the message.
        step: Of the model, from 1, for the message.
        place: Where a gradient of the bucket was handed over last, for the message.

    Raises:
        NonFiniteError: Naming rank, parameter, step and element.
    """
    if buffer.dtype.char in "fd":
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(buffer, buffer)):
                return
    for name, view in views.items():
        at = first_not_finite(view)
        if at is not None:
            raise _error(name, view, at, rank, step, place)


def _error(name: str, view: Array, at: int, rank: int, step: int, place: tuple[CodeType, int] | None) -> NonFiniteError:
    index = tuple(map(int, np.unravel_index(at, view.shape)))
    return NonFiniteError(
        rank=rank,
        operation=f"the gradient of {name!r}",
        seq=-1,
        step=step,
        call_site=call_site(*place) if place is not None else "?",
        array=f"{view.dtype.name} {view.shape}",
        index=index,
        value=str(view[index]),
        count=int(view.size - np.count_nonzero(np.isfinite(view))),
    )
