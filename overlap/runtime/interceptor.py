"""Interceptors: hooks by which simulated faults, tests and checks change the programs and operations of a world."""

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

    A world has at most one interceptor; see `Communicators.use_interceptor`.
    """

    async def run_program(self, program: Callable[[], Awaitable[T]], context: RankContext) -> T:
        """Run the program of a rank, and return its result."""
        return await program()

    def on_issued(self, place: Place, operation: Any) -> None:
        """Observe an operation as it is issued.

        A collective is about to get the number `place.next_seq`. A message is in its lane and has its number, unless it
        is a receive from any source.
        """

    def arrive(self, place: Place, operation: Any) -> None:
        """Let an operation, whose input exists, arrive: call `place.match(operation)` now, later, or never."""
        place.match(operation)

    def withdraw_held_receive(self, operation: Operation) -> bool:
        """Withdraw a receive that this interceptor holds, so that it never arrives. Return False if it holds none."""
        return False

    def may_start(self, match: Match, operation: Operation) -> bool:
        """Whether a collective may start, now that its last end, `operation`, has arrived; if not, nothing starts it.

        Called for collectives whose ranks are all in one process and share its memory.
        """
        return True
