"""Levels of the fabric between nodes: the bytes of a collective that cross each, and the time that they take there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from topology import Cluster

from ..collectives.placement import Floats, Ints
from .maxplus import CostBreakdown
from .option import Option, Part, Price, Wrapped
from .placed import PlacedRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The bytes of an algorithm that leave the blocks of one level, for each byte of the vector."""

    level: str  # its name
    share: float  # of all blocks together
    busiest: float  # of the block that most leave
    s_per_byte: float  # on the way out of that block


def crossings(cluster: Cluster, ranks: Sequence[int], parts: Sequence[Part]) -> tuple[Crossing, ...]:
    """Count what crosses each level of a cluster's fabric.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.
        parts: The phases of an algorithm on that group.

    Returns:
        One for each level, from the nodes upwards; none if the cluster's file tells of no levels.
    """
    found = []
    for name, block, bytes_per_s in _blocks(cluster, ranks):
        out = sum((_leaving(block, part, one) for part in parts for one in part.placed.each), np.zeros(_count(block)))
        busiest = float(out.max(initial=0.0))
        found.append(Crossing(level=name, share=float(out.sum()), busiest=busiest, s_per_byte=busiest / bytes_per_s))
    return tuple(found)


def held_up_s_per_byte(cluster: Cluster, ranks: Sequence[int], parts: Sequence[Part]) -> float:
    """Return by how much the ways out of blocks make steps longer than their wires do, for each byte of the vector.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.
        parts: The phases of an algorithm on that group.
    """
    levels, total_s = list(_blocks(cluster, ranks)), 0.0
    for part in parts:
        for one in part.placed.each:
            times = one.round.repeat * part.share / part.placed.rounds.slots
            wires_s = times * float(one.wire_s_per_byte.max(initial=0.0))
            ways_s = [float(_leaving(block, part, one).max(initial=0.0)) / rate for _, block, rate in levels]
            total_s += max(0.0, *(each - wires_s for each in ways_s))
    return total_s


def _blocks(cluster: Cluster, ranks: Sequence[int]) -> Iterator[tuple[str, Ints, float]]:
    """Yield the name of each level, the block of each rank there, and the bytes per second of a block's way out."""
    fabric, network = cluster.machine.fabric, cluster.machine.network
    if fabric is None or network is None:
        return
    of_a_node = cluster.nics_per_node * cluster.bandwidth_bytes_per_s(network.link)
    node = np.asarray(ranks, np.int64) // cluster.ranks_per_node
    for level in fabric.levels:
        yield level.name, node // level.nodes, level.out_bytes_per_s(of_a_node)


def _count(block: Ints) -> int:
    return int(block.max(initial=0)) + 1


def _leaving(block: Ints, part: Part, one: PlacedRound) -> Floats:
    """Return the bytes that leave each block in one round with its repetitions, for each byte of the vector."""
    src, dst = one.round.src, one.round.dst
    across = block[src] != block[dst]
    sent = one.round.sent[across] * (one.round.repeat * part.share / part.placed.rounds.slots)
    out: Floats = np.bincount(block[src[across]], sent, _count(block)).astype(np.float64)
    return out


class Levelled(Wrapped):
    """An option whose steps wait for the ways out of the blocks of a fabric.

    Args:
        option: The option.
        crossed: What crosses each level.
        held_up_s_per_byte: By how much its steps are longer than their wires make them.
    """

    def __init__(self, option: Option, crossed: tuple[Crossing, ...], held_up_s_per_byte: float) -> None:
        super().__init__(option)
        self._s_per_byte = max((each.s_per_byte for each in crossed), default=0.0)
        self._held_up_s_per_byte = held_up_s_per_byte

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`; slices pass the ways out while others are inside."""
        found = self.option.price(nbytes, below_s=below_s)
        longer_s = self._held_up_s_per_byte * nbytes if found.slices == 1 else 0.0
        least_s = self.option.price(0).total_s + self._s_per_byte * nbytes
        return replace(found, total_s=max(found.total_s + longer_s, least_s))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes; the time on the fabric is one of bytes on wires."""
        found = self.option.breakdown(nbytes, slices)
        beyond_s = self.price(nbytes).total_s - self.option.price(nbytes).total_s
        return replace(found, wire_s=found.wire_s + beyond_s)
