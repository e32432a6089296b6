"""Waits in flight records: a rank waits for the members of an operation that have not arrived at it.

A member has arrived once it has issued the operation of the same number at the same place, and has an input for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..runtime.blame.standing import Stall, Standing, find_stall
from .reading import Operation, RankRecord


def oldest_unfinished(record: RankRecord) -> Operation | None:
    """Return the oldest unfinished operation of a rank; a running compute counts before operations that use it.

    Of several computes that have begun, the last one runs: the ends of the others have not been recorded yet.
    """
    running = [
        (op.started_ns, op) for op in record.unfinished if op.words.kind == "compute" and op.started_ns is not None
    ]
    if running:
        return max(running, key=lambda pair: pair[0])[1]
    return next(iter(record.unfinished), None)


def runs_compute(record: RankRecord) -> bool:
    """Whether a rank runs a compute; then it waits for no other rank, whatever else is unfinished."""
    operation = oldest_unfinished(record)
    return operation is not None and operation.words.kind == "compute" and operation.started_ns is not None


def is_elsewhere(record: RankRecord, excepted: Collection[int], ranks: Mapping[int, RankRecord]) -> bool:
    """Whether a rank computes, or is in an operation that waits for ranks, none of them in `excepted`."""
    first = oldest_unfinished(record)
    if first is None or first.words.kind == "compute":
        return runs_compute(record)
    lacking = {rank for rank in absent_members(first, ranks) if rank != record.rank}
    return bool(lacking) and lacking.isdisjoint(excepted)


def absent_members(operation: Operation, ranks: Mapping[int, RankRecord]) -> list[int]:
    """Return the members that have not arrived at an unfinished operation, as far as the records show; ascending.

    A rank without a record is not known to have arrived.
    """
    if operation.ended_ns is not None and not operation.failed:
        return []
    return [rank for rank in sorted(operation.words.members) if not _has_arrived(ranks.get(rank), operation)]


def reopen_ended_by_leaver(ranks: Mapping[int, RankRecord]) -> dict[int, RankRecord]:
    """Return the records; operations that failed because a member had finished its program count as unfinished.

    A program learns of such a failure only where it awaits the operation. Until then it issues others.
    """
    finished = {rank for rank, record in ranks.items() if record.left}

    def reopen(operation: Operation) -> Operation:
        """Return the operation as an unfinished one if a member that has finished its program made it fail."""
        lacking = operation.failed and not finished.isdisjoint(absent_members(operation, ranks))
        return replace(operation, ended_ns=None, failed=False) if lacking else operation

    return {
        rank: replace(record, operations=tuple(map(reopen, record.operations))) if finished else record
        for rank, record in ranks.items()
    }


def _has_arrived(record: RankRecord | None, operation: Operation) -> bool:
    """Whether a rank has issued an operation and has its input, or has issued a later one at the same place."""
    if record is None:
        return False
    reached = [
        own for own in record.operations if own.words.key == operation.words.key and own.number >= operation.number
    ]
    same = [own for own in reached if own.number == operation.number]
    if same:  # issued, but without its input nothing can begin
        return bool(same[0].words.what) or (same[0].ended_ns is not None and not same[0].failed)
    return bool(reached)


def stall_in_records(ranks: Mapping[int, RankRecord]) -> Stall | None:
    """Return the ranks that wait for others in the end, with the ranks that they wait for; None if no rank waits.

    A rank without a record waits for nobody, as far as is known.
    """
    waits = {rank: _waits_for(rank, record, ranks) for rank, record in ranks.items()}
    return stall_from_waits(waits | {other: [] for others in waits.values() for other in others if other not in waits})


def stall_from_waits(waits: Mapping[int, Sequence[int]]) -> Stall | None:
    """Return the stall that follows from the ranks for which each rank waits; None if no rank waits."""
    return find_stall({
        rank: Standing(rank=rank, lines=(), awaits=tuple(others), busy="" if others else "elsewhere")
        for rank, others in waits.items()
    })  # fmt: skip


def _waits_for(rank: int, record: RankRecord, ranks: Mapping[int, RankRecord]) -> list[int]:
    """Return the absent members of the oldest operation in which a rank waits; [] while it computes."""
    first = oldest_unfinished(record)
    if first is None or first.words.kind == "compute":
        return []
    for operation in record.unfinished:
        if others := [other for other in absent_members(operation, ranks) if other != rank]:
            return others
    return []
