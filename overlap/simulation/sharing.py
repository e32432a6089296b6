"""Fair rates of flows that share scarce resources. Pure; no Trio.

The most urgent flows come first, and of each lane the oldest; less urgent and younger flows get the rest, as where
messages queue for a wire. Equals share by message, as messages on wires do: on a full resource all messages get the
same, so that a flow with seven messages there gets seven times the share of a flow with one, and none more than it
needs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..collectives.placement import Floats, Ints
from .flow import Flow, FlowSection

# Resources and levels whose ratio is less bind together: they differ by the rounding of sums of a few products.
_TOLERANCE = 1 + 1e-12
# Rest of a resource below which it is used up: the rounding of such sums.
_LEAST_REST = 1e-12
# Crowds whose rates are remembered: the microbatches of a step make the same ones again and again.
_MOST_CROWDS = 1 << 12


class Rates:
    """Rates of connected flows, computed once for flows in the same sections.

    The needs of a crowd's flows determine the scarce resources, so rates depend on nothing but their sections, caps and
    turns.
    """

    def __init__(self) -> None:
        self._rates: dict[object, tuple[list[float], list[FlowSection]]] = {}

    def of(self, flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
        """Return the rates of flows that need scarce resources.

        All rates of the flows of a turn rise together until a flow reaches its cap or a resource is used up; the flows
        affected stay there and the others rise on. Each rises in proportion to the share that its messages would get of
        the resource that limits it most, if all users of a resource shared it.

        Args:
            flows: Flows that need any of them, oldest first.
            scarce: Numbers of the resources that they overfill together.
        """
        key = tuple((id(flow.section), flow.cap) for flow in flows), tuple(map(tuple, _group_turns(flows)))
        entry = self._rates.get(key)
        if entry is None:
            if len(self._rates) >= _MOST_CROWDS:
                self._rates.clear()
            # Sections are kept as well: the id of an object is its own only while it lives.
            entry = self._rates[key] = fair_rates(flows, scarce), [flow.section for flow in flows]
        return entry[0]


def fair_rates(flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
    """Return the rates of flows that share scarce resources, computed as `Rates.of` describes."""
    # One row for each pair of a flow and a resource that it needs: `owner` is the flow's index.
    owner = np.repeat(np.arange(len(flows)), [len(flow.section.resources) for flow in flows])
    needed = np.concatenate([flow.section.resources for flow in flows])
    share = np.concatenate([flow.section.shares for flow in flows])
    message = np.concatenate([np.fromiter(flow.section.messages.values(), np.float64) for flow in flows])
    numbers = np.fromiter(scarce, np.int64, len(scarce))
    is_scarce = np.zeros(int(max(needed.max(), numbers.max())) + 1, np.bool_)
    is_scarce[numbers] = True
    # Keep the rows of scarce resources only, and number these from 0.
    limiting = is_scarce[needed]
    owner, share, message = owner[limiting], share[limiting], message[limiting]
    names, resource = np.unique(needed[limiting], return_inverse=True)
    cap = np.array([flow.cap for flow in flows])
    rate = np.zeros(len(flows))
    free: Floats = np.ones(len(names))
    for turn in _group_turns(flows):
        rising = np.zeros(len(flows), np.bool_)
        rising[turn] = True
        # Slope of a flow: its least rate if all users of each resource shared it by message.
        total = np.bincount(resource, np.where(rising[owner], message, 0.0), len(names))
        slope = np.full(len(flows), np.inf)
        np.minimum.at(slope, owner, message / (share * np.where(total > 0, total, 1.0)[resource]))
        slope[~rising | np.isinf(slope)] = 1.0
        while rising.any():
            # Rates are level * slope; raise the level to where the first resource is full, or the first cap is met.
            rise = np.bincount(resource, np.where(rising, slope, 0.0)[owner] * share, len(names))
            full = np.divide(free, rise, out=np.full(len(names), np.inf), where=rise > 0)
            ceiling = np.where(rising, cap / slope, np.inf)
            level = min(full.min(), ceiling.min())
            stops = rising & (ceiling <= level * _TOLERANCE)
            stops[owner[(full <= level * _TOLERANCE)[resource] & rising[owner]]] = True
            rate[stops] = np.where(ceiling <= level * _TOLERANCE, cap, level * slope)[stops]
            rising &= ~stops
            rest = 1.0 - np.bincount(resource, rate[owner] * share, len(names))
            free = np.where(rest < _LEAST_REST, 0.0, rest)
    return rate.tolist()


def _group_turns(flows: Sequence[Flow]) -> list[list[int]]:
    """Return the indices of flows that share as equals, turn by turn: by priority, then by age within a lane."""
    older: dict[object, int] = {}  # by lane: its flows so far
    turns: dict[tuple[int, int], list[int]] = {}
    for number, flow in enumerate(flows):
        index = 0
        if flow.lane is not None:
            lane = flow.priority, flow.lane
            index = older.get(lane, 0)
            older[lane] = index + 1
        turns.setdefault((flow.priority, index), []).append(number)
    return [turns[turn] for turn in sorted(turns)]
