"""Demand of messages between two ranks.

The number of pairs of ranks is quadratic, but there are few kinds of routes. Pairs whose routes have the same figures,
wire by wire, take the same time, and the same shares of their own memories, processors and wires. So the cost model
prices each kind of route once. Pure; no Trio.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..collectives.placement import Ints, place_group
from ..collectives.schedule import Schedule
from ..cost.clocks import cost
from ..cost.option import Flat, Price
from ..cost.parameters import CostParameters
from ..cost.placed import place_rounds
from ..cost.remembered import LimitedCache
from ..cost.rounds import Round, Rounds
from .conditions import SlowWires
from .demand import Demand, Pricing
from .loads import Resources

# Demands to remember: training loops send the same messages in every step.
_MOST_DEMANDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RankPair:
    """A sender and a receiver, with the price of the route between them."""

    ranks: Ints  # (2,) world ranks of sender and receiver
    # Numbers of all resources of a message between them, in the same order for all pairs with the same kind of route.
    resources: list[int]
    # The kind of route: pricing of the first pair with such a route, and the resources of that pair.
    route: tuple[Pricing, list[int]]


class SimulatedMessages:
    """Demands of messages: their times, and how much of each resource they use.

    Args:
        figures: Parameters of the cost model for this cluster.
        resources: Resources of the cluster.
        slow: The slow wires of the cluster.
    """

    def __init__(self, figures: CostParameters, resources: Resources, slow: SlowWires) -> None:
        self._figures, self._resources, self._slow = figures, resources, slow
        self._routes: dict[object, tuple[Pricing, list[int]]] = {}  # `_RankPair.route`, by the figures of the route
        self._pairs: dict[tuple[int, int], _RankPair] = {}
        self._demands = LimitedCache[tuple[int, int, float, int], Demand](_MOST_DEMANDS)

    def demand(self, src: int, dst: int, nbytes: float, late_ns: int) -> Demand:
        """Return the `Demand` of a message; the newest ones are remembered.

        A message from a rank to itself is a copy in the rank's memory.

        Args:
            src: World rank of the sender.
            dst: World rank of the receiver.
            nbytes: Bytes of the message.
            late_ns: Arrival of the receiver minus arrival of the sender; negative if the receiver was first.

        Raises:
            TopologyError: No wire joins the two ranks.
        """
        key = src, dst, nbytes, late_ns
        return self._demands.find_or_compute(key, lambda: self._compute_demand(*key))

    def _compute_demand(self, src: int, dst: int, nbytes: float, late_ns: int) -> Demand:
        """Return the demand of a message. Arguments: see `demand`.

        The pricing is that of the first pair with the same kind of route. In its demand, the resources of the first
        pair are replaced by those of this pair.
        """
        pair = self._pairs.get((src, dst))
        if pair is None:
            pair = self._pairs[src, dst] = self._make_pair(src, dst)
        pricing, resources = pair.route
        if src == dst:  # priced as a group of one rank; both ends of the message, 0 and 1, are done together
            demand = replace(pricing.demand(nbytes, np.zeros(1, np.int64)), positions=(np.arange(2),))
        else:
            demand = pricing.demand(nbytes, np.array([max(-late_ns, 0), max(late_ns, 0)], np.int64))
        resource_of_this_pair = dict(zip(resources, pair.resources, strict=True))
        replaced = np.array([resource_of_this_pair[resource] for resource in demand.resources.tolist()], np.int64)
        return replace(demand, ranks=pair.ranks, resources=replaced)

    def _make_pair(self, src: int, dst: int) -> _RankPair:
        """Return the record of a pair; make the pricing of its kind of route if it is the first such pair."""
        ranks = np.array([src] if src == dst else [src, dst])
        healthy = place_group(self._resources.cluster, ranks.tolist())
        placement = self._slow.placement_with_slow_wires(healthy)
        ends = np.arange(len(ranks) - 1)
        wires = placement.routes(ends, ends + 1).wire
        blocks = [way[way >= 0] for way, _ in self._resources.ways_out(ranks[:1], ranks[-1:])]
        memories, cores = self._resources.memory_numbers(ranks), self._resources.cc_core_numbers(ranks)
        resources = np.concatenate([memories, cores, *blocks, self._resources.wire_numbers(wires)]).tolist()
        figures = placement.wires()
        columns = (
            placement.device,
            *(column[wires] for column in (figures.kind, figures.latency_s, figures.bytes_per_s)),
        )
        # Devices, figures of the wires, and number of ways out on each level: equal for pairs with one kind of route.
        route_key = repr(([column.tolist() for column in columns], list(map(len, blocks))))
        if route_key not in self._routes:
            placed = place_rounds(healthy, _message_rounds(len(ranks)), parameters=self._figures)
            option = _MessageOption("", "", placed, _refuse_table)
            self._routes[route_key] = Pricing(option, ranks, self._resources, self._slow), resources
        return _RankPair(ranks=np.array([src, dst]), resources=resources, route=self._routes[route_key])


class _MessageOption(Flat):
    """The price of a message alone, without the lower bounds of a phase, where many messages share the resources."""

    def _price_without_exits(self, nbytes: float, below_s: float) -> Price:
        return Price(total_s=cost(self.parts[0].placed, nbytes).total_s)


def _refuse_table() -> Schedule:
    """Fail: a message has no schedule, and nothing asks for one."""
    raise AssertionError("this is a bug in overlap, please report it: a message has no table")


@lru_cache(maxsize=2)
def _message_rounds(size: int) -> Rounds:
    """Return the rounds of one message from rank 0 to rank 1 (size 2), or of a copy on one rank (size 1)."""
    none, touched = np.zeros(size), np.ones(size)
    ends = np.zeros(size - 1, np.int64)
    round_ = Round(
        repeat=1, src=ends, dst=ends + 1, sent=np.ones(size - 1), added=none, local_added=none,
        moving=touched if size > 1 else none, adding=none, local=none if size > 1 else 2 * touched,
    )  # fmt: skip
    return Rounds(size=size, slots=1, rounds=(round_,))
