"""Resources of a cluster, and the load that each round of an operation puts on them. Pure; no Trio.

A round is busy while its bytes are on the wires, and idle while it starts its next step and the last bytes arrive. That
matters only while other operations run: they use wires while this one is idle, or uses other wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    busy_s_per_byte: Floats  # (needs,) busy time of each resource, for each byte of the vector
    messages: Floats  # (needs,) number of messages that share the resource at a time
    idle_s: float  # time in which no resource is busy
    taken_s_per_byte: float  # time in which some resource is busy
    whole: bool  # whether it is one section, as busy and idle parts alternate with each repetition

    def sections(self, nbytes: float) -> list[tuple[float, Floats, Floats]]:
        """Return the sections of a round: seconds, busy seconds by resource, and messages that share it."""
        taken_s, busy_s = self.taken_s_per_byte * nbytes, self.busy_s_per_byte * nbytes
        total_s = taken_s + self.idle_s
        if self.whole or min(taken_s, self.idle_s) < _LEAST_SECTION_SHARE * total_s:
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
        # The wires that any round uses, in the order of their numbers.
        rounds = [(part, placed) for part in parts for placed in part.placed.placed_rounds]
        self._memories, self._ways = _Memories(parts, ranks, resources), _WaysOut(parts, ranks, resources)
        total_s = np.zeros(max((len(placed.load_s_per_byte) for _, placed in rounds), default=0))
        for part, placed in rounds:
            total_s[: len(placed.load_s_per_byte)] += _slot_bytes(part, placed) * placed.load_s_per_byte
        self._wires = np.flatnonzero(total_s)
        self.resources: NDArray[np.int64] = np.concatenate(
            [self._memories.numbers, self._ways.numbers, resources.wires(self._wires)]
        )
        loads = [self._round_load(part, placed) for part, placed in rounds]
        self._busy_s_per_byte, self._messages = np.zeros(len(self.resources)), np.zeros(len(self.resources))
        for load in loads:
            self._busy_s_per_byte += load.busy_s_per_byte
            self._messages += load.busy_s_per_byte * load.messages
        busy = self._busy_s_per_byte > 0
        self._messages[busy] /= self._busy_s_per_byte[busy]
        self._rounds = loads if len(rounds) <= _MOST_SECTION_ROUNDS else []

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

    def _round_load(self, part: PricedPhase, placed: PlacedRound) -> _RoundLoad:
        wires_s = np.zeros(int(self._wires.max(initial=-1)) + 1)
        load = placed.load_s_per_byte[: len(wires_s)]  # wires get their numbers at their first use
        wires_s[: len(load)] = _slot_bytes(part, placed) * load
        copied = np.maximum(placed.wire_s_per_byte, placed.moving_s_per_byte + placed.adding_s_per_byte)
        moved_s = float(np.maximum(copied, placed.reducing_s_per_byte).max(initial=0.0))
        taken_s = max(moved_s, float(placed.beside_s_per_byte.max(initial=0.0))) * _slot_bytes(part, placed)
        local_s = float(placed.local_s_per_byte.max(initial=0.0)) * _slot_bytes(part, placed)
        memory_messages, wire_messages = self._memories.messages(placed), _wire_messages(part, placed, len(wires_s))
        ways_s, way_messages = self._ways.busy_s(part, placed)
        return _RoundLoad(
            busy_s_per_byte=np.concatenate([self._memories.busy_s(part, placed), ways_s, wires_s[self._wires]]),
            messages=np.maximum(np.concatenate([memory_messages, way_messages, wire_messages[self._wires]]), 1.0),
            idle_s=float((placed.start_s + placed.latency_s).max(initial=0.0)) * placed.round.repeat,
            taken_s_per_byte=max(taken_s, float(ways_s.max(initial=0.0))) + local_s,
            whole=placed.round.repeat > 1,
        )


class _Memories:
    """Memories of the devices of ranks, where their bandwidth is known.

    Args:
        parts: The phases.
        resources: Resources of the cluster.
    """

    def __init__(self, parts: Sequence[PricedPhase], ranks: Ints, resources: Resources) -> None:
        self._rate = parts[0].placed.placement.memory_bytes_per_s if parts else None
        self.numbers, self._memory_index = np.unique(resources.memories(ranks), return_inverse=True)
        if self._rate is None:
            self.numbers = self.numbers[:0]

    def busy_s(self, part: PricedPhase, placed: PlacedRound) -> Floats:
        """Return the busy time of each memory in a round, for each byte of the vector."""
        if self._rate is None:
            return np.zeros(0)
        touched = _slot_bytes(part, placed) * placed.round.touched
        rate = self._rate * part.placed.parameters.memory_efficiency
        return np.bincount(self._memory_index, touched, len(self.numbers)) / rate

    def messages(self, placed: PlacedRound) -> Floats:
        """Return (memories,) the number of messages of a round that are read from or written to each memory."""
        if self._rate is None:
            return np.zeros(0)
        ends = np.concatenate([placed.round.src, placed.round.dst])
        counts = None if placed.round.count is None else np.tile(placed.round.count, 2)
        return np.bincount(self._memory_index[ends], counts, len(self.numbers)).astype(np.float64)


class _WaysOut:
    """Ways out of the blocks of a fabric's levels that an operation takes.

    Args:
        parts: The phases.
        ranks: (size,) World ranks.
        resources: Resources of the cluster.
    """

    def __init__(self, parts: Sequence[PricedPhase], ranks: Ints, resources: Resources) -> None:
        self._ranks, self._resources = ranks, resources
        crossed = [
            way[way >= 0]
            for part in parts
            for placed in part.placed.placed_rounds
            for way, _ in resources.ways_out(ranks[placed.round.src], ranks[placed.round.dst])
        ]
        self.numbers: Ints = np.unique(np.concatenate([np.zeros(0, np.int64), *crossed]))

    def busy_s(self, part: PricedPhase, placed: PlacedRound) -> tuple[Floats, Floats]:
        """Return the load of a round on each way out of a block.

        Returns:
            (ways,) busy seconds for each byte of the vector, and (ways,) number of messages.
        """
        busy_s, messages = np.zeros(len(self.numbers)), np.zeros(len(self.numbers))
        if not len(self.numbers):
            return busy_s, messages
        count = np.ones(len(placed.round.src)) if placed.round.count is None else placed.round.count
        for way, bytes_per_s in self._resources.ways_out(self._ranks[placed.round.src], self._ranks[placed.round.dst]):
            # Messages inside of a block take no way out.
            leaves = way >= 0
            index = np.searchsorted(self.numbers, way[leaves])
            sent = placed.round.sent[leaves] * _slot_bytes(part, placed)
            busy_s += np.bincount(index, sent, len(busy_s)) / bytes_per_s
            messages += np.bincount(index, count[leaves], len(messages))
        return busy_s, messages


def _wire_messages(part: PricedPhase, placed: PlacedRound, wires: int) -> Floats:
    way = part.placed.placement.routes(placed.round.src, placed.round.dst, placed.round.far)
    counts = None if placed.round.count is None else np.repeat(placed.round.count, np.diff(way.first))
    return np.bincount(way.wire, counts, wires)[:wires].astype(np.float64)


def _slot_bytes(part: PricedPhase, placed: PlacedRound) -> float:
    """Return the bytes of a slot for each byte of the vector, times the repetitions of the round."""
    return placed.round.repeat * part.share / part.placed.rounds.slots
