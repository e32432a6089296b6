"""Virtual time: the clock and its kernel, and the modelled cluster that programs run on.

From the bottom up: `clock` is Trio's clock on integer nanoseconds, and `kernel` moves it. A `flow` is work that gets on
at a rate; `sharing` finds the rates of flows that need more than there is, and `fluid` keeps all flows. `loads` numbers
the resources of a cluster; `demand`, `loads` and `messages` find the load of an operation by the cost model,
`unfolding` lists the messages of a collective, and `unfolded` runs it message by message. `fabric` has everything in
flight, `traffic` puts it on the kernel's time, and `symmetry` lets a few ranks stand for all. `compute_cost` prices
computes, by a model or as `timeline.replay.computes` read them from a real run; `conditions` holds imperfections,
`faults` holds faults.
"""

from __future__ import annotations

from .clock import VirtualClock
from .compute_cost import ComputeCosts, Profile, Roofline
from .conditions import CALM, NO_INTERFERENCE, Conditions, Interference
from .demand import Demand
from .fabric import Fabric, Reached, Transfer
from .faults import Fates, Faults
from .kernel import Kernel, Lineage, Order, Timer
from .symmetry import Alike, AlikeBy, Same, repeated, together
from .traffic import Traffic

__all__ = [
    "CALM",
    "NO_INTERFERENCE",
    "Alike",
    "AlikeBy",
    "ComputeCosts",
    "Conditions",
    "Demand",
    "Fabric",
    "Fates",
    "Faults",
    "Interference",
    "Kernel",
    "Lineage",
    "Order",
    "Profile",
    "Reached",
    "Roofline",
    "Same",
    "Timer",
    "Traffic",
    "Transfer",
    "VirtualClock",
    "repeated",
    "together",
]
