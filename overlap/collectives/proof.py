"""Proof of a schedule: it computes its collective, on every machine and under any timing, or it does not run.

Four things are proved.

1. **The result.** The table is replayed on random numbers (see `fingerprint`), with two seeds, against the definition
   of the collective. Missing, repeated and stale contributions all change the result. The vocabulary (see `rules`) lets
   sums enter OUT by finalising only, and never leave it for SCRATCH, so they are finalised once.
2. **The same bits on all ranks.** In an all-reduce a third replay combines by a function that is neither associative
   nor commutative, with operands in the order that the executor uses. All ranks must get the same value: then they
   applied the same parenthesisation to operands in the same order. Algorithms that are to reduce in the order of ranks
   must get the value that this order has.
3. **No hazards.** In a phase no cell is written twice, except by the ADDs of one fan-in group; no cell is read and
   written, except by its own ADD; and no cell that a local row reads is written remotely in the same step. This is
   checked on the layout in which buffers share memory as far as an executor may let them; the second seed is replayed
   on that layout.
4. **No deadlock.** By the third point all dependencies of a row, by data or by its place in a queue, point to earlier
   rows of the table. The table is therefore an order in which everything can be carried out one transfer at a time,
   each beginning when the one before has ended: even without any credit (a send ends when its receiver has taken the
   bytes) something can always go on, and more credits only relax that.
"""

from __future__ import annotations

from .execution import Replay
from .memory import Fingerprint, ReplayMemory, SlotLayout
from .rules import check_header, phase_bounds
from .schedule import IN_RANK_ORDER, Schedule

_SEEDS = (0x6A09E667, 0xBB67AE85)


def verify(schedule: Schedule) -> None:
    """Prove a schedule.

    Cost: about 75 ns a row, and about 55 bytes for each slot of each rank.

    Args:
        schedule: Any table; nothing about it is assumed.

    Raises:
        ScheduleError: With the rank, slot and step at fault, and the missing or duplicate contributor.
    """
    check_header(schedule)
    bounds = phase_bounds(schedule)
    layout, prints = SlotLayout(schedule), [Fingerprint(schedule, seed) for seed in _SEEDS]
    replay = Replay(schedule, layout, _proof_memories(schedule, layout, prints))
    replay.run(bounds)
    replay.check_results()


def _proof_memories(schedule: Schedule, layout: SlotLayout, prints: list[Fingerprint]) -> list[ReplayMemory]:
    """Return the memories on which to replay a schedule.

    If the schedule's buffers never share memory, one memory carries both fingerprints. Otherwise there are two: one
    with all buffers apart, one with shared buffers. A third detects the order of operands where the proof checks it.
    """
    if layout.shared == layout.apart:
        return [ReplayMemory(layout, layout.apart, prints)]
    # Each of the two memories carries one fingerprint.
    ordered = schedule.collective == "all_reduce" or schedule.algorithm in IN_RANK_ORDER
    first = ReplayMemory(layout, layout.apart, prints[:1], room_for_copy=ordered)
    memories = [first, ReplayMemory(layout, layout.shared, prints[1:])]
    return [*memories, first.order_sensitive_copy(layout)] if ordered else memories
