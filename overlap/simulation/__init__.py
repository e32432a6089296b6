"""Virtual time: the clock and its kernel, and the modelled cluster that programs run on.

From the bottom up: `clock` is Trio's clock on integer nanoseconds, `kernel` moves it. `flow` is something that gets
on, `occupancy` adds up what flows need, `sharing` says how fast they are where that is too much, `fluid` keeps all of
them. `resources` numbers what there is; `demand`, `loads` and `messages` say what an operation needs of it by the cost
model, `unfolding` what each message of a collective does, and `unfolded` is one that goes message by message. `fabric`
has everything in flight, `traffic` puts it on the kernel's time, and `alike` lets a few ranks stand for all.
`compute_cost` says what computes take, `replayed` what each one of a real run did; `conditions` and `interference` hold
what is not perfect, `faults` what goes wrong.
"""

from __future__ import annotations

from .clock import VirtualClock
from .compute_cost import ComputeCosts, Profile, Roofline
from .conditions import CALM, NO_INTERFERENCE, Conditions, Interference
from .demand import Demand
from .fabric import Fabric, Reached, Stretch, Transfer
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
    "Stretch",
    "Timer",
    "Traffic",
    "Transfer",
    "VirtualClock",
    "repeated",
    "together",
]
