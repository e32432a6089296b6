"""The arrays among the arguments of a compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]

_READ_ONLY = (
    "arrays that are passed to rank.compute are read-only until it is done, for the function too, since others may "
    "read them: return the new value, or write into a copy"
)

_UNFINISHED = "arrays that an operation works on are read-only until it is done: await it first, or write into a copy"

_ndarray = np.ndarray
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


def arrays_in(args: tuple[object, ...]) -> tuple[list[Array], list[object]]:
    """Return the arrays among `args`, and whatever else is there but plain numbers and text.

    Tuples (named ones too), lists and the values of dicts are looked into, at any depth; each of them once. Objects of
    other types, dataclasses among them, are not: what a function reaches through an object, as through a closure, is
    between the two of them.

    Cost: 0.3 us for plain arguments, 20 us for a dict of 100.
    """
    arrays: list[Array] = []
    for item in args:
        if type(item) is _ndarray:
            arrays.append(item)
        elif type(item) not in _PLAIN:
            return _search(args)
    return arrays, []


def _search(args: tuple[object, ...]) -> tuple[list[Array], list[object]]:
    arrays: list[Array] = []
    others: list[object] = []
    left, seen = list(args), set[int]()
    for item in left:  # which grows
        if isinstance(item, _ndarray):
            arrays.append(item)
        elif type(item) in _PLAIN:
            continue
        elif not isinstance(item, (tuple, list, dict)):
            others.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            left.extend(item.values() if isinstance(item, dict) else item)
    return arrays, others


def explain(error: BaseException) -> None:
    """Tell a function that has tried to write into what was lent to it what to do instead."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        error.add_note(_READ_ONLY)


def explain_unfinished(error: BaseException) -> None:
    """Tell a program that has tried to write into what its unfinished operations work on what to do instead."""
    if isinstance(error, ValueError) and "read-only" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(_UNFINISHED)
