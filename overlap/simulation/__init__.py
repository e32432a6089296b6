"""Virtual time: the clock and its kernel, and the modelled cluster that programs run on.

From the bottom up: `clock` is Trio's clock on integer nanoseconds, and `kernel` moves it. A `flow` is work at a rate;
`sharing` computes the rates of flows on scarce resources, and `fluid` keeps all flows. `loads` numbers the resources of
a cluster; `demand`, `loads` and `messages` compute the load of an operation by the cost model. `fabric` has all
transfers in flight, `traffic` drives it by the kernel's events, and `symmetry` has the representatives of ranks that
behave alike.
`compute_cost` prices computes, by a model or as they took in a real run; `conditions`
holds imperfections, `faults` holds faults.
"""

from __future__ import annotations

from .clock import VirtualClock
from .compute_cost import ComputeCosts, Profile, Roofline
from .conditions import CALM, NO_INTERFERENCE, Conditions, Interference
from .demand import Demand
from .fabric import FabricTransfer, ReachedRanks, SimulatedFabric
from .faults import Fates, Faults
from .kernel import EventOrder, Kernel, Lineage, Timer
from .symmetry import Alike, AlikeBy, AlikeGroups, group_by_unit, join_demands
from .traffic import FabricDriver

__all__ = [
    "CALM",
    "NO_INTERFERENCE",
    "Alike",
    "AlikeBy",
    "AlikeGroups",
    "ComputeCosts",
    "Conditions",
    "Demand",
    "EventOrder",
    "FabricDriver",
    "FabricTransfer",
    "Fates",
    "Faults",
    "Interference",
    "Kernel",
    "Lineage",
    "Profile",
    "ReachedRanks",
    "Roofline",
    "SimulatedFabric",
    "Timer",
    "VirtualClock",
    "group_by_unit",
    "join_demands",
]
