"""One process of ours among several: `overlap run -m overlap.cli.bench.member ASSIGNMENT` measures as `measure` does.

The process of rank 0 prints a line of JSON for each row. All rows are of one world, as the steps of a program are, and
as those of other libraries: connections new to a row would be measured while they learn what they can carry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import trio

from ... import Rank, run
from .cases import Assignment, Case
from .measuring import on_rank


def main(text: str) -> None:
    """Measure every row, all in one world."""
    run(_measure, Assignment.from_json(text))


async def _measure(rank: Rank, assignment: Assignment) -> None:
    turns = assignment.in_turn() if rank.local_rank == 0 else None
    for case in assignment.cases:
        if not await _begins(rank, turns):
            return  # whoever wanted to know has gone
        told = await on_rank(rank, case, assignment.sampling, assignment.check)
        if told is not None:
            print(json.dumps({"told": told}), flush=True)
    if turns is not None:
        next(turns, None)  # which says that the last row is done


async def _begins(rank: Rank, turns: Iterator[Case] | None) -> bool:
    """Wait until it is the turn of all processes; one rank of each knows of its own."""
    has_turn = turns is None or await trio.to_thread.run_sync(next, turns, None, abandon_on_cancel=True) is not None
    return bool((await rank.all_reduce(np.array([has_turn], np.int8), "min"))[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
