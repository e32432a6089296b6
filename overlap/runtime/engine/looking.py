"""What of an operation a thread may do that waits for it: look for a moment whether the others have come, and go on.

A loop that sleeps is not woken for that, and neither is the thread. While it looks, its process need not be rung.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from time import perf_counter

from ...errors import PeerFailedError
from ..handover import Handover
from ..operation import Operation
from .meeting import Meeting

__all__ = ["Looking"]


class Looking(ABC):
    """One rank's end of an operation that goes on when the others have come as far."""

    __slots__ = ("_meeting", "_operation")

    _meeting: Meeting
    _operation: Operation

    @property
    @abstractmethod
    def _others_came(self) -> bool:
        """Whether it can go on; any thread may ask."""

    @abstractmethod
    def look(self) -> None:
        """Go on, if the others have come as far."""

    @abstractmethod
    def cancel(self) -> None:
        """End, once nothing of this rank's is touched any more."""

    def look_here(self, handover: Handover) -> None:
        """Look for a moment, in a thread that waits for the operation, and go on if all have come meanwhile."""
        patience_s = self._roused(handover)
        if patience_s:
            until = perf_counter() + patience_s
            while not (came := self._others_came or self._operation.done) and perf_counter() < until:
                pass
            self._dozed(handover, came=bool(came))

    def _roused(self, handover: Handover) -> float:
        if not handover.enter():
            return 0.0
        try:
            return self._meeting.board.rouse() if self._operation.scope is self else 0.0
        finally:
            handover.leave()

    def _dozed(self, handover: Handover, *, came: bool) -> None:
        """Let this process be rung again, and look who has come before that could be known."""
        alone, board, operation = False, self._meeting.board, self._operation
        if handover.enter():
            try:
                alone = board.doze(came=came)
                if operation.scope is self and not operation.heard and board.lost is None:
                    self.look()
            finally:
                handover.leave()
        if not alone:
            with suppress(PeerFailedError):  # nobody waits any more
                operation.context.from_thread(self._doze, came)

    def _doze(self, came: bool) -> None:
        self._meeting.board.doze(came=came)
        self._meeting.board.look()
