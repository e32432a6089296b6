"""Gathers and scatters with blocks that go around rings, so that all wires at the root carry the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ...errors import ScheduleError
from ..pattern import Ints
from ..schedule import Buffer, Schedule
from ..tablewriter import TableWriter

Rings: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""Rings; each is a sequence of devices, and each device a sequence of ranks."""

_Device: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingScatter:
    """Messages of a scatter along rings: columns with one entry for each message of one block."""

    steps: int  # number of steps
    step: Ints  # step of each message
    src: Ints  # rank that sends
    dst: Ints  # rank that receives
    block: Ints  # rank that the block is for


def ring_scatter(size: int, root: int, rings: Rings | None = None) -> RingScatter:
    """Return the messages of a scatter along rings. Blocks with a long way leave first; all arrive in the last step.

    Of all rings, the half with the shortest way to a device carries the blocks of this device, in turn. On the way, one
    rank of every device passes the block on.

    Args:
        size: Ranks.
        root: Rank that has all blocks.
        rings: Sequences of devices, which are sequences of ranks; by default every rank is one device, on one ring
            in both directions.

    Raises:
        ScheduleError: If a ring does not visit all ranks, or two rings visit different devices.
    """
    ring = [(rank,) for rank in range(size)]
    first_path, *_ = paths = [_rotate_ring(root, each) for each in rings or (ring, ring[::-1])]
    for path in paths:
        if sorted(rank for device in path for rank in device) != list(range(size)):
            raise ScheduleError(f"rings: each must visit each of the {size} ranks once, got {path}")
        if sorted(path) != sorted(first_path):
            raise ScheduleError(f"rings: all must visit the same devices, got {first_path} and {path}")
    # By block: the ranks on its way, from the root to the block's rank.
    ways = [way for place, device in enumerate(first_path) for way in _block_routes(root, place, device, paths)]
    steps = max((len(way) - 1 for way in ways), default=0)
    rows = [
        (steps + 1 - len(way) + hop, src, dst, way[-1]) for way in ways for hop, (src, dst) in enumerate(pairwise(way))
    ]
    step, src, dst, block = np.asarray(sorted(rows), np.int32).reshape(-1, 4).T
    return RingScatter(steps=steps, step=step, src=src, dst=dst, block=block)


def _rotate_ring(root: int, ring: Sequence[Sequence[int]]) -> list[_Device]:
    """Return the devices of a ring, from the root's device on."""
    home = next((place for place, device in enumerate(ring) if root in device), 0)
    return [tuple(device) for device in (*ring[home:], *ring[:home])]


def _block_routes(root: int, turn: int, device: _Device, paths: Sequence[list[_Device]]) -> list[list[int]]:
    """Return for each rank of a device but the root the way of its block: root, ranks that pass it on, the rank.

    Blocks of the device are counted from `turn`; the number chooses the ring. `paths` begin at the root's device.
    """
    hops = [path.index(device) for path in paths]
    # Half of the rings, rounded up: those with the fewest devices on the way.
    soonest = sorted(range(len(paths)), key=lambda ring: hops[ring])[: -(-len(paths) // 2)]
    ways = []
    for number, rank in enumerate(device, turn):
        ring = soonest[number % len(soonest)]
        between = [hop[ring % len(hop)] for hop in paths[ring][1 : hops[ring]]]
        if rank != root:
            ways.append([root, *between, rank])
    return ways


def scatter(size: int, *, root: int = 0, rings: Rings | None = None) -> Schedule:
    """Return the scatter that passes every block along a ring, from device to device.

    Cost: as many steps as the longest way has hops; n / rings bytes on each wire at the root.

    Args:
        size: Ranks.
        root: Rank that has all blocks.
        rings: See `ring_scatter`.
    """
    out, table = ring_scatter(size, root, rings), TableWriter()
    first, last = out.src == root, out.dst == out.block
    table.add_moves(0, root, root, (Buffer.IN, root), (Buffer.OUT, 0))
    table.add_moves(
        out.step, out.src, out.dst,
        (np.where(first, np.uint8(Buffer.IN), np.uint8(Buffer.SCRATCH)), out.block),
        (np.where(last, np.uint8(Buffer.OUT), np.uint8(Buffer.SCRATCH)), np.where(last, 0, out.block)),
    )  # fmt: skip
    return table.build("scatter", "multi_ring", size, root=root, scratch=size)
