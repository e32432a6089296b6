"""Patterns fitted to a machine, made from the plain ones: several side by side, or with other numbers for the ranks.

They take geometry as numbers: which ranks share a device, in which order a ring visits devices. No topology here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..errors import ScheduleError
from . import pattern as read
from .generators.doubling import halving_doubling
from .generators.hierarchical import compose, stages, with_inner
from .generators.kangaring import kangaring
from .generators.mesh import mesh
from .pattern import Ints, Pattern, owners, spread
from .pipeline import pipelined
from .schedule import Schedule

__all__ = ["READINGS", "device_cube", "kangarings", "relabelled", "side_by_side", "two_levels"]

READINGS: Mapping[str, Callable[[str, Pattern], Schedule]] = {
    "all_reduce": read.all_reduce,
    "reduce_scatter": read.reduce_scatter,
    "all_gather": read.all_gather,
}
"""The collectives that one pattern gives, and that compose from two levels."""


def side_by_side(patterns: Sequence[Pattern]) -> Pattern:
    """Cut every chunk in as many parts as there are patterns; each part follows its own, on channels of its own.

    Cost: the steps of the longest; as many bytes as one of them, spread over the wires of all.

    Args:
        patterns: Over the same ranks, each rank owning equally many chunks.
    """
    if any(pattern.mate for pattern in patterns):
        return replace(_together(patterns), mate=_together([pattern.backward for pattern in patterns]))
    return _together(patterns)


def _together(patterns: Sequence[Pattern]) -> Pattern:
    size, columns, chunks, lanes, groups = patterns[0].size, [], 0, 0, 0
    for p in patterns:
        group = np.where(p.group >= 0, p.group + groups, -1)
        columns.append([p.step, p.src, p.dst, p.chunk + chunks, p.channel + lanes, group])
        chunks += len(p.owner)
        lanes += int(p.channel.max(initial=0)) + 1
        groups += int(p.group.max(initial=-1)) + 1
    step, src, dst, chunk, channel, group = (np.concatenate(column) for column in zip(*columns, strict=True))
    whole = spread(size, owners(size, chunks // size), step, src, dst, chunk, channel=channel, group=group)
    return replace(whole, steps=max(pattern.steps for pattern in patterns))


def relabelled(pattern: Pattern, ranks: Sequence[int]) -> Pattern:
    """Let `ranks[i]` play the part of rank i.

    Raises:
        ScheduleError: If `ranks` is not a permutation.
    """
    if sorted(ranks) != list(range(pattern.size)):
        raise ScheduleError(f"ranks: expected each of 0..{pattern.size - 1} once, got {list(ranks)}")
    plays = np.asarray(ranks, np.int32)
    if (plays == np.arange(pattern.size)).all():
        return pattern
    return replace(_renamed(pattern, plays), mate=_renamed(pattern.mate, plays) if pattern.mate else None)


def _renamed(p: Pattern, plays: Ints) -> Pattern:
    part, owner = np.divmod(np.arange(len(p.owner), dtype=np.int32), np.int32(p.size))
    chunk = part * np.int32(p.size) + plays[owner]
    place = np.arange(len(chunk), dtype=np.int32) if p.place is None else p.place
    moved = np.empty_like(place)
    moved[chunk] = place
    return replace(p, src=plays[p.src], dst=plays[p.dst], chunk=chunk[p.chunk], place=moved)


def device_cube(devices: Sequence[Sequence[int]]) -> Pattern:
    """Halve and double over devices as corners of a cube, and spread inside devices at once.

    Ranks of the same place in their devices form sub-groups. Their chunks are cut in as many parts as the cube has
    axes; part i starts with axis i, so that the wires of all axes work all the time.

    Cost: log2(devices) + 1 steps each way; n (size - 1) / size bytes per rank, of which at most n / ranks_per_device
    leave the device. Source: aws-neuron/aws-neuron-sdk, neuron-runtime/explore/intranode-collective-comm.rst.

    Args:
        devices: The ranks of each device; a power of two of them, with equally many ranks.

    Raises:
        ScheduleError: If the devices are no cube.
    """
    count, each = len(devices), {len(ranks) for ranks in devices}
    if count & (count - 1) or len(each) != 1:
        raise ScheduleError(f"a cube needs a power of two devices with equally many ranks, got {count} with {each}")
    axes = max(1, count.bit_length() - 1)
    across = side_by_side([relabelled(halving_doubling(count), _turned(count, axis)) for axis in range(axes)])
    return relabelled(compose(across, mesh(each.pop())), [rank for ranks in devices for rank in ranks])


def _turned(corners: int, by: int) -> list[int]:
    """Return the corners of a cube with their bits rotated."""
    bits = corners.bit_length() - 1
    return [(corner << by | corner >> (bits - by)) & (corners - 1) for corner in range(corners)]


def kangarings(size: int, pairs: Sequence[tuple[int, int]], orders: Sequence[Sequence[int]]) -> Pattern:
    """Run a KangaRing on each of several rings, each with its part of every chunk.

    Cost: as one KangaRing, over the wires of all rings at once.

    Args:
        size: Ranks.
        pairs: Two ranks each that share a memory.
        orders: The rings, each a sequence of all pairs.

    Raises:
        ScheduleError: If the pairs are not all ranks, or a ring is not a permutation of the pairs.
    """
    flat = [rank for pair in pairs for rank in pair]
    return relabelled(side_by_side([kangaring(size, order=order) for order in orders]), flat)


def two_levels(collective: str, between: Pattern | Schedule, inside: Pattern, slices: int = 1) -> Schedule:
    """Compose a collective over nodes and ranks inside them, numbered node by node.

    Cost: the sum of the steps of both levels; between nodes 1 / ranks_per_node of what a flat algorithm moves there.

    Args:
        collective: One of `READINGS`.
        between: Pattern over nodes, or the table of an all-reduce over nodes.
        inside: Pattern over the ranks of one node.
        slices: Cut the data in so many pieces, and pipeline them through the phases.
    """
    if isinstance(between, Schedule):
        schedule, starts = with_inner(read.all_reduce("hierarchical", inside), between, inside.size)
    else:
        schedule = READINGS[collective]("hierarchical", compose(between, inside))
        starts = stages(collective, between.steps, inside.steps)
    return pipelined(schedule, starts, slices)
