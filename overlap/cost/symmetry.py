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

from ..collectives.placement import Ints, Placement, place
from .geometry import Geometry
from .levels import fabric_levels


@dataclass(frozen=True, kw_only=True, eq=False)
class Representatives:
    """Sampled ranks that represent all."""

    placement: Placement  # where these ranks are
    groups: Sequence[Sequence[int]]  # groups that run one phase at the same time, as positions in the placement
    # (sampled, own): sampled ranks of other nodes, and the ranks of the home node that do the same.
    alike: tuple[Sequence[int], Sequence[int]] = ((), ())


@dataclass(frozen=True, kw_only=True)
class EqualNodes:
    """Nodes of a group, and the samples of its ranks that represent all in a phase."""

    geometry: Geometry  # machine and ranks of the group
    placement: Placement  # where the ranks of the group are
    home: int  # number of the node that represents all
    folds: bool  # whether one node represents all: all have ranks at the same places, and a network joins some

    @classmethod
    def of(cls, geometry: Geometry, placement: Placement, home: int) -> EqualNodes:
        """Return the nodes of a group, and find out whether one node can represent all."""
        cluster, ranks = geometry.cluster, geometry.ranks
        places = {tuple(ranks[index] % cluster.ranks_per_node for index in node) for node in geometry.nodes}
        folds = len(places) == 1 and len(geometry.units) > 1 and cluster.machine.network is not None
        return cls(geometry=geometry, placement=placement, home=home, folds=folds)

    @cached_property
    def _home_ranks(self) -> tuple[int, ...]:
        return tuple(self.geometry.ranks[index] for index in self.geometry.nodes[self.home])

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """Numbers of a unit's nodes in the order of a ring through one place; none if no unit represents others."""
        g, per_unit = self.geometry, self.geometry.cluster.ranks_per_unit
        places = {tuple(g.ranks[index] % per_unit for index in unit) for unit in g.units}
        if not self.folds or len(places) > 1:
            return ()
        count = len(g.nodes) // len(g.units)
        return g.part([node[0] for node in g.nodes[:count]]).ring_order if count > 1 else (0,)

    @cached_property
    def unit(self) -> Representatives:
        """The first unit alone, with one neighbour in the network: more neighbours change nothing."""
        cluster, count = self.geometry.cluster, len(self.ring)
        two = replace(cluster, nodes=2 * cluster.servers, world_size=2 * cluster.ranks_per_unit)
        world = [self.geometry.ranks[index] % cluster.ranks_per_unit for index in self.geometry.units[0]]
        size = len(self._home_ranks)
        groups = [range(node * size, (node + 1) * size) for node in range(count)]
        return Representatives(placement=place(two, world), groups=groups)

    @cached_property
    def _adapter_bundles(self) -> tuple[tuple[int, ...], ...]:
        """Local ranks of a node by their adapters; all in one bundle if bundles are not alike."""
        cluster = self.geometry.cluster
        sets: dict[int, list[int]] = {}
        for number, rank in enumerate(self._home_ranks):
            sets.setdefault(cluster.nic_of(rank), []).append(number)
        whole = len(self._home_ranks) == cluster.ranks_per_node and cluster.devices_per_node % len(sets) == 0
        return tuple(tuple(sets[nic]) for nic in sorted(sets)) if whole else (tuple(range(len(self._home_ranks))),)

    @property
    def _first_bundle(self) -> tuple[int, ...]:
        """Local ranks of the first adapter bundle, which represents the others."""
        return self._adapter_bundles[0]

    @cached_property
    def _sampled_ranks(self) -> tuple[Placement, dict[int, int]]:
        """The home node and the first places of all others, and the position of each of the ranks among them."""
        nodes = self.geometry.nodes
        chosen = list(nodes[self.home])
        others = [node for number, node in enumerate(nodes) if number != self.home]
        chosen += [node[place] for node in others for place in self._first_bundle]
        world = tuple(self.geometry.ranks[index] for index in chosen)
        return place(self.geometry.cluster, world), {index: number for number, index in enumerate(chosen)}

    def inside_sample(self, folded: bool) -> Representatives | None:
        """Return the sample for phases inside nodes: a unit, or the home node among ranks that represent others."""
        if not self.folds:
            return None
        if folded:
            return self.unit
        placement, size = self._sampled_ranks[0], len(self._home_ranks)
        others = range(size, placement.size)
        like = self._first_bundle * (len(others) // len(self._first_bundle))
        return Representatives(placement=placement, groups=[range(size)], alike=(others, like))

    def root_sample(self) -> Representatives | None:
        """Return the sample for a phase inside the home node: all of it, among ranks that represent others."""
        if not self.folds:
            return None
        return Representatives(placement=self._sampled_ranks[0], groups=[range(len(self._home_ranks))])

    def between_sample(self) -> Representatives | None:
        """Return the sampled ranks of phases between unequal nodes: in each node, its first adapter bundle.

        None if there is only one set.
        """
        if not self.folds:
            return None
        placement, number = self._sampled_ranks
        groups = [[number[node[place]] for node in self.geometry.nodes] for place in self._first_bundle]
        # Places in the home node, which is the first in the placement; rank others[i] behaves as the i-th of the
        # first set, counted round and round.
        others = [place for bundle in self._adapter_bundles[1:] for place in bundle]
        return Representatives(
            placement=placement, groups=groups, alike=(others, self._first_bundle * len(self._adapter_bundles[1:]))
        )


# Size of the largest group with all its pairs compared.
_MOST = 64


def congruence_key(cluster: Cluster, ranks: Sequence[int]) -> bytes:
    """Return a digest that two groups share only if their placements are alike; exact up to 64 ranks.

    Alike means: from any rank to any other, in group order, messages of both groups cross as many wires, of the same
    kinds, and two messages of one group share a wire just where those of the other do; ranks share devices and nodes
    alike, and follow each other as in the world in the same places: algorithms by nodes and by sides of a torus need
    that. Cost: all pairs of ranks, 0.2 ms for 8 and 2 ms for 64. Larger groups share a digest if one is the other on
    other nodes, or on other devices where all devices of a node are alike.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.

    Raises:
        TopologyError: If no wire joins two of them.
    """
    order = np.argsort(np.asarray(ranks, np.int64))
    if len(ranks) > _MOST:
        return _digest(_move_to_front(cluster, ranks), order)
    placement = place(cluster, ranks)
    src, dst = np.nonzero(~np.eye(len(ranks), dtype=np.bool_))
    routes = placement.routes(src, dst)
    wires, wire = _distinct_in_order(routes.wire)
    kinds = placement.wires().kind[wires].astype("U16")
    _, device = _distinct_in_order(placement.device)
    _, node = _distinct_in_order(np.asarray(ranks, np.int64) // cluster.ranks_per_node)
    return _digest(routes.first, wire, kinds, device, node, order)


def _move_to_front(cluster: Cluster, ranks: Sequence[int]) -> Ints:
    """Return the ranks of the same group on the first nodes, and on the first devices if all are alike."""
    unit = lcm(cluster.ranks_per_unit, *(level.ranks for level in fabric_levels(cluster)))
    group = np.asarray(ranks, np.int64) - ranks[0] // unit * unit
    shared_nics = 0 < cluster.nics_per_node < cluster.devices_per_node
    if cluster.wiring.complete and not shared_nics:
        node, local = np.divmod(group, cluster.ranks_per_node)
        device, core = np.divmod(local, cluster.ranks_per_device)
        group = node * cluster.capacity_per_node + _distinct_in_order(device)[1] * cluster.ranks_per_device + core
    return group


def _digest(*columns: NDArray[Any]) -> bytes:
    return hashlib.blake2b(b"/".join(column.tobytes() for column in columns), digest_size=16).digest()


def _distinct_in_order(names: Ints) -> tuple[Ints, Ints]:
    """Return distinct names in order of appearance, and the position of each name among them."""
    distinct, seen_at, inverse = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(seen_at)
    return distinct[order], np.argsort(order)[inverse]
