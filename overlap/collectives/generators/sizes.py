"""Numbers of ranks that algorithms take: the generators, the choice of algorithms and the checks of calls ask here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Reason why an algorithm refuses a number of ranks, or None. An algorithm that is not listed takes every number.
_MISFITS: Mapping[str, Callable[[int], str | None]] = {
    "kangaring": lambda size: "needs an even number of ranks" if size % 2 else None,
    "swing": lambda size: "needs an even number of ranks" if size % 2 and size > 1 else None,
}


def misfit(algorithm: str, size: int) -> str | None:
    """Return why an algorithm, with its default options, does not take a number of ranks; None if it does.

    >>> misfit("swing", 3)
    'needs an even number of ranks, and the group has 3'
    """
    reason = _MISFITS[algorithm](size) if algorithm in _MISFITS else None
    return None if reason is None else f"{reason}, and the group has {size}"


def fits(algorithm: str, size: int) -> bool:
    """Return whether an algorithm, with its default options, takes a number of ranks."""
    return misfit(algorithm, size) is None
