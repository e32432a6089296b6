"""Where the ranks of one communicator meet that live in several processes of one host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from trio.lowlevel import TrioToken

from transports.common import Board, Place

from ..communicator import Communicator
from ..match import Match
from .workers import Workers

#: The last phase of an operation: a rank reads nothing of the others any more.
DONE = 3


class Mode(IntEnum):
    """Where the input of a rank is that has come."""

    NOWHERE = 0  #: it gives nothing
    ON_BOARD = 1  #: on the board; `where` is its length
    MAPPED = 2  #: in memory that all map
    PRIVATE = 3  #: in its own memory
    HOMELESS = 4  #: it should be mapped, but there is no room
    COMMON = 5  #: in memory that all map, and its owner may change it once all have read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all meetings of a process share."""

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
        """Return mapped memory, after taking back what nobody reads any more."""
        lent = self._lent
        while lent and self.board.passed(lent[0][0], lent[0][1], DONE):
            self.board.take_back(lent.popleft()[2])
        return self.board.lend(nbytes)

    def keep(self, number: int, tag: int, place: Place) -> None:
        """Take memory back once all have read it."""
        self._lent.append((number, tag, place))
