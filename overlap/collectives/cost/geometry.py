"""What a group looks like on its machine, in numbers of the group: devices, nodes, pairs, rings, sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from topology import Cluster, Grid, TopologyError

__all__ = ["Geometry"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A group on a cluster.

    Attributes:
        cluster: The machine.
        ranks: World ranks in group order.
    """

    cluster: Cluster
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each device, devices and ranks ascending as in the world."""
        return self._by(lambda rank: (self.cluster.place(rank).node, self.cluster.place(rank).device))

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each node."""
        return self._by(lambda rank: (self.cluster.place(rank).node, 0))

    @property
    def units(self) -> int:
        """How many sets of devices that only the network joins."""
        return len({self.cluster.place(rank).node // self.cluster.servers for rank in self.ranks})

    def _by(self, key: Callable[[int], tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, int], list[int]] = {}
        for rank, index in sorted((rank, index) for index, rank in enumerate(self.ranks)):
            found.setdefault(key(rank), []).append(index)
        return tuple(tuple(found[place]) for place in sorted(found))

    def why_not_by_node(self) -> str | None:
        """Return why the group is not the same ranks of several nodes, numbered node by node; None if it is."""
        if len(self.nodes) < 2:
            return "all ranks are on one node"
        if len({len(node) for node in self.nodes}) > 1:
            return "nodes have different numbers of ranks"
        if len(self.nodes[0]) < 2:
            return "nodes have one rank each"
        if [rank for node in self.nodes for rank in node] != list(range(self.size)):
            return "ranks are not numbered node by node"
        return None

    def why_no_cube(self) -> str | None:
        """Return why devices are no corners of a cube; None if they are."""
        if self.units > 1:
            return "only the network joins its nodes"
        try:
            self.cluster.hypercube_axes(self.ranks)
        except TopologyError as error:
            return str(error)
        return None

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Group ranks two by two, each pair on one device; each device has an even number of the group's ranks."""
        return tuple((device[i], device[i + 1]) for device in self.devices for i in range(0, len(device), 2))

    @cached_property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """Disjoint rings of wires, as orders of group ranks, each in both directions where that makes a difference."""
        orders = [self._indices(ring) for ring in self.cluster.rings(self.ranks)]
        both = [order for ring in orders for order in (ring, ring[::-1])]
        return tuple(both if len(self.devices) > 2 or self.size > 2 else both[:1])

    @property
    def ring_order(self) -> tuple[int, ...]:
        """An order of group ranks for one ring, even where no ring of wires exists."""
        return self._indices(self.cluster.ring_order(self.ranks))

    def _indices(self, ranks: Sequence[int]) -> tuple[int, ...]:
        of = {rank: index for index, rank in enumerate(self.ranks)}
        return tuple(of[rank] for rank in ranks)

    def grid(self) -> Grid | None:
        """Return the sides that single ranks on devices fill in group order, None if they fill none."""
        alone = len(self.devices) == self.size and list(self.ranks) == sorted(self.ranks)
        return self.cluster.grid(self.ranks) if alone else None

    def part(self, indices: Sequence[int]) -> Geometry:
        """Return the geometry of some of the group's ranks."""
        return Geometry(cluster=self.cluster, ranks=tuple(self.ranks[index] for index in indices))
