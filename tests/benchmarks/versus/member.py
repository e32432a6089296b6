"""One process of ours that measures its rows in turn: `overlap run -m tests.benchmarks.versus.member ASSIGNMENT`."""

import json
import sys
from collections.abc import Iterator

import numpy as np
import trio

from overlap import Rank, run
from overlap.cli.bench.cases import Case
from overlap.cli.bench.measuring import measure_case

from .assignment import AssignmentInTurn


def main(text: str) -> None:
    """Measure every row, all in one world."""
    run(measure, AssignmentInTurn.from_json(text))


async def measure(rank: Rank, assignment: AssignmentInTurn) -> None:
    """Measure rows on one rank; rank 0 prints a line of JSON for each."""
    turns = assignment.in_turn() if rank.local_rank == 0 else None
    for case in assignment.cases:
        if not await _begins(rank, turns):
            return
        told = await measure_case(rank, case, assignment.sampling)
        if told is not None:
            print(json.dumps({"told": told}), flush=True)
    if turns is not None:
        next(turns, None)  # says that the last row is done


async def _begins(rank: Rank, turns: Iterator[Case] | None) -> bool:
    """Wait for the turn of all processes; one rank of each process waits for its own."""
    has_turn = turns is None or await trio.to_thread.run_sync(next, turns, None, abandon_on_cancel=True) is not None
    return bool((await rank.all_reduce(np.array([has_turn], np.int8), "min"))[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
