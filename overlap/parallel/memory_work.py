"""The library's own computes, which do nothing but move memory: packing, updating; and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.rank import Rank
from .called_from import users_frame

T = TypeVar("T")


class MemoryWork:
    """Issues computes whose cost on the virtual clock is the memory that they move.

    They take no time there if the bandwidth of the cluster's memory is not known, as that of "local".
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._known = rank, True
        try:
            rank.compute(_nothing, name="ask", bytes_moved=1, call_site=users_frame())
        except UsageError:
            self._known = False

    def compute(
        self, fn: Callable[..., T], *args: object, name: str, moved_bytes: float, stream: str | None = None
    ) -> Future[T]:
        """Issue a compute that reads and writes so many bytes, on behalf of the line that has called the strategy."""
        place = users_frame()
        if self._known:
            return self._rank.compute(fn, *args, name=name, bytes_moved=moved_bytes, stream=stream, call_site=place)
        return self._rank.compute(fn, *args, name=name, seconds=0.0, stream=stream, call_site=place)


def _nothing() -> None:
    """Take no time where time is real."""
