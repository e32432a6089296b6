"""Where a result comes from: an exact, slow answer about one slot. It explains failed proofs, and is their oracle."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from .schedule import Buffer, Op, Schedule


class Origin(NamedTuple):
    """A slot of some rank's buffer before the first step."""

    rank: int
    buffer: Buffer
    slot: int


def contributors(schedule: Schedule, rank: int, slot: int) -> Counter[Origin]:
    """Return how often each initial slot goes into slot `slot` of the OUT of `rank`, following the rows backwards.

    Cost: O(rows), in Python for the rows that touch this slot's place within a block.
    """
    k, s = schedule.slots_per_block, schedule
    rows = np.flatnonzero((slot - s.dslot) % k < s.count)
    names = (s.op, s.src, s.dst, s.sbuf, s.sslot, s.dbuf, s.dslot, s.count)
    demand: Counter[tuple[int, int, int]] = Counter({(rank, int(Buffer.OUT), slot): 1})
    for op, src, dst, sbuf, sslot, dbuf, dslot, count in zip(*(c[rows][::-1].tolist() for c in names), strict=True):
        for offset in range((slot - dslot) % k, count, k):
            target = (dst, dbuf, dslot + offset)
            times = demand[target] if op == Op.ADD else demand.pop(target, 0)
            if times:
                demand[(src, sbuf, sslot + offset)] += times
    return Counter({Origin(r, Buffer(b), at): times for (r, b, at), times in demand.items() if times})


def wanted(schedule: Schedule, rank: int, slot: int) -> Counter[Origin]:
    """Return what `contributors` must be by the definition of the collective."""
    k, size = schedule.slots_per_block, schedule.size
    block, index = divmod(slot, k)
    everybody, own = range(size), rank * k + slot
    arrived = [src for src, dst in schedule.pairs if dst == rank]
    cells = {
        "all_reduce": [(r, slot) for r in everybody],
        "reduce": [(r, slot) for r in everybody],
        "reduce_scatter": [(r, own) for r in everybody],
        "all_gather": [(block, index)],
        "gather": [(block, index)],
        "broadcast": [(schedule.root, slot)],
        "scatter": [(schedule.root, own)],
        "all_to_all": [(block, rank * k + index)],
        "permute": [(src, slot) for src in arrived],
    }[schedule.collective]
    initial = [Origin(rank, Buffer.OUT, slot)] if schedule.collective == "permute" and not arrived else []
    return Counter([Origin(r, Buffer.IN, at) for r, at in cells] + initial)
