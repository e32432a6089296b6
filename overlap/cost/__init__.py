"""Prices of schedules on a machine.

In the order of use: `rounds` reads a table without its slots, `on` puts it on a placement, `cost` computes when
every rank finishes.
"""

from __future__ import annotations

from .maxplus import Cost, CostBreakdown, Resolution, cost
from .parameters import IDEAL, CostParameters, parameters
from .placed import Placed, on
from .rounds import Round, Rounds, rounds

__all__ = [
    "IDEAL",
    "Cost",
    "CostBreakdown",
    "CostParameters",
    "Placed",
    "Resolution",
    "Round",
    "Rounds",
    "cost",
    "on",
    "parameters",
    "rounds",
]
