"""Geometry of a group on its machine, in group ranks: devices, nodes, pairs, rings, sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topology import Cluster, Grid, TopologyError


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A group on a cluster."""

    cluster: Cluster  # The machine
    ranks: tuple[int, ...]  # World ranks in group order

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each device; devices, and the ranks of a device, are in the order of world ranks."""
        local, node = self._world_ranks % self.cluster.ranks_per_node, self._world_ranks // self.cluster.ranks_per_node
        return self._split_by_key(node * self.cluster.devices_per_node + local // self.cluster.ranks_per_device)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each node."""
        return self._split_by_key(self._world_ranks // self.cluster.ranks_per_node)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each unit: a node or an UltraServer, which only the network joins with others."""
        return self._split_by_key(self._world_ranks // self.cluster.ranks_per_unit)

    @cached_property
    def _world_ranks(self) -> NDArray[np.int64]:
        return np.asarray(self.ranks, np.int64)

    def _split_by_key(self, key: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
        """Return the group ranks in parts with equal keys, in the order of world ranks, with which keys must ascend."""
        order = np.argsort(self._world_ranks, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order])) + 1
        return tuple(tuple(part.tolist()) for part in np.split(order, bounds))

    @cached_property
    def hierarchical_misfit_reason(self) -> str | None:
        """Reason why two-level algorithms do not apply; None if they apply.

        They need several nodes with two or more ranks each, equally many, and group ranks in the order of world ranks.
        """
        if len(self.nodes) < 2:
            return "all ranks are on one node"
        if len({len(node) for node in self.nodes}) > 1:
            return "nodes have different numbers of ranks"
        if len(self.nodes[0]) < 2:
            return "nodes have one rank each"
        if (np.diff(self._world_ranks) < 0).any():
            return "ranks are not numbered node by node"
        return None

    @cached_property
    def cube_misfit_reason(self) -> str | None:
        """Reason why algorithms along the edges of a cube do not apply; None if the devices are corners of a cube."""
        if len(self.units) > 1:
            return "only the network joins its nodes"
        try:
            self.cluster.hypercube_axes(self.ranks)
        except TopologyError as error:
            return str(error)
        return None

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of group ranks of one device. Each device must have an even number of the group's ranks."""
        return tuple((device[i], device[i + 1]) for device in self.devices for i in range(0, len(device), 2))

    @cached_property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """Rings of wires without a common wire, each as a sequence of all group ranks, in both directions."""
        orders = [self._group_indices(ring) for ring in self.cluster.rings(self.ranks)]
        # For two ranks both directions are the same ring.
        both = [order for ring in orders for order in (ring, ring[::-1])]
        return tuple(both if self.size > 2 else both[:1])

    @cached_property
    def device_rings(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The rings of `rings`, each as a sequence of devices; a device is a tuple of group ranks."""
        device_of = {rank: device for device in self.devices for rank in device}
        return tuple(tuple(dict.fromkeys(device_of[rank] for rank in ring)) for ring in self.rings)

    @property
    def ring_order(self) -> tuple[int, ...]:
        """An order of group ranks for a ring, even if the wires form no ring."""
        return self._group_indices(self.cluster.ring_order(self.ranks))

    def _group_indices(self, ranks: Sequence[int]) -> tuple[int, ...]:
        index_of = {rank: index for index, rank in enumerate(self.ranks)}
        return tuple(index_of[rank] for rank in ranks)

    def grid(self) -> Grid | None:
        """Return the grid of devices that the group fills, one rank on each device, in order; None if there is none."""
        alone = len(self.devices) == self.size and list(self.ranks) == sorted(self.ranks)
        return self.cluster.grid(self.ranks) if alone else None

    def geometry_of(self, indices: Sequence[int]) -> Geometry:
        """Return the geometry of some ranks of the group, given as group ranks; they become 0, 1, ... in this order."""
        return Geometry(cluster=self.cluster, ranks=tuple(self.ranks[index] for index in indices))
