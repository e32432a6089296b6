"""What a world stands on: the placed cluster, the wires, and the other processes if there are any."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transports import NeuronLink, Transport

from ..errors import UsageError

if TYPE_CHECKING:
    import topology

    from ..config import RunConfig
    from ..settings import Wires
    from .connecting import Joined
    from .identity import RendezvousConfig
    from .place import Place

DEFAULT_RANKS = 2  # on the local machine: the fewest that can show an overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSetup:
    """What a world stands on."""

    size: int  # Ranks in the world
    cluster: topology.Cluster  # Where they are placed
    transport: Transport  # Reaches them all; open
    joined: Joined | None = None  # The other processes, if there are any


@asynccontextmanager
async def alone(config: RunConfig) -> AsyncIterator[WorldSetup]:
    """Set up a world in this process."""
    ranks, wires = config.ranks, config.wires
    if ranks is None and isinstance(wires, Transport):
        ranks = len(wires.ranks)
    placed = cluster_of(config.cluster, ranks, told=config.told("ranks", "cluster"))
    size = ranks or placed.world_size
    transport = around(NeuronLink(size), wires)
    if transport.ranks != tuple(range(size)):
        raise UsageError(f"transport: joins ranks {list(transport.ranks)}, but the world has ranks 0 to {size - 1}")
    async with transport.open():
        yield WorldSetup(size=size, cluster=placed, transport=transport)


def around(wires: Transport, wrap: Wires | None) -> Transport:
    """Return the wires with whatever the caller puts around them.

    Raises:
        UsageError: If that is no transport.
    """
    if wrap is None:
        return wires
    wrapped = wrap if isinstance(wrap, Transport) else wrap(wires)
    if not isinstance(wrapped, Transport):
        raise UsageError(
            f"transport: expected a transport of ranks {list(wires.ranks)}, or a function that makes one "
            f"of another, got {wrapped!r}"
        )
    return wrapped


@asynccontextmanager
async def among(
    place: Place, config: RunConfig, *, meeting: RendezvousConfig | None = None
) -> AsyncIterator[WorldSetup]:
    """Set up a world of several processes, of which this is one.

    Args:
        place: Where it stands.
        config: What the world is asked to be.
        meeting: Where and how the processes meet; by default as their launcher says.
    """
    from .connecting import joined, met

    placed, transport = _spread(place, config.cluster or "local", told=config.told("cluster")), config.wires
    own = transport if isinstance(transport, Transport) else None
    if own is not None and (own.ranks, len(own.peers)) != (tuple(place.ranks), place.world_size):
        raise UsageError(
            f"transport: serves ranks {list(own.ranks)} and reaches {len(own.peers)}; this is process "
            f"{place.process} of {place.processes}, with ranks {list(place.ranks)} of {place.world_size}"
        )

    def wires(default: Transport) -> Transport:
        return own or around(default, transport)

    opened = met(place, meeting, config, wires=wires) if meeting else joined(place, placed.name, config, wires=wires)
    async with opened as found:
        yield WorldSetup(size=place.world_size, cluster=placed, transport=found.transport, joined=found)


def cluster_of(cluster: str | topology.Cluster | None, ranks: int | None, *, told: str = "") -> topology.Cluster:
    """Return the cluster of that name; the plain machine has as many ranks as are asked for.

    Args:
        cluster: The cluster, its name, or None for the plain machine.
        ranks: How many ranks it is to have at least.
        told: Who has said so, for the error.

    Raises:
        UsageError: If there is no such cluster, or the ranks do not fit.
    """
    import topology  # here, because a program that only imports us should not pay for the machines

    if cluster is None or cluster == "local":
        return topology.cluster("local", ranks=ranks or DEFAULT_RANKS)
    try:
        placed = topology.cluster(cluster) if isinstance(cluster, str) else cluster
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{told}") from error
    if ranks is not None and ranks > placed.world_size:
        raise UsageError(f"ranks: {ranks} do not fit on {placed.name}, which has {placed.world_size}{told}")
    return placed


def _spread(place: Place, cluster: str | topology.Cluster, *, told: str) -> topology.Cluster:
    """Return the cluster, with as many nodes as the launcher says."""
    import topology

    if not isinstance(cluster, str):
        if cluster.world_size < place.world_size:
            raise UsageError(
                f"{place.source} started {place.world_size} ranks; {cluster.name} has {cluster.world_size}"
            )
        return cluster
    try:
        return topology.cluster(cluster, nodes=place.nodes, ranks=place.world_size)
    except topology.TopologyError as error:
        raise UsageError(f"cluster: {error}{told}") from error
