"""Rounds of rings without their tables, whose length grows with the square of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives.placement import Floats, Ints
from .rounds import Round, Rounds


def ring_rounds(collective: str, orders: Sequence[Sequence[int]]) -> Rounds:
    """Return what `rounds` finds in the schedule of a ring, or of several side by side.

    Args:
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        orders: The rings, each a sequence of all ranks.
    """
    path = np.asarray(orders, np.int64)
    size, parts = path.shape[1], path.shape[0]
    following = np.roll(path, -1, axis=1)
    key, message = np.unique((following * size + path).reshape(-1), return_inverse=True)
    sent = np.bincount(message, minlength=len(key)).astype(np.float64)
    ends = key % size, key // size, sent
    none, whole = np.zeros(size), np.full(size, float(parts))
    adding = _round(size - 1, ends, added=whole, moving=none, adding=3 * whole, local=none)
    moving = _round(size - 1, ends, added=none, moving=2 * whole, adding=none, local=none)
    if collective == "all_gather":
        own = _round(1, ends, added=none, moving=2 * whole, adding=none, local=2 * whole)
        later = _round(size - 2, ends, added=none, moving=2 * whole, adding=none, local=none)
        return Rounds(size=size, slots=parts * size, rounds=(own, later) if size > 2 else (own,))
    found = (adding,) if collective == "reduce_scatter" else (adding, moving)
    return Rounds(size=size, slots=parts * size, rounds=found)


def _round(
    repeat: int, ends: tuple[Ints, Ints, Floats], *, added: Floats, moving: Floats, adding: Floats, local: Floats
) -> Round:
    src, dst, sent = ends
    return Round(
        repeat=repeat, passed_on=bool(added.any()), src=src, dst=dst, sent=sent,
        added=added, local_added=np.zeros(len(added)), moving=moving, adding=adding, local=local,
    )  # fmt: skip
