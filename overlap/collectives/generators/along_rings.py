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
"""Rings as sequences of devices, and devices as sequences of ranks."""

_Device: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingScatter:
    """Messages of a scatter along rings, one entry each."""

    steps: int  # number of steps
    step: Ints  # step of each message
    src: Ints  # rank that sends
    dst: Ints  # rank that receives
    block: Ints  # rank whose block it is


def ring_scatter(size: int, root: int, rings: Rings | None = None) -> RingScatter:
    """Send every block along one ring. Blocks with the longest way leave first, so that all arrive in the last steps.

    A device's blocks take turns on that half of the rings that brings them there soonest; on each of them, one rank of
    every device on the way hands on.

    Args:
        size: Ranks.
        root: Rank that has all blocks.
        rings: Sequences of devices, which are sequences of ranks; by default every rank is one device, on one ring
            in both directions.

    Raises:
        ScheduleError: If a ring does not visit all ranks, or two rings visit different devices.
    """
    paths = [_rotate_ring(root, ring) for ring in rings or _default_rings(size)]
    for path in paths:
        if sorted(rank for device in path for rank in device) != list(range(size)):
            raise ScheduleError(f"a ring must visit each of the {size} ranks once, got {path}")
        if sorted(path) != sorted(paths[0]):
            raise ScheduleError(f"rings must visit the same devices, got {paths[0]} and {path}")
    ways = [way for place, device in enumerate(paths[0]) for way in _block_routes(root, place, device, paths)]
    steps = max((len(way) - 1 for way in ways), default=0)
    rows = [
        (steps + 1 - len(way) + hop, src, dst, way[-1]) for way in ways for hop, (src, dst) in enumerate(pairwise(way))
    ]
    table = np.asarray(sorted(rows), np.int32).reshape(-1, 4)
    return RingScatter(steps=steps, step=table[:, 0], src=table[:, 1], dst=table[:, 2], block=table[:, 3])


def _default_rings(size: int) -> Rings:
    ring = [(rank,) for rank in range(size)]
    return [ring, ring[::-1]]


def _rotate_ring(root: int, ring: Sequence[Sequence[int]]) -> list[_Device]:
    home = next((place for place, device in enumerate(ring) if root in device), 0)
    return [tuple(device) for device in (*ring[home:], *ring[:home])]


def _block_routes(root: int, turn: int, device: _Device, paths: Sequence[list[_Device]]) -> list[list[int]]:
    """Return for each block of a device the ranks that it passes, from the root on.

    Args:
        root: Rank that has all blocks.
        turn: Number of the first block, which decides on its ring.
        device: The ranks of the device.
        paths: The devices along each ring, from the root's device on.
    """
    hops = [path.index(device) for path in paths]
    soonest = sorted(range(len(paths)), key=lambda ring: hops[ring])[: -(-len(paths) // 2)]
    ways = []
    for number, rank in enumerate(device, turn):
        ring = soonest[number % len(soonest)]
        between = [hop[ring % len(hop)] for hop in paths[ring][1 : hops[ring]]]
        if rank != root:
            ways.append([root, *between, rank])
    return ways


def scatter(size: int, *, root: int = 0, rings: Rings | None = None) -> Schedule:
    """Pass every block on along a ring.

    Cost: as many steps as there are devices to the farthest; n / rings bytes on each wire at the root.
    """
    out, table = ring_scatter(size, root, rings), TableWriter()
    first, last = out.src == root, out.dst == out.block
    table.move(0, root, root, (Buffer.IN, root), (Buffer.OUT, 0))
    table.move(
        out.step, out.src, out.dst,
        (np.where(first, np.uint8(Buffer.IN), np.uint8(Buffer.SCRATCH)), out.block),
        (np.where(last, np.uint8(Buffer.OUT), np.uint8(Buffer.SCRATCH)), np.where(last, 0, out.block)),
    )  # fmt: skip
    return table.build("scatter", "multi_ring", size, root=root, scratch=size)
