"""What one rank computes that another does not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .columnar import SpanColumns
from .intervals import Interval


class Excess:
    """The compute of all ranks inside a window, by name and place.

    Args:
        spans: Of the ranks, of any kind.
        window: From when to when.
    """

    def __init__(self, spans: SpanColumns, window: Interval) -> None:
        self._totals: dict[int, dict[tuple[str, str], int]] = {}
        inside_ns = np.minimum(spans.end_ns, window[1]) - np.maximum(spans.start_ns, window[0])
        computed = np.flatnonzero(spans.is_kind("compute") & (inside_ns > 0))
        names, sites = spans.index[2][computed], spans.index[6][computed]
        keys = [sites, names, spans.rank[computed]]
        order = np.lexsort(keys)
        begins = np.ones(len(order), bool)
        begins[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
        firsts = np.flatnonzero(begins)
        if not len(firsts):
            return
        sums_ns = np.add.reduceat(inside_ns[computed[order]], firsts)
        told = (key[order][firsts].tolist() for key in keys)
        for site, name, rank, ns in zip(*told, sums_ns.tolist(), strict=True):
            self._totals.setdefault(rank, {})[spans.texts[name], spans.texts[site]] = ns

    def most(self, victim: int, rank: int) -> tuple[str, str, int]:
        """Return name and place of what `rank` computes longer than `victim` by most, and by how much."""
        mine: Mapping[tuple[str, str], int] = self._totals.get(victim, {})
        more = {key: ns - mine.get(key, 0) for key, ns in self._totals.get(rank, {}).items()}
        name, site = max(more, key=lambda key: (more[key], key), default=("", ""))
        return name, site, more.get((name, site), 0)
