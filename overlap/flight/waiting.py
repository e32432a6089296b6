"""Who waits for whom, from the flight records of all processes: the rank whose turn it is, or a circle. Pure.

An operation waits for the members that have not issued the operation of the same number at the same place, or have no
input for it yet. Following that from rank to rank ends at one that waits for nobody, which is the odd one out, or goes
round.
"""

from __future__ import annotations

from collections.abc import Mapping

from .reading import Operation, RankRecord


def oldest(record: RankRecord) -> Operation | None:
    """Return what a rank has not finished for longest; a compute that runs counts before what waits for its result.

    Of several computes that have begun, the last runs: it follows the others, whose end has not been noted yet.
    """
    running = [(op.started_ns, op) for op in record.unfinished if op.kind == "compute" and op.started_ns is not None]
    if running:
        return max(running, key=lambda pair: pair[0])[1]
    return next(iter(record.unfinished), None)


def absent(operation: Operation, ranks: Mapping[int, RankRecord]) -> list[int]:
    """Return the members that have not come to an unfinished operation, as far as the records tell; ascending.

    A rank without a record is not known to have come.
    """
    if operation.ended_ns is not None and not operation.failed:
        return []
    return [rank for rank in sorted(operation.members) if not _has_come(ranks.get(rank), operation)]


def _has_come(record: RankRecord | None, operation: Operation) -> bool:
    if record is None:
        return False
    there = [own for own in record.operations if own.key == operation.key and own.number >= operation.number]
    same = [own for own in there if own.number == operation.number]
    if same:  # issued, but without its input nothing can begin
        return bool(same[0].what) or (same[0].ended_ns is not None and not same[0].failed)
    return bool(there)


def odd_ones(ranks: Mapping[int, RankRecord]) -> tuple[list[int], bool]:
    """Return the ranks that others wait for in the end, and whether these wait for each other in a circle.

    None of both if nobody waits for a rank.
    """
    waits = {rank: _waits_for(rank, record, ranks) for rank, record in ranks.items()}
    begin = [rank for rank, others in waits.items() if others]
    if not begin:
        return [], False
    ends = sorted({_follow(rank, waits) for rank in begin}, key=lambda end: (end[1], end[0]))
    straight = [rank for rank, circle in ends if not circle]
    if straight:
        return straight, False
    return _circle(ends[0][0], waits), True


def _waits_for(rank: int, record: RankRecord, ranks: Mapping[int, RankRecord]) -> list[int]:
    """Return whom a rank waits for in the oldest operation in which it does; nobody while it computes."""
    first = oldest(record)
    if first is None or first.kind == "compute":
        return []
    for operation in record.unfinished:
        if others := [other for other in absent(operation, ranks) if other != rank]:
            return others
    return []


def _follow(rank: int, waits: Mapping[int, list[int]]) -> tuple[int, bool]:
    seen: set[int] = set()
    while waits.get(rank):
        if rank in seen:
            return rank, True
        seen.add(rank)
        rank = waits[rank][0]
    return rank, False


def _circle(rank: int, waits: Mapping[int, list[int]]) -> list[int]:
    members = [rank]
    while (following := waits[members[-1]][0]) != rank:
        members.append(following)
    return members
