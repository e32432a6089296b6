"""Shapes that a set of ranks forms on the machine: rings, grids and hypercubes; and cuts of the machine.

A *unit* here is a set of nodes that wires between devices join: an UltraServer if there is one, else a node. Devices
are numbered over the whole cluster: device d of node k is ``k * devices_per_node + d``.
"""

from __future__ import annotations

from collections import Counter
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
    """One exchange of recursive halving or doubling: every rank of a group exchanges data with a partner."""

    bit: int  # the indices of two partners in the group differ in this bit
    level: LinkKind  # slowest kind of wire between partners
    hops: int  # number of wires on the longest way between partners
    partners: tuple[int, ...]  # partner of each rank, by the rank's index in the ascending group


def group_by_device(cluster: RankMap, ranks: Iterable[int]) -> Devices:
    """Return the ranks on each device, by the device's number in the cluster; devices and ranks ascending.

    Raises:
        TopologyError: There are no ranks, or one that does not exist.
    """
    members: dict[int, tuple[int, ...]] = {}
    for rank in sorted(set(ranks)):
        place = cluster.place(rank)
        device = place.node * cluster.devices_per_node + place.device
        members[device] = (*members.get(device, ()), rank)
    if not members:
        raise TopologyError("ranks: a group needs at least one rank, found none")
    return members


def rings(cluster: RankMap, ranks: Iterable[int]) -> tuple[Cycle, ...]:
    """Find rings of ranks that visit each of their devices once and share no wire.

    A ring is an order of the ranks in which neighbours, also the last and the first, are on one device or on devices
    with a wire between them; ranks of a device stay together. Each ring may be used in both directions. There are two
    on a 4x4 torus, three on an UltraServer, one on a row of a torus. If the ranks are on several units, the rings of
    the units are opened, and their ends are joined over the network.

    Returns:
        The rings; empty if the wires hold none, as on a chain: then see `ring_order`.
    """
    devices = group_by_device(cluster, ranks)
    per_unit = [_find_unit_rings(cluster, unit) for unit in _devices_by_unit(cluster, devices)]
    # There are as many rings as on the unit with the fewest.
    joined = (tuple(device for part in parts for device in part) for parts in zip(*per_unit, strict=False))
    return tuple(tuple(rank for device in ring for rank in devices[device]) for ring in joined)


def ring_order(cluster: RankMap, ranks: Iterable[int]) -> Cycle:
    """Order ranks for one ring: the first of `rings`, or, if there is none, a walk through the devices.

    The walk visits a spanning tree of each unit's devices depth first: a ring in this order crosses every wire of the
    tree once in each direction. Devices that no wire joins to the others follow in the order of their numbers.
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
    """Append to `order` every device that wires reach from `start`, depth first, unless `order` has it already.

    The neighbours in `graph` are ascending.
    """
    stack = [start]
    while stack:
        if (device := stack.pop()) not in order:
            order.append(device)
            stack.extend(reversed(graph[device]))


def _devices_by_unit(cluster: RankMap, devices: Iterable[int]) -> list[list[int]]:
    """Return the devices of each unit, as lists, in the order of `devices`."""
    size, units = cluster.devices_per_node * cluster.servers, dict[int, list[int]]()
    for device in devices:
        units.setdefault(device // size, []).append(device)
    return list(units.values())


def _find_unit_rings(cluster: RankMap, devices: list[int]) -> tuple[Cycle, ...]:
    """Return edge-disjoint rings of the devices of one unit."""
    if cluster.wiring.complete and cluster.servers == 1:
        # Behind a switch all rings use the one port of each device, so a second ring adds nothing.
        return zigzag_cycles(devices)[: 1 if cluster.wiring.switched else None]
    return disjoint_cycles(_neighbour_graph(cluster, devices), _axis_rings(cluster, devices))


def _neighbour_graph(cluster: RankMap, devices: list[int]) -> dict[int, tuple[int, ...]]:
    """Return, for each of the given devices, those of them that a wire joins to it, ascending."""
    used = set(devices)
    return {device: tuple(sorted(used.intersection(_neighbour_devices(cluster, device)))) for device in devices}


def _neighbour_devices(cluster: RankMap, device: int) -> list[int]:
    """Return the devices that wires join to a device, in its node and in other servers."""
    per_node = cluster.devices_per_node
    node, inside = divmod(device, per_node)
    first, server = node - node % cluster.servers, node % cluster.servers
    coupled = [(first + other) * per_node + inside for other in torus(cluster.servers).neighbours(server)]
    return [node * per_node + other for other in cluster.wiring.adjacent_devices(inside)] + coupled


def _axis_rings(cluster: RankMap, devices: list[int]) -> list[list[Cycle]]:
    """Return, for each axis of the torus that the devices fill, the rings along it; empty if they fill none.

    Axes that do not close, or with fewer than three places, are left out.
    """
    shape = _find_grid(cluster, devices)
    if shape is None:
        return []
    return [
        [
            # Once around the axis, from the position with coordinate 0.
            tuple(devices[_move_along_axis(shape, start, axis, step)] for step in range(side))
            for start in range(shape.size)
            if shape.coordinates(start)[axis] == 0
        ]
        for axis, side in enumerate(shape.dims)
        if shape.wraps[axis] and side > 2
    ]


def _move_along_axis(shape: Grid, start: int, axis: int, by: int) -> int:
    """Return the device `by` steps from `start` along an axis whose ends meet, both as positions in `shape`."""
    device = shape.moved(start, axis, by)
    assert device is not None
    return device


def grid(cluster: RankMap, ranks: Iterable[int]) -> Grid | None:
    """Return the grid that the devices of some ranks fill; the devices, ascending, are its positions row by row.

    Examples of its sides: (4, 4) for a whole trn2.48xlarge; (2, 4) for two neighbouring rows of it, of which the first
    side is open and the second a ring; (4, 4, 4) for an UltraServer. Sides of length 1 are left out.

    Returns:
        The grid; None if the devices fill no box, are not wired as a grid, have different numbers of the ranks, or are
        in several units.
    """
    devices = group_by_device(cluster, ranks)
    even = len({len(members) for members in devices.values()}) == 1
    return _find_grid(cluster, list(devices)) if even and len(_devices_by_unit(cluster, devices)) == 1 else None


def _find_grid(cluster: RankMap, devices: list[int]) -> Grid | None:
    """Return the grid that devices of one unit, ascending, fill; None if they fill none."""
    inside = cluster.wiring.grid
    if inside is None:
        return None
    per_node = cluster.devices_per_node
    # The grid of the whole unit. Its first axis is the ring of servers, which has length 1 without UltraServers.
    full = Grid(dims=(cluster.servers, *inside.dims), wraps=(True, *inside.wraps))
    # The devices fill a grid if their coordinates on each axis are neighbours, and the product of the numbers of
    # coordinates is the number of devices.
    places = [full.coordinates(device % (per_node * cluster.servers)) for device in devices]
    sides = [sorted(set(side)) for side in zip(*places, strict=True)]
    size = 1
    for axis, side in enumerate(sides):
        size *= len(side)
        if not _are_consecutive(side, full.dims[axis], wraps=full.wraps[axis]):
            return None
    axes = [axis for axis, side in enumerate(sides) if len(side) > 1]
    if size != len(devices):
        return None
    wraps = (full.wraps[axis] and len(sides[axis]) == full.dims[axis] for axis in axes)
    return Grid(dims=tuple(len(sides[axis]) for axis in axes), wraps=tuple(wraps))


def _are_consecutive(side: list[int], length: int, *, wraps: bool) -> bool:
    """Whether ascending coordinates follow each other on an axis; on a ring, the first and the last one do as well."""
    around = wraps and len(side) == 2 and side[1] - side[0] == length - 1
    return around or side == list(range(side[0], side[0] + len(side)))


def hypercube_axes(cluster: RankMap, ranks: Iterable[int]) -> tuple[Axis, ...]:
    """Return an `Axis` for each bit of the index of a rank in the ascending group, the highest bit first.

    On a whole node the high bits select the device (called W, X, Y and Z on 16 devices), the low bits the core.

    Raises:
        TopologyError: The number of ranks is no power of two, or they are not spread evenly over devices and nodes.
    """
    devices = group_by_device(cluster, ranks)
    group = [rank for members in devices.values() for rank in members]
    per_node = Counter(device // cluster.devices_per_node for device in devices)
    even = len({len(members) for members in devices.values()}) == 1 and len(set(per_node.values())) == 1
    if not even or len(group) & (len(group) - 1):
        raise TopologyError(
            "recursive halving and doubling needs a power of two ranks, evenly on devices and nodes; "
            f"found {len(group)} ranks on {len(devices)} devices; choose another algorithm"
        )
    return tuple(_make_exchange_axis(cluster, group, bit) for bit in reversed(range(len(group).bit_length() - 1)))


def _make_exchange_axis(cluster: RankMap, group: list[int], bit: int) -> Axis:
    """Return the axis that pairs ranks whose indices in the group differ in bit number `bit` only."""
    partners = tuple(group[index ^ (1 << bit)] for index in range(len(group)))
    links_of_pairs = [
        (route(cluster, rank, partner), cluster.link_kind(rank, partner))
        for rank, partner in zip(group, partners, strict=True)
    ]
    # Figures of the axis are those of the pair with the longest latency.
    longest, level = max(links_of_pairs, key=lambda way: sum(link.latency_s for link in way[0]))
    return Axis(bit=bit, level=level, hops=len(longest), partners=partners)


def bisection_bytes_per_s(cluster: RankMap) -> float:
    """Return the bandwidth in bytes/s across the narrowest cut of a cluster into halves, one way.

    The cut goes, for several units, between units (the adapters of the smaller half count); for one UltraServer,
    between servers or through all servers, whichever is narrower; for one node, through the wires between devices; for
    a single device, between its cores.
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
    """Return the bandwidth in bytes/s across the narrowest cut of one node into halves, one way."""
    if cluster.devices_per_node > 1:
        return cluster.wiring.count_bisection_wires() * cluster.bandwidth_bytes_per_s(cluster.machine.wires.link)
    half = cluster.ranks_per_device // 2
    has_chip_link = any(spec.kind == "chip" for spec in cluster.machine.links)
    return half * cluster.bandwidth_bytes_per_s("chip") if has_chip_link else 0.0
