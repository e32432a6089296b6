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
    """The wires that some messages cross, in compressed rows."""

    first: Ints  # (messages + 1,) index in `wire` of each message's first wire
    wire: Ints  # numbers of directed wires, message after message; at least one for each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wires:
    """Published figures of directed wires, by number."""

    kind: NDArray[np.str_]  # kind of each wire
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
        """Return the wires from each `src` to the `dst` of the same message.

        Args:
            src: (messages,) group ranks.
            dst: (messages,) group ranks; equal to `src` only where the message is far.
            far: (messages,) whether the message goes to the counterpart of `dst` in another node; none does if None.

        Raises:
            TopologyError: If no wire joins two of them.
        """

    @abstractmethod
    def wires(self) -> Wires:
        """Return the figures of all wires that routes have used so far."""

    def first_by_ends(self, wires: Ints) -> int:
        """Return the first of some wires by an order of their ends, which no earlier call changes."""
        return int(wires.min())

    @abstractmethod
    def describe(self, wire: int) -> str:
        """Name the two ends of a wire."""


def place(cluster: Cluster, ranks: Sequence[int] | None = None) -> Placement:
    """Place a group on a cluster.

    Args:
        cluster: The machine.
        ranks: World ranks in group order; all of them by default.

    Raises:
        TopologyError: If a rank does not exist.
    """
    group = np.asarray(range(cluster.world_size) if ranks is None else ranks, np.int64)
    for rank in group[(group < 0) | (group >= cluster.world_size)].tolist():
        cluster.place(rank)  # raises, and says why
    return _OnCluster(cluster, group)


class Numbering:
    """Numbers for the wires of a cluster.

    First come the wires inside devices, then the two halves of each way into the network: both follow from the
    numbers of their ends. Wires between devices are numbered as they are first used; the cluster is asked once for
    each pair of devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        bundles = max(1, min(cluster.nics_per_node, cluster.devices_per_node))
        node, device, core = _place_ranks(cluster, np.arange(cluster.world_size))
        self.core: Ints = core
        self.device: Ints = node * cluster.devices_per_node + device
        self.unit: Ints = node // cluster.servers
        self.nic: Ints = node * bundles + device * bundles // cluster.devices_per_node
        self.first_nic: int = cluster.world_size * cluster.ranks_per_device
        self.first_link: int = self.first_nic + 2 * bundles * cluster.nodes
        self.links: list[Link] = []
        self._number: dict[Link, int] = {}
        self._ways: list[list[int]] = []
        self._way: dict[int, int] = {}  # index in `_ways`, by the pair of devices
        self._up: dict[int, int] = {}  # wires to the switch of a node and from it, by device
        self._down: dict[int, int] = {}
        self._padded_ways: tuple[Ints, Ints] = np.zeros((0, 1), np.int64), np.zeros(0, np.int64)
        self._wires: Wires | None = None

    def ways(self, a: Ints, b: Ints) -> tuple[Ints, Ints]:
        """Return the wires between the devices of ranks of one unit, (pairs, most wires), and their numbers."""
        devices = self.cluster.nodes * self.cluster.devices_per_node
        keys, row, inverse = np.unique(
            self.device[a] * devices + self.device[b], return_index=True, return_inverse=True
        )
        ways = self._way
        for key, first, other in zip(keys.tolist(), a[row].tolist(), b[row].tolist(), strict=True):
            if key not in ways:
                ways[key] = len(self._ways)
                self._ways.append(self._wires_between(first, other, *divmod(key, devices)))
        table, lengths = self._padded_way_table()
        rows = np.array([ways[key] for key in keys.tolist()], np.int64)[inverse]
        return table[rows], lengths[rows]

    def _wires_between(self, a: int, b: int, src_device: int, dst_device: int) -> list[int]:
        """Return the wires between two ranks of different devices; wires of a switch are looked up by device."""
        per_node = self.cluster.devices_per_node
        near = src_device // per_node == dst_device // per_node
        if near and src_device in self._up and dst_device in self._down:
            return [self._up[src_device], self._down[dst_device]]
        wires = [self._number_link(link) for link in self.cluster.route(a, b)]
        if near and self.cluster.wiring.switched:
            self._up[src_device], self._down[dst_device] = wires
        return wires

    def _padded_way_table(self) -> tuple[Ints, Ints]:
        """Return the wires of all device pairs so far as one table, -1 for none, and the number of each."""
        if len(self._padded_ways[1]) < len(self._ways):
            lengths = np.array([len(way) for way in self._ways], np.int64)
            longest = int(lengths.max(initial=1))
            table = np.array([way + [-1] * (longest - len(way)) for way in self._ways], np.int64)
            self._padded_ways = table, lengths
        return self._padded_ways

    def _number_link(self, link: Link) -> int:
        if link not in self._number:
            self._number[link] = self.first_link + len(self.links)
            self.links.append(link)
        return self._number[link]

    def shift_to_units(self, wires: Ints, units: Ints) -> Ints:
        """Return the wires in other units that have the same places as `wires` in theirs.

        Args:
            wires: (wires,) Numbers of wires; all units (nodes, or UltraServers) of the cluster are whole.
            units: (units,) Distances to these units.

        Returns:
            (units, wires) Numbers of the wires there.
        """
        cluster, servers = self.cluster, self.cluster.servers
        chip = servers * cluster.ranks_per_node * cluster.ranks_per_device
        nic = servers * (self.first_link - self.first_nic) // cluster.nodes
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
        here = int(np.flatnonzero(self.nic == nic)[0])
        there = int(np.flatnonzero(self.unit != self.unit[here])[0])
        return cluster.route(there, here)[-1] if down else cluster.route(here, there)[0]

    def first_by_ends(self, wires: Ints) -> int:
        """Return the first of some wires by their ends; those inside devices and to the network are before others."""
        if wires.min() < self.first_link:
            return int(wires.min())
        return int(min(wires.tolist(), key=lambda wire: _sort_key(self.links[wire - self.first_link])))

    def wires(self) -> Wires:
        """Return the figures of all wires numbered so far."""
        if self._wires is None or len(self._wires.kind) < self.first_link + len(self.links):
            self._wires = self._collect_figures()
        return self._wires

    def _collect_figures(self) -> Wires:
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
            latency_s[self.first_nic : self.first_link : 2] = cluster.latency_s(network.link)
            bytes_per_s[outward] = cluster.bandwidth_bytes_per_s(network.link) * cluster.nics_per_bundle
        return Wires(kind=kind, latency_s=latency_s, bytes_per_s=bytes_per_s)


def _place_ranks(cluster: Cluster, ranks: Ints) -> tuple[Ints, Ints, Ints]:
    """Return node, device of the node, and core of each rank: `RankMap.place` for many ranks."""
    node, local = np.divmod(ranks, cluster.ranks_per_node)
    device, core = np.divmod(local, cluster.ranks_per_device)
    return node, device, core


def _shift_link(link: Link, nodes: int) -> Link:
    src, dst = (replace(port, node=port.node + nodes) for port in (link.src, link.dst))
    return replace(link, src=src, dst=dst)


def _sort_key(link: Link) -> tuple[tuple[str, int, int], ...]:
    return tuple((port.role, port.node, port.index) for port in (link.src, link.dst))


# A number is valid as long as anyone holds it: cached plans must never meet a second numbering.
_numberings: WeakValueDictionary[Cluster, Numbering] = WeakValueDictionary()


def numbering(cluster: Cluster) -> Numbering:
    """Return the numbering of a cluster's wires. It stays the same while a placement or a caller holds it."""
    found = _numberings.get(cluster)
    if found is None:
        found = _numberings[cluster] = Numbering(cluster)
    return found


class _OnCluster(Placement):
    def __init__(self, cluster: Cluster, ranks: Ints) -> None:
        self._cluster, self._world = cluster, ranks
        self.size = len(ranks)
        machine = cluster.machine
        node, device, _ = _place_ranks(cluster, ranks)
        # Ranks of the plain machine have a core each, and one memory for all of a node.
        shares = node // cluster.servers if machine.devices is None else node * cluster.devices_per_node + device
        self.device = np.unique(shares, return_inverse=True)[1].astype(np.int64)
        memory = machine.chip.memory_bytes_per_s or machine.collectives.usual.memory_bytes_per_s
        self.memory_bytes_per_s = memory.value if memory else None

    @cached_property
    def _numbering(self) -> Numbering:
        """Numbering, made for the first message: a group as large as the world has many wires."""
        return numbering(self._cluster)

    def wires(self) -> Wires:
        return self._numbering.wires()

    def first_by_ends(self, wires: Ints) -> int:
        return self._numbering.first_by_ends(wires)

    def describe(self, wire: int) -> str:
        """Return a wire as text, by its ends."""
        link = self._numbering.link(wire)
        ends = (f"{p.role} {p.node}.{p.index}" if p.role != "fabric" else "fabric" for p in (link.src, link.dst))
        return " -> ".join(ends)

    def routes(self, src: Ints, dst: Ints, far: NDArray[np.bool_] | None = None) -> Routes:
        """Return the wires that each message crosses, in columns; `far` has messages between units."""
        wires, a, b = self._numbering, self._world[src], self._world[dst]
        far = wires.unit[a] != wires.unit[b] if far is None else far
        chip = (wires.device[a] == wires.device[b]) & ~far
        if far.any() and wires.cluster.machine.network is None:
            row = int(np.argmax(far))
            wires.cluster.route(int(a[row]), int(b[row]))  # raises, and says why
        between = np.flatnonzero(~chip & ~far)
        ways, lengths = wires.ways(a[between], b[between])
        length = np.where(chip, 1, 2)
        length[between] = lengths
        first = np.concatenate([[0], np.cumsum(length)])
        wire = np.empty(first[-1], np.int64)
        start = first[:-1]
        wire[start[chip]] = a[chip] * wires.cluster.ranks_per_device + wires.core[b[chip]]
        wire[start[far]] = wires.first_nic + 2 * wires.nic[a[far]]
        wire[start[far] + 1] = wires.first_nic + 2 * wires.nic[b[far]] + 1
        for hop in range(int(length[between].max(initial=0))):
            rows = length[between] > hop
            wire[start[between[rows]] + hop] = ways[rows, hop]
        return Routes(first=first, wire=wire)
