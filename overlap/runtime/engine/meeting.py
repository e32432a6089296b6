"""Meetings of ranks in several processes of one host, at a board."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import trio
from trio.lowlevel import TrioToken

from transports.common import Board, Place, Waits

from ...collectives.call import Call
from ..communicator import Communicator
from ..executor import Executor
from ..handover import Looking
from ..operation import Operation
from ..stream import SPAN
from .workers import Workers

_LOOK_S = 0.001  # between looks at a row that is not free

#: The last phase of an operation: a rank reads nothing of the others any more.
DONE = 3


class Mode(IntEnum):
    """The place of the input of a rank that has come."""

    NOWHERE = 0  #: the rank gives no input
    ON_BOARD = 1  #: on the board; `where` is its length
    MAPPED = 2  #: in memory that all processes map
    PRIVATE = 3  #: in the private memory of its process
    HOMELESS = 4  #: not in mapped memory, for want of room
    COMMON = 5  #: in memory that all processes map; its owner may change it once all have read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The objects that all meetings of a process share."""

    workers: Workers  # The threads that do large work
    token: TrioToken  # Token of the event loop
    program: Callable[[Communicator, Call, Operation], Executor]  # Chooses a program, where memory does not do


class Meeting:
    """A board, and the memory that is lent for it.

    Attributes:
        board: What the ranks have in common.
        communicator: Theirs.
        common: What this meeting shares with others.
    """

    common: Common
    board: Board
    communicator: Communicator

    def __init__(self, common: Common, board: Board, communicator: Communicator) -> None:
        self.common, self.board, self.communicator = common, board, communicator
        self._lent: deque[tuple[int, int, Place]] = deque()
        self._met = -1  # the last operation to which all have come

    def met(self, number: int) -> None:
        """Note that all ranks have come to an operation."""
        self._met = max(self._met, number)

    def free(self, operation: Operation) -> bool:
        """Whether a rank may post its end of an operation: the others are done with what its row holds.

        They are if all have come to an operation that is less than `SPAN` before. A rank that only gives, and does not
        wait, may be far ahead of the others.
        """
        number = operation.seq
        if number - SPAN <= self._met:
            return True
        for past in (number - SPAN // 2, number - SPAN):  # the first spares the next operations this question
            if self.board.came(past):
                self.met(past)
                return True
        return self.board.free(operation.port.position, number)

    async def until_free(self, operation: Operation, begin: Callable[[], None]) -> None:
        """Begin an operation as soon as its row is free, unless it has been given up; nothing rings for that."""
        while operation.scope is not None and not (self.board.lost or self.free(operation)):  # noqa: ASYNC110
            await trio.sleep(_LOOK_S)
        if operation.scope is not None:
            begin()

    def close(self) -> None:
        """Give back all memory of the meeting; no rank uses it any more."""
        while self._lent:
            self.board.take_back(self._lent.popleft()[2])
        self.board.close()

    def lend(self, nbytes: int) -> Place | None:
        """Return mapped memory, after taking back the places that nobody reads any more."""
        lent = self._lent
        while lent and self.board.passed(lent[0][0], lent[0][1], DONE):
            self.board.take_back(lent.popleft()[2])
        return self.board.lend(nbytes)

    def keep(self, number: int, tag: int, place: Place) -> None:
        """Take memory back once all have read it."""
        self._lent.append((number, tag, place))


class BoardRun(Looking):
    """One rank's end of an operation at a board."""

    __slots__ = ("_meeting", "_operation")

    _meeting: Meeting
    _operation: Operation

    @property
    def waiting(self) -> Waits:
        """The way to wait for the other processes."""
        return self._meeting.board.waiting

    def look_in_thread(self) -> None:
        """Go on, unless that is for the loop to do."""
        if self._operation.scope is self and not self.is_for_loop:
            self.look()

    @property
    def is_for_loop(self) -> bool:
        """Whether going on wakes a task, or is the end of the world."""
        return self._operation.heard or self._meeting.board.lost is not None

    def look_before_sleeping(self) -> None:
        """Look for a moment, on the loop's thread, before a task sleeps that waits for the operation.

        Where other ranks live in this process, they may be those who have not come, and it is their turn.
        """
        alone, waiting = self._meeting.communicator.here == 1, self.waiting
        while self.waits and (waiting.wait(self) if alone else self.others_came):
            self.look()
