"""Symmetry of groups: a few ranks that stand for all in a price, and groups that sit alike.

Inside nodes one node stands for all. Between nodes, where all nodes do the same, the nodes of one unit stand for all,
which is a node or an UltraServer; where they do not, as in a tree, the ranks that share one set of adapters stand for
those that share others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology import Cluster

from ..collectives.placement import Ints, Placement, place
from .geometry import Geometry


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Some ranks that stand for all."""

    placement: Placement  # where these ranks are
    groups: Sequence[Sequence[int]]  # groups that do one phase at the same time, as positions in the placement
    # ranks that do the same as others in a node of their own, and are all that is looked at of it: their numbers, and
    # those of the others.
    alike: tuple[Sequence[int], Sequence[int]] = ((), ())


@dataclass(frozen=True, kw_only=True)
class EqualNodes:
    """A group of equal nodes."""

    geometry: Geometry  # machine and ranks of the group
    placement: Placement  # where the ranks of the group are
    home: int  # the node that stands for all
    folds: bool  # whether one node stands for all: all have ranks at the same places, and a network joins some

    @classmethod
    def of(cls, geometry: Geometry, placement: Placement, home: int) -> EqualNodes:
        """Look at a group."""
        cluster, ranks = geometry.cluster, geometry.ranks
        places = {tuple(ranks[index] % cluster.ranks_per_node for index in node) for node in geometry.nodes}
        folds = len(places) == 1 and len(geometry.units) > 1 and cluster.machine.network is not None
        return cls(geometry=geometry, placement=placement, home=home, folds=folds)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """World ranks of the home node."""
        return tuple(self.geometry.ranks[index] for index in self.geometry.nodes[self.home])

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """The nodes of a unit, as numbers in it, in the order in which a ring of one place passes them; none if units
        do not stand for each other.
        """
        g, whole = self.geometry, self.geometry.cluster.ranks_per_unit
        places = {tuple(g.ranks[index] % whole for index in unit) for unit in g.units}
        if not self.folds or len(places) > 1:
            return ()
        count = len(g.nodes) // len(g.units)
        return g.part([node[0] for node in g.nodes[:count]]).ring_order if count > 1 else (0,)

    @cached_property
    def unit(self) -> Sample:
        """The first unit alone, where it has one neighbour in the network: of more, nothing is different."""
        cluster, count = self.geometry.cluster, len(self.ring)
        two = replace(cluster, nodes=2 * cluster.servers, world_size=2 * cluster.ranks_per_unit)
        world = [self.geometry.ranks[index] % cluster.ranks_per_unit for index in self.geometry.units[0]]
        groups = [range(at, at + len(self._ranks)) for at in range(0, count * len(self._ranks), len(self._ranks))]
        return Sample(placement=place(two, world), groups=groups)

    @cached_property
    def _bundles(self) -> tuple[tuple[int, ...], ...]:
        """The places of a node, those together that share adapters; all of them together if they are not alike."""
        cluster = self.geometry.cluster
        sets: dict[int, list[int]] = {}
        for number, rank in enumerate(self._ranks):
            sets.setdefault(cluster.nic_of(rank), []).append(number)
        whole = len(self._ranks) == cluster.ranks_per_node and cluster.devices_per_node % len(sets) == 0
        return tuple(tuple(sets[nic]) for nic in sorted(sets)) if whole else (tuple(range(len(self._ranks))),)

    @property
    def _bundle(self) -> tuple[int, ...]:
        """The bundle that stands for the others."""
        return self._bundles[0]

    @cached_property
    def _some(self) -> tuple[Placement, dict[int, int]]:
        """The home node and the first places of all others, and where each of the group's ranks is among them."""
        nodes = self.geometry.nodes
        chosen = list(nodes[self.home])
        chosen += [node[place] for number, node in enumerate(nodes) if number != self.home for place in self._bundle]
        world = tuple(self.geometry.ranks[index] for index in chosen)
        return place(self.geometry.cluster, world), {index: number for number, index in enumerate(chosen)}

    def inside(self, folded: bool) -> Sample | None:
        """Return the sample for phases inside nodes: a unit, or the home node among ranks that stand for others."""
        if not self.folds:
            return None
        if folded:
            return self.unit
        placement, size = self._some[0], len(self._ranks)
        others = range(size, placement.size)
        like = self._bundle * (len(others) // len(self._bundle))
        return Sample(placement=placement, groups=[range(size)], alike=(others, like))

    def root_node(self) -> Sample | None:
        """Return the sample for a phase inside the home node: all of it, among ranks that stand for others."""
        return Sample(placement=self._some[0], groups=[range(len(self._ranks))]) if self.folds else None

    def between(self) -> Sample | None:
        """Return the sample for phases between nodes in which nodes differ."""
        if not self.folds:
            return None
        placement, number = self._some
        groups = [[number[node[place]] for node in self.geometry.nodes] for place in self._bundle]
        others = [
            place for bundle in self._bundles[1:] for place in bundle
        ]  # of the home node, the first in the placement
        return Sample(placement=placement, groups=groups, alike=(others, self._bundle * len(self._bundles[1:])))


# Ranks of the largest group of which all pairs are looked at.
_MOST = 64


def congruence(cluster: Cluster, ranks: Sequence[int]) -> bytes:
    """Return a digest that two groups share only if they sit alike, and of up to 64 ranks exactly if they do.

    Alike means: from any rank to any other, in group order, messages of both groups cross as many wires, of the same
    kinds, and two messages of one group share a wire just where those of the other do; ranks share devices and nodes
    alike, and follow each other as in the world in the same places: algorithms that go by nodes and by sides of a torus
    ask for that. Cost: all pairs of ranks, 0.2 ms for 8 and 2 ms for 64. Larger groups share a digest if one is the
    other on other nodes, or on other devices where those of a node are all alike.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.

    Raises:
        TopologyError: If no wire joins two of them.
    """
    order = np.argsort(np.asarray(ranks, np.int64))
    if len(ranks) > _MOST:
        return _digest(_moved_to_the_front(cluster, ranks), order)
    placement = place(cluster, ranks)
    src, dst = np.nonzero(~np.eye(len(ranks), dtype=np.bool_))
    routes = placement.routes(src, dst)
    wires, wire = _in_order(routes.wire)
    kinds = placement.wires().kind[wires].astype("U16")
    _, device = _in_order(placement.device)
    _, node = _in_order(np.asarray(ranks, np.int64) // cluster.ranks_per_node)
    return _digest(routes.first, wire, kinds, device, node, order)


def _moved_to_the_front(cluster: Cluster, ranks: Sequence[int]) -> Ints:
    """Return the places where a group would sit on the first nodes, and on the first devices if all are alike."""
    levels = cluster.machine.fabric.levels if cluster.machine.fabric else ()
    unit = lcm(cluster.ranks_per_unit, *(level.nodes * cluster.ranks_per_node for level in levels))
    group = np.asarray(ranks, np.int64) - ranks[0] // unit * unit
    shared_nics = 0 < cluster.nics_per_node < cluster.devices_per_node
    if cluster.wiring.complete and not shared_nics:
        node, local = np.divmod(group, cluster.ranks_per_node)
        device, core = np.divmod(local, cluster.ranks_per_device)
        group = node * cluster.capacity_per_node + _in_order(device)[1] * cluster.ranks_per_device + core
    return group


def _digest(*columns: NDArray[Any]) -> bytes:
    return hashlib.blake2b(b"/".join(each.tobytes() for each in columns), digest_size=16).digest()


def _in_order(names: Ints) -> tuple[Ints, Ints]:
    """Return distinct names in the order in which they come first, and each one's place among them."""
    distinct, seen_at, which = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(seen_at)
    return distinct[order], np.argsort(order)[which]
