"""Patterns fitted to a machine: several copies side by side, or with other numbers for the ranks.

They take geometry as numbers: which ranks share a device, in which order a ring visits devices. No topology here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..pattern import Ints, Pattern, edge_pattern, owners
from .doubling import halving_doubling
from .hierarchical import compose
from .mesh import mesh
from .ring import kangaring


def side_by_side(patterns: Sequence[Pattern]) -> Pattern:
    """Cut every chunk in as many parts as there are patterns; each part follows one pattern, on channels of its own.

    Cost: the steps of the longest; as many bytes as one of them, spread over the wires of all.

    Args:
        patterns: Over the same ranks, each rank owning equally many chunks.
    """
    if any(pattern.mate for pattern in patterns):
        return replace(_combine_patterns(patterns), mate=_combine_patterns([pattern.backward for pattern in patterns]))
    return _combine_patterns(patterns)


def _combine_patterns(patterns: Sequence[Pattern]) -> Pattern:
    """Return one pattern that runs several patterns of one size in parallel, each on its own chunks and channels."""
    size, columns, chunks, lanes, groups = patterns[0].size, [], 0, 0, 0
    for p in patterns:
        group = np.where(p.group >= 0, p.group + groups, -1)
        columns.append([p.step, p.src, p.dst, p.chunk + chunks, p.channel + lanes, group])
        chunks += len(p.owner)
        lanes += int(p.channel.max(initial=0)) + 1
        groups += int(p.group.max(initial=-1)) + 1
    step, src, dst, chunk, channel, group = (np.concatenate(column) for column in zip(*columns, strict=True))
    whole = edge_pattern(size, owners(size, chunks // size), step, src, dst, chunk, channel=channel, group=group)
    return replace(whole, steps=max(pattern.steps for pattern in patterns))


def relabel(pattern: Pattern, ranks: Sequence[int]) -> Pattern:
    """Return the pattern in which rank `ranks[i]` does the work of rank i.

    Raises:
        ScheduleError: If `ranks` is not a permutation.
    """
    if sorted(ranks) != list(range(pattern.size)):
        raise ScheduleError(f"ranks: expected each of 0..{pattern.size - 1} once, got {list(ranks)}")
    plays = np.asarray(ranks, np.int32)
    if (plays == np.arange(pattern.size)).all():
        return pattern
    return replace(_renumber(pattern, plays), mate=_renumber(pattern.mate, plays) if pattern.mate else None)


def _renumber(p: Pattern, plays: Ints) -> Pattern:
    """Return a pattern with other numbers for its ranks: `plays[i]` is the rank in the place of i."""
    # A chunk belongs to a part and an owner; with another owner it gets another number, and keeps its place.
    part, owner = np.divmod(np.arange(len(p.owner), dtype=np.int32), np.int32(p.size))
    chunk = part * np.int32(p.size) + plays[owner]
    place = np.arange(len(chunk), dtype=np.int32) if p.place is None else p.place
    moved = np.empty_like(place)
    moved[chunk] = place
    return replace(p, src=plays[p.src], dst=plays[p.dst], chunk=chunk[p.chunk], place=moved)


def rdh(size: int, *, devices: Sequence[Sequence[int]] | None = None) -> Pattern:
    """Halve and double over distances, or over the devices of a machine.

    Cost: as `halving_doubling`, or as `device_cube`.

    Args:
        size: Ranks.
        devices: The ranks of each device; by default every rank counts as one.

    Raises:
        ScheduleError: If the devices are no cube, or do not cover all ranks.
    """
    if devices is None:
        return halving_doubling(size)
    if sum(map(len, devices)) != size:
        raise ScheduleError(f"devices: expected all {size} ranks, each once, got {list(devices)}")
    return device_cube(devices)


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
    count, rank_counts = len(devices), {len(ranks) for ranks in devices}
    if count & (count - 1) or len(rank_counts) != 1:
        raise ScheduleError(
            f"a cube needs a power of two devices with equally many ranks, got {count} with {rank_counts}; "
            "choose another algorithm"
        )
    axes = max(1, count.bit_length() - 1)
    across = side_by_side([relabel(halving_doubling(count), _rotate_cube(count, axis)) for axis in range(axes)])
    return relabel(compose(across, mesh(rank_counts.pop())), [rank for ranks in devices for rank in ranks])


def _rotate_cube(corners: int, by: int) -> list[int]:
    bits = corners.bit_length() - 1
    return [(corner << by | corner >> (bits - by)) & (corners - 1) for corner in range(corners)]


def kangarings(
    size: int, *, couples: Sequence[tuple[int, int]] | None = None, orders: Sequence[Sequence[int]] | None = None
) -> Pattern:
    """Run a KangaRing on each of several rings, each with its part of every chunk.

    Cost: as one KangaRing, over the wires of all rings at once.

    Args:
        size: Ranks.
        couples: Pairs of ranks that share a memory; (0, 1), (2, 3), ... by default.
        orders: The rings, each a sequence of all couples; by default one ring, in the order given.

    Raises:
        ScheduleError: If the couples are not all ranks, or a ring is not a permutation of the couples.
    """
    rings = [kangaring(size, order=order) for order in ([None] if orders is None else orders)]
    whole = rings[0] if len(rings) == 1 else side_by_side(rings)
    return whole if couples is None else relabel(whole, [rank for couple in couples for rank in couple])
