"""Looking: one rank's end of an operation that waits for other processes of its host looks before it sleeps.

A look saves two wake-ups: a task need not sleep, and neither the loop nor a thread has to be woken. Meanwhile its
process need not be rung.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from time import perf_counter

from trio import RunFinishedError

from transports.common import Waits

from ..event_loop import Handover, Looks


class Looking(Looks):
    """One rank's end of an operation, which goes on when the others have come as far."""

    __slots__ = ()

    @property
    @abstractmethod
    def waiting(self) -> Waits:
        """The way to wait for the other processes."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether the operation waits for other processes. Any thread may ask."""

    @property
    @abstractmethod
    def others_came(self) -> bool:
        """Whether it waits for the others, and they have come as far, or one never will. Any thread may ask."""

    @property
    def is_for_loop(self) -> bool:
        """Whether only the loop can go on, for instance because that wakes a task. Any thread may ask."""
        return False

    @abstractmethod
    def look(self) -> None:
        """Go on, if the others have come as far."""

    @abstractmethod
    def look_in_thread(self) -> None:
        """Go on likewise, in a thread that has the loop's place, unless that is for the loop to do."""

    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Look for a while, in a thread that waits for the operation, and go on whenever all have come as far."""
        until_s = None if longest_s is None else perf_counter() + longest_s
        roused = True  # unless it is known not to be: this thread may be interrupted anywhere
        try:
            roused = handover.in_place(self._roused, False)
            while roused and self.waiting.linger(self, None if until_s is None else max(0.0, until_s - perf_counter())):
                if not handover.in_place(self._goes_on, False):
                    break
        finally:
            if roused and not handover.in_place(self._dozed, False):
                with suppress(RunFinishedError):  # nobody waits any more
                    handover.post(self._doze)

    def _roused(self) -> bool:
        """Take the place of the sleeping loop, which need not be rung then; False if more is waited for here."""
        return self._ready() and not self.is_for_loop and self.waiting.rouse(self)

    def _ready(self) -> bool:
        """Get ready to look, in a thread that has the loop's place; return whether there is anything to wait for."""
        return self.waits

    def _goes_on(self) -> bool:
        """Go on; return whether it waits again, and nothing else is to be done."""
        self.look_in_thread()
        return self.waits and not self.is_for_loop and self.waiting.alone(self)

    def _dozed(self) -> bool:
        """Let this process be rung again, and look who has come before that could be known; False: the loop must."""
        self.waiting.doze()
        self.look_in_thread()
        return self.waiting.alone(self) and not (self.waits and self.is_for_loop)

    def _doze(self) -> None:
        self.waiting.doze()
        self.waiting.look()
