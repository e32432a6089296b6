"""Pieces of time: the one table of lost time, for traces of overlap and of other tools.

A piece is an interval of one rank with one cause. The pieces of a rank are disjoint, in order, and without gaps: those
of a step add up to its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ..timeline.columnar import Int64s, Mask, Rows, run_starts, sum_by_index
from ..timeline.measure.intervals import Interval, Merged, complement, expand_ranges, intersect_each, union
from .causes import LOOP, NAMES, UNKNOWN, WAIT
from .sites import CallSite, SiteCost

MAX_CHAIN_RANKS = 16
"""Longest chain of ranks, each waiting for the next, that `follow_waits` follows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Columns of n pieces, sorted by rank and start."""

    sites: tuple[CallSite, ...]  # table of call sites
    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    cause: NDArray[np.int8]  # index in `causes.NAMES`
    site: Int64s  # index in `sites`, -1: none; for a wait, the call site of the late rank
    late: Int64s  # rank that a wait is for, or that keeps the event loop busy; -1: none, or unknown
    did: NDArray[np.int8]  # for a wait, what the late rank spent that time on, as an index in `causes.NAMES`; else -1

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def lengths_ns(self) -> Int64s:
        """Length of each piece, in nanoseconds."""
        return self.end_ns - self.start_ns

    @classmethod
    def of_one_rank(
        cls, sites: Sequence[CallSite], rank: int, start_ns: Int64s, end_ns: Int64s, cause: str | NDArray[np.int8],
        *, site: Int64s | int,
    ) -> Pieces:  # fmt: skip
        """Return pieces of one rank, none of which is a wait.

        Args:
            sites: Table of call sites.
            rank: The rank.
            start_ns: Start of each piece.
            end_ns: End of each piece.
            cause: Name of one cause for all pieces, or the index of each piece's cause in `causes.NAMES`.
            site: Index of the call site in `sites`, one for all pieces or one for each; -1: none.
        """
        count = len(start_ns)
        causes = np.full(count, NAMES.index(cause), np.int8) if isinstance(cause, str) else cause
        return cls(
            sites=tuple(sites), start_ns=start_ns, end_ns=end_ns, cause=causes, did=np.full(count, -1, np.int8),
            rank=np.full(count, rank, np.int64), site=np.broadcast_to(site, count).astype(np.int64),
            late=np.full(count, -1, np.int64),
        )  # fmt: skip

    @classmethod
    def concatenate(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return all pieces of several tables in one table, sorted by rank and start."""
        # If all are empty, the first one stays, for its table of call sites.
        parts = [part for part in parts if len(part)] or list(parts[:1])
        tables: dict[int, int] = {}  # by id of a table of call sites, its offset in the new table
        sites: list[CallSite] = []
        shifted = []
        for part in parts:
            # Parts of one profile share a table, the same object: it is copied once.
            if id(part.sites) not in tables:
                tables[id(part.sites)] = len(sites)
                sites += part.sites
            shifted.append(np.where(part.site < 0, -1, part.site + tables[id(part.sites)]))
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        columns["site"] = np.concatenate(shifted)
        found = cls(sites=parts[0].sites if len(tables) == 1 else tuple(sites), **columns)
        return found.take(np.lexsort((found.start_ns, found.rank)))

    def take(self, which: Mask | Rows | slice) -> Pieces:
        """Return some of the pieces, by a mask, a slice or row numbers; row numbers also give the order."""
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def is_cause(self, *names: str) -> Mask:
        """Return a mask of the pieces that have one of some causes."""
        return np.isin(self.cause, [NAMES.index(name) for name in names])

    def instants_of_causes(self, *names: str) -> Merged:
        """Return the times at which any rank has a piece of one of some causes, as merged intervals."""
        which = self.is_cause(*names)
        return union(self.start_ns[which], self.end_ns[which])

    def split_by_cover(self, cover: Merged) -> tuple[Pieces, Pieces]:
        """Return the parts of the pieces inside some intervals, and the parts outside."""
        inside, outside = (self._cut_to_union(each) for each in (cover, complement(cover)))
        return inside, outside

    def _cut_to_union(self, cover: Merged) -> Pieces:
        row, start_ns, end_ns = intersect_each(self.start_ns, self.end_ns, cover)
        return replace(self.take(row), start_ns=start_ns, end_ns=end_ns)

    def cut_to_rank_window(self, rank: int, window: Interval) -> Pieces:
        """Return the pieces of a rank in a window (start, end), cut at its edges. Cost: the number of these pieces."""
        return self._cut_to_windows(*(np.array([each]) for each in (rank, *window)))[1]

    def cut_to_rank_windows(self, windows: Mapping[int, Interval]) -> Pieces:
        """Return the pieces of ranks in their windows (start, end), cut at the edges; other ranks are left out."""
        low_ns, high_ns = np.array([*windows.values()], np.int64).reshape(-1, 2).T
        return self._cut_to_windows(np.array([*windows], np.int64), low_ns, high_ns)[1]

    def cost_by_cause(self) -> dict[str, int]:
        """Return the time of each cause in nanoseconds, the largest first, without causes that take none."""
        sums_ns = sum_by_index(self.cause, self.lengths_ns, len(NAMES))
        return {NAMES[at]: int(sums_ns[at]) for at in np.argsort(-sums_ns, kind="stable").tolist() if sums_ns[at]}

    def sites_by_cause(self) -> dict[str, list[SiteCost]]:
        """Return the call sites of each cause, the most expensive first; pieces without a call site are left out."""
        known = self.take(self.site >= 0)
        # One number for each pair of cause and call site, which `divmod` below takes apart again.
        keys, kind = np.unique(known.cause.astype(np.int64) * len(self.sites) + known.site, return_inverse=True)
        sums_ns = sum_by_index(kind, known.lengths_ns, len(keys))
        counts = np.bincount(kind, minlength=len(keys))
        found: dict[str, list[SiteCost]] = {}
        for at in np.argsort(-sums_ns, kind="stable").tolist():
            cause, site = divmod(int(keys[at]), len(self.sites))
            found.setdefault(NAMES[cause], []).append(SiteCost(self.sites[site], int(sums_ns[at]), int(counts[at])))
        return found

    def by_rank(self) -> Iterator[tuple[int, Pieces]]:
        """Yield each rank with its pieces."""
        firsts = run_starts(self.rank)
        for which in np.split(np.arange(len(self)), firsts[1:]) if len(self) else ():
            yield int(self.rank[which[0]]), self.take(which)

    def by_late_rank(self) -> Iterator[tuple[int, Pieces]]:
        """Yield each rank that others waited for with these waits; -1 is a rank that is not recorded."""
        waits = self.take(self.is_cause(WAIT))
        for rank in np.unique(waits.late).tolist():
            yield rank, waits.take(waits.late == rank)

    def follow_waits(self, every: Pieces) -> tuple[Pieces, Pieces]:
        """Divide the waits by what the late rank did at that time.

        If rank 0 waits for rank 1, and rank 1 at that time waits for rank 2, the wait of rank 0 is for rank 2. Chains
        are followed up to `MAX_CHAIN_RANKS` ranks. Cost: a pass over the waits for each rank of the longest chain.

        Args:
            every: The pieces of all ranks, without gaps at the time of the waits, with the same table of call sites.

        Returns:
            All other pieces unchanged; and the parts of the waits, with `late`, `did` and `site` of the rank that is
            late in the end.
        """
        # A wait for an unknown rank cannot be followed.
        waiting = self.is_cause(WAIT) & (self.late >= 0)
        waits = self.take(waiting)
        done = [waits.take(slice(0))]
        # For each wait, a row with the ranks of its chain so far.
        passed = waits.rank[:, None]
        while len(waits):
            # What the late ranks did in the meantime: `index` is the wait to which each part belongs.
            index, parts = every._cut_to_windows(waits.late, waits.start_ns, waits.end_ns)
            late = waits.late[index]
            passed = np.concatenate([passed[index], late[:, None]], axis=1)
            further = parts.is_cause(WAIT) & (parts.late >= 0) & (passed.shape[1] < MAX_CHAIN_RANKS)
            further &= (passed != parts.late[:, None]).all(axis=1)
            # If nothing is recorded of the late rank, or ranks wait in a circle, the call site stays that of the wait:
            # the operation that the late rank had to arrive at.
            idle = (parts.is_cause(UNKNOWN) & (parts.site < 0)) | parts.is_cause(WAIT)
            parts = replace(
                parts, rank=waits.rank[index], cause=waits.cause[index],
                did=np.where(further, -1, np.where(idle, NAMES.index(UNKNOWN), parts.cause)).astype(np.int8),
                site=np.where(idle & ~further, waits.site[index], parts.site),
                late=np.where(further | (parts.is_cause(LOOP) & (parts.late >= 0)), parts.late, late),
            )  # fmt: skip
            done.append(parts.take(~further))
            waits, passed = parts.take(further), passed[further]
        return self.take(~waiting), Pieces.concatenate(done)

    def _cut_to_windows(self, rank: Int64s, low_ns: Int64s, high_ns: Int64s) -> tuple[Rows, Pieces]:
        """Return the pieces in n windows, each of one rank, cut at the edges, after the index of each one's window."""
        indices, rows = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)]
        order = np.argsort(rank, kind="stable")
        for which in np.split(order, run_starts(rank[order])[1:]) if len(rank) else ():
            first, last = np.searchsorted(self.rank, [rank[which[0]], rank[which[0]] + 1]).tolist()
            begin = np.searchsorted(self.end_ns[first:last], low_ns[which], "right")
            stop = np.searchsorted(self.start_ns[first:last], high_ns[which], "left")
            at, row = expand_ranges(begin, np.maximum(begin, stop))
            indices.append(which[at])
            rows.append(first + row)
        index, part = np.concatenate(indices), self.take(np.concatenate(rows))
        start_ns, end_ns = np.maximum(part.start_ns, low_ns[index]), np.minimum(part.end_ns, high_ns[index])
        return index, replace(part, start_ns=start_ns, end_ns=end_ns)


_COLUMNS = tuple(field.name for field in fields(Pieces) if field.name != "sites")
