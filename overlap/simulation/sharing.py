"""Fair rates of flows that share scarce resources. Pure; no Trio.

Flows take turns: the most urgent flows first, and of each lane its oldest flow; less urgent and younger flows get the
rest, as if messages queued for a wire. Flows of one turn share by message: on a full resource each message gets the
same, so a flow with seven messages there gets seven times the share of a flow with one message. No flow gets more than
it needs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Ints
from ..cost.remembered import LimitedCache
from .flow import Flow, FlowSection

# Levels whose ratio is less count as equal: they differ only by the rounding of sums.
_TOLERANCE = 1 + 1e-12
# A resource of which less is free counts as used up: the rest is rounding of sums.
_LEAST_REST = 1e-12
# Sets of flows whose rates are remembered: the microbatches of a step have the same ones again and again.
_MOST_CROWDS = 1 << 12


class Rates:
    """Computes and remembers the rates of flows that share scarce resources.

    Rates depend on nothing but the flows' sections, caps and turns: the needs of the flows determine which resources
    are scarce.
    """

    def __init__(self) -> None:
        self._rates = LimitedCache[object, tuple[list[float], list[FlowSection]]](_MOST_CROWDS)

    def find_rates(self, flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
        """Return the rate of each flow, in the order of `flows`.

        Turn by turn, the rates of all flows of the turn rise from 0 together. When a flow reaches its cap, or a
        resource is used up, the flows affected stop, and the others rise further. How fast a flow rises is in
        proportion to the share that its messages would get of the resource that limits it most.

        Args:
            flows: Flows that need some of the scarce resources, oldest first.
            scarce: Numbers of the scarce resources, which these flows together would overload.
        """
        key = tuple((id(flow.section), flow.cap) for flow in flows), tuple(map(tuple, _group_flows_by_turn(flows)))
        # The sections are remembered as well, so that they stay alive: the key has their ids.
        rates, _ = self._rates.find_or_compute(
            key, lambda: (fair_rates(flows, scarce), [flow.section for flow in flows])
        )
        return rates


class _Needs(NamedTuple):
    """Which flow needs how much of which scarce resource, as columns with one row for each need."""

    flow: Ints
    """(needs,) Index of the flow."""

    resource: Ints
    """(needs,) Index of the resource among all that are needed, from 0."""

    share: Floats
    """(needs,) Share of the resource that the flow takes at rate 1."""

    messages: Floats
    """(needs,) Number of the flow's messages that use the resource at the same time."""

    resources: int
    """Number of different resources that are needed."""

    def sum_by_resource(self, amounts: Floats) -> Floats:
        """Return (resources,) the sum of the amounts (needs,) of each resource."""
        # Without any rows, bincount returns integers whatever the amounts.
        return np.bincount(self.resource, amounts, self.resources).astype(np.float64, copy=False)


def fair_rates(flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
    """Return the rates of flows that share scarce resources, computed as `Rates.find_rates` describes."""
    needs = _list_needs(flows, scarce)
    cap = np.array([flow.cap for flow in flows])
    rate = np.zeros(len(flows))
    free: Floats = np.ones(needs.resources)
    for turn in _group_flows_by_turn(flows):
        rising = np.zeros(len(flows), np.bool_)
        rising[turn] = True
        slope = _rate_slopes(needs, rising)
        while rising.any():
            # The rate of a flow is level * slope. Raise the level until the first resource is full, or the first flow
            # is at its cap. `full` and `ceiling` are the levels at which that happens for each.
            rise = needs.sum_by_resource(np.where(rising, slope, 0.0)[needs.flow] * needs.share)
            full = np.divide(free, rise, out=np.full(needs.resources, np.inf), where=rise > 0)
            ceiling = np.where(rising, cap / slope, np.inf)
            level = min(full.min(), ceiling.min())
            at_cap = ceiling <= level * _TOLERANCE
            stops = rising & at_cap
            # Flows that need a resource which is full now stop as well.
            stops[needs.flow[(full <= level * _TOLERANCE)[needs.resource] & rising[needs.flow]]] = True
            rate[stops] = np.where(at_cap, cap, level * slope)[stops]
            rising &= ~stops
            rest = 1.0 - needs.sum_by_resource(rate[needs.flow] * needs.share)
            free = np.where(rest < _LEAST_REST, 0.0, rest)
    return rate.tolist()


def _list_needs(flows: Sequence[Flow], scarce: Collection[int] | Ints) -> _Needs:
    """Return which flow needs how much of which scarce resource. Arguments: see `Rates.find_rates`."""
    sections = [flow.section for flow in flows]
    flow = np.repeat(np.arange(len(flows)), [len(section.resources) for section in sections])
    needed = np.concatenate([section.resources for section in sections])
    share = np.concatenate([section.shares for section in sections])
    messages = np.concatenate([np.fromiter(section.messages.values(), np.float64) for section in sections])
    scarce_numbers = np.fromiter(scarce, np.int64, len(scarce))
    is_scarce = np.zeros(int(max(needed.max(), scarce_numbers.max())) + 1, np.bool_)
    is_scarce[scarce_numbers] = True
    limiting = is_scarce[needed]
    numbers, resource = np.unique(needed[limiting], return_inverse=True)
    return _Needs(flow[limiting], resource, share[limiting], messages[limiting], len(numbers))


def _rate_slopes(needs: _Needs, rising: NDArray[np.bool_]) -> Floats:
    """Return (flows,) how fast the rate of each flow rises, relative to the others; 1 if it is not in `rising`.

    It is the rate with which the flow takes a fair share of its tightest resource: the share of its messages among all
    messages of rising flows there.
    """
    messages = needs.sum_by_resource(np.where(rising[needs.flow], needs.messages, 0.0))
    slope = np.full(len(rising), np.inf)
    part = needs.messages / (needs.share * np.where(messages > 0, messages, 1.0)[needs.resource])
    np.minimum.at(slope, needs.flow, part)
    slope[~rising | np.isinf(slope)] = 1.0
    return slope


def _group_flows_by_turn(flows: Sequence[Flow]) -> list[list[int]]:
    """Return the indices of the flows of each turn.

    Turns are ordered by priority. The n-th oldest flow of a lane is in the n-th turn of its priority; a flow without a
    lane is in the first.
    """
    older: dict[object, int] = {}  # by priority and lane: number of flows so far
    turns: dict[tuple[int, int], list[int]] = {}  # by priority and place in the lane
    for number, flow in enumerate(flows):
        index = 0
        if flow.lane is not None:
            lane = flow.priority, flow.lane
            index = older.get(lane, 0)
            older[lane] = index + 1
        turns.setdefault((flow.priority, index), []).append(number)
    return [turns[turn] for turn in sorted(turns)]
