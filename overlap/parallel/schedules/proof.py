"""The proof of a pipeline schedule: every microbatch passes every stage once, in an order that ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...errors import ScheduleError
from .action import Action, ActionKind, Rows
from .timing import Durations, replay_starts


def prove(name: str, rows: Rows) -> tuple[int, int, tuple[int, ...]]:
    """Prove a schedule; return how many stages and microbatches it has, and the rank of every stage.

    Each stage belongs to one rank. Of each stage and microbatch there is one F, and one B or one I and one W, nothing
    twice, in an order that dependencies allow. The ranks, each in its own order, come to the end.

    Raises:
        ScheduleError: If any of this does not hold. The message has every row, and marks where.
    """
    owners = _find_owners(name, rows)
    stages, microbatches = len(owners), 1 + max(action.microbatch for row in rows for action in row)
    _prove_complete(name, rows, owners, microbatches)
    _prove_end(name, rows, owners)
    return stages, microbatches, owners


def peak_live(rows: Rows) -> tuple[int, ...]:
    """Return for every rank how many activations it holds at most, each of one microbatch at one of its stages.

    One is held from its F to its B, or to its W.
    """
    return tuple(_count_peak_live(row) for row in rows)


def _count_peak_live(row: Sequence[Action]) -> int:
    """Return the most activations that a rank holds at once, in the order of its row."""
    live = most = 0
    for action in row:
        live += action.kind is ActionKind.FORWARD
        most = max(most, live)
        live -= action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    return most


def _find_owners(name: str, rows: Rows) -> tuple[int, ...]:
    """Return the rank of every stage; refuse stages of two ranks, or of none."""
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            owner = owners.setdefault(action.stage, rank)
            if owner != rank:
                raise _schedule_error(name, rows, rank, step, f"stage {action.stage} is rank {owner}'s already")
    if not owners:
        raise _schedule_error(name, rows, None, None, "nothing is to be done")
    for stage in range(max(owners) + 1):
        if stage not in owners:
            raise _schedule_error(name, rows, None, None, f"no rank has stage {stage}")
    return tuple(owners[stage] for stage in range(len(owners)))


def _prove_complete(name: str, rows: Rows, owners: tuple[int, ...], microbatches: int) -> None:
    """Refuse rows with an action twice, or a microbatch without its F and B, or F, I and W, at a stage."""
    counts = Counter(action for row in rows for action in row)
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if counts[action] > 1 and action in row[:step]:
                raise _schedule_error(name, rows, rank, step, f"{action} is there twice")
    for stage, rank in enumerate(owners):
        for i in range(microbatches):
            kinds = "".join(kind for kind in ActionKind if Action(stage, kind, i) in counts)
            if kinds not in ("FB", "FIW"):
                count = f"has {', '.join(kinds) or 'nothing'} of microbatch {i}"
                raise _schedule_error(name, rows, rank, None, f"stage {stage} {count}; it takes F and B, or F, I and W")


def _prove_end(name: str, rows: Rows, owners: tuple[int, ...]) -> None:
    """Replay the rows, and refuse them if a rank waits without end; the error names each waiting rank."""
    starts = replay_starts(rows, owners, Durations())
    stuck = {rank: step for rank, row in enumerate(rows) for step in range(len(row))[::-1] if row[step] not in starts}
    if stuck:
        waits = []
        for rank, step in stuck.items():
            action = rows[rank][step]
            missing = next(e for e in action.needs(len(owners) - 1) if not any(each in starts for each in e))
            waits.append(f"rank {rank} waits in {action} for {' or '.join(map(str, missing))}")
        rank, step = next(iter(stuck.items()))
        raise _schedule_error(name, rows, rank, step, f"it never ends: {', '.join(waits)}")


def _schedule_error(name: str, rows: Rows, rank: int | None, step: int | None, what: str) -> ScheduleError:
    """Return the error with all rows in its message, and the action of `rank` and `step` marked."""
    lines = [f"schedule {name!r}: {what}"]
    for each, row in enumerate(rows):
        cells = [f">>{action}<<" if (each, at) == (rank, step) else str(action) for at, action in enumerate(row)]
        lines.append(f"  rank {each}: {' '.join(cells)}".rstrip())
    return ScheduleError("\n".join(lines), rank=rank, step=step)
