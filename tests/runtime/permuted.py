"""Collectives on groups of the same ranks in several orders, each checked against numpy; a program of its own, too."""

import sys
from collections.abc import Sequence

import numpy as np

import overlap

try:
    from tests.runtime.reference import REFERENCES
except ImportError:  # as a program: the folder of this file is on the path
    from reference import REFERENCES  # type: ignore[import-not-found,no-redef]

KINDS = tuple(kind for kind in REFERENCES if kind != "permute")  # which takes pairs


async def main(rank: overlap.Rank, orders: Sequence[Sequence[int]], kinds: Sequence[str], count: int) -> int:
    """Return how many results were looked at."""
    looked = 0
    for order in orders:
        if rank.rank not in order:
            continue
        group = rank.group(order)
        xs = [(np.arange(count * len(order)) % 97 * (each + 1)).astype(np.float32) for each in order]
        for kind in kinds:
            result = await getattr(group, kind)(xs[group.rank])
            expected = REFERENCES[kind](xs)[group.rank]
            if expected is None:
                assert result is None
            else:
                np.testing.assert_array_equal(result, expected, err_msg=f"{kind} on {list(order)}")
            looked += 1
    return looked


if __name__ == "__main__":
    orders = [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [0, 2, 1, 3], [3, 2, 1, 0], [1, 0, 3, 2]]
    print(overlap.run(main, orders, KINDS, int(sys.argv[1])))
