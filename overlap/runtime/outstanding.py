"""What a rank has issued: the operations that are unfinished, and the failures that nobody has seen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

import trio

from ..timeline.spans import call_site
from .future import Failure, Future

T_co = TypeVar("T_co", covariant=True)

__all__ = ["Issued", "Outstanding"]

_LISTED = 4  # how many unfinished operations of a rank a report names


class Issued(Future[T_co]):
    """The handle of something a rank has issued: a collective, a message, or a compute.

    Attributes:
        name: As given by the caller, or that of the operation or function.
        place: Where it was issued, as code and instruction: finding the line takes longer.
    """

    __slots__ = ("name", "place")

    name: str
    place: tuple[CodeType, int]

    @property
    def call_site(self) -> str:
        """Where it was issued, as "file:line"."""
        return call_site(*self.place)

    @property
    def waits_for(self) -> str:
        """Whom it waits for, for people to read; may be empty."""
        return ""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Fail it because the world has ended."""


class Outstanding:
    """What one rank has issued and not finished.

    Attributes:
        operations: In the order in which they were issued.
        draining: Whether the rank waits for them to end.
        doing: What was unfinished when it was abandoned, as text.
    """

    __slots__ = ("_changed", "_unseen", "doing", "draining", "operations")

    def __init__(self) -> None:
        self.operations: dict[Issued[object], None] = {}
        self.draining = False
        self.doing: list[str] = []
        self._unseen: list[Failure] = []
        self._changed = trio.Event()

    def note_end(self, failure: Failure | None) -> None:
        """Keep the failure of an operation that ended, in case nobody asks for it, and let `drain` look again."""
        if failure is not None:
            self._unseen.append(failure)
        self._changed.set()

    async def drain(self) -> None:
        """Wait for everything issued.

        Raises:
            BaseException: The first error that nobody has seen.
        """
        self.draining = True
        while self.operations and not self._first_unseen():
            self._changed = trio.Event()
            await self._changed.wait()
        unseen = self._first_unseen()
        if unseen is not None:
            unseen.seen = True
            raise unseen.error

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Fail everything unfinished."""
        self.doing = self.doing or self.lines()
        for operation in reversed(list(self.operations)):  # else room made by the first would start the next
            operation.abandon(error())

    def lines(self, *, detailed: bool = False) -> list[str]:
        """Name the unfinished operations, oldest first, and if `detailed` whom they wait for."""
        operations = list(self.operations)
        lines = [
            f"{operation.label} ({operation.call_site})" + (operation.waits_for if detailed else "")
            for operation in operations[:_LISTED]
        ]
        rest = len(operations) - _LISTED
        return [*lines, f"and {rest} more"] if rest > 0 else lines

    def _first_unseen(self) -> Failure | None:
        return next((failure for failure in self._unseen if not failure.seen), None)
