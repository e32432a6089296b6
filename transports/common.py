"""Boards: shared memory in which the ranks of a group, in several processes of one host, match an operation.

A transport with shared memory has a `Board` for each group. An operation has a number and a tag; ranks with equal calls
have equal tags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Run, Table
    from transports.signature import PlainSignature, Signature

#: Operations under way at once: a rank may post number n once all ranks have finished n - OPERATIONS.
OPERATIONS = 64
#: Longest payload of a post, in bytes.
PAYLOAD_BYTES = 4096


class Board(ABC):
    """The shared memory of the ranks of one group. A position is a rank of the group.

    Attributes:
        ready: Whether all ranks have opened the board; nothing can be submitted before.
        usable: Whether every process has room for the board, and an engine; alike on all ranks once it is ready.
        lost: Why one of the ranks is lost; None: no rank is.
        processes: Number of processes of this host that share memory, this one included.
        look_s: How long a thread polls before it sleeps.
        engine: Engine that carries out the operations; runs are waited for, and cancelled, there.
    """

    ready: bool
    usable: bool
    lost: str | None
    processes: int
    look_s: float
    engine: Engine

    @abstractmethod
    def open(self, position: int, when_ready: Callable[[], None]) -> None:
        """Open the board for a rank of this process; `when_ready` is called later, unless the board is ready now.

        It is also called if a process of the board is lost before.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it for the ranks of this process; its memory is released once all other processes have, or are lost."""

    @abstractmethod
    def submit(
        self, table: Table, owner: object, number: int, tag: int, source: int, target: int, priority: int,
        nbytes: int, home: int, *, signature: Signature | None = None, waited_for: bool = False,
    ) -> Run:  # fmt: skip
        """Let the engine carry out a rank's end of an operation; it may have ended when this returns.

        Args:
            table: The program of the operation.
            owner: Its `on_end` is called on the event loop's thread, unless a waiting thread finds the end first.
            number: Number of the operation.
            tag: Tag of the operation, the same for all ranks with equal calls; its last byte is 0.
            source: Address of the input; 0: there is none.
            target: Address of the result; 0: there is none.
            priority: Lower is more urgent.
            nbytes: Length of an input.
            home: Offset of the shared result that this rank loans; 0: none.
            signature: What the operation is, written beside the row. Its run ends as a `MISMATCH` if a rank that it
                waits for has posted this number with another tag: the first 40 bits of a tag are of the call, the next
                16 of the number. `Run.position` is the position of that rank then. None: no rank looks for that.
            waited_for: Whether the calling thread waits for the end at once, so that no thread has to be woken.
        """

    @abstractmethod
    def row_tag(self, position: int, number: int) -> int:
        """Return the tag of operation `number` in the row of a rank; 0: it is not there, or not there any more."""

    @abstractmethod
    def row_signature(self, position: int, number: int) -> PlainSignature:
        """Return the signature beside the row of operation `number`; only of a number that is there.

        Raises:
            LinkLostError: The other process has written something else there.
        """

    @abstractmethod
    def loan_to_all(self, nbytes: int) -> int | None:
        """Loan memory of this process to all ranks together, and return its offset; None without free memory.

        The loan ends once every rank has called its function of `make_release`.
        """

    @abstractmethod
    def make_release(self, position: int, owner: int, where: int, nbytes: int) -> Callable[[], None]:
        """Return the function by which a rank of this process releases a loan to all ranks; any thread may call it.

        Args:
            position: Position of the rank that releases.
            owner: Position of a rank of the process that owns the memory.
            where: Offset that `loan_to_all` returned there.
            nbytes: Length of the loan.
        """

    @abstractmethod
    def loan_view(self, position: int, where: int, nbytes: int) -> memoryview:
        """Return the memory of a loan, as a rank's process maps it."""
