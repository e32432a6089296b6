"""Rings, in which every rank talks to its neighbours only, and KangaRing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...errors import ScheduleError
from ..pattern import Ints, Pattern, edge_pattern, owner_column
from .sizes import fits


def ring(size: int, *, order: Sequence[int] | None = None) -> Pattern:
    """Return the pattern in which every chunk travels once around a ring.

    Cost: size - 1 steps; n (size - 1) / size bytes sent per rank each way, the least possible. Any size.

    Args:
        size: Ranks.
        order: The ring as a sequence of all ranks; 0, 1, 2, ... by default.
    """
    return multi_ring(size, orders=[range(size) if order is None else order])


def multi_ring(size: int, *, orders: Sequence[Sequence[int]] | None = None) -> Pattern:
    """Return the pattern of several rings, each of which carries one part of every chunk, on a channel of its own.

    Cost: as one ring, but the links of all rings share the bytes: the rings of a torus have no link in common.

    Args:
        size: Ranks.
        orders: The rings, each a sequence of all ranks; one ring in both directions by default.

    Raises:
        ScheduleError: If an order is not a permutation of all ranks.
    """
    rings = [range(size), range(size - 1, -1, -1)] if orders is None else orders
    for order in rings:
        if sorted(order) != list(range(size)):
            raise ScheduleError(f"orders: a ring must visit each of the {size} ranks once, got {list(order)}")
    path = np.asarray(rings, np.int32)
    return replace(_make_rings(size, path, 1), mate=_make_rings(size, path, -1))


def _make_rings(size: int, path: Ints, way: int) -> Pattern:
    """Return the pattern of rings, `path` (rings, size); `way` is 1 to send in this order, -1 in the opposite one."""
    step = np.arange(size - 1, dtype=np.int32)[:, None, None]
    channel = np.arange(len(path), dtype=np.int32)[:, None]
    # At step t the rank in place i sends the chunk that is owned t places before it. Windows over the ring, written
    # twice, give these chunks for all places and steps.
    twice = np.concatenate([path, path], axis=1) + channel * np.int32(size)
    from_place = sliding_window_view(twice, size, axis=1)
    chunk = (from_place[:, :1:-1] if way > 0 else from_place[:, : size - 1]).transpose(1, 0, 2)
    return edge_pattern(
        size, owner_column(size, len(path)), step, path, np.roll(path, -way, axis=1), chunk, channel=channel
    )


def kangaring(size: int, *, order: Sequence[int] | None = None) -> Pattern:
    """Return KangaRing: pairs of ranks form a ring. A chunk travels along one rank of each pair.

    Chunks of even ranks travel along the even ranks, chunks of odd ranks along the odd ones. Each rank on this way also
    sends the chunk to its partner.

    Cost: size / 2 steps each way; n (size - 1) / size bytes per rank on average.

    Args:
        size: Ranks, an even number; ranks 2i and 2i + 1 are a pair.
        order: The ring as a sequence of all pairs; 0, 1, 2, ... by default.

    Raises:
        ScheduleError: If `size` is odd, or `order` is not a permutation of the pairs.
    """
    pairs = size // 2
    path = list(range(pairs)) if order is None else list(order)
    if not fits("kangaring", size):
        raise ScheduleError(f"size: kangaring needs an even number of ranks, got {size}; use algorithm 'ring'")
    if sorted(path) != list(range(pairs)):
        raise ScheduleError(f"order: expected each of the pairs 0 to {pairs - 1} once, got {path}")
    return replace(_make_pair_ring(size, path), mate=_make_pair_ring(size, path[::-1]))


def _make_pair_ring(size: int, path: Sequence[int]) -> Pattern:
    """Return the pattern of `kangaring` around the ring `path`, a sequence of pairs, in this direction."""
    pairs = size // 2
    step = np.arange(pairs, dtype=np.int32)[:, None, None]
    cycle = np.arange(2, dtype=np.int32)[:, None]
    place = np.arange(pairs, dtype=np.int32)
    pair = np.asarray(path, np.int32)
    # Axes of the arrays: step, cycle (chunks of even or of odd ranks), place in the ring. The primary of a pair sends a
    # chunk to the primary of the following pair, and to its own partner, the secondary.
    primary, secondary, following = 2 * pair + cycle, 2 * pair + 1 - cycle, 2 * np.roll(pair, -1) + cycle
    chunk = 2 * pair[(place - step) % pairs] + cycle
    group = (step * 2 + cycle) * pairs + place
    # The last chunk to arrive goes no further along the ring.
    onward = (step[:-1], primary, following, chunk[:-1], cycle, group[:-1])
    aside = (step, primary, secondary, chunk, cycle, group)
    flat = [[column.reshape(-1) for column in np.broadcast_arrays(*block)] for block in (onward, aside)]
    when, src, dst, passed, channel, grouped = (np.concatenate(column) for column in zip(*flat, strict=True))
    return edge_pattern(size, owner_column(size), when, src, dst, passed, channel=channel, group=grouped)
