"""What to say about a schedule that fails its proof."""

from __future__ import annotations

import numpy as np

from ..errors import ScheduleError
from .provenance import Origin, contributors, wanted
from .schedule import IN_RANK_ORDER, Buffer, Schedule


def hazard(schedule: Schedule, row: int, what: str) -> ScheduleError:
    """Return the error for a row that writes what another row of its step touches."""
    rank, slot, step = int(schedule.dst[row]), int(schedule.dslot[row]), int(schedule.step[row])
    buffer = Buffer(int(schedule.dbuf[row])).name
    return ScheduleError(
        f"{schedule!r}: step {step}, row {row} writes {buffer} of rank {rank} from slot {slot} on, which {what}; "
        "give one of them another slot or another step",
        rank=rank,
        slot=slot,
        step=step,
    )


def explain(schedule: Schedule, rank: int, slot: int) -> ScheduleError:
    """Return the error for a result that is wrong, by tracing where it comes from."""
    got, want = contributors(schedule, rank, slot), wanted(schedule, rank, slot)
    step = _last_write(schedule, rank, slot)
    place = f"{schedule!r}: slot {slot} of the result of rank {rank}, last written in step {step},"
    missing, surplus = sorted(want - got), sorted(got - want)
    told = []
    if missing:
        told.append(f"lacks {_list(missing)}")
    if surplus:
        told.append(f"has more than once or should not have {_list(surplus)}")
    if not told:
        in_order = schedule.algorithm in IN_RANK_ORDER
        told.append("is not combined in the order of ranks" if in_order else "is not combined as on the other ranks")
    culprit = next(iter(missing + surplus), None)
    return ScheduleError(
        f"{place} {' and '.join(told)}",
        rank=rank,
        slot=slot,
        step=step,
        contributor=None if culprit is None else culprit.rank,
    )


def _last_write(schedule: Schedule, rank: int, slot: int) -> int | None:
    s = schedule
    rows = (s.dst == rank) & (s.dbuf == Buffer.OUT) & (s.dslot <= slot) & (slot < s.dslot + s.count)
    return int(s.step[np.flatnonzero(rows)[-1]]) if rows.any() else None


def _list(origins: list[Origin]) -> str:
    told = [f"{o.buffer.name} slot {o.slot} of rank {o.rank}" for o in origins[:3]]
    return ", ".join(told) + (f" and {len(origins) - 3} more" if len(origins) > 3 else "")
