"""Errors of schedules that fail their proof, and the origin of each wrong result."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from ..errors import ScheduleError
from .schedule import IN_RANK_ORDER, Buffer, Op, Schedule


class Origin(NamedTuple):
    """A slot of a rank's buffer, with the value that it has before the first step."""

    rank: int
    buffer: Buffer
    slot: int


def count_contributors(schedule: Schedule, rank: int, slot: int) -> Counter[Origin]:
    """Return how often each initial value enters the final value of a slot of OUT on a rank.

    The rows are followed backwards from that slot. A right all-reduce counts each rank's IN once.

    Cost: O(rows); a Python loop over the rows that touch the same slot number modulo k as `slot`.

    Args:
        schedule: The table.
        rank: The rank.
        slot: The slot of OUT on it.
    """
    k, s = schedule.slots_per_block, schedule
    rows = np.flatnonzero((slot - s.dslot) % k < s.count)
    names = (s.op, s.src, s.dst, s.sbuf, s.sslot, s.dbuf, s.dslot, s.count)
    demand: Counter[tuple[int, int, int]] = Counter({(rank, int(Buffer.OUT), slot): 1})
    for op, src, dst, sbuf, sslot, dbuf, dslot, count in zip(*(c[rows][::-1].tolist() for c in names), strict=True):
        for offset in range((slot - dslot) % k, count, k):
            target = (dst, dbuf, dslot + offset)
            # Backwards: the value after an ADD needs its source and its old target; after a MOVE, its source alone.
            times = demand[target] if op == Op.ADD else demand.pop(target, 0)
            if times:
                demand[(src, sbuf, sslot + offset)] += times
    return Counter({Origin(r, Buffer(b), at): times for (r, b, at), times in demand.items() if times})


def count_expected_contributors(schedule: Schedule, rank: int, slot: int) -> Counter[Origin]:
    """Return how often each initial value must enter a slot of OUT, by the definition of the collective.

    Args:
        schedule: The table, for the collective and its root or pairs.
        rank: The rank.
        slot: The slot of OUT on it.
    """
    k, size = schedule.slots_per_block, schedule.size
    block, index = divmod(slot, k)
    everybody, own_slot = range(size), rank * k + slot
    arrived = [src for src, dst in schedule.pairs if dst == rank]
    cells = {
        "all_reduce": [(r, slot) for r in everybody],
        "reduce": [(r, slot) for r in everybody],
        "reduce_scatter": [(r, own_slot) for r in everybody],
        "all_gather": [(block, index)],
        "gather": [(block, index)],
        "broadcast": [(schedule.root, slot)],
        "scatter": [(schedule.root, own_slot)],
        "all_to_all": [(block, rank * k + index)],
        "permute": [(src, slot) for src in arrived],
    }[schedule.collective]
    initial = [Origin(rank, Buffer.OUT, slot)] if schedule.collective == "permute" and not arrived else []
    return Counter([Origin(r, Buffer.IN, at) for r, at in cells] + initial)


def hazard_error(schedule: Schedule, row: int, conflict: str) -> ScheduleError:
    """Return the error for a row that writes a cell which another row of its step uses.

    Args:
        schedule: The table.
        row: The row.
        conflict: What the other row does with the cell, as text: "another row of its step reads".
    """
    rank, slot, step = int(schedule.dst[row]), int(schedule.dslot[row]), int(schedule.step[row])
    buffer = Buffer(int(schedule.dbuf[row])).name
    return ScheduleError(
        f"{schedule!r}: step {step}, row {row} writes {buffer} of rank {rank} from slot {slot} on, which {conflict}; "
        "give one of them another slot or another step",
        rank=rank,
        slot=slot,
        step=step,
    )


def wrong_result_error(schedule: Schedule, rank: int, slot: int) -> ScheduleError:
    """Return the error for a wrong result, with the inputs that reached it and those that should have.

    Args:
        schedule: The table.
        rank: Rank with the wrong result.
        slot: Slot of OUT that is wrong.
    """
    got, want = count_contributors(schedule, rank, slot), count_expected_contributors(schedule, rank, slot)
    step = _last_write_step(schedule, rank, slot)
    subject = f"{schedule!r}: slot {slot} of the result of rank {rank}, last written in step {step},"
    missing, surplus = sorted(want - got), sorted(got - want)
    problems = []
    if missing:
        problems.append(f"lacks {_list_transfers(missing)}")
    if surplus:
        problems.append(f"has more than once or should not have {_list_transfers(surplus)}")
    if not problems:
        in_order = schedule.algorithm in IN_RANK_ORDER
        problems.append(
            "is not combined in the order of ranks" if in_order else "is not combined as on the other ranks"
        )
    # The rank of the first wrong contribution; None if only the order is wrong.
    culprit = next(iter(missing + surplus), None)
    return ScheduleError(
        f"{subject} {' and '.join(problems)}; correct the generator of the schedule",
        rank=rank,
        slot=slot,
        step=step,
        contributor=None if culprit is None else culprit.rank,
    )


def _last_write_step(schedule: Schedule, rank: int, slot: int) -> int | None:
    """Return the step in which a slot of OUT was last written on a rank; None if it never was."""
    s = schedule
    rows = (s.dst == rank) & (s.dbuf == Buffer.OUT) & (s.dslot <= slot) & (slot < s.dslot + s.count)
    return int(s.step[np.flatnonzero(rows)[-1]]) if rows.any() else None


def _list_transfers(origins: list[Origin]) -> str:
    names = [f"{o.buffer.name} slot {o.slot} of rank {o.rank}" for o in origins[:3]]
    return ", ".join(names) + (f" and {len(origins) - 3} more" if len(origins) > 3 else "")
