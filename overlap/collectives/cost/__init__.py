"""What a schedule costs on a machine.

In the order things flow: `rounds` reads a table without its slots, `on` puts it on a placement, `cost` computes when
every rank finishes. `closed` has the closed forms that this is compared with.
"""

from __future__ import annotations

from .maxplus import Breakdown, Cost, Resolution, cost
from .parameters import IDEAL, Parameters, parameters
from .placed import Placed, on
from .rounds import Round, Rounds, rounds
from .star import Star

__all__ = [
    "IDEAL",
    "Breakdown",
    "Cost",
    "Parameters",
    "Placed",
    "Resolution",
    "Round",
    "Rounds",
    "Star",
    "cost",
    "on",
    "parameters",
    "rounds",
]
