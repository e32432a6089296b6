"""Interceptors: what simulated faults, tests and checks change about the programs and operations of a world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from .context import RankContext
    from .inbox import Inbox
    from .match import Match
    from .operation import Operation
    from .port import Port

T = TypeVar("T")
Place: TypeAlias = "Port | Inbox"
"""Where an operation arrives: a collective at a port, a message in the inbox."""


class Interceptor:
    """Sees the operations of all ranks of a world, and decides when they arrive; by default at once.

    A world has one or none; see `Communicators.use`.
    """

    async def live(self, program: Callable[[], Awaitable[T]], context: RankContext) -> T:
        """Run the program of a rank, and return its result."""
        return await program()

    def issued(self, place: Place, operation: Any) -> None:
        """Observe a collective before it gets the number `port.next_seq`, or a message in its lane."""

    def arrive(self, place: Place, operation: Any) -> None:
        """Let the end of a rank arrive: now, by `place.match`, or later, or never."""
        place.match(operation)

    def withdraw(self, operation: Operation) -> bool:
        """Withdraw a receive that is held; False if it is not."""
        return False

    def starts(self, match: Match, operation: Operation) -> bool:
        """Whether the ends of a match may start, now that all have arrived, `operation` last."""
        return True
