"""Checks of gradients: shapes, finite values and the global norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, sqrt
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ...errors import NonFiniteError, UsageError, mark_agreed
from ...runtime.checking import first_not_finite_index
from ...runtime.group import Group
from ...timeline.recording import format_call_site
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
        gradient: The gradient that was handed over; of a future, its result.
        shape: Shape of the parameter.
        dtype: Dtype of the parameter.
        step: Step of the model, from 1; the message counts from 0, as `rank.step` does.
        site: The line that handed the gradient over; None leaves it out of the message.

    Raises:
        UsageError: The value is no array, has another shape, or is complex while the parameter is not.
    """
    actual = getattr(gradient, "shape", None)
    # A complex parameter accepts any gradient, a real one only a real gradient.
    if actual == shape and (dtype.kind == "c" or getattr(getattr(gradient, "dtype", None), "kind", "") != "c"):
        return
    subject = f"reduce: gradient of {name!r} in step {step - 1}: expected"
    where = f"; it was handed over at {format_call_site(*site)}" if site is not None else ""
    if actual is None:
        raise UsageError(f"{subject} an array, got {type(gradient).__name__}{where}")
    if actual != shape:
        raise UsageError(f"{subject} shape {shape}, got {actual}{where}")
    raise UsageError(f"{subject} real numbers, as the parameter's, got {getattr(gradient, 'dtype', '')}{where}")


_KINDS = ("nan", "inf", "-inf")


class _BadElements(NamedTuple):
    """The elements of an array that are not finite, as three integers that ranks exchange; all 0 if there are none."""

    total: int = 0
    """Number of elements that are not finite."""

    first: int = 0
    """Flat index of the first of them."""

    kind: int = 0
    """Value of the first of them, as an index in `_KINDS`."""


def is_finite(flat: Array) -> bool:
    """Whether all elements of a flat array are finite.

    Cost: one pass, the dot product of the array with itself. Elements are looked at one by one only if that product is
    not finite (it may have overflowed), or if the dtype is not float32 or float64.
    """
    if flat.dtype.char in "fd":
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    return first_not_finite_index(flat) is None


def find_gradient_error(views: Mapping[str, Array], *, rank: int, step: int, site: Site | None) -> NonFiniteError:
    """Return the error that names rank, parameter, step and element of the first gradient that is not finite.

    Args:
        views: Gradients by name; at least one is not finite.
        rank: World rank that has the gradients.
        step: Step of the model, from 1.
        site: The line of the program that handed a gradient over last; None if it is unknown.
    """
    name, view = next((name, view) for name, view in views.items() if first_not_finite_index(view) is not None)
    return _not_finite_error(name, view, _find_bad_elements(view), rank, step, site)


def blame_rank(group: Group, name: str, gradient: Array | None, view: Array, step: int, site: Site | None) -> None:
    """Find the rank whose gradient is not finite, and raise the same error on all ranks.

    All ranks call this, since all have received a mean that is not finite. It blocks, so it must run in a compute.

    Args:
        group: The ranks that have the mean, with a stream for this exchange alone.
        name: Name of the parameter.
        gradient: This rank's gradient; None if it is known to be finite.
        view: An array of the parameter's shape and dtype.
        step: Step of the model, from 1.
        site: The line that handed the gradient over; None if it is unknown.

    Raises:
        NonFiniteError: A rank had a gradient that is not finite.
        UsageError: No rank had: only the sum of the gradients is not finite.
    """
    bad_elements = _BadElements() if gradient is None else _find_bad_elements(gradient)
    # `result()` blocks this thread, not the event loop.
    rows = group.all_gather(np.array(bad_elements, np.int64)).result().reshape(-1, 3)
    for rank, row in zip(group.ranks, rows.tolist(), strict=True):
        bad_elements = _BadElements(*row)
        if bad_elements.total:
            raise _not_finite_error(name, view, bad_elements, rank, step, site, sent=group.size > 1)
    message = f"reduce: the gradients of {name!r} in step {step - 1} are finite, but their sum over the ranks is not"
    raise mark_agreed(UsageError(f"{message}; scale the loss down"))


def _find_bad_elements(array: Array) -> _BadElements:
    """Return the number of elements that are not finite, and the first of them; all 0 if there are none."""
    first = first_not_finite_index(array)
    if first is None:
        return _BadElements()
    value = float(array.reshape(-1)[first])
    total = array.size - np.count_nonzero(np.isfinite(array))
    return _BadElements(int(total), first, _KINDS.index(str(value)))


def _not_finite_error(
    name: str, array: Array, bad_elements: _BadElements, rank: int, step: int, site: Site | None, *, sent: bool = False
) -> NonFiniteError:
    """Return the error for a gradient of world rank `rank`, which has at least one of `bad_elements`.

    Only shape and dtype of `array` are used. `step` counts from 1, and the error from 0. With `sent`, the other ranks
    have received the mean with that gradient.
    """
    return NonFiniteError(
        rank=rank,
        operation=f"the gradient of {name!r}",
        seq=-1,
        step=step - 1,
        call_site=format_call_site(*site) if site is not None else "?",
        array=f"{array.dtype.name} {array.shape}",
        index=tuple(map(int, np.unravel_index(bad_elements.first, array.shape))),
        value=_KINDS[bad_elements.kind],
        count=bad_elements.total,
        sent=sent,
    )


_BLOCK = 1 << 14  # elements squared at once: 128 KiB of float64, which a core's second-level cache holds

Part: TypeAlias = tuple[slice, int]
"""The slice of a flat gradient that belongs to a parameter, and the number of ranks that add its values to the norm."""


def global_square_sum(parts: Sequence[Sequence[Part]], *reduced: Array) -> NDArray[np.float64]:
    """Return the sum of the squares of all gradients, (1,).

    Squares are added in float64 for each parameter, and the sums of the parameters without rounding (fsum). So the bits
    do not depend on how parameters are divided into buckets.

    Args:
        parts: For each mean, the parameters in it. The squares of a parameter that several ranks add are divided by the
            number of these ranks.
        reduced: The mean gradients, flat.
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
        squares: (1,) Sum of the squares of all gradients.
    """
    return min(1.0, limit / (sqrt(float(squares[0])) + 1e-6))


def square_sum(array: Array) -> float:
    """Return the sum of the squares of a flat array, added in float64."""
    total = 0.0
    for at in range(0, array.size, _BLOCK):
        wide = array[at : at + _BLOCK].astype(np.float64)
        total += float(np.dot(wide, wide))
    return total
