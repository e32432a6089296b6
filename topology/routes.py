"""Wires, and the way from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from .errors import TopologyError
from .grid import torus
from .machine import LinkKind
from .rankmap import RankMap


@dataclass(frozen=True, slots=True)
class Port:
    """An end of a wire."""

    # "core", "device", "switch" (of a node), "nic" (the adapters that a device uses, as one) or "fabric" (between
    # nodes).
    role: Literal["core", "device", "switch", "nic", "fabric"]
    node: int  # 0 for the fabric
    index: int  # local index of a core, number of a device or of a bundle of adapters; 0 for switch and fabric


FABRIC = Port("fabric", 0, 0)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire; transfers that share it share its bandwidth."""

    kind: LinkKind  # kind of wire
    src: Port  # where bytes enter
    dst: Port  # where they leave
    # time to cross it, without the bytes. A way through a switch or the fabric has it on its first half only.
    latency_s: float
    bandwidth_bytes_per_s: float  # what it carries


def route(cluster: RankMap, a: int, b: int) -> tuple[Link, ...]:
    """List the directed links from rank a to rank b; see `Cluster.route`."""
    kind, here, there = cluster.link_kind(a, b), cluster.place(a), cluster.place(b)
    if kind == "self":
        return ()
    if kind == "chip":
        ends = [Port("core", here.node, rank % cluster.ranks_per_node) for rank in (a, b)]
        return _wired(cluster, kind, ends)
    if here.node == there.node:
        return _between_devices(cluster, here.node, here.device, there.device)
    if here.node // cluster.servers == there.node // cluster.servers:
        inside = _between_devices(cluster, here.node, here.device, there.device)
        return inside + _between_servers(cluster, here.node, there.node, there.device)
    if cluster.machine.network is None:
        raise TopologyError(
            f"no wire joins node {here.node} and node {there.node}: "
            f"{cluster.machine.name} has no network for collectives"
        )
    src, dst = (Port("nic", place.node, cluster.nic_of(rank)) for rank, place in ((a, here), (b, there)))
    return _through(cluster, kind, src, FABRIC, dst)


def _between_devices(cluster: RankMap, node: int, src: int, dst: int) -> tuple[Link, ...]:
    ports = [Port("device", node, device) for device in cluster.wiring.path(src, dst)]
    kind = cluster.machine.wires.link
    if cluster.wiring.switched and src != dst:
        return _through(cluster, kind, ports[0], Port("switch", node, 0), ports[1])
    return _wired(cluster, kind, ports)


def _between_servers(cluster: RankMap, src: int, dst: int, device: int) -> tuple[Link, ...]:
    first = src - src % cluster.servers
    way = torus(cluster.servers).path(src - first, dst - first)
    assert cluster.machine.ultraserver is not None
    return _wired(cluster, cluster.machine.ultraserver.link, [Port("device", first + server, device) for server in way])


def _wired(cluster: RankMap, kind: LinkKind, ports: list[Port]) -> tuple[Link, ...]:
    if len(ports) < 2:
        return ()
    latency_s, rate = cluster.latency_s(kind), cluster.bandwidth_bytes_per_s(kind)
    return tuple(Link(kind, near, far, latency_s, rate) for near, far in pairwise(ports))


def _through(cluster: RankMap, kind: LinkKind, src: Port, middle: Port, dst: Port) -> tuple[Link, ...]:
    rate = cluster.bandwidth_bytes_per_s(kind) * (cluster.nics_per_bundle if middle == FABRIC else 1)
    return (Link(kind, src, middle, cluster.latency_s(kind), rate), Link(kind, middle, dst, 0.0, rate))
