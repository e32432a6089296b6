"""Demand of messages between two ranks.

There are as many pairs of ranks as ranks squared, but few kinds of routes: pairs on routes with the same figures, wire
by wire, take the same time and the same shares, each of memories, processors and wires of its own. So the cost model
prices each kind of route once. Pure; no Trio.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..collectives.placement import Ints, place
from ..collectives.schedule import Schedule
from ..cost import CostParameters, Round, Rounds, cost, on
from ..cost.option import Flat, Price
from .conditions import SlowWires
from .demand import Demand, Pricing
from .loads import Resources

# Messages to keep the demand of: training loops send the same ones in every step.
_MOST_DEMANDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RankPair:
    """A sender and a receiver, with the price of the route between them."""

    ranks: Ints  # (2,) world ranks of sender and receiver
    # all resources of a message between them, in the same order for pairs on routes of one kind.
    resources: list[int]
    route: tuple[Pricing, list[int]]  # price of the first such pair, and its resources


class SimulatedMessages:
    """Demands of messages.

    Args:
        figures: Parameters of the cost model.
        resources: Resources of the cluster.
        slow: The jitter of its wires.
    """

    def __init__(self, figures: CostParameters, resources: Resources, slow: SlowWires) -> None:
        self._figures, self._resources, self._slow = figures, resources, slow
        self._routes: dict[object, tuple[Pricing, list[int]]] = {}
        self._pairs: dict[tuple[int, int], _RankPair] = {}
        self._demands: dict[tuple[int, int, float, int], Demand] = {}

    def demand(self, src: int, dst: int, nbytes: float, late_ns: int) -> Demand:
        """Return the demand of a message; from a rank to itself it is a copy in its memory.

        Args:
            src: World rank of the sender.
            dst: World rank of the receiver.
            nbytes: Bytes of the message.
            late_ns: Time between the arrivals of sender and receiver, less than 0 if the receiver was first.

        Raises:
            TopologyError: If no wire joins them.
        """
        key = src, dst, nbytes, late_ns
        demand = self._demands.get(key)
        if demand is None:
            if len(self._demands) >= _MOST_DEMANDS:
                self._demands.clear()
            demand = self._demands[key] = self._compute_demand(*key)
        return demand

    def _compute_demand(self, src: int, dst: int, nbytes: float, late_ns: int) -> Demand:
        """Return the demand of a message: that of its kind of route, on the resources of this pair."""
        pair = self._pairs.get((src, dst))
        if pair is None:
            pair = self._pairs[src, dst] = self._make_pair(src, dst)
        pricing, resources = pair.route
        if src == dst:  # the price is that of a group of one rank, and a message has two ends
            demand = replace(pricing.demand(nbytes, np.zeros(1, np.int64)), positions=(np.arange(2),))
        else:
            demand = pricing.demand(nbytes, np.array([max(-late_ns, 0), max(late_ns, 0)], np.int64))
        numbers = dict(zip(resources, pair.resources, strict=True))
        needed = np.array([numbers[resource] for resource in demand.resources.tolist()], np.int64)
        return replace(demand, ranks=pair.ranks, resources=needed)

    def _make_pair(self, src: int, dst: int) -> _RankPair:
        """Return the ranks and resources of a pair; the first pair of a kind of route has the kind priced."""
        ranks = np.array([src] if src == dst else [src, dst])
        placement = self._slow.slow_placement(place(self._resources.cluster, ranks.tolist()))
        ends = np.arange(len(ranks) - 1)
        wires = placement.routes(ends, ends + 1).wire
        blocks = [way[way >= 0] for way, _ in self._resources.ways_out(ranks[:1], ranks[-1:])]
        resources = np.concatenate(
            [
                self._resources.memories(ranks),
                self._resources.cc_cores(ranks),
                *blocks,
                self._resources.wires(wires),
            ]
        ).tolist()
        figures = placement.wires()
        wire_figures = (
            figures.kind[wires].tolist(),
            figures.latency_s[wires].tolist(),
            figures.bytes_per_s[wires].tolist(),
        )
        # Equal for pairs on routes with the same figures.
        route_key = repr((placement.device.tolist(), wire_figures, list(map(len, blocks))))
        if route_key not in self._routes:
            self._routes[route_key] = self._price_route(ranks), resources
        return _RankPair(ranks=np.array([src, dst]), resources=resources, route=self._routes[route_key])

    def _price_route(self, ranks: Ints) -> Pricing:
        """Return the pricing of messages between two ranks, or of copies on one rank."""
        placed = on(
            place(self._resources.cluster, ranks.tolist()), _message_rounds(len(ranks)), parameters=self._figures
        )
        return Pricing(_MessageOption("", "", placed, _refuse_table), ranks, self._resources, self._slow)


class _MessageOption(Flat):
    """A message, without the bounds of a collective, in which many messages share processors and memories."""

    def _price(self, nbytes: float, below_s: float) -> Price:
        return Price(total_s=cost(self.parts[0].placed, nbytes).total_s)


def _refuse_table() -> Schedule:
    raise AssertionError("this is a bug in overlap: a message has no table")


@lru_cache(maxsize=2)
def _message_rounds(size: int) -> Rounds:
    """Return one message from rank 0 to rank 1, or a copy on one rank."""
    none, touched = np.zeros(size), np.ones(size)
    ends = np.zeros(size - 1, np.int64)
    round_ = Round(
        repeat=1, src=ends, dst=ends + 1, sent=np.ones(size - 1), added=none, local_added=none,
        moving=touched if size > 1 else none, adding=none, local=none if size > 1 else 2 * touched,
    )  # fmt: skip
    return Rounds(size=size, slots=1, rounds=(round_,))
