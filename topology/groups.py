"""Shapes in a set of ranks on the machine: rings, grids, hypercubes, cuts.

A *unit* here is a set of nodes that device wires join: an UltraServer where there is one, else a node. Devices of the
whole cluster are numbered through: device d of node k is ``k * devices_per_node + d``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .cycles import Cycle, disjoint_cycles, zigzag_cycles
from .errors import TopologyError
from .machine import LinkKind
from .routes import RankMap, route
from .wiring import Grid, torus

Devices = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One exchange of recursive halving or doubling."""

    bit: int  # bit of the index in the group in which partners differ
    level: LinkKind  # slowest kind of wire between partners
    hops: int  # wires on the longest way between partners
    partners: tuple[int, ...]  # per index of the (ascending) group, the rank at the other end


def group_by_device(cluster: RankMap, ranks: Iterable[int]) -> Devices:
    """Return ranks by their device; devices and ranks ascending.

    Raises:
        TopologyError: if there is no rank, or one that does not exist.
    """
    group_by_device: dict[int, list[int]] = {}
    for rank in sorted(set(ranks)):
        place = cluster.place(rank)
        group_by_device.setdefault(place.node * cluster.devices_per_node + place.device, []).append(rank)
    if not group_by_device:
        raise TopologyError("a group needs at least one rank, found none; pass ranks")
    return {device: tuple(members) for device, members in group_by_device.items()}


def rings(cluster: RankMap, ranks: Iterable[int]) -> tuple[Cycle, ...]:
    """Find edge-disjoint Hamiltonian cycles in the devices of some ranks.

    Each is an order of the ranks in which neighbours (the last and the first, too) share a device or a wire; ranks
    of a device stay together. Every ring may be used in both directions. Two on a 4x4 torus, three on an
    UltraServer, one on a row of a torus. Where the ranks span units, each unit's ring is opened and the ends are
    joined over the network.

    Returns:
        No ring at all where the wires hold none, as on a chain: see `ring_order`.
    """
    devices = group_by_device(cluster, ranks)
    per_unit = [_unit_rings(cluster, unit) for unit in _devices_by_unit(cluster, devices)]
    joined = (tuple(device for part in parts for device in part) for parts in zip(*per_unit, strict=False))
    return tuple(tuple(rank for device in ring for rank in devices[device]) for ring in joined)


def ring_order(cluster: RankMap, ranks: Iterable[int]) -> Cycle:
    """Order ranks for one ring: the first of `rings`, or else a walk that sends at most one flow over each direction
    of a wire.

    The walk visits a spanning tree of each unit's devices depth first; going round it crosses every tree wire once
    each way. Devices that the group itself does not connect follow in the order of their numbers.
    """
    if disjoint_rings := rings(cluster, ranks):
        return disjoint_rings[0]
    devices = group_by_device(cluster, ranks)
    order: list[int] = []
    for unit in _devices_by_unit(cluster, devices):
        graph = _neighbour_graph(cluster, unit)
        for start in unit:
            _visit_depth_first(graph, start, order)
    return tuple(rank for device in order for rank in devices[device])


def _visit_depth_first(graph: dict[int, tuple[int, ...]], start: int, order: list[int]) -> None:
    """Append the devices that wires reach from a device to an order, depth first."""
    stack = [start]
    while stack:
        if (device := stack.pop()) not in order:
            order.append(device)
            stack.extend(reversed(graph[device]))


def _devices_by_unit(cluster: RankMap, devices: Iterable[int]) -> list[list[int]]:
    size, units = cluster.devices_per_node * cluster.servers, dict[int, list[int]]()
    for device in devices:
        units.setdefault(device // size, []).append(device)
    return list(units.values())


def _unit_rings(cluster: RankMap, devices: list[int]) -> tuple[Cycle, ...]:
    """Return edge-disjoint rings of the devices of one unit."""
    if cluster.wiring.complete and cluster.servers == 1:
        # Behind a switch every ring of a device shares its one port, so a second ring adds nothing.
        return zigzag_cycles(devices)[: 1 if cluster.wiring.switched else None]
    return disjoint_cycles(_neighbour_graph(cluster, devices), _axis_rings(cluster, devices))


def _neighbour_graph(cluster: RankMap, devices: list[int]) -> dict[int, tuple[int, ...]]:
    used = set(devices)
    return {device: tuple(sorted(used.intersection(_neighbours(cluster, device)))) for device in devices}


def _neighbours(cluster: RankMap, device: int) -> list[int]:
    """Return the devices that wires join to a device, in its node and in other servers."""
    per_node = cluster.devices_per_node
    node, inside = divmod(device, per_node)
    first, server = node - node % cluster.servers, node % cluster.servers
    coupled = [(first + other) * per_node + inside for other in torus(cluster.servers).neighbours(server)]
    return [node * per_node + other for other in cluster.wiring.adjacent(inside)] + coupled


def _axis_rings(cluster: RankMap, devices: list[int]) -> list[list[Cycle]]:
    """Return the rings along each axis of the torus that some devices fill."""
    shape = _find_grid(cluster, devices)
    if shape is None:
        return []
    return [
        [
            tuple(devices[_move_along_axis(shape, start, axis, step)] for step in range(side))
            for start in range(shape.size)
            if shape.coordinates(start)[axis] == 0
        ]
        for axis, side in enumerate(shape.dims)
        if shape.wraps[axis] and side > 2
    ]


def _move_along_axis(shape: Grid, start: int, axis: int, by: int) -> int:
    """Return the device some steps along an axis whose ends meet."""
    device = shape.moved(start, axis, by)
    assert device is not None
    return device


def grid(cluster: RankMap, ranks: Iterable[int]) -> Grid | None:
    """Return the grid that the devices of some ranks fill, in ascending order row by row.

    (4, 4) for a whole trn2.48xlarge, (2, 4) for two neighbouring rows (its first side open, its second a ring), (4,
    4, 4) for an UltraServer. Sides of one device are left out.

    Returns:
        None if the devices fill no box, are not wired as a grid, hold different numbers of the ranks, or lie in
        several units.
    """
    devices = group_by_device(cluster, ranks)
    even = len({len(members) for members in devices.values()}) == 1
    return _find_grid(cluster, list(devices)) if even and len(_devices_by_unit(cluster, devices)) == 1 else None


def _find_grid(cluster: RankMap, devices: list[int]) -> Grid | None:
    inside = cluster.wiring.grid
    if inside is None:
        return None
    per_node = cluster.devices_per_node
    # The servers of a unit are the first axis, in a ring.
    full = Grid(dims=(cluster.servers, *inside.dims), wraps=(True, *inside.wraps))
    # The devices fill a grid if each axis has a walkable side, and the product of the sides is their number.
    places = [full.coordinates(device % (per_node * cluster.servers)) for device in devices]
    sides = [sorted(set(side)) for side in zip(*places, strict=True)]
    size = 1
    for axis, side in enumerate(sides):
        size *= len(side)
        if not _can_walk(side, full.dims[axis], wraps=full.wraps[axis]):
            return None
    axes = [axis for axis, side in enumerate(sides) if len(side) > 1]
    if size != len(devices):
        return None
    wraps = (full.wraps[axis] and len(sides[axis]) == full.dims[axis] for axis in axes)
    return Grid(dims=tuple(len(sides[axis]) for axis in axes), wraps=tuple(wraps))


def _can_walk(side: list[int], length: int, *, wraps: bool) -> bool:
    """Whether devices follow each other along a side; two at its ends do if it wraps."""
    around = wraps and len(side) == 2 and side[1] - side[0] == length - 1
    return around or side == list(range(side[0], side[0] + len(side)))


def hypercube_axes(cluster: RankMap, ranks: Iterable[int]) -> tuple[Axis, ...]:
    """Pair ranks along each bit of their index in the ascending group, the highest bit first.

    On a whole node the high bits are those of the device, called W, X, Y and Z on 16 devices, and the low ones
    those of the core.

    Raises:
        TopologyError: unless the group is a power of two and takes equally many ranks of each device and devices of
            each node.
    """
    devices = group_by_device(cluster, ranks)
    group = [rank for members in devices.values() for rank in members]
    per_node: dict[int, int] = {}
    for device in devices:
        per_node[device // cluster.devices_per_node] = per_node.get(device // cluster.devices_per_node, 0) + 1
    even = len({len(members) for members in devices.values()}) == 1 and len(set(per_node.values())) == 1
    if not even or len(group) & (len(group) - 1):
        raise TopologyError(
            "recursive halving and doubling needs a power of two ranks, evenly on devices and nodes; "
            f"found {len(group)} ranks on {len(devices)} devices"
        )
    return tuple(_exchange_axis(cluster, group, bit) for bit in reversed(range(len(group).bit_length() - 1)))


def _exchange_axis(cluster: RankMap, group: list[int], bit: int) -> Axis:
    """Return the axis that pairs ranks whose indices in the group differ in one bit."""
    partners = tuple(group[index ^ (1 << bit)] for index in range(len(group)))
    links_of_pairs = [
        (route(cluster, rank, partner), cluster.link_kind(rank, partner))
        for rank, partner in zip(group, partners, strict=True)
    ]
    longest, level = max(links_of_pairs, key=lambda way: sum(link.latency_s for link in way[0]))
    return Axis(bit=bit, level=level, hops=len(longest), partners=partners)


def bisection_bytes_per_s(cluster: RankMap) -> float:
    """Return the bandwidth across the narrowest cut of a cluster into halves, one way.

    Several units are cut between units, through the adapters of the smaller half; one UltraServer either between
    servers or through all of them; a node through its device wires; a single device between its cores.
    """
    units = cluster.nodes // cluster.servers
    if units > 1:
        network = cluster.machine.network
        rate = cluster.bandwidth_bytes_per_s(network.link) if network else 0.0
        return (units // 2) * cluster.servers * cluster.nics_per_node * rate
    inside = cluster.servers * _node_cut_bytes_per_s(cluster)
    if cluster.servers == 1 or cluster.machine.ultraserver is None:
        return inside
    between = torus(cluster.servers).cut_wires() * cluster.devices_per_node
    return min(inside, between * cluster.bandwidth_bytes_per_s(cluster.machine.ultraserver.link))


def _node_cut_bytes_per_s(cluster: RankMap) -> float:
    """Return the bandwidth across the narrowest cut of one node into halves, one way."""
    if cluster.devices_per_node > 1:
        return cluster.wiring.bisection_wires() * cluster.bandwidth_bytes_per_s(cluster.machine.wires.link)
    half = cluster.ranks_per_device // 2
    has_chip_link = any(spec.kind == "chip" for spec in cluster.machine.links)
    return half * cluster.bandwidth_bytes_per_s("chip") if has_chip_link else 0.0
