"""Resources of a cluster, and the load that each round of an operation puts on them. Pure; no Trio.

A round is busy while its bytes are on the wires. It is idle while its step starts, and during the latency of the last
bytes. The difference matters when other operations run at the same time, as they can use idle wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from topology import Cluster

from ..collectives.placement import Floats, Ints, wire_numbering
from ..cost.levels import FabricLevel, fabric_levels
from ..cost.phase import PricedPhase
from ..cost.placed import PlacedRound


class Resources:
    """Numbers for the resources that flows share on a cluster.

    The order of the numbers is: the memory of each device, the collective processors (CC-cores) of each rank, the ways
    out of blocks, and wires. A way out is the common connection of a block of ranks, on one level of the fabric, to
    other blocks. Wires are last, because they get their numbers at their first use.

    Args:
        cluster: The machine.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster: Cluster = cluster
        self._wire_numbering = wire_numbering(cluster)
        places = [cluster.place(rank) for rank in range(cluster.world_size)]
        # A machine without devices has one memory for each node.
        has_devices = cluster.machine.devices is not None
        devices = [place.node * cluster.devices_per_node + (place.device if has_devices else 0) for place in places]
        self._device = np.array(devices, np.int64)
        self._first_core = cluster.devices_per_node * cluster.nodes
        self._first_way = self._first_core + cluster.world_size
        self._levels: list[tuple[int, FabricLevel]] = []  # number of the first block's way out, and the level
        self._first_wire = self._first_way
        for level in fabric_levels(cluster):
            self._levels.append((self._first_wire, level))
            # One way out for each block; the last block may be smaller.
            self._first_wire += -(-cluster.world_size // level.ranks)

    @property
    def ranks_per_unit(self) -> int:
        """Number of ranks of the smallest unit that holds whole nodes, UltraServers and blocks of every fabric level.

        All units of a cluster are alike, so that resources can be shifted from one to another. It is the world size if
        such a unit does not divide the cluster. `cluster.ranks_per_unit` leaves the levels of the fabric aside.
        """
        cluster = self.cluster
        # The least common multiple, so that no block of a level extends over two units.
        unit = lcm(cluster.ranks_per_unit, *(level.ranks for _, level in self._levels))
        return cluster.world_size if cluster.world_size % unit else unit

    @property
    def count(self) -> int:
        """Number of all resources; of wires, only those that have been used so far."""
        return self._first_wire + len(self._wire_numbering.wires().kind)

    def memory_numbers(self, ranks: Ints) -> Ints:
        """Return, for each rank, the number of the memory of its device."""
        return self._device[ranks]

    def cc_core_numbers(self, ranks: Ints) -> Ints:
        """Return, for each rank, the number of its collective processors, which are one resource."""
        return self._first_core + ranks

    def ways_out(self, src: Ints, dst: Ints) -> list[tuple[Ints, float]]:
        """Return the ways out of blocks that messages use, for each level of the fabric.

        Args:
            src: (messages,) World ranks of the senders.
            dst: (messages,) World ranks of the receivers.

        Returns:
            For each level a pair: (messages,) the number of the way out of the sender's block, or -1 if the message
            stays inside the block; and the bytes per second of a way out.
        """
        ways = []
        for first, level in self._levels:
            block = src // level.ranks
            way = np.where(block != dst // level.ranks, first + block, -1)
            ways.append((way, level.out_bytes_per_s))
        return ways

    def wire_numbers(self, wires: Ints) -> Ints:
        """Return the resource numbers of wires, given their numbers in a placement."""
        return self._first_wire + wires

    def shift_resources_to_units(self, resources: Ints, units: Ints) -> Ints:
        """Return (units, resources): for each unit, the corresponding resources of that unit.

        Example: with 32 ranks in a unit, the processors of rank 3, shifted by 2 units, are those of rank 67.

        Args:
            resources: (resources,) Numbers of resources.
            units: (units,) By how many units to shift; see `ranks_per_unit`.
        """
        is_wire, nodes = resources >= self._first_wire, self.ranks_per_unit // self.cluster.ranks_per_node
        step = np.full(len(resources), self.ranks_per_unit)
        step[resources < self._first_core] = nodes * self.cluster.devices_per_node
        for first, level in self._levels:
            # Higher levels have higher numbers: for each resource, its own level is assigned last.
            step[resources >= first] = self.ranks_per_unit // level.ranks
        # Numbers of processors grow by the ranks of a unit, those of memories by its devices, of ways out by its
        # blocks. Wires follow below.
        shifted: Ints = resources + np.multiply.outer(units, step)
        servers = units * (nodes // self.cluster.servers or 1)
        wires = resources[is_wire] - self._first_wire
        shifted[:, is_wire] = self.wire_numbers(self._wire_numbering.shift_wires_to_units(wires, servers))
        return shifted


# With more rounds than this, an operation is one section with an even load: each round is short against the whole.
_MOST_SECTION_ROUNDS = 8
# If the busy or the idle part of a round is a smaller share of it, the round is one section.
_LEAST_SECTION_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RoundLoad:
    """Load of one round of an operation, including the round's repetitions."""

    busy_s_per_byte: Floats  # (resources,) seconds in which each resource is busy, per byte of the whole vector
    messages: Floats  # (resources,) number of messages that use the resource at the same time, at least 1
    idle_s: float  # seconds in which no resource is busy
    taken_s_per_byte: float  # seconds in which some resource is busy, per byte of the whole vector
    repeats: bool  # whether the round is repeated: busy and idle parts alternate, so it is one section

    def sections(self, nbytes: float) -> list[tuple[float, Floats, Floats]]:
        """Return the sections of the round: (seconds, busy seconds by resource, messages by resource) of each.

        Args:
            nbytes: Bytes of the whole vector.
        """
        taken_s, busy_s = self.taken_s_per_byte * nbytes, self.busy_s_per_byte * nbytes
        total_s = taken_s + self.idle_s
        if self.repeats or min(taken_s, self.idle_s) < _LEAST_SECTION_SHARE * total_s:
            return [(total_s, busy_s, self.messages)]
        return [(taken_s, busy_s, self.messages), (self.idle_s, np.zeros(len(busy_s)), self.messages)]


class Loads:
    """The load that all phases of an operation put on resources.

    Args:
        parts: The phases, with the bandwidth of slow wires.
        ranks: (size,) World ranks.
        resources: Resources of the cluster.

    Attributes:
        resources: (needs,) Numbers of the resources that the operation uses.
    """

    def __init__(self, parts: Sequence[PricedPhase], ranks: Ints, resources: Resources) -> None:
        rounds = [(part, placed) for part in parts for placed in part.placed.placed_rounds]
        has_sections = len(rounds) <= _MOST_SECTION_ROUNDS
        busy_s, messages, loads = np.zeros(resources.count), np.zeros(resources.count), []
        for part, placed in rounds:
            load = _make_round_load(part, placed, ranks, resources)
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
        """Return the lengths of sections (sections,), and busy seconds and numbers of messages (sections, needs).

        Lengths are relative to each other. Messages are those that use a resource at the same time.

        Args:
            nbytes: Bytes of the whole vector.
            evenly: Whether there is one section, because phases run in parallel.
        """
        if evenly or not self._rounds:
            return np.ones(1), self._busy_s_per_byte[None, :] * nbytes, self._messages[None, :]
        sections = [section for load in self._rounds for section in load.sections(nbytes) if section[0]]
        if not sections:
            idle = np.zeros((1, len(self.resources)))
            return np.ones(1), idle, idle
        lengths_s, busy_s, messages = zip(*sections, strict=True)
        return np.array(lengths_s), np.array(busy_s), np.array(messages)


def _make_round_load(part: PricedPhase, placed: PlacedRound, ranks: Ints, resources: Resources) -> _RoundLoad:
    """Return the load of a round of phase `part` on all resources, by their numbers; `ranks` are world ranks."""
    round_, placement = placed.round, part.placed.placement
    # Bytes of a slot per byte of the whole vector, times the repetitions of the round.
    slot_bytes = round_.repeat * part.share / part.placed.rounds.slots
    counts = np.ones(len(round_.src)) if round_.count is None else round_.count  # number of equal messages of each row
    busy_s, messages = np.zeros(resources.count), np.zeros(resources.count)
    if placement.memory_bytes_per_s is not None:
        memory = resources.memory_numbers(ranks)
        touched = np.bincount(memory, slot_bytes * round_.memory_accesses)
        busy_s[: len(touched)] = touched / (placement.memory_bytes_per_s * part.placed.parameters.memory_efficiency)
        ends = memory[np.concatenate([round_.src, round_.dst])]
        messages[: len(touched)] = np.bincount(ends, np.tile(counts, 2), len(touched))
    way_s = 0.0  # busy time of the busiest way out
    for way, bytes_per_s in resources.ways_out(ranks[round_.src], ranks[round_.dst]):
        leaves = way >= 0  # messages that leave their block
        sent_s = np.bincount(way[leaves], round_.sent[leaves] * slot_bytes) / bytes_per_s
        busy_s[: len(sent_s)] += sent_s
        messages[: len(sent_s)] += np.bincount(way[leaves], counts[leaves])
        way_s = max(way_s, float(sent_s.max(initial=0.0)))
    wires = resources.wire_numbers(np.arange(len(placed.load_s_per_byte)))  # wires get their numbers at their first use
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
