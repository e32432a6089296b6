"""Checks of gradients: shapes, finite values and the global norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, sqrt
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...errors import NonFiniteError, UsageError, mark_agreed
from ...runtime.checking import first_not_finite
from ...runtime.group import Group
from ...timeline.recording import call_site
from ..tree import Site

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tree import Array


def check_gradient(
    name: str,
    gradient: object,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    step: int,
    site: Site | None = None,
) -> None:
    """Refuse a value that cannot be the gradient of a parameter.

    Args:
        name: Name of the parameter.
        gradient: The value that was handed over, or the result of the future that was.
        shape: Shape of the parameter.
        dtype: Dtype of the parameter.
        step: Step of the model, from 1; messages count as `rank.step` does, from 0.
        site: The line that handed it over; None: the caller is there.

    Raises:
        UsageError: If it is no array, has another shape, or is complex where the parameter is not.
    """
    actual = getattr(gradient, "shape", None)
    if actual == shape and (dtype.kind == "c" or getattr(getattr(gradient, "dtype", None), "kind", "") != "c"):
        return
    subject = f"reduce: the gradient of {name!r} in step {step - 1}"
    where = f"; it was handed over at {call_site(*site)}" if site is not None else ""
    if actual is None:
        raise UsageError(f"{subject} is of type {type(gradient).__name__}, not an array{where}")
    if actual != shape:
        raise UsageError(f"{subject} has shape {actual}, the parameter {shape}{where}")
    raise UsageError(f"{subject} is {getattr(gradient, 'dtype', '')}, the parameter {dtype}{where}")


_KINDS = ("nan", "inf", "-inf")
_FINITE = (0, 0, 0)


def is_finite(flat: Array) -> bool:
    """Whether all elements of a flat array are finite.

    Cost: one pass, as a dot product with itself; element by element only if that is not finite, or the type has none.
    """
    if flat.dtype.char in "fd":
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    return first_not_finite(flat) is None


def not_finite(views: Mapping[str, Array], *, rank: int, step: int, site: Site | None) -> NonFiniteError:
    """Return the error that names rank, parameter, step and element of the first gradient that is not finite.

    Args:
        views: Gradients by name, of which one is not finite.
        rank: World rank.
        step: Step of the model, from 1.
        site: The line that handed a gradient over last.
    """
    name, view = next((name, view) for name, view in views.items() if first_not_finite(view) is not None)
    return _not_finite_error(name, view, _find_not_finite(view), rank, step, site)


def blame_rank(group: Group, name: str, gradient: Array | None, view: Array, step: int, site: Site | None) -> None:
    """Find the rank with a gradient that is not finite, on the thread of a compute, and raise the error on all ranks.

    A mean that is not finite shows on all ranks, so all of them call this.

    Args:
        group: The ranks that have the mean, on a stream of its own.
        name: Name of the parameter.
        gradient: This rank's gradient; None if it is known to be finite.
        view: An array of its shape and type.
        step: Step of the model, from 1.
        site: The line that handed the gradient over.

    Raises:
        NonFiniteError: The same on every rank, if a rank had such a gradient.
        UsageError: If none had: the sum was too large.
    """
    bad_elements = _FINITE if gradient is None else _find_not_finite(gradient)
    rows = group.all_gather(np.array(bad_elements, np.int64)).result().reshape(-1, 3)
    for rank, (count, index, kind) in zip(group.ranks, rows.tolist(), strict=True):
        if count:
            raise _not_finite_error(name, view, (count, index, kind), rank, step, site)
    message = f"reduce: the gradients of {name!r} in step {step - 1} are finite, but their sum over the ranks is not"
    raise mark_agreed(UsageError(f"{message}; scale the loss down"))


def _find_not_finite(array: Array) -> tuple[int, int, int]:
    """Return how many elements are not finite, the flat index of the first one, and its index in `_KINDS`."""
    at = first_not_finite(array)
    if at is None:
        return _FINITE
    value = float(array.reshape(-1)[at])
    count = array.size - np.count_nonzero(np.isfinite(array))
    return int(count), at, _KINDS.index(str(value))


def _not_finite_error(
    name: str, array: Array, bad_elements: tuple[int, int, int], rank: int, step: int, site: Site | None
) -> NonFiniteError:
    """Return the error for a gradient, from the count, place and kind of its elements that are not finite."""
    count, index, kind = bad_elements
    return NonFiniteError(
        rank=rank,
        operation=f"the gradient of {name!r}",
        seq=-1,
        step=step - 1,
        call_site=call_site(*site) if site is not None else "?",
        array=f"{array.dtype.name} {array.shape}",
        index=tuple(map(int, np.unravel_index(index, array.shape))),
        value=_KINDS[kind],
        count=count,
    )


_BLOCK = 1 << 14  # elements squared at once: 128 KiB of float64, which a core's second-level cache holds

Part: TypeAlias = tuple[slice, int]
"""The place of a parameter in a flat gradient, and the number of ranks that add the same values to the norm."""


def square_sums(parts: Sequence[Sequence[Part]], *reduced: Array) -> NDArray[np.float64]:
    """Return the sum of the squares of gradients, (1,).

    Squares are added in float64, parameter by parameter, and these sums exactly: the same bits for any buckets.

    Args:
        parts: Of each bucket, where its parameters are.
        reduced: The mean gradient of each bucket, flat.
    """
    sums = (
        square_sum(array[part]) / copies
        for places, array in zip(parts, reduced, strict=True)
        for part, copies in places
    )
    return np.array([fsum(sums)])


def clip_factor(limit: float, squares: NDArray[np.float64]) -> float:
    """Return the factor that brings the global norm of gradients down to `limit`.

    min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ (torch/nn/utils/clip_grad.py).

    Args:
        limit: Limit of the norm.
        squares: (1,) Their sum.
    """
    return min(1.0, limit / (sqrt(float(squares[0])) + 1e-6))


def square_sum(array: Array) -> float:
    """Return the sum of the squares of a flat array, added in float64."""
    total = 0.0
    for at in range(0, array.size, _BLOCK):
        wide = array[at : at + _BLOCK].astype(np.float64)
        total += float(np.dot(wide, wide))
    return total
