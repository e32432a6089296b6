"""Meetings of ranks in several processes of one host, at a board that they look at before they sleep.

A look saves two wake-ups: a task need not sleep, and neither the loop nor a thread has to be woken. Meanwhile its
process need not be rung.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from trio.lowlevel import TrioToken

from transports.common import Board, Place

from ...errors import PeerFailedError
from ..communicator import Communicator
from ..event_loop import Handover, Looks
from ..match import Match
from ..operation import Operation
from .workers import Workers

#: The last phase of an operation: a rank reads nothing of the others any more.
DONE = 3


class Mode(IntEnum):
    """The place of the input of a rank that has come."""

    NOWHERE = 0  #: it gives nothing
    ON_BOARD = 1  #: on the board; `where` is its length
    MAPPED = 2  #: in memory that all map
    PRIVATE = 3  #: in its own memory
    HOMELESS = 4  #: it should be mapped, but there is no room
    COMMON = 5  #: in memory that all map, and its owner may change it once all have read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The objects that all meetings of a process share."""

    workers: Workers  # Where large work is done
    token: TrioToken  # Of the event loop
    fall_back: Callable[[Communicator, Match], None]  # Starts an operation as a program, where memory does not do


class Meeting:
    """A board, and the memory that is lent for it.

    Attributes:
        board: What the ranks have in common.
        communicator: Theirs.
        common: What this meeting shares with others.
    """

    def __init__(self, common: Common, board: Board, communicator: Communicator) -> None:
        self.common, self.board, self.communicator = common, board, communicator
        self._lent: deque[tuple[int, int, Place]] = deque()

    def lend(self, nbytes: int) -> Place | None:
        """Return mapped memory, after taking back the places that nobody reads any more."""
        lent = self._lent
        while lent and self.board.passed(lent[0][0], lent[0][1], DONE):
            self.board.take_back(lent.popleft()[2])
        return self.board.lend(nbytes)

    def keep(self, number: int, tag: int, place: Place) -> None:
        """Take memory back once all have read it."""
        self._lent.append((number, tag, place))


class Looking(Looks):
    """One rank's end of an operation, which goes on when the others have come as far."""

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
