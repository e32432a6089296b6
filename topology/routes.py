"""Places of ranks, and the directed links from one rank to another.

Ranks count cores, then devices, then nodes: on two nodes of 16 devices with 2 cores, rank 35 is node 1, device 1,
core 1. Rules, rings and routes use `RankMap`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from .errors import TopologyError, unknown_name_error
from .machine import LinkKind, LinkSpec, Machine, Rule
from .wiring import Wiring, torus


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank."""

    node: int  # node of the cluster
    device: int  # device of the node
    core: int  # logical core of the device


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RankMap:
    """A cluster of equal nodes, as far as places of ranks and figures of wires are concerned; base of `Cluster`."""

    machine: Machine  # the kind of node
    nodes: int  # number of nodes
    lnc: int  # physical cores per logical core
    world_size: int  # number of ranks, spread evenly over the nodes
    strict: bool  # whether an illegal group is an error (otherwise a warning)
    edition: int  # year of the rules that apply
    wiring: Wiring = field(compare=False)  # the graph of one node's devices

    def __repr__(self) -> str:
        lnc = f" lnc={self.lnc}" if len(self.machine.chip.lnc) > 1 else ""
        return f"<{type(self).__name__} {self.name}{lnc}: {self.world_size} ranks>"

    def __hash__(self) -> int:
        return hash((self.machine.name, self.nodes, self.lnc, self.world_size))

    @property
    def name(self) -> str:
        """The one-string form: ``trn2.48xlarge x4``."""
        return f"{self.machine.name} x{self.nodes}" if self.nodes > 1 else self.machine.name

    @property
    def devices_per_node(self) -> int:
        """Devices in a node, used or not."""
        return self.wiring.devices

    @property
    def ranks_per_device(self) -> int:
        """Logical cores of a device."""
        return self.machine.chip.cores // self.lnc

    @property
    def capacity_per_node(self) -> int:
        """Ranks that fit on a node."""
        return self.devices_per_node * self.ranks_per_device

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of this world on each node; they are on the node's first cores."""
        return self.world_size // self.nodes

    @property
    def servers(self) -> int:
        """Number of nodes of this cluster in one UltraServer; 1 if only the network joins nodes."""
        return min(self.nodes, self.machine.ultraserver.servers[-1]) if self.machine.ultraserver else 1

    @property
    def ranks_per_unit(self) -> int:
        """Number of ranks of a unit: of an UltraServer, or else of a node. Only the network joins units."""
        return self.servers * self.ranks_per_node

    def place(self, rank: int) -> Place:
        """Return the place of a rank.

        Raises:
            TopologyError: if there is no such rank.
        """
        self._check_rank(rank)
        node, local = divmod(rank, self.ranks_per_node)
        return Place(node, *divmod(local, self.ranks_per_device))

    def rank_at(self, place: Place) -> int:
        """Return the rank at a place, the reverse of `place`.

        Raises:
            TopologyError: The place is not on this cluster, or has no rank of this world.
        """
        local = place.device * self.ranks_per_device + place.core
        fits = 0 <= place.node < self.nodes and 0 <= place.core < self.ranks_per_device
        if not fits or not 0 <= local < self.ranks_per_node:
            raise TopologyError(
                f"{place} holds no rank of {self!r}: expected node 0 to {self.nodes - 1}, device 0 to "
                f"{self.devices_per_node - 1} and core 0 to {self.ranks_per_device - 1}"
            )
        return place.node * self.ranks_per_node + local

    def _check_rank(self, rank: int) -> None:
        """Refuse a rank that is not in the world, with a `TopologyError`."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not in the world of {self!r}: expected 0 to {self.world_size - 1}")

    def link_kind(self, a: int, b: int) -> LinkKind:
        """Return the slowest kind of wire between two ranks; "self" if a equals b, "none" if no wire joins their nodes.

        Raises:
            TopologyError: A rank does not exist.
        """
        from_place, to_place = self.place(a), self.place(b)
        if a == b:
            return "self"
        if from_place.node == to_place.node:
            return "chip" if from_place.device == to_place.device else self.machine.wires.link
        if from_place.node // self.servers == to_place.node // self.servers:
            assert self.machine.ultraserver is not None
            return self.machine.ultraserver.link
        return self.machine.network.link if self.machine.network else "none"

    def link(self, kind: LinkKind) -> LinkSpec:
        """Return the published figures of a kind of wire, with their sources.

        Raises:
            TopologyError: if this machine has no such wire.
        """
        for spec in self.machine.links:
            if spec.kind == kind:
                return spec
        raise unknown_name_error(f"link kind on {self.machine.name}", kind, [spec.kind for spec in self.machine.links])

    def latency_s(self, kind: LinkKind) -> float:
        """Return the latency of one hop over a kind of wire."""
        return self.link(kind).latency_s.value

    def bandwidth_bytes_per_s(self, kind: LinkKind) -> float:
        """Return the bandwidth of one wire of a kind (one adapter, for the network) in one direction."""
        spec = self.link(kind)
        return spec.bandwidth_bytes_per_s.value * (self.lnc if spec.per_core else 1)

    @property
    def nics_per_node(self) -> int:
        """Network adapters of a node; 0 without a network."""
        return int(self.machine.network.nics.value) if self.machine.network else 0

    @property
    def nics_used_by_device(self) -> int:
        """Number of adapters that one device uses together; 1 if devices share adapters, or there is no network."""
        return max(1, self.nics_per_node // self.devices_per_node)

    def nic_of(self, rank: int) -> int:
        """Return the index, in its node, of the adapter that a rank's device uses; devices share adapters evenly.

        If a node has more adapters than devices, each device uses a bundle of several: then it is the index of the
        bundle.
        """
        bundles = min(self.nics_per_node, self.devices_per_node)
        return self.place(rank).device * bundles // self.devices_per_node

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in force for this edition and logical-core setting."""
        return tuple(rule for rule in self.machine.rules if rule.in_force(edition=self.edition, lnc=self.lnc))


@dataclass(frozen=True, slots=True)
class WireEnd:
    """An end of a wire."""

    # "core", "device", "switch" (of a node), "nic" (the adapters that a device uses, as one) or "fabric" (between
    # nodes).
    role: Literal["core", "device", "switch", "nic", "fabric"]
    node: int  # 0 for the fabric
    index: int  # local index of a core, number of a device or of a bundle of adapters; 0 for switch and fabric


FABRIC = WireEnd("fabric", 0, 0)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire; transfers over the same link share its bandwidth."""

    kind: LinkKind  # kind of wire
    src: WireEnd  # end at which bytes enter
    dst: WireEnd  # end at which bytes leave
    # time to cross the link, without the time of the bytes. A way through a switch or the fabric is two links, and the
    # first one has all the latency.
    latency_s: float
    bandwidth_bytes_per_s: float


def route(cluster: RankMap, a: int, b: int) -> tuple[Link, ...]:
    """Return the directed links from rank a to rank b; see `Cluster.route`."""
    kind, source, target = cluster.link_kind(a, b), cluster.place(a), cluster.place(b)
    if kind == "self":
        return ()
    if kind == "chip":
        ends = [WireEnd("core", source.node, rank % cluster.ranks_per_node) for rank in (a, b)]
        return _links_between(cluster, kind, ends)
    if source.node == target.node:
        return _links_between_devices(cluster, source.node, source.device, target.device)
    if source.node // cluster.servers == target.node // cluster.servers:
        inside = _links_between_devices(cluster, source.node, source.device, target.device)
        return inside + _links_between_servers(cluster, source.node, target.node, target.device)
    if cluster.machine.network is None:
        raise TopologyError(
            f"no wire joins node {source.node} and node {target.node}: "
            f"{cluster.machine.name} has no network for collectives; use one node, or another machine"
        )
    src, dst = (WireEnd("nic", place.node, cluster.nic_of(rank)) for rank, place in ((a, source), (b, target)))
    return _links_through(cluster, kind, src, FABRIC, dst)


def _links_between_devices(cluster: RankMap, node: int, src: int, dst: int) -> tuple[Link, ...]:
    """Return the links between devices of a node, to the switch and from it if there is one; () to itself."""
    ports = [WireEnd("device", node, device) for device in cluster.wiring.path(src, dst)]
    kind = cluster.machine.wires.link
    if cluster.wiring.switched and src != dst:
        return _links_through(cluster, kind, ports[0], WireEnd("switch", node, 0), ports[1])
    return _links_between(cluster, kind, ports)


def _links_between_servers(cluster: RankMap, src: int, dst: int, device: int) -> tuple[Link, ...]:
    """Return the links between device number `device` of two nodes of an UltraServer, along the ring of servers."""
    first = src - src % cluster.servers
    way = torus(cluster.servers).path(src - first, dst - first)
    assert cluster.machine.ultraserver is not None
    return _links_between(
        cluster, cluster.machine.ultraserver.link, [WireEnd("device", first + server, device) for server in way]
    )


def _links_between(cluster: RankMap, kind: LinkKind, ports: list[WireEnd]) -> tuple[Link, ...]:
    """Return the links from each of the ends to the next one; empty for a single end."""
    if len(ports) < 2:
        return ()
    latency_s, rate = cluster.latency_s(kind), cluster.bandwidth_bytes_per_s(kind)
    return tuple(Link(kind, near, far, latency_s, rate) for near, far in pairwise(ports))


def _links_through(cluster: RankMap, kind: LinkKind, src: WireEnd, middle: WireEnd, dst: WireEnd) -> tuple[Link, ...]:
    """Return the two links through a switch or the network; the first one has all the latency."""
    rate = cluster.bandwidth_bytes_per_s(kind) * (cluster.nics_used_by_device if middle == FABRIC else 1)
    return (Link(kind, src, middle, cluster.latency_s(kind), rate), Link(kind, middle, dst, 0.0, rate))
