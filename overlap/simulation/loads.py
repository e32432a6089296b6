"""Resources of a cluster, and the load that each round of an operation puts on them. Pure; no Trio.

A round is busy while its bytes are on the wires, and idle while it starts its next step and the last bytes arrive. That
matters only while other operations run: they use wires while this one is idle, or uses other wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from topology import Cluster

from ..collectives.placement import Floats, Ints, numbering
from ..cost.levels import FabricLevel, fabric_levels
from ..cost.phase import PricedPhase
from ..cost.placed import PlacedRound


class Resources:
    """Numbers of the resources that flows share on a cluster.

    These are memories of devices, collective processors of ranks, the ways out of the blocks of a fabric's levels, and
    wires.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster: Cluster = cluster
        self._numbering = numbering(cluster)
        places = [cluster.place(rank) for rank in range(cluster.world_size)]
        # Ranks of the plain machine have a core each, and one memory for all of a node.
        has_devices = cluster.machine.devices is not None
        devices = [place.node * cluster.devices_per_node + (place.device if has_devices else 0) for place in places]
        self._device = np.array(devices, np.int64)
        self._first_core = cluster.devices_per_node * cluster.nodes
        self._first_way = self._first_core + cluster.world_size
        self._levels: list[tuple[int, FabricLevel]] = []  # with the number of its first block's way out
        self._first_wire = self._first_way
        for level in fabric_levels(cluster):
            self._levels.append((self._first_wire, level))
            self._first_wire += -(-cluster.world_size // level.ranks)

    @property
    def ranks_per_unit(self) -> int:
        """Ranks of a unit: a node, an UltraServer, or a block of the highest level of a fabric. All units are alike.

        All ranks are one unit where the units do not divide the cluster.
        """
        cluster = self.cluster
        unit = lcm(cluster.ranks_per_unit, *(level.ranks for _, level in self._levels))
        return cluster.world_size if cluster.world_size % unit else unit

    @property
    def count(self) -> int:
        """Number of all resources, with the wires that have a number so far."""
        return self._first_wire + len(self._numbering.wires().kind)

    def memories(self, ranks: Ints) -> Ints:
        """Return the number of the memory of each rank's device."""
        return self._device[ranks]

    def cc_cores(self, ranks: Ints) -> Ints:
        """Return the numbers of the ranks' collective processors, in the order of `ranks`."""
        return self._first_core + ranks

    def ways_out(self, src: Ints, dst: Ints) -> list[tuple[Ints, float]]:
        """Return the ways out of blocks that messages take, level by level of the fabric.

        Args:
            src: (messages,) World ranks of the senders.
            dst: (messages,) World ranks of the receivers.

        Returns:
            For each level (messages,) the way out of the sender's block, -1 where a message stays inside, and its bytes
            per second.
        """
        ways = []
        for first, level in self._levels:
            block = src // level.ranks
            way = np.where(block != dst // level.ranks, first + block, -1)
            ways.append((way, level.out_bytes_per_s))
        return ways

    def wires(self, wires: Ints) -> Ints:
        """Return the numbers of wires as resources, from their numbers on a placement."""
        return self._first_wire + wires

    def shift_units(self, resources: Ints, units: Ints) -> Ints:
        """Return (units, resources) the same resources of other units of the cluster; see `ranks_per_unit`."""
        is_wire, nodes = resources >= self._first_wire, self.ranks_per_unit // self.cluster.ranks_per_node
        step = np.full(len(resources), self.ranks_per_unit)
        step[resources < self._first_core] = nodes * self.cluster.devices_per_node
        for first, level in self._levels:
            step[resources >= first] = self.ranks_per_unit // level.ranks
        # Ranks and their processors move by the ranks of a unit, memories by its devices, ways out by its blocks.
        shifted: Ints = resources + np.multiply.outer(units, step)
        servers = units * (nodes // self.cluster.servers or 1)
        shifted[:, is_wire] = self.wires(self._numbering.shift_to_units(resources[is_wire] - self._first_wire, servers))
        return shifted


# Operations of more rounds are taken to load their resources evenly: their rounds are short against the whole.
_MOST_SECTION_ROUNDS = 8
# Share of a round below which its busy or its idle part is no section of its own.
_LEAST_SECTION_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RoundLoad:
    """Load of one round of an operation, with its repetitions."""

    busy_s_per_byte: Floats  # (resources,) busy time of each resource, for each byte of the vector
    messages: Floats  # (resources,) number of messages that share the resource at a time, at least 1
    idle_s: float  # time in which no resource is busy
    taken_s_per_byte: float  # time in which some resource is busy
    repeats: bool  # whether its busy and idle parts alternate, so that it is one section

    def sections(self, nbytes: float) -> list[tuple[float, Floats, Floats]]:
        """Return the sections of a round: seconds, busy seconds by resource, and messages that share it."""
        taken_s, busy_s = self.taken_s_per_byte * nbytes, self.busy_s_per_byte * nbytes
        total_s = taken_s + self.idle_s
        if self.repeats or min(taken_s, self.idle_s) < _LEAST_SECTION_SHARE * total_s:
            return [(total_s, busy_s, self.messages)]
        return [(taken_s, busy_s, self.messages), (self.idle_s, np.zeros(len(busy_s)), self.messages)]


class Loads:
    """Loads of the phases of an operation.

    Args:
        parts: The phases, on wires as they are.
        ranks: (size,) World ranks.
        resources: Resources of the cluster.

    Attributes:
        resources: (needs,) The resources that it uses.
    """

    def __init__(self, parts: Sequence[PricedPhase], ranks: Ints, resources: Resources) -> None:
        rounds = [(part, placed) for part in parts for placed in part.placed.placed_rounds]
        has_sections = len(rounds) <= _MOST_SECTION_ROUNDS
        busy_s, messages, loads = np.zeros(resources.count), np.zeros(resources.count), []
        for part, placed in rounds:
            load = _round_load(part, placed, ranks, resources)
            busy_s += load.busy_s_per_byte
            messages += load.busy_s_per_byte * load.messages
            if has_sections:
                loads.append(load)
        is_used = busy_s > 0
        messages[is_used] /= busy_s[is_used]  # means, weighted by busy time
        self.resources: NDArray[np.int64] = np.flatnonzero(is_used)
        self._busy_s_per_byte, self._messages = busy_s[is_used], messages[is_used]
        self._rounds = [
            replace(load, busy_s_per_byte=load.busy_s_per_byte[is_used], messages=load.messages[is_used])
            for load in loads
        ]

    def sections(self, nbytes: float, *, evenly: bool) -> tuple[Floats, Floats, Floats]:
        """Return relative times of sections, and (sections, needs) busy seconds and messages at a time.

        Args:
            nbytes: Bytes of the whole vector.
            evenly: Whether phases run in parallel, so that there is one section.
        """
        if evenly or not self._rounds:
            return np.ones(1), self._busy_s_per_byte[None, :] * nbytes, self._messages[None, :]
        sections = [section for load in self._rounds for section in load.sections(nbytes) if section[0]]
        if not sections:
            idle = np.zeros((1, len(self.resources)))
            return np.ones(1), idle, idle
        lengths_s, busy_s, messages = zip(*sections, strict=True)
        return np.array(lengths_s), np.array(busy_s), np.array(messages)


def _round_load(part: PricedPhase, placed: PlacedRound, ranks: Ints, resources: Resources) -> _RoundLoad:
    """Return the load of a round on all resources of the cluster, by their numbers.

    Args:
        part: Phase of the round.
        placed: The round.
        ranks: (size,) World ranks of the group.
        resources: Resources of the cluster.
    """
    round_, placement = placed.round, part.placed.placement
    # Bytes of a slot for each byte of the vector, times the repetitions of the round.
    slot_bytes = round_.repeat * part.share / part.placed.rounds.slots
    counts = np.ones(len(round_.src)) if round_.count is None else round_.count  # of equal messages
    busy_s, messages = np.zeros(resources.count), np.zeros(resources.count)
    if placement.memory_bytes_per_s is not None:
        memory = resources.memories(ranks)
        touched = np.bincount(memory, slot_bytes * round_.touched)
        busy_s[: len(touched)] = touched / (placement.memory_bytes_per_s * part.placed.parameters.memory_efficiency)
        ends = memory[np.concatenate([round_.src, round_.dst])]
        messages[: len(touched)] = np.bincount(ends, np.tile(counts, 2), len(touched))
    way_s = 0.0  # of the busiest way out
    for way, bytes_per_s in resources.ways_out(ranks[round_.src], ranks[round_.dst]):
        leaves = way >= 0  # messages inside of a block take no way out
        sent_s = np.bincount(way[leaves], round_.sent[leaves] * slot_bytes) / bytes_per_s
        busy_s[: len(sent_s)] += sent_s
        messages[: len(sent_s)] += np.bincount(way[leaves], counts[leaves])
        way_s = max(way_s, float(sent_s.max(initial=0.0)))
    wires = resources.wires(np.arange(len(placed.load_s_per_byte)))  # wires get their numbers at their first use
    busy_s[wires] = slot_bytes * placed.load_s_per_byte
    routes = placement.routes(round_.src, round_.dst, round_.far)
    messages[wires] = np.bincount(routes.wire, np.repeat(counts, np.diff(routes.first)), len(wires))
    copied = np.maximum(placed.wire_s_per_byte, placed.moving_s_per_byte + placed.adding_s_per_byte)
    moved_s = float(np.maximum(copied, placed.reducing_s_per_byte).max(initial=0.0))
    taken_s = max(moved_s, float(placed.unawaited_s_per_byte.max(initial=0.0))) * slot_bytes
    return _RoundLoad(
        busy_s_per_byte=busy_s,
        messages=np.maximum(messages, 1.0),
        idle_s=float((placed.start_s + placed.latency_s).max(initial=0.0)) * round_.repeat,
        taken_s_per_byte=max(taken_s, way_s) + float(placed.local_s_per_byte.max(initial=0.0)) * slot_bytes,
        repeats=round_.repeat > 1,
    )
