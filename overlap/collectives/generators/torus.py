"""Algorithms for tori: several copies side by side, each starting along another link of the rank.

Ranks of a torus with sides `dims` are numbered row-major. Each copy carries a part of every chunk, on its own channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import ScheduleError
from ..pattern import Ints, Pattern, edge_pattern, owner_column
from .sizes import fits

Held: TypeAlias = NDArray[np.bool_]
# One step of a copy: number of the step; (size,) the rank that each rank sends to; (size, size) whether a rank (first
# axis) sends the chunk of an owner (second axis).
TorusStep: TypeAlias = tuple[int, Ints, Held]


def bucket(size: int, *, dims: Sequence[int] | None = None) -> Pattern:
    """Return the bucket algorithm: rings along one dimension of a torus, then along the next.

    Read forwards it is an all-gather. In the first dimension each rank passes its chunk round its ring, until all ranks
    of the ring have all chunks of the ring; in the next dimension it passes on all these chunks together, and so on. So
    that no link idles, each chunk is cut into a part for each link of a rank, and each part begins with another
    dimension and direction. Read backwards, as a reduce-scatter, parts run in the opposite directions.

    Cost: sum of (side - 1) steps; n (size - 1) / size bytes per rank, over all 2 D links of D dimensions at once.

    Args:
        size: Ranks.
        dims: Sides of the torus; the squarest two by default.

    Raises:
        ScheduleError: If `dims` do not multiply to `size`.
    """
    sides = squarest_sides(size) if dims is None else tuple(dims)
    all_gather = _combine_torus_copies(size, sides, _bucket_steps, first=1)
    return replace(all_gather, mate=_combine_torus_copies(size, sides, _bucket_steps, first=-1))


def swing(size: int, *, dims: Sequence[int] | None = None) -> Pattern:
    """Exchange over distances 1, -1, 3, -5, 11, ...: as few steps as doubling, but shorter ways on a torus.

    On sides that are no powers of two several ways lead to some ranks; a chunk takes the first and leaves the others.

    Cost: sum of ceil(log2(side)) steps; n (size - 1) / size bytes per rank, over all 2 D links at once. Source:
    De Sensi and others, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce", arXiv 2401.09356, the variant for
    bandwidth.

    Args:
        size: Ranks.
        dims: Sides of the torus, even or 1: odd rings have no partners. One ring by default.

    Raises:
        ScheduleError: If `dims` do not multiply to `size`, or one is odd.
    """
    sides = (size,) if dims is None else tuple(dims)
    if not all(fits("swing", side) for side in sides):
        raise ScheduleError(f"swing needs even sides, got {sides}; 'bucket' takes any")
    return _combine_torus_copies(size, sides, _swing_steps)


def squarest_sides(size: int) -> tuple[int, int]:
    """Return the two factors of `size` that differ least, the larger one first."""
    side = next(side for side in range(isqrt(size), 0, -1) if size % side == 0)
    return size // side, side


def _combine_torus_copies(
    size: int,
    sides: Sequence[int],
    make_steps: Callable[[Ints, Sequence[int], int, int], Iterable[TorusStep]],
    *,
    first: int = 1,
) -> Pattern:
    """Return a pattern of several copies of an algorithm on a torus, each with a share of the data.

    Copies differ in the axis and direction in which they start; there are two for each axis longer than 1, the first in
    direction `first`. `make_steps(ranks as a torus, axes in turn, direction, size)` yields the steps of one copy.
    Raises `ScheduleError` if the sides do not multiply to the number of ranks.
    """
    if prod(sides) != size or min(sides, default=1) < 1:
        raise ScheduleError(f"a torus of sides {sides} does not have {size} ranks; pass sides with that product")
    ranks = np.arange(size, dtype=np.int32).reshape(tuple(sides))
    axes = [axis for axis, side in enumerate(sides) if side > 1]
    starts = [(turn, sign) for turn in range(len(axes)) for sign in (first, -first)]
    # Rows are (step, src, dst, chunk, channel).
    rows: list[Ints] = [np.empty((0, 5), np.int32)]
    for copy, (turn, sign) in enumerate(starts):
        for step, receiver, sends in make_steps(ranks, axes[turn:] + axes[:turn], sign, size):
            src, owner = np.nonzero(sends)
            same = np.full(len(src), 1)
            rows.append(np.stack([same * step, src, receiver[src], owner + copy * size, same * copy], axis=1))
    step, src, dst, chunk, channel = np.concatenate(rows).T
    return edge_pattern(size, owner_column(size, max(1, len(starts))), step, src, dst, chunk, channel=channel)


def _bucket_steps(ranks: Ints, axes: Sequence[int], sign: int, size: int) -> Iterable[TorusStep]:
    """Yield the steps of one copy of `bucket`: rings along each axis in turn.

    The axes of `ranks` are those of the torus; `axes` are those longer than 1, in the order of their use. Chunks travel
    in direction `sign`, 1 or -1.
    """
    has, step = np.eye(size, dtype=np.bool_), 0
    for axis in axes:
        receiver = np.roll(ranks, -sign, axis).reshape(-1)
        start = has
        for distance in range(ranks.shape[axis] - 1):
            # Each rank sends the chunks that the rank `distance` places before it had at the start of this axis.
            sends = start[np.roll(ranks, sign * distance, axis).reshape(-1)]
            yield step, receiver, sends
            has = has | sends[np.roll(ranks, sign, axis).reshape(-1)]
            step += 1


def _swing_steps(ranks: Ints, axes: Sequence[int], sign: int, size: int) -> Iterable[TorusStep]:
    """Yield the steps of one copy of `swing`: the exchanges of the reduce-scatter, the last one first.

    Arguments: see `_bucket_steps`; `sign` is the direction of the reduce-scatter's first exchange.
    """
    remaining = {axis: (ranks.shape[axis] - 1).bit_length() for axis in axes}
    exchanges: list[Ints] = []
    while any(remaining.values()):
        for axis in axes:
            if remaining[axis]:
                local = (ranks.shape[axis] - 1).bit_length() - remaining[axis]
                # Distances 1, -1, 3, -5, ...: (1 - (-2)^n) / 3 for n = 1, 2, ...
                exchanges.append(_swing_peers(ranks, axis, sign * (1 - (-2) ** (local + 1)) // 3))
                remaining[axis] -= 1
    held = np.eye(size, dtype=np.bool_)
    for step, peer in enumerate(reversed(exchanges)):
        # Send the chunks that the partner lacks. All ranks exchange at once: `held` is updated after the step.
        yield step, peer, held & ~held[peer]
        held = held | held[peer]


def _swing_peers(ranks: Ints, axis: int, distance: int) -> Ints:
    """Return (size,) the partner of each rank: `distance` places on along `axis`; before it at odd coordinates."""
    coordinate = np.indices(ranks.shape)[axis]
    forwards, backwards = np.roll(ranks, -distance, axis), np.roll(ranks, distance, axis)
    return np.where(coordinate % 2 == 0, forwards, backwards).reshape(-1)
