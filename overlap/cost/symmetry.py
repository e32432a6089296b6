"""Symmetry of groups: a few ranks that represent all in a price, and groups with the same placement.

Inside nodes one node represents all. Between nodes, if all nodes do the same, one unit (a node or an UltraServer)
represents all; if they do not, as in a tree, the ranks of one set of adapters represent the ranks of the others.
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

from ..collectives.placement import Ints, Placement, place_group
from .geometry import Geometry
from .levels import fabric_levels


@dataclass(frozen=True, kw_only=True, eq=False)
class Representatives:
    """Sampled ranks that represent all ranks of a group in the price of a phase."""

    placement: Placement  # where the sampled ranks are; they are numbered 0, 1, ... in it
    groups: Sequence[Sequence[int]]  # groups of sampled ranks that run the phase at the same time
    # Two sequences of sampled ranks: rank alike[0][i], which is in no group, costs the same as rank alike[1][i].
    alike: tuple[Sequence[int], Sequence[int]] = ((), ())


@dataclass(frozen=True, kw_only=True)
class EqualNodes:
    """The nodes of a group, all with the same number of ranks, and samples of ranks that represent all in a phase.

    A sample has the ranks whose messages are priced. The home node is the node that represents the others. A unit is a
    node, or the nodes of an UltraServer, which wires join. A bundle is the local ranks of a node that share a network
    adapter.
    """

    geometry: Geometry  # machine and ranks of the group
    placement: Placement  # where the ranks of the group are
    home: int  # number of the node that represents all
    one_node_represents_all: bool  # whether all have the same local ranks, and a network joins units

    @classmethod
    def of(cls, geometry: Geometry, placement: Placement, home: int) -> EqualNodes:
        """Return the nodes of a group, after a check whether one node can represent all.

        Args:
            geometry: Machine and ranks of the group.
            placement: Where the ranks of the group are.
            home: Number of the node that represents all: the root's.
        """
        cluster, ranks = geometry.cluster, geometry.ranks
        places = {tuple(ranks[index] % cluster.ranks_per_node for index in node) for node in geometry.nodes}
        one_node_represents_all = len(places) == 1 and len(geometry.units) > 1 and cluster.machine.network is not None
        return cls(geometry=geometry, placement=placement, home=home, one_node_represents_all=one_node_represents_all)

    @cached_property
    def _home_ranks(self) -> tuple[int, ...]:
        return tuple(self.geometry.ranks[index] for index in self.geometry.nodes[self.home])

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """Numbers of a unit's nodes in the order of a ring through them; () if one unit cannot represent all."""
        g, per_unit = self.geometry, self.geometry.cluster.ranks_per_unit
        places = {tuple(g.ranks[index] % per_unit for index in unit) for unit in g.units}
        if not self.one_node_represents_all or len(places) > 1:
            return ()
        count = len(g.nodes) // len(g.units)
        return g.geometry_of([node[0] for node in g.nodes[:count]]).ring_order if count > 1 else (0,)

    @cached_property
    def unit_sample(self) -> Representatives:
        """Representatives of a group that spans several units: the ranks of its first unit, one group for each node."""
        cluster, count = self.geometry.cluster, len(self.ring)
        # The cluster has two units, as one alone would have no network; a network with more units costs the same.
        two = replace(cluster, nodes=2 * cluster.servers, world_size=2 * cluster.ranks_per_unit)
        world = [self.geometry.ranks[index] % cluster.ranks_per_unit for index in self.geometry.units[0]]
        size = len(self._home_ranks)
        groups = [range(node * size, (node + 1) * size) for node in range(count)]
        return Representatives(placement=place_group(two, world), groups=groups)

    @cached_property
    def _adapter_bundles(self) -> tuple[tuple[int, ...], ...]:
        """Indexes of the ranks in a node by bundle; one bundle of all ranks if the bundles would differ."""
        cluster = self.geometry.cluster
        sets: dict[int, list[int]] = {}
        for number, rank in enumerate(self._home_ranks):
            sets.setdefault(cluster.nic_of(rank), []).append(number)
        whole = len(self._home_ranks) == cluster.ranks_per_node and cluster.devices_per_node % len(sets) == 0
        return tuple(tuple(sets[nic]) for nic in sorted(sets)) if whole else (tuple(range(len(self._home_ranks))),)

    @property
    def _first_bundle(self) -> tuple[int, ...]:
        """Indexes in a node of the ranks of the first bundle, which represents the other bundles."""
        return self._adapter_bundles[0]

    @cached_property
    def _place_sampled_ranks(self) -> tuple[Placement, dict[int, int]]:
        """Placement of the home node's ranks, then the first bundle of each other node; their numbers by group rank."""
        nodes = self.geometry.nodes
        chosen = list(nodes[self.home])
        others = [node for number, node in enumerate(nodes) if number != self.home]
        chosen += [node[place] for node in others for place in self._first_bundle]
        world = tuple(self.geometry.ranks[index] for index in chosen)
        return place_group(self.geometry.cluster, world), {index: number for number, index in enumerate(chosen)}

    def inside_sample(self, folded: bool) -> Representatives | None:
        """Return the sample for phases inside nodes; None if one node cannot represent all.

        Args:
            folded: Whether the sample is one unit. Otherwise it is the home node, and the first bundle of each other
                node.
        """
        if not self.one_node_represents_all:
            return None
        if folded:
            return self.unit_sample
        placement, size = self._place_sampled_ranks[0], len(self._home_ranks)
        # A sampled rank outside the home node costs the same as the rank with its local rank in the home node.
        others = range(size, placement.size)
        at_home = self._first_bundle * (len(others) // len(self._first_bundle))
        return Representatives(placement=placement, groups=[range(size)], alike=(others, at_home))

    def root_sample(self) -> Representatives | None:
        """Return the sample for a phase that only the home node runs, such as a scatter by the root.

        The only group is all ranks of the home node. The first bundle of each other node is placed, too, as in
        `inside_sample`, but has no part in the phase. None if one node cannot represent all.
        """
        if not self.one_node_represents_all:
            return None
        return Representatives(placement=self._place_sampled_ranks[0], groups=[range(len(self._home_ranks))])

    def between_sample(self) -> Representatives | None:
        """Return the sample for a phase between nodes that do different work, as in a tree.

        The groups of the sample are the ranks of the first bundle, each with its counterparts in all nodes. None if
        nodes have different local ranks.
        """
        if not self.one_node_represents_all:
            return None
        placement, number = self._place_sampled_ranks
        groups = [[number[node[place]] for node in self.geometry.nodes] for place in self._first_bundle]
        # Ranks of the home node, which has the first numbers in the placement. Ranks of each further bundle cost the
        # same as those of the first bundle.
        others = [place for bundle in self._adapter_bundles[1:] for place in bundle]
        return Representatives(
            placement=placement, groups=groups, alike=(others, self._first_bundle * len(self._adapter_bundles[1:]))
        )


# Number of ranks up to which all pairs of a group are compared.
_MOST = 64


def congruence_key(cluster: Cluster, ranks: Sequence[int]) -> bytes:
    """Return a digest that is equal for two groups only if their placements are alike, so that all prices are equal.

    Alike means, for ranks in group order:

    * A message from rank i to rank j crosses the same number of wires, of the same kinds, in both groups.
    * Two messages of one group share a wire if and only if the same messages of the other group do.
    * The same ranks share a device and a node, and the order of world ranks is the same.

    Up to 64 ranks the digest is equal if and only if this holds. Larger groups have equal digests if one is the other
    moved to other nodes, or to other devices where all devices of a node are alike.

    Cost: all pairs of ranks, 0.2 ms for 8 ranks and 2 ms for 64.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.

    Raises:
        TopologyError: No wire joins two of the ranks.
    """
    order = np.argsort(np.asarray(ranks, np.int64))
    if len(ranks) > _MOST:
        return _digest(_move_group_to_front(cluster, ranks), order)
    placement = place_group(cluster, ranks)
    src, dst = np.nonzero(~np.eye(len(ranks), dtype=np.bool_))
    routes = placement.routes(src, dst)
    wires, wire = _distinct_in_order(routes.wire)
    kinds = placement.wires().kind[wires].astype("U16")
    _, device = _distinct_in_order(placement.device)
    _, node = _distinct_in_order(np.asarray(ranks, np.int64) // cluster.ranks_per_node)
    return _digest(routes.first, wire, kinds, device, node, order)


def _move_group_to_front(cluster: Cluster, ranks: Sequence[int]) -> Ints:
    """Return the ranks of an equivalent group on the first nodes, and on the first devices if all devices are alike."""
    # A shift by a multiple of `unit` ranks keeps the borders of units and of the network's levels: no cost changes.
    unit = lcm(cluster.ranks_per_unit, *(level.ranks for level in fabric_levels(cluster)))
    group = np.asarray(ranks, np.int64) - ranks[0] // unit * unit
    # Devices that share network adapters are not alike: the price depends on which of them share one.
    shared_nics = 0 < cluster.nics_per_node < cluster.devices_per_node
    if cluster.wiring.complete and not shared_nics:
        node, local = np.divmod(group, cluster.ranks_per_node)
        device, core = np.divmod(local, cluster.ranks_per_device)
        group = node * cluster.capacity_per_node + _distinct_in_order(device)[1] * cluster.ranks_per_device + core
    return group


def _digest(*columns: NDArray[Any]) -> bytes:
    return hashlib.blake2b(b"/".join(column.tobytes() for column in columns), digest_size=16).digest()


def _distinct_in_order(names: Ints) -> tuple[Ints, Ints]:
    """Return the distinct names in order of appearance, and (names,) the index of each name among them.

    [7, 3, 7] gives [7, 3] and [0, 1, 0].
    """
    distinct, seen_at, inverse = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(seen_at)
    return distinct[order], np.argsort(order)[inverse]
