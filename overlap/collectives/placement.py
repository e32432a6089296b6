"""Placement of a group on a machine: the directed wires that every message crosses, as columns.

Routes are the routes of `topology.Cluster.route`, for many pairs of ranks at once. Wires are numbered, so that the
load of a step on all wires is one `bincount`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from topology import Cluster, Link, Place

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The wires that messages cross, in the order of travel: message m crosses wire[first[m] : first[m + 1]].

    first = [0, 1, 3] and wire = [7, 2, 5]: message 0 crosses wire 7, message 1 crosses wire 2 and then wire 5.
    """

    first: Ints  # (messages + 1,) index in `wire` of each message's first wire; then the length of `wire`
    wire: Ints  # numbers of directed wires; every message crosses at least one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wires:
    """Published figures of directed wires: columns, indexed by the number of a wire."""

    kind: NDArray[np.str_]  # kind of link, such as "chip" inside a device
    latency_s: Floats  # time to cross it; a route through a switch or the network has it on its first half only
    bytes_per_s: Floats  # bandwidth


class Placement(ABC):
    """Places of the ranks of a group, and the wires that join them."""

    size: int  # ranks in the group
    device: Ints  # (size,) number of each rank's device: ranks of a device share its memory
    # bandwidth of one device's memory, None where it is not known or not modelled.
    memory_bytes_per_s: float | None = None

    @abstractmethod
    def routes(self, src: Ints, dst: Ints, far: NDArray[np.bool_] | None = None) -> Routes:
        """Return the wires that message i crosses from rank `src[i]` to rank `dst[i]`.

        A unit is a node, or the UltraServer that it belongs to. Messages between units cross the network.

        Args:
            src: (messages,) group ranks.
            dst: (messages,) group ranks; equal to `src` only where `far` is true.
            far: (messages,) whether the message goes to the rank of another unit that has the place of `dst` there;
                None: to `dst` itself, in whatever unit it is.

        Raises:
            TopologyError: No wire joins two of the ranks.
        """

    @abstractmethod
    def wires(self) -> Wires:
        """Return latency and bandwidth of each wire, indexed by its number, for all wires that have a number so far."""

    def first_in_stable_order(self, wires: Ints) -> int:
        """Return the number of the wire that is first in an order by the ends of wires.

        Numbers of wires depend on earlier calls of `routes`. A choice among equally loaded wires must not.
        """
        return int(wires.min())

    @abstractmethod
    def describe(self, wire: int) -> str:
        """Return the two ends of a wire as text, by the wire's number."""


def place_group(cluster: Cluster, ranks: Sequence[int] | None = None) -> Placement:
    """Place a group on a cluster.

    Args:
        cluster: The machine.
        ranks: World ranks in group order; all of them by default.

    Raises:
        TopologyError: If a rank does not exist.
    """
    group = np.asarray(range(cluster.world_size) if ranks is None else ranks, np.int64)
    for rank in group[(group < 0) | (group >= cluster.world_size)].tolist():
        # Only ranks that do not exist come here.
        cluster.place(rank)  # raises, and says why
    return _ClusterPlacement(cluster, group)


class WireNumbering:
    """Numbers for the directed wires of a cluster.

    1. A wire inside a device has the number sending rank * ranks_per_device + receiving core.
    2. A network adapter n has two wires from `first_nic` on: 2 * n into the network, 2 * n + 1 out of it.
    3. Wires between devices of a unit (a node or an UltraServer) have the numbers from `first_link` on, in the order of
       first use. `Cluster.route` is asked once for each pair of devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        bundles = max(1, min(cluster.nics_per_node, cluster.devices_per_node))
        # By rank: core in its device, device in the cluster, unit, and network adapter (or bundle of them).
        node, device, core = _place_ranks(cluster, np.arange(cluster.world_size))
        self.core: Ints = core
        self.device: Ints = node * cluster.devices_per_node + device
        self.unit: Ints = node // cluster.servers
        self.nic: Ints = node * bundles + device * bundles // cluster.devices_per_node
        self.first_nic: int = cluster.world_size * cluster.ranks_per_device
        self.first_link: int = self.first_nic + 2 * bundles * cluster.nodes
        self.links: list[Link] = []
        self._number: dict[Link, int] = {}
        self._ways: list[list[int]] = []  # wires from one device to another, for each pair of devices used so far
        self._way: dict[int, int] = {}  # index in `_ways`, by source device * devices + destination device
        self._up: dict[int, int] = {}  # wire to the switch of the node, by device
        self._down: dict[int, int] = {}  # wire from the switch of the node, by device
        # `_ways` as a table, and the number of wires in each of its rows; made again when `_ways` has grown.
        self._padded_ways: tuple[Ints, Ints] = np.zeros((0, 1), np.int64), np.zeros(0, np.int64)
        self._wires: Wires | None = None

    def wires_between_devices(self, a: Ints, b: Ints) -> tuple[Ints, Ints]:
        """Return the wires from the device of rank `a[i]` to the device of rank `b[i]`, another device of its unit.

        Returns:
            (pairs, longest) numbers of wires, filled up with -1; and (pairs,) how many wires each pair has.
        """
        devices = self.cluster.nodes * self.cluster.devices_per_node
        keys, row, inverse = np.unique(
            self.device[a] * devices + self.device[b], return_index=True, return_inverse=True
        )
        ways = self._way
        for key, first, other in zip(keys.tolist(), a[row].tolist(), b[row].tolist(), strict=True):
            if key not in ways:
                ways[key] = len(self._ways)
                self._ways.append(self._number_wires_between(first, other, *divmod(key, devices)))
        table, lengths = self._padded_way_table()
        rows = np.array([ways[key] for key in keys.tolist()], np.int64)[inverse]
        return table[rows], lengths[rows]

    def _number_wires_between(self, a: int, b: int, src_device: int, dst_device: int) -> list[int]:
        """Return the numbers of the wires between two world ranks of a unit; a new wire gets the next number.

        The ranks are on different devices, which are numbered through the cluster.
        """
        per_node = self.cluster.devices_per_node
        near = src_device // per_node == dst_device // per_node
        if near and src_device in self._up and dst_device in self._down:
            return [self._up[src_device], self._down[dst_device]]
        wires = [self._number_link(link) for link in self.cluster.route(a, b)]
        if near and self.cluster.wiring.switched:
            # Through a switch: the first wire depends on the source device alone, the second on the destination.
            self._up[src_device], self._down[dst_device] = wires
        return wires

    def _padded_way_table(self) -> tuple[Ints, Ints]:
        """Return `_ways` as one table, filled up with -1, and the number of wires in each row."""
        if len(self._padded_ways[1]) < len(self._ways):
            lengths = np.array([len(way) for way in self._ways], np.int64)
            longest = int(lengths.max(initial=1))
            table = np.array([way + [-1] * (longest - len(way)) for way in self._ways], np.int64)
            self._padded_ways = table, lengths
        return self._padded_ways

    def _number_link(self, link: Link) -> int:
        """Return the number of a link between devices; a new one gets the next."""
        if link not in self._number:
            self._number[link] = self.first_link + len(self.links)
            self.links.append(link)
        return self._number[link]

    def shift_wires_to_units(self, wires: Ints, units: Ints) -> Ints:
        """Return the corresponding wires of other units (nodes, or UltraServers).

        Args:
            wires: (wires,) Numbers of wires; all units of the cluster must have all their ranks.
            units: (units,) For each other unit, how many units further on it is.

        Returns:
            (units, wires) Numbers of the corresponding wires; wires between devices are numbered if they are new.
        """
        cluster, servers = self.cluster, self.cluster.servers
        chip = servers * cluster.ranks_per_node * cluster.ranks_per_device
        nic = servers * (self.first_link - self.first_nic) // cluster.nodes
        # Numbers of wires inside devices and to the network follow from their ends: add a fixed step for each unit.
        moved = wires + np.multiply.outer(units, np.where(wires < self.first_nic, chip, nic))
        for index in np.flatnonzero(wires >= self.first_link).tolist():
            link = self.links[int(wires[index]) - self.first_link]
            moved[:, index] = [self._number_link(_shift_link(link, unit * servers)) for unit in units.tolist()]
        return moved

    def link(self, wire: int) -> Link:
        """Return the link of a wire's number."""
        cluster = self.cluster
        if wire >= self.first_link:
            return self.links[wire - self.first_link]
        if wire < self.first_nic:
            rank, core = divmod(wire, cluster.ranks_per_device)
            place = cluster.place(rank)
            return cluster.route(rank, cluster.rank_at(Place(place.node, place.device, core)))[0]
        nic, down = divmod(wire - self.first_nic, 2)
        here = int(np.flatnonzero(self.nic == nic)[0])  # the first rank with this adapter
        there = int(np.flatnonzero(self.unit != self.unit[here])[0])  # the first rank of another unit
        return cluster.route(there, here)[-1] if down else cluster.route(here, there)[0]

    def first_in_stable_order(self, wires: Ints) -> int:
        """See `Placement`. Wires inside devices and to the network come first; the others are sorted by their ends."""
        if wires.min() < self.first_link:
            return int(wires.min())
        return int(min(wires.tolist(), key=lambda wire: _link_sort_key(self.links[wire - self.first_link])))

    def wires(self) -> Wires:
        """Return latency and bandwidth of all wires numbered so far."""
        if self._wires is None or len(self._wires.kind) < self.first_link + len(self.links):
            self._wires = self._collect_figures()
        return self._wires

    def _collect_figures(self) -> Wires:
        """Return latency and bandwidth of all wires: inside devices, then to the network, then between devices."""
        cluster, network = self.cluster, self.cluster.machine.network
        chips, nics, outer = self.first_nic, self.first_link - self.first_nic, network.link if network else "none"
        kind = np.concatenate(
            [np.full(chips, "chip"), np.full(nics, outer), np.array([link.kind for link in self.links], np.str_)]
        )
        latency_s = np.concatenate([np.zeros(self.first_link), [link.latency_s for link in self.links]])
        bytes_per_s = np.concatenate([np.ones(self.first_link), [link.bandwidth_bytes_per_s for link in self.links]])
        if any(spec.kind == "chip" for spec in cluster.machine.links):
            latency_s[:chips], bytes_per_s[:chips] = cluster.latency_s("chip"), cluster.bandwidth_bytes_per_s("chip")
        if network:
            outward = slice(self.first_nic, self.first_link)
            # Every other wire: a message pays the network's latency on the wire into it, and none on the wire out.
            latency_s[self.first_nic : self.first_link : 2] = cluster.latency_s(network.link)
            bytes_per_s[outward] = cluster.bandwidth_bytes_per_s(network.link) * cluster.nics_used_by_device
        return Wires(kind=kind, latency_s=latency_s, bytes_per_s=bytes_per_s)


def _place_ranks(cluster: Cluster, ranks: Ints) -> tuple[Ints, Ints, Ints]:
    """Return for each rank its node, its device in that node, and its core in that device."""
    node, local = np.divmod(ranks, cluster.ranks_per_node)
    device, core = np.divmod(local, cluster.ranks_per_device)
    return node, device, core


def _shift_link(link: Link, nodes: int) -> Link:
    """Return the corresponding link between the nodes `nodes` further on."""
    src, dst = (replace(port, node=port.node + nodes) for port in (link.src, link.dst))
    return replace(link, src=src, dst=dst)


def _link_sort_key(link: Link) -> tuple[tuple[str, int, int], ...]:
    """Return the values by which links are sorted: role, node and index of the source, then of the destination."""
    return tuple((port.role, port.node, port.index) for port in (link.src, link.dst))


# One numbering for each cluster as long as anything refers to it: numbers in cached plans must keep their meaning.
_wire_numberings: WeakValueDictionary[Cluster, WireNumbering] = WeakValueDictionary()


def wire_numbering(cluster: Cluster) -> WireNumbering:
    """Return the numbering of a cluster's wires. It stays the same while a placement or a caller holds it."""
    found = _wire_numberings.get(cluster)
    if found is None:
        found = _wire_numberings[cluster] = WireNumbering(cluster)
    return found


class _ClusterPlacement(Placement):
    """A group on a cluster: maps group ranks to world ranks, and uses the cluster's numbering of wires."""

    def __init__(self, cluster: Cluster, ranks: Ints) -> None:
        self._cluster, self._world = cluster, ranks
        self.size = len(ranks)
        machine = cluster.machine
        node, device, _ = _place_ranks(cluster, ranks)
        # Where a node may have any number of devices (the local machine), all ranks of the node share one memory.
        shares = node // cluster.servers if machine.devices is None else node * cluster.devices_per_node + device
        self.device = np.unique(shares, return_inverse=True)[1].astype(np.int64)
        memory = machine.chip.memory_bytes_per_s or machine.collectives.usual.memory_bytes_per_s
        self.memory_bytes_per_s = memory.value if memory else None

    @cached_property
    def _wire_numbering(self) -> WireNumbering:
        """Numbering of the cluster's wires, made at the first message: a group as large as the world has many wires."""
        return wire_numbering(self._cluster)

    def wires(self) -> Wires:
        """See `Placement.wires`."""
        return self._wire_numbering.wires()

    def first_in_stable_order(self, wires: Ints) -> int:
        """See `Placement.first_in_stable_order`."""
        return self._wire_numbering.first_in_stable_order(wires)

    def describe(self, wire: int) -> str:
        """Return a wire as text, by its ends."""
        link = self._wire_numbering.link(wire)
        ends = (f"{p.role} {p.node}.{p.index}" if p.role != "fabric" else "fabric" for p in (link.src, link.dst))
        return " -> ".join(ends)

    def routes(self, src: Ints, dst: Ints, far: NDArray[np.bool_] | None = None) -> Routes:
        """Return the wires that each message crosses, in columns; see `Placement.routes`.

        Without `far`, messages between units are those whose ranks are in different units.
        """
        numbering, a, b = self._wire_numbering, self._world[src], self._world[dst]
        far = numbering.unit[a] != numbering.unit[b] if far is None else far
        chip = (numbering.device[a] == numbering.device[b]) & ~far
        if far.any() and numbering.cluster.machine.network is None:
            row = int(np.argmax(far))
            numbering.cluster.route(int(a[row]), int(b[row]))  # raises, and says why
        between = np.flatnonzero(~chip & ~far)
        ways, lengths = numbering.wires_between_devices(a[between], b[between])
        length = np.where(chip, 1, 2)
        length[between] = lengths
        first = np.concatenate([[0], np.cumsum(length)])
        wire = np.empty(first[-1], np.int64)
        start = first[:-1]
        # See `WireNumbering`: one wire inside a device; two wires, into the network and out of it, between units.
        wire[start[chip]] = a[chip] * numbering.cluster.ranks_per_device + numbering.core[b[chip]]
        wire[start[far]] = numbering.first_nic + 2 * numbering.nic[a[far]]
        wire[start[far] + 1] = numbering.first_nic + 2 * numbering.nic[b[far]] + 1
        for hop in range(int(length[between].max(initial=0))):
            rows = length[between] > hop
            wire[start[between[rows]] + hop] = ways[rows, hop]
        return Routes(first=first, wire=wire)
