"""Prices above the price of a stronger collective: there the machine's library has nothing better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .select import Plan, plan

if TYPE_CHECKING:
    from topology import Cluster

# Collectives that give at least the result of the key.
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

    library: str  # library that has nothing better
    collectives: tuple[str, ...]  # their names, one after the other
    predicted_s: float  # their time


def faster_collectives(chosen: Plan, cluster: Cluster) -> Instead | None:
    """Return collectives that take less time than a plan and give at least as much; None if there are none.

    Only a library's limits lead to that. Where every schedule is allowed, such prices do not occur.
    """
    names = _INSTEAD.get(chosen.op, ())
    if not chosen.library or not names:
        return None
    total_s = sum(plan(name, chosen.nbytes, cluster, chosen.ranks, dtype=chosen.dtype).predicted_s for name in names)
    if chosen.predicted_s <= total_s * (1 + _CLOSE):
        return None
    return Instead(library=chosen.library, collectives=names, predicted_s=total_s)
