"""Classes of ranks that behave alike in the simulation of a recorded run, so that two of each run for all. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ...errors import UsageError
from ...simulation import Alike
from .growth import WORLD, Growth
from .tape import Tape


def classify_ranks(tape: Tape, growth: Growth) -> Callable[[int], int] | None:
    """Return the class of each rank, which is its recorded rank; None if ranks of a class may differ.

    They may differ where their groups are no rows of a grid, or their messages go over different distances.

    Args:
        tape: The recorded run.
        growth: The mapping of ranks to recorded ranks.
    """
    alike = Alike.of(growth.recorded_rank, growth.ranks)
    shifts: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    groups = {
        rank: {(m.kind, m.info.group, m.info.ranks) for m in moves if m.kind in ("collective", "message")}
        for rank, moves in tape.moves.items()
    }
    try:
        for rank in alike.simulated:
            for kind, name, members in groups[growth.recorded_rank(rank)]:
                if kind == "collective" and not (name == WORLD and len(members) == growth.recorded):
                    alike.rows(growth.group(rank, name, members))
        for rank in range(growth.ranks):
            recorded = growth.recorded_rank(rank)
            for kind, _, members in groups[recorded]:
                if kind == "message":
                    # The index is True, so 1, at the first of the two ranks.
                    peer = members[members[0] == recorded]
                    shifts[recorded, peer].add((growth.peer(rank, peer) - rank) % growth.ranks)
    except UsageError:
        return None
    return growth.recorded_rank if all(len(each) == 1 for each in shifts.values()) else None
