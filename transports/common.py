"""Boards: shared memory in which the ranks of a group, in several processes of one host, meet for an operation.

A transport with shared memory has a `Board` for each group. An operation has a number and a tag; ranks with equal calls
have equal tags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transports.shared_memory.engine import Run, Table

#: Operations under way at once: a rank may post number n once all ranks are done with number n - OPERATIONS.
OPERATIONS = 64
#: Longest payload of a post, in bytes.
PAYLOAD_BYTES = 4096


class Board(ABC):
    """The shared memory of the ranks of one group. A position is a rank of the group.

    Attributes:
        ready: Whether all ranks have opened it; before, nothing can be submitted.
        usable: Whether there is room for it everywhere, and an engine; alike everywhere once it is ready.
        lost: Why nothing more can be expected of one of the ranks; None: of all of them.
        processes: How many processes of this host have memory in common, this one among them.
        look_s: How long a thread looks for the others before it sleeps.
    """

    ready: bool
    usable: bool
    lost: str | None
    processes: int
    look_s: float

    @abstractmethod
    def open(self, position: int, when_ready: Callable[[], None]) -> None:
        """Open the board for a rank of this process; `when_ready` is called later, unless all have already."""

    @abstractmethod
    def close(self) -> None:
        """Give back this process's part of the board, once no rank of any process uses the board any more."""

    @abstractmethod
    def submit(
        self, table: Table, owner: object, number: int, tag: int, source: int, target: int, priority: int,
        nbytes: int, home: int, *, waited_for: bool = False,
    ) -> Run:  # fmt: skip
        """Let the engine carry out a rank's end of an operation; it may have ended when this returns.

        Args:
            table: How.
            owner: Its `ended` is called on the loop's thread, unless a thread that waits finds out before.
            number: Of the operation.
            tag: Of the operation, the same for all ranks with equal calls; its last byte is 0.
            source: Address of the input; 0: there is none.
            target: Address of the result; 0: there is none.
            priority: Lower is more urgent.
            nbytes: Of an input.
            home: Where the shared result lies that this rank lends; 0: none.
            waited_for: Whether this thread waits for it at once: then none has to be woken for it.
        """

    @abstractmethod
    def wait(self, run: Run, seconds: float, look_s: float) -> int:
        """Wait for the end of a run without Python's lock, after a look; return its state. Any thread."""

    @abstractmethod
    def forget(self, run: Run) -> None:
        """Let the engine not tell the owner of a run, which knows of its end."""

    @abstractmethod
    def cancel(self, run: Run) -> bool:
        """Give a run up; return whether nothing of its rank's is touched any more, else that is so when it ends."""

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
