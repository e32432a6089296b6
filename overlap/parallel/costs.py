"""What the library's own computes cost on the virtual clock."""

from __future__ import annotations

from ..errors import UsageError
from ..runtime.rank import Rank

__all__ = ["MemoryCosts"]


class MemoryCosts:
    """Costs of computes that do nothing but move memory: packing, updating.

    They take no time where the bandwidth of the cluster's memory is not known, as that of "local".
    """

    def __init__(self, rank: Rank) -> None:
        self._known = True
        try:
            rank.compute(_nothing, name="ask", bytes_moved=1)
        except UsageError:
            self._known = False

    def of(self, nbytes: float) -> dict[str, float]:
        """Return what `rank.compute` takes for moving so many bytes."""
        return {"bytes_moved": nbytes} if self._known else {"seconds": 0.0}


def _nothing() -> None:
    """Take no time where time is real."""
