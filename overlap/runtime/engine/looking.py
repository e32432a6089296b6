"""What whoever waits for an operation may do itself: look for a moment whether the others have come, and go on.

That saves two wake-ups: a task need not sleep, and neither the loop nor a thread has to be woken. While one looks, its
process need not be rung.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress

from ...errors import PeerFailedError
from ..event_loop import Handover, Looks
from ..operation import Operation
from .meeting import Meeting


class Looking(Looks):
    """One rank's end of an operation that goes on when the others have come as far."""

    __slots__ = ("_meeting", "_operation")

    _meeting: Meeting
    _operation: Operation

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether it is for the others that it waits. Any thread may ask."""

    @property
    @abstractmethod
    def others_came(self) -> bool:
        """Whether it waits for the others, and they have come as far, or one never will. Any thread may ask."""

    @abstractmethod
    def look(self) -> None:
        """Go on, if the others have come as far."""

    def look_before_sleeping(self) -> None:
        """Look for a moment, on the loop's thread, before a task sleeps that waits for the operation.

        Where other ranks live in this process, they may be those who have not come, and it is their turn.
        """
        alone, board = self._meeting.communicator.here == 1, self._meeting.board
        while self.waits and (board.wait(self) if alone else self.others_came):
            self.look()

    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Look for a while, in a thread that waits for the operation, and go on if all have come meanwhile."""
        if self._roused(handover):
            try:
                self._meeting.board.linger(self, longest_s)
            finally:
                self._dozed(handover)

    def _roused(self, handover: Handover) -> bool:
        if not handover.enter():
            return False
        try:
            return self.waits and self._meeting.board.rouse()
        finally:
            handover.leave()

    def _dozed(self, handover: Handover) -> None:
        """Let this process be rung again, and look who has come before that could be known."""
        alone, board, operation = False, self._meeting.board, self._operation
        if handover.enter():
            try:
                alone = board.doze()
                if operation.scope is self and not operation.heard and board.lost is None:
                    self.look()
            finally:
                handover.leave()
        if not alone:
            with suppress(PeerFailedError):  # nobody waits any more
                operation.context.from_thread(self._doze)

    def _doze(self) -> None:
        self._meeting.board.doze()
        self._meeting.board.look()
