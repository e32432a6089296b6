"""How often to look for what has come, when nothing can say that something has."""

from __future__ import annotations

from time import perf_counter

import trio
from trio.lowlevel import ParkingLot, checkpoint

#: So long after something happened, look at every turn of the event loop.
SPIN_S = 1e-3

#: The same while bytes are under way: MPI moves some 16 KiB at a look, and says nothing before a piece is through.
SPIN_MOVING_S = 20e-3

#: After that, pause for this part of the time that has passed since: what comes late is noticed that much later.
PAUSE_PART = 1 / 32

#: The same while bytes are under way.
PAUSE_PART_MOVING = 1 / 256

#: Longest pause, and the pause while nobody here waits for anything. A turn of an event loop that has gone cold
#: costs about 0.2 ms of processor time, 1.5 % of a core at this rate.
LONGEST_PAUSE_S = 16e-3


class Pace:
    """Pauses that grow with the time since something happened. MPI has no descriptor that an event loop could wait for.

    A wait of t seconds is noticed at most max(1 ms, t/32) late, 16 ms at the most: Linux rounds what an event loop
    sleeps up to whole milliseconds. Bytes that are under way are looked after more often: in most MPI libraries they
    move only during a call.
    """

    def __init__(self) -> None:
        self._stirred_s = perf_counter()
        self._sleeper = ParkingLot()

    def stir(self) -> None:
        """Note that something happened, so that more of it is likely; end a pause."""
        self._stirred_s = perf_counter()
        self._sleeper.unpark_all()

    async def rest(self, *, urgent: bool, moving: bool) -> None:
        """Pause as long as is right now.

        Args:
            urgent: Whether somebody waits for what may come.
            moving: Whether bytes are under way.
        """
        waited_s = perf_counter() - self._stirred_s
        if waited_s < (SPIN_MOVING_S if moving else SPIN_S) and (urgent or moving):
            await checkpoint()
            return
        with trio.move_on_after(pause_s(waited_s, urgent=urgent, moving=moving)):
            await self._sleeper.park()


def pause_s(waited_s: float, *, urgent: bool, moving: bool) -> float:
    """Return how long to pause when nothing has happened for so long."""
    if not urgent and not moving:
        return LONGEST_PAUSE_S
    return min(waited_s * (PAUSE_PART_MOVING if moving else PAUSE_PART), LONGEST_PAUSE_S)
