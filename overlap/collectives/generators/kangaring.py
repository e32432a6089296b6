"""KangaRing: a ring over one rank of each pair; the other rides along.

Source: aws-neuron/aws-neuron-sdk, neuron-runtime/explore/intranode-collective-comm.rst. Two ranks in front of one
memory form a pair. The primary moves and reduces; what it passes on it also hands to its secondary, with one read for
both writes. Backwards, the secondary's share, what came in and the primary's own are one reduction. There are two
cycles, one for the chunks of even ranks and one for those of odd ranks, in which the roles are exchanged, so that both
ranks work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..pattern import Pattern, owners, spread


def kangaring(size: int, *, order: Sequence[int] | None = None) -> Pattern:
    """Pass every chunk round a ring of the primaries, and to their secondaries.

    Cost: size / 2 steps each way; n (size - 1) / size bytes per rank on average.

    Args:
        size: Ranks, an even number; ranks 2i and 2i + 1 are a pair.
        order: The ring as a sequence of all pairs; 0, 1, 2, ... by default.

    Raises:
        ScheduleError: If `size` is odd, or `order` is not a permutation of the pairs.
    """
    pairs = size // 2
    path = list(range(pairs)) if order is None else list(order)
    if size % 2 or sorted(path) != list(range(pairs)):
        raise ScheduleError(f"kangaring needs an even number of ranks and a ring of all pairs, got {size} and {path}")
    return replace(_pass_on(size, path), mate=_pass_on(size, path[::-1]))


def _pass_on(size: int, path: Sequence[int]) -> Pattern:
    pairs = size // 2
    step = np.arange(pairs, dtype=np.int32)[:, None, None]
    cycle = np.arange(2, dtype=np.int32)[:, None]
    place = np.arange(pairs, dtype=np.int32)
    pair = np.asarray(path, np.int32)
    primary, secondary, following = 2 * pair + cycle, 2 * pair + 1 - cycle, 2 * np.roll(pair, -1) + cycle
    chunk = 2 * pair[(place - step) % pairs] + cycle
    group = (step * 2 + cycle) * pairs + place
    # The last to arrive goes no further along the ring.
    onward = (step[:-1], primary, following, chunk[:-1], cycle, group[:-1])
    aside = (step, primary, secondary, chunk, cycle, group)
    flat = [[column.reshape(-1) for column in np.broadcast_arrays(*block)] for block in (onward, aside)]
    when, src, dst, what, channel, grouped = (np.concatenate(column) for column in zip(*flat, strict=True))
    return spread(size, owners(size), when, src, dst, what, channel=channel, group=grouped)
