"""What watches a world of real time: who waits too long, and who keeps its event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Protocol

import trio

from ..notice import notify
from .loop_watch import Busy, LoopWatch
from .stall_watch import OtherStandings, StallLimits, StallWatch
from .world_member import Member


class OtherLoops(OtherStandings, Protocol):
    """The other processes of a world, as its watch sees them."""

    def tell_busy(self, rank: int, place: str) -> None:
        """Say that a rank here keeps the loop, and where, or with no place that it does no more; any thread."""


def world_watch(
    members: Sequence[Member],
    token: trio.lowlevel.TrioToken,
    limits: StallLimits,
    others: OtherLoops | None,
    give_up: Callable[[float], None],
) -> LoopWatch:
    """Return what watches for stalls, and for who keeps the loop, for the length of a ``with`` in the loop's thread.

    Args:
        members: The ranks of this process.
        token: Of their loop.
        limits: When a stall is told, and when it is given up.
        others: Where the other processes are told.
        give_up: Ends the world, given for how many seconds nothing has moved.
    """
    ranks = {member.context.rank: member for member in members}
    watch = StallWatch(ranks, limits, others, give_up)
    return LoopWatch(
        token,
        get_ident(),
        look=watch.look,
        period_s=watch.period_s,
        tasks=lambda: {rank: member.task for rank, member in ranks.items() if member.task is not None},
        told=partial(_tell_busy, others, alone=len(members) == 1),
        over=lambda busy, now_ns: _note_free(ranks[busy.rank], others, busy, now_ns),
    )


def _tell_busy(others: OtherLoops | None, busy: Busy, seconds: float, *, alone: bool) -> None:
    """Say who keeps the loop; in the thread that watches it."""
    waiting = "nothing else of it goes on" if alone else "the other ranks of this process wait"
    notify(
        f"rank {busy.rank} has kept the event loop busy for {seconds:.0f} s at {busy.place}; {waiting}; "
        "rank.compute or trio.to_thread would take that work off the loop"
    )
    if others:
        others.tell_busy(busy.rank, busy.place)


def _note_free(member: Member, others: OtherLoops | None, busy: Busy, now_ns: int) -> None:
    """Show in the timeline that a rank has kept the loop."""
    member.context.record(("program", "program", busy.place, busy.since_ns, now_ns, None))
    if others:
        others.tell_busy(busy.rank, "")
