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

# How long a thread looks before it sleeps, as a watchman does.
_LOOK_S = 50e-6


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
        if self._roused(handover):
            until = perf_counter() + _LOOK_S
            while not self._others_came and not self._operation.done and perf_counter() < until:
                pass
            self._dozed(handover)

    def _roused(self, handover: Handover) -> bool:
        if not handover.enter():
            return False
        try:
            return self._operation.scope is self and self._meeting.board.rouse()
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
