"""Interceptors: what simulated faults, tests and checks change about the collectives of a world."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .match import Match
    from .operation import Operation
    from .port import Port


class Interceptor:
    """Sees the collectives of all ranks of a world, and decides when they arrive; by default at once.

    A world has one or none; see `Communicators.intercept`.
    """

    def issued(self, port: Port, operation: Operation) -> None:
        """Take note of an operation that is about to get the number `port.next_seq`."""

    def arrive(self, port: Port, operation: Operation) -> None:
        """Let the end of a rank arrive: now, by `port.match`, or later, or never."""
        port.match(operation)

    def starts(self, match: Match, operation: Operation) -> bool:
        """Whether the ends of a match may start, now that all have arrived, `operation` last."""
        return True
