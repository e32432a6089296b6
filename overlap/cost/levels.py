"""Levels of the fabric between nodes: the bytes of a collective that cross each, and the time that they take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from topology import Cluster

from ..collectives.placement import Floats, Ints
from .maxplus import CostBreakdown
from .option import Option, Part, Price, Wrapped


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
    fabric, network = cluster.machine.fabric, cluster.machine.network
    if fabric is None or network is None:
        return ()
    of_a_node = cluster.nics_per_node * cluster.bandwidth_bytes_per_s(network.link)
    node = np.asarray(ranks, np.int64) // cluster.ranks_per_node
    found = []
    for level in fabric.levels:
        out = _leaving(node // level.nodes, parts)
        busiest = float(out.max(initial=0.0))
        found.append(
            Crossing(
                level=level.name,
                share=float(out.sum()),
                busiest=busiest,
                s_per_byte=busiest / level.out_bytes_per_s(of_a_node),
            )
        )
    return tuple(found)


def _leaving(block: Ints, parts: Sequence[Part]) -> Floats:
    """Return the bytes that leave each block, for each byte of the vector."""
    out = np.zeros(int(block.max(initial=0)) + 1)
    for part in parts:
        rounds = part.placed.rounds
        for one in rounds.rounds:
            across = block[one.src] != block[one.dst]
            sent = one.sent[across] * (one.repeat * part.share / rounds.slots)
            out += np.bincount(block[one.src[across]], sent, len(out))
    return out


class Levelled(Wrapped):
    """An option that takes at least as long as its bytes need on the way out of the blocks of a fabric."""

    def __init__(self, option: Option, crossed: tuple[Crossing, ...]) -> None:
        super().__init__(option)
        self._s_per_byte = max((each.s_per_byte for each in crossed), default=0.0)

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`."""
        found = self.option.price(nbytes, below_s=below_s)
        least_s = self.option.price(0).total_s + self._s_per_byte * nbytes
        return replace(found, total_s=max(found.total_s, least_s))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes; the time on the fabric is one of bytes on wires."""
        found = self.option.breakdown(nbytes, slices)
        beyond_s = self.price(nbytes).total_s - self.option.price(nbytes).total_s
        return replace(found, wire_s=found.wire_s + beyond_s)
