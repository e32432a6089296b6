"""Pauses between two polls of MPI, which cannot wake a process when a message arrives."""

from __future__ import annotations

from time import perf_counter

import trio
from trio.lowlevel import ParkingLot, checkpoint

#: After an event, MPI is polled in every turn of the event loop for so long.
SPIN_S = 1e-3

#: Likewise while bytes are under way: MPI moves some 16 KiB in a poll, and reports only finished pieces.
SPIN_MOVING_S = 20e-3

#: After that, each pause is this part of the time since the event, so a late message is noticed that much later.
PAUSE_PART = 1 / 32

#: Likewise while bytes are under way.
PAUSE_PART_MOVING = 1 / 256

#: Longest pause, and the pause while no call here waits for anything. A turn of an event loop that has gone cold
#: costs about 0.2 ms of processor time, 1.5 % of a core at this rate.
LONGEST_PAUSE_S = 16e-3


class PollPace:
    """Pauses that grow with the time since something happened. MPI has no descriptor that an event loop could wait for.

    A wait of t seconds is noticed at most max(1 ms, t/32) late, 16 ms at the most: Linux rounds what an event loop
    sleeps up to whole milliseconds. Bytes that are under way are looked after more often: in most MPI libraries they
    move only during a call.
    """

    def __init__(self) -> None:
        self._stirred_s = perf_counter()
        self._sleeper = ParkingLot()

    def stir(self) -> None:
        """Record an event, after which another is likely; end a pause."""
        self._stirred_s = perf_counter()
        self._sleeper.unpark_all()

    async def rest(self, *, urgent: bool, moving: bool) -> None:
        """Pause before the next poll: one turn of the event loop soon after an event, longer later.

        Args:
            urgent: Whether a call waits for a message.
            moving: Whether bytes are under way.
        """
        waited_s = perf_counter() - self._stirred_s
        if waited_s < (SPIN_MOVING_S if moving else SPIN_S) and (urgent or moving):
            await checkpoint()
            return
        with trio.move_on_after(pause_s(waited_s, urgent=urgent, moving=moving)):
            await self._sleeper.park()


def pause_s(waited_s: float, *, urgent: bool, moving: bool) -> float:
    """Return the pause after so long without an event."""
    if not urgent and not moving:
        return LONGEST_PAUSE_S
    return min(waited_s * (PAUSE_PART_MOVING if moving else PAUSE_PART), LONGEST_PAUSE_S)
