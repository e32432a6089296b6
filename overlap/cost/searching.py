"""Searches for the figures with the smallest loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, log

# Share of a range that each cut leaves.
_GOLDEN = (5**0.5 - 1) / 2


def lowest(loss: Callable[[float], float], low: float, high: float, *, steps: int) -> float:
    """Return the minimum of a function of one valley, by cutting its range `steps` times in the golden ratio."""
    lower, upper = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    of_lower, of_upper = loss(lower), loss(upper)
    for _ in range(steps):
        if of_lower <= of_upper:
            high, upper, of_upper = upper, lower, of_lower
            lower = high - _GOLDEN * (high - low)
            of_lower = loss(lower)
        else:
            low, lower, of_lower = lower, upper, of_upper
            upper = low + _GOLDEN * (high - low)
            of_upper = loss(upper)
    return lower if of_lower <= of_upper else upper


def descend(
    starts: Mapping[str, float],
    loss: Callable[[dict[str, float]], float],
    bounds: Callable[[int, float], tuple[float, float]],
    *,
    turns: int,
    steps: int,
) -> dict[str, float]:
    """Minimize a function of several positive figures: the logarithm of one figure after the other, in several turns.

    Args:
        starts: Starting points by name.
        loss: The function.
        bounds: Returns the range of a logarithm in a turn, from the turn's number and the present logarithm.
        turns: Number of turns.
        steps: Number of cuts of each range.
    """
    figures = dict(starts)
    for turn in range(turns):
        for name in figures:

            def loss_at(logarithm: float, name: str = name) -> float:
                return loss({**figures, name: exp(logarithm)})

            figures[name] = exp(lowest(loss_at, *bounds(turn, log(figures[name])), steps=steps))
    return figures
