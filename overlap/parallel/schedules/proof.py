"""The proof of a pipeline schedule: every microbatch passes every stage once, and no rank waits forever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...errors import ScheduleError
from .action import Action, ActionKind, Rows
from .timing import Durations, replay_starts


def prove_schedule(name: str, rows: Rows) -> tuple[int, int, tuple[int, ...]]:
    """Prove a schedule; return (number of stages, number of microbatches, rank of every stage).

    Each stage must belong to one rank. Each stage and microbatch must have one F, and either one B, or one I and one W.
    If each rank carries out its row in order, all ranks must come to their end.

    Args:
        name: Name of the schedule, for the error.
        rows: The actions of every rank.

    Raises:
        ScheduleError: If the schedule lacks a property. The message has every row, and marks the action at fault.
    """
    owners = _find_owners(name, rows)
    stages, microbatches = len(owners), 1 + max(action.microbatch for row in rows for action in row)
    _prove_complete(name, rows, owners, microbatches)
    _prove_termination(name, rows, owners)
    return stages, microbatches, owners


def peak_activations(rows: Rows) -> tuple[int, ...]:
    """Return, for each rank, the most activations that it holds at once: those of one stage and microbatch count as 1.

    Activations are held from F to B or W.
    """
    return tuple(_count_peak_activations(row) for row in rows)


def _count_peak_activations(row: Sequence[Action]) -> int:
    """Return the most activations that a rank holds at once, in the order of its row."""
    live = most = 0
    for action in row:
        live += action.kind is ActionKind.FORWARD
        most = max(most, live)
        live -= action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    return most


def _find_owners(name: str, rows: Rows) -> tuple[int, ...]:
    """Return the rank of every stage; refuse a stage that is on two ranks, or on none."""
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            owner = owners.setdefault(action.stage, rank)
            if owner != rank:
                raise _schedule_error(name, rows, f"rank {owner} has stage {action.stage}; leave it to one", rank, step)
    if not owners:
        raise _schedule_error(name, rows, "no rank has an action; give each rank some")
    for stage in range(max(owners) + 1):
        if stage not in owners:
            raise _schedule_error(name, rows, f"no rank has stage {stage}; give its actions to one")
    return tuple(owners[stage] for stage in range(len(owners)))


def _prove_complete(name: str, rows: Rows, owners: tuple[int, ...], microbatches: int) -> None:
    """Refuse rows unless every microbatch has, at each stage, F and B, or F, I and W, each of them once.

    The `ScheduleError` marks the first action that is missing or repeated.
    """
    counts = Counter(action for row in rows for action in row)
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if counts[action] > 1 and action in row[:step]:
                raise _schedule_error(name, rows, f"{action} is there twice; leave out one", rank, step)
    for stage, rank in enumerate(owners):
        for i in range(microbatches):
            kinds = "".join(kind for kind in ActionKind if Action(stage, kind, i) in counts)
            if kinds not in ("FB", "FIW"):
                count = f"has {', '.join(kinds) or 'nothing'} of microbatch {i}"
                raise _schedule_error(name, rows, f"stage {stage} {count}; it takes F and B, or F, I and W", rank)


def _prove_termination(name: str, rows: Rows, owners: tuple[int, ...]) -> None:
    """Replay the rows; refuse them if ranks wait for each other forever. The error names each waiting rank."""
    starts = replay_starts(rows, owners, Durations())
    # By rank, the index of the first action that never starts: steps go backwards, so the first one is written last.
    stuck = {rank: step for rank, row in enumerate(rows) for step in range(len(row))[::-1] if row[step] not in starts}
    if stuck:
        waits = []
        for rank, step in stuck.items():
            action = rows[rank][step]
            missing = next(e for e in action.needs(len(owners) - 1) if not any(each in starts for each in e))
            waits.append(f"rank {rank} waits in {action} for {' or '.join(map(str, missing))}")
        rank, step = next(iter(stuck.items()))
        raise _schedule_error(name, rows, f"it never ends: {', '.join(waits)}; reorder them", rank, step)


def _schedule_error(name: str, rows: Rows, why: str, rank: int | None = None, step: int | None = None) -> ScheduleError:
    """Return the error: its message has all rows, with the action of `rank` and `step` marked by >> <<.

    `rank` is None if no single rank is at fault, and `step` if no action is marked.
    """
    lines = [f"schedule {name!r}: {why}"]
    for number, row in enumerate(rows):
        cells = [f">>{action}<<" if (number, at) == (rank, step) else str(action) for at, action in enumerate(row)]
        lines.append(f"  rank {number}: {' '.join(cells)}".rstrip())
    return ScheduleError("\n".join(lines), rank=rank, step=step)
