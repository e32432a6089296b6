"""Prices above those of collectives that give more: where the machine's library has nothing better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .select import Plan, plan

if TYPE_CHECKING:
    from topology import Cluster

# Each gives at least what the collective before it does.
_INSTEAD = {
    "reduce": ("all_reduce",),
    "broadcast": ("all_reduce",),
    "gather": ("all_gather",),
    "scatter": ("reduce_scatter",),
    "all_gather": ("all_reduce",),
    "reduce_scatter": ("all_reduce",),
    "all_reduce": ("reduce_scatter", "all_gather"),
}
# Prices that differ by less are equal.
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """Collectives that would give at least as much in less time."""

    library: str  # that has nothing better
    collectives: tuple[str, ...]  # one after the other
    predicted_s: float  # their time


def forced(chosen: Plan, cluster: Cluster) -> Instead | None:
    """Return what would take less than a plan and give at least as much; None if there is nothing such.

    Only a library forces that. Where we choose freely, such prices do not occur.
    """
    names = _INSTEAD.get(chosen.op, ())
    if not chosen.library or not names:
        return None
    total_s = sum(plan(each, chosen.nbytes, cluster, chosen.ranks, dtype=chosen.dtype).predicted_s for each in names)
    if chosen.predicted_s <= total_s * (1 + _CLOSE):
        return None
    return Instead(library=chosen.library, collectives=names, predicted_s=total_s)
