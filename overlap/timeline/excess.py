"""What one rank computes that another does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .intervals import Interval
from .spans import Span

__all__ = ["Excess"]


class Excess:
    """The compute of all ranks inside a window, by name and place.

    Args:
        spans: Of the ranks, of any kind.
        window: From when to when.
    """

    def __init__(self, spans: Iterable[Span], window: Interval) -> None:
        self._totals: dict[int, dict[tuple[str, str], int]] = {}
        for span in spans:
            inside_ns = min(span.end_ns, window[1]) - max(span.start_ns, window[0])
            if span.kind == "compute" and inside_ns > 0:
                of = self._totals.setdefault(span.rank, {})
                key = span.name, span.call_site
                of[key] = of.get(key, 0) + inside_ns

    def most(self, victim: int, rank: int) -> tuple[str, str, int]:
        """Return name and place of what `rank` computes longer than `victim` by most, and by how much."""
        mine: Mapping[tuple[str, str], int] = self._totals.get(victim, {})
        more = {key: ns - mine.get(key, 0) for key, ns in self._totals.get(rank, {}).items()}
        name, site = max(more, key=lambda key: (more[key], key), default=("", ""))
        return name, site, more.get((name, site), 0)
