"""Boards: shared memory in which the ranks of a group, in several processes of one host, meet for an operation.

A transport with shared memory has a `Board` for each group. An operation has a number and a tag; ranks with equal calls
have equal tags. Each rank *posts* its phase and the place of its bytes, and checks whether the other ranks have reached
that phase. The last rank wakes the others. No function here waits, except as `Waits.wait` and `Waits.linger` say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

#: Operations under way at once: a rank may post number n once all ranks are done with number n - OPERATIONS.
OPERATIONS = 64
#: Longest payload of a post, in bytes.
PAYLOAD_BYTES = 4096
#: Number of phases, which take the last byte of a tag; phase 0 is never posted.
PHASES = 256


class Place:
    """Memory of a board that is lent to an operation of this process.

    Attributes:
        where: Offset by which other ranks find it.
        view: Its bytes.
    """

    __slots__ = ("view", "where")
    view: memoryview
    where: int

    def __init__(self, where: int, view: memoryview) -> None:
        self.where, self.view = where, view


class Watcher(Protocol):
    """An operation that waits at a board until other ranks have come."""

    @property
    def others_came(self) -> bool:
        """Whether the operation can go on, or never will; any thread may ask."""

    def look(self) -> None:
        """Go on with the operation, if the other ranks have come."""


class Waits(ABC):
    """The waiting of a process for others of its host: watchers look, sleep, and are rung awake."""

    __slots__ = ()

    @abstractmethod
    def watch(self, watcher: Watcher) -> None:
        """Add a watcher, which is called on the event loop whenever other ranks have come or a rank is lost."""

    @abstractmethod
    def unwatch(self, watcher: Watcher) -> None:
        """Remove a watcher that `watch` added, if it is still there."""

    @abstractmethod
    def wait(self, watcher: Watcher) -> bool:
        """Return whether a watcher can go on, looking shortly if that has helped lately; the loop's thread only."""

    @abstractmethod
    def rouse(self, watcher: Watcher) -> bool:
        """Stop the wake-ups of this process, because a thread looks instead; False if others wait here, too.

        Args:
            watcher: The one that waits, which `watch` has added.
        """

    @abstractmethod
    def linger(self, watcher: Watcher, longest_s: float | None) -> bool:
        """Return whether somebody can go on, after a look, and then a nap from which another process wakes.

        In any thread, after `rouse`. It ends within a moment once nobody waits any more, or somebody else does.

        Args:
            watcher: The one that waits.
            longest_s: Longest sleep, in seconds; None: no limit.
        """

    @abstractmethod
    def doze(self) -> None:
        """Allow wake-ups again; the caller must look at once."""

    @abstractmethod
    def alone(self, watcher: Watcher) -> bool:
        """Whether nobody else waits here, and there is no message that nobody has taken in."""

    @abstractmethod
    def look(self) -> None:
        """Take in messages, and call all watchers of this process; the loop's thread only."""


class Board(ABC):
    """The shared memory of the ranks of one group. A position is a rank of the group."""

    ready: bool  # Whether all ranks have opened it; before, nothing can be posted
    usable: bool  # Whether there is room for it everywhere; known, and alike everywhere, once it is ready
    reads: bool  # Whether every rank can read every other's private memory; known likewise
    lost: str | None  # Why nothing more can be expected of one of the ranks; None: of all of them
    processes: int  # How many processes of this host have memory in common, this one among them
    waiting: Waits  # How this process waits for the others

    @abstractmethod
    def open(self, position: int, when_ready: Callable[[], None]) -> None:
        """Open the board for a rank of this process; `when_ready` is called later, unless all have already."""

    @abstractmethod
    def close(self) -> None:
        """Give back this process's part of the board, once no rank of any process uses the board any more."""

    @abstractmethod
    def arrive(
        self, position: int, number: int, tag: int, *, where: int = 0, mode: int = 0, payload: memoryview | None = None,
        result: int = 0,
    ) -> None:  # fmt: skip
        """Say that a rank of this process has come to an operation: phase 1.

        Args:
            position: Of the rank.
            number: Of the operation.
            tag: Of the operation; its last byte is 0.
            where: Anything, for the others.
            mode: Anything else.
            payload: Bytes for the others, up to `PAYLOAD_BYTES`.
            result: As in `advance`.
        """

    @abstractmethod
    def advance(self, position: int, number: int, tag: int, phase: int, *, result: int = 0) -> None:
        """Say how far a rank of this process has come since; what it has said before stays for those who are slower.

        Args:
            position: Of the rank.
            number: Of the operation.
            tag: Of the operation.
            phase: How far: 2 or more.
            result: Anything, for the others; 0 leaves it as it was.
        """

    @abstractmethod
    def end(self, position: int, number: int, tag: int) -> None:
        """Say that a rank of this process is done with an operation, all of whose phases it has reached.

        Args:
            position: Of the rank.
            number: Of the operation.
            tag: Of the operation.
        """

    @abstractmethod
    def free(self, position: int, number: int) -> bool:
        """Whether a rank of this process may post this number: all are done with what it last posted in its place."""

    @abstractmethod
    def reached(self, number: int, tag: int, phase: int) -> bool:
        """Whether every rank has come so far with what has this number and tag."""

    @abstractmethod
    def has_come(self, position: int, number: int, tag: int) -> bool:
        """Whether one rank has come to what has this number and tag."""

    @abstractmethod
    def came(self, number: int) -> bool:
        """Whether every rank is known to have come to this number, or on to one that has taken its place."""

    @abstractmethod
    def passed(self, number: int, tag: int, phase: int) -> bool:
        """Whether every rank has come so far, or on to later operations."""

    @abstractmethod
    def posted(self, position: int, number: int) -> tuple[int, int]:
        """Return `where` and `mode` of a rank that has come."""

    @abstractmethod
    def result(self, position: int, number: int) -> int:
        """Return `result` of a rank that has said it."""

    @abstractmethod
    def payload(self, position: int, number: int, nbytes: int) -> memoryview:
        """Return what a rank has brought along, all of it."""

    @abstractmethod
    def payloads(self, position: int, nbytes: int) -> tuple[memoryview, int]:
        """Return where what a rank brings along lies, and how far apart that of one operation is from that of the next.

        That of an operation is at its number modulo `OPERATIONS`; who is quick puts it there before the rank arrives.

        Args:
            position: Of the rank.
            nbytes: Size of each payload: where they lie depends on it.
        """

    @abstractmethod
    def ring(self) -> None:
        """Wake all other processes of the group that sleep at the board."""

    @abstractmethod
    def lend(self, nbytes: int) -> Place | None:
        """Return memory of this process that all ranks can map; None: there is no more."""

    @abstractmethod
    def take_back(self, place: Place) -> None:
        """Take back lent memory that no rank reads any more."""

    @abstractmethod
    def place_of(self, address: int, nbytes: int) -> int | None:
        """Return where memory of this process begins among what all ranks can map; None: it is private."""

    @abstractmethod
    def lend_to_all(self, nbytes: int) -> int | None:
        """Lend memory of this process to all ranks together, and return where it is; None: there is no more.

        It comes back by itself once `left` has been called of every rank.
        """

    @abstractmethod
    def left(self, position: int, owner: int, where: int, nbytes: int) -> Callable[[], None]:
        """Return what says that a rank of this process needs no more what has been lent to all; for any thread.

        Args:
            position: Of the rank.
            owner: Position of a rank of the process whose memory it is.
            where: As `lend_to_all` has returned it there.
            nbytes: As asked for there.
        """

    @abstractmethod
    def mapped(self, position: int, where: int, nbytes: int) -> memoryview:
        """Return memory that a rank was lent."""

    @abstractmethod
    def read(self, position: int, address: int, into: memoryview) -> None:
        """Read the private memory of a rank. In any thread; others run meanwhile.

        Raises:
            LinkLostError: It is gone.
        """
