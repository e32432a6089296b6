"""Patterns fitted to a machine: several patterns in parallel, or with other numbers for the ranks.

The functions get the geometry of the machine as numbers: which ranks share a device, in which order a ring visits
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..pattern import Ints, Pattern, edge_pattern, owner_column
from .doubling import halving_doubling
from .hierarchical import compose_two_levels
from .mesh import mesh
from .ring import kangaring


def combine_side_by_side(patterns: Sequence[Pattern]) -> Pattern:
    """Return one pattern in which every chunk is cut in parts: part i follows `patterns[i]`, on channels of its own.

    Cost: the steps of the longest pattern; the bytes of one pattern, spread over the wires of all.

    Args:
        patterns: Patterns over the same ranks. In each, all ranks own the same number of chunks.
    """
    if any(pattern.mate for pattern in patterns):
        return replace(
            _combine_one_direction(patterns), mate=_combine_one_direction([pattern.backward for pattern in patterns])
        )
    return _combine_one_direction(patterns)


def _combine_one_direction(patterns: Sequence[Pattern]) -> Pattern:
    """Return one pattern that runs several patterns of one size in parallel, each on its own chunks and channels."""
    size, columns = patterns[0].size, []
    chunks, lanes, groups = 0, 0, 0  # numbers of chunks, channels and groups of the patterns so far
    for p in patterns:
        group = np.where(p.group >= 0, p.group + groups, -1)
        columns.append([p.step, p.src, p.dst, p.chunk + chunks, p.channel + lanes, group])
        chunks += len(p.owner)
        lanes += int(p.channel.max(initial=0)) + 1
        groups += int(p.group.max(initial=-1)) + 1
    step, src, dst, chunk, channel, group = (np.concatenate(column) for column in zip(*columns, strict=True))
    whole = edge_pattern(size, owner_column(size, chunks // size), step, src, dst, chunk, channel=channel, group=group)
    return replace(whole, steps=max(pattern.steps for pattern in patterns))


def relabel_ranks(pattern: Pattern, ranks: Sequence[int]) -> Pattern:
    """Return the pattern in which rank `ranks[i]` does the work of rank i.

    Raises:
        ScheduleError: If `ranks` is not a permutation.
    """
    if sorted(ranks) != list(range(pattern.size)):
        raise ScheduleError(f"ranks: expected each of 0..{pattern.size - 1} once, got {list(ranks)}")
    plays = np.asarray(ranks, np.int32)
    if (plays == np.arange(pattern.size)).all():
        return pattern
    return replace(
        _relabel_one_direction(pattern, plays),
        mate=_relabel_one_direction(pattern.mate, plays) if pattern.mate else None,
    )


def _relabel_one_direction(p: Pattern, plays: Ints) -> Pattern:
    """Return the pattern in which rank `plays[i]` does the work of rank i."""
    # Chunk `part * size + owner` gets the number of its new owner, and keeps its place in buffers.
    part, owner = np.divmod(np.arange(len(p.owner), dtype=np.int32), np.int32(p.size))
    chunk = part * np.int32(p.size) + plays[owner]
    place = np.arange(len(chunk), dtype=np.int32) if p.place is None else p.place
    moved = np.empty_like(place)
    moved[chunk] = place
    return replace(p, src=plays[p.src], dst=plays[p.dst], chunk=chunk[p.chunk], place=moved)


def rdh(size: int, *, devices: Sequence[Sequence[int]] | None = None) -> Pattern:
    """Return RDH (recursive doubling and halving): over ranks, or over the devices of a machine if these are given.

    The patterns are those of `halving_doubling` and of `device_cube`.

    Args:
        size: Ranks.
        devices: The ranks of each device; None: exchange over ranks.

    Raises:
        ScheduleError: The number of devices is no power of two, or they do not have all ranks, equally many each.
    """
    if devices is None:
        return halving_doubling(size)
    if sum(map(len, devices)) != size:
        raise ScheduleError(f"devices: expected all {size} ranks, each once, got {list(devices)}")
    return device_cube(devices)


def device_cube(devices: Sequence[Sequence[int]]) -> Pattern:
    """Return halving and doubling between devices, and a direct exchange inside each device.

    The devices are the corners of a cube of log2(devices) dimensions; each exchange is along one axis, between the
    ranks that have the same index in their devices. Chunks are cut in as many parts as there are axes. Part i starts
    with axis i, so that the wires of all axes work all the time. At the end every rank sends to all other ranks of its
    device in one step.

    Cost: log2(devices) + 1 steps each way; n (size - 1) / size bytes per rank, of which at most n / ranks_per_device
    leave the device. Source: aws-neuron/aws-neuron-sdk, neuron-runtime/explore/intranode-collective-comm.rst.

    Args:
        devices: The ranks of each device; a power of two of devices, with equally many ranks.

    Raises:
        ScheduleError: The number of devices is no power of two, or they have different numbers of ranks.
    """
    count, rank_counts = len(devices), {len(ranks) for ranks in devices}
    if count & (count - 1) or len(rank_counts) != 1:
        raise ScheduleError(
            f"rdh needs a power of two devices with equally many ranks; this group has {count} devices with "
            f"{' or '.join(map(str, sorted(rank_counts)))} ranks; choose another algorithm"
        )
    axes = max(1, count.bit_length() - 1)
    first_axes = [relabel_ranks(halving_doubling(count), _rotate_cube_corners(count, axis)) for axis in range(axes)]
    between_devices = combine_side_by_side(first_axes)
    inside_device = mesh(rank_counts.pop())
    ranks_device_by_device = [rank for ranks in devices for rank in ranks]
    return relabel_ranks(compose_two_levels(between_devices, inside_device), ranks_device_by_device)


def _rotate_cube_corners(corners: int, by: int) -> list[int]:
    """Return the number of each corner after its binary digits rotate left, so that axis 0 becomes axis `by`."""
    bits = corners.bit_length() - 1
    return [(corner << by | corner >> (bits - by)) & (corners - 1) for corner in range(corners)]


def kangarings(
    size: int, *, couples: Sequence[tuple[int, int]] | None = None, orders: Sequence[Sequence[int]] | None = None
) -> Pattern:
    """Return the pattern of several KangaRings, each of which carries one part of every chunk; see `ring.kangaring`.

    A KangaRing is a ring over couples: pairs of ranks that share a memory.

    Cost: as one KangaRing, spread over the wires of all rings.

    Args:
        size: Ranks.
        couples: The couples; (0, 1), (2, 3), ... by default.
        orders: The rings; each lists the indexes of all couples in its order. By default one ring, 0, 1, 2, ...

    Raises:
        ScheduleError: The couples do not have each rank once, or a ring is not a permutation of the couples.
    """
    rings = [kangaring(size, order=order) for order in ([None] if orders is None else orders)]
    whole = rings[0] if len(rings) == 1 else combine_side_by_side(rings)
    return whole if couples is None else relabel_ranks(whole, [rank for couple in couples for rank in couple])
