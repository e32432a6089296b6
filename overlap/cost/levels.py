"""Levels of the fabric between nodes: the bytes of a collective that cross each level, and their time there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from topology import Cluster

from ..collectives.placement import Floats, Ints
from .option import AlgorithmOption, BlockExits
from .phase import PricedPhase
from .placed import PlacedRound


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLevel:
    """One level of the switches between nodes. The level divides the nodes into blocks, such as racks."""

    name: str  # name of the level
    ranks: int  # ranks of a block
    out_bytes_per_s: float  # bandwidth out of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The bytes that leave the blocks of one level during an algorithm, for each byte of the vector."""

    level: str  # name of the level
    share: float  # bytes out of all blocks together
    busiest: float  # bytes out of the busiest block
    s_per_byte: float  # seconds that these bytes take to leave the busiest block


def find_crossings(cluster: Cluster, ranks: Sequence[int], parts: Sequence[PricedPhase]) -> tuple[Crossing, ...]:
    """Count the bytes that cross each level of a cluster's fabric.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.
        parts: The phases of an algorithm on that group.

    Returns:
        A crossing for each level, from the nodes upwards; none if the cluster's file has no levels.
    """
    crossed = []
    for name, block, bytes_per_s in _level_blocks(cluster, ranks):
        out = sum(
            (_count_leaving_bytes(block, part, placed) for part in parts for placed in part.placed.placed_rounds),
            np.zeros(_block_count(block)),
        )
        busiest = float(out.max(initial=0.0))
        crossed.append(Crossing(level=name, share=float(out.sum()), busiest=busiest, s_per_byte=busiest / bytes_per_s))
    return tuple(crossed)


def block_exits(option: AlgorithmOption, cluster: Cluster, ranks: Sequence[int]) -> BlockExits:
    """Return how long an option waits for the bandwidth out of blocks, the largest over all levels.

    Args:
        option: The option.
        cluster: The machine.
        ranks: World ranks in group order.
    """
    crossed = find_crossings(cluster, ranks, option.parts)
    return BlockExits(
        s_per_byte=max((crossing.s_per_byte for crossing in crossed), default=0.0),
        held_up_s_per_byte=_exit_delay_s_per_byte(cluster, ranks, option.parts),
    )


def _exit_delay_s_per_byte(cluster: Cluster, ranks: Sequence[int], parts: Sequence[PricedPhase]) -> float:
    """Return by how long the bandwidth out of blocks delays steps beyond their wires, for each byte of the vector."""
    levels, total_s = list(_level_blocks(cluster, ranks)), 0.0
    for part in parts:
        for placed in part.placed.placed_rounds:
            times = placed.round.repeat * part.share / part.placed.rounds.slots
            wires_s = times * float(placed.wire_s_per_byte.max(initial=0.0))
            ways_s = [
                float(_count_leaving_bytes(block, part, placed).max(initial=0.0)) / rate for _, block, rate in levels
            ]
            total_s += max(0.0, *(way_s - wires_s for way_s in ways_s))
    return total_s


def fabric_levels(cluster: Cluster) -> list[FabricLevel]:
    """Return the levels of a cluster's fabric, from the nodes upwards; [] if the machine's file has none."""
    fabric, network = cluster.machine.fabric, cluster.machine.network
    if fabric is None or network is None:
        return []
    of_a_node = cluster.nics_per_node * cluster.bandwidth_bytes_per_s(network.link)
    return [
        FabricLevel(
            name=level.name,
            ranks=level.nodes * cluster.ranks_per_node,
            out_bytes_per_s=level.out_bytes_per_s(of_a_node),
        )
        for level in fabric.levels
    ]


def _level_blocks(cluster: Cluster, ranks: Sequence[int]) -> Iterator[tuple[str, Ints, float]]:
    """Yield for each level: its name, (ranks,) the block of each rank, and the bytes per second out of a block."""
    for level in fabric_levels(cluster):
        yield level.name, np.asarray(ranks, np.int64) // level.ranks, level.out_bytes_per_s


def _block_count(block: Ints) -> int:
    return int(block.max(initial=0)) + 1


def _count_leaving_bytes(block: Ints, part: PricedPhase, placed: PlacedRound) -> Floats:
    """Return (blocks,) the bytes that leave each block in all repetitions of a round, for each byte of the vector."""
    src, dst = placed.round.src, placed.round.dst
    across = block[src] != block[dst]
    sent = placed.round.sent[across] * (placed.round.repeat * part.share / part.placed.rounds.slots)
    out: Floats = np.bincount(block[src[across]], sent, _block_count(block)).astype(np.float64)
    return out
