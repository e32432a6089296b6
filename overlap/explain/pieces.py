"""Pieces of time: the one table of lost time, for traces of ours and of other tools.

The pieces of a rank are disjoint, in order, and without gaps, so those of a step add up to its length: every nanosecond
has one cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ..timeline.columnar import Int64s, Mask, Rows, run_starts
from ..timeline.measure.intervals import Interval, Merged, complement, expand_ranges, intersect_each, union
from .causes import LOOP, NAMES, UNKNOWN, WAIT
from .sites import CallSite

MAX_CHAIN_RANKS = 16
"""Longest chain of ranks, each waiting for the next, that is followed."""

SiteCost = tuple[CallSite, int, int]
"""A call site, its time in nanoseconds, and its number of pieces."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Columns of n pieces, sorted by rank and start."""

    sites: tuple[CallSite, ...]  # table of call sites
    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    cause: NDArray[np.int8]  # index in `causes.NAMES`
    site: Int64s  # of the cause, index in `sites`, or -1; of a wait, what the late rank had to come to, or does
    late: Int64s  # rank that a wait is for, or that keeps the event loop; -1 if there is none, or it is not known
    did: NDArray[np.int8]  # cause of the late rank at that time; -1 for pieces that are no waits

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def of(
        cls, sites: Sequence[CallSite], rank: int, start_ns: Int64s, end_ns: Int64s, cause: str | NDArray[np.int8],
        *, site: Int64s | int = -1, late: Int64s | int = -1,
    ) -> Pieces:  # fmt: skip
        """Return pieces of one rank between n instants each."""
        count = len(start_ns)
        causes = np.full(count, NAMES.index(cause), np.int8) if isinstance(cause, str) else cause
        return cls(
            sites=tuple(sites), start_ns=start_ns, end_ns=end_ns, cause=causes, did=np.full(count, -1, np.int8),
            rank=np.full(count, rank, np.int64), site=np.broadcast_to(site, count).astype(np.int64),
            late=np.broadcast_to(late, count).astype(np.int64),
        )  # fmt: skip

    @classmethod
    def concatenate(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return the pieces of several parts, sorted; equal tables of call sites are kept once."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        tables: dict[int, int] = {}
        sites: list[CallSite] = []
        shifted = []
        for part in parts:
            if id(part.sites) not in tables:
                tables[id(part.sites)] = len(sites)
                sites += part.sites
            shifted.append(np.where(part.site < 0, -1, part.site + tables[id(part.sites)]))
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        columns["site"] = np.concatenate(shifted)
        found = cls(sites=parts[0].sites if len(tables) == 1 else tuple(sites), **columns)
        return found.take(np.lexsort((found.start_ns, found.rank)))

    def take(self, which: Mask | Rows | slice) -> Pieces:
        """Return some pieces: a mask keeps their order, row numbers give the order."""
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def is_cause(self, *names: str) -> Mask:
        """Return the mask of the pieces of some causes."""
        return np.isin(self.cause, [NAMES.index(name) for name in names])

    def cover(self, *names: str) -> Merged:
        """Return the instants of the pieces of some causes, on any rank."""
        which = self.is_cause(*names)
        return union(self.start_ns[which], self.end_ns[which])

    def split(self, cover: Merged) -> tuple[Pieces, Pieces]:
        """Return the parts of the pieces inside a union, and those outside."""
        inside, outside = (self._cut_to_union(each) for each in (cover, complement(cover)))
        return inside, outside

    def _cut_to_union(self, cover: Merged) -> Pieces:
        row, start_ns, end_ns = intersect_each(self.start_ns, self.end_ns, cover)
        return replace(self.take(row), start_ns=start_ns, end_ns=end_ns)

    def of_rank(self, rank: int, window: Interval) -> Pieces:
        """Return the pieces of a rank, cut at the edges of a window. Cost: the size of that part."""
        return self._cut_to_windows(*(np.array([each]) for each in (rank, *window)))[1]

    def within(self, windows: Mapping[int, Interval]) -> Pieces:
        """Return the pieces of the ranks that have a window, cut at its edges."""
        low_ns, high_ns = np.array([*windows.values()], np.int64).reshape(-1, 2).T
        return self._cut_to_windows(np.array([*windows], np.int64), low_ns, high_ns)[1]

    def costs(self) -> dict[str, int]:
        """Return the time of each cause in nanoseconds, the largest first, without causes that take none."""
        sums_ns = np.zeros(len(NAMES), np.int64)
        np.add.at(sums_ns, self.cause, self.end_ns - self.start_ns)
        return {NAMES[at]: int(sums_ns[at]) for at in np.argsort(-sums_ns, kind="stable").tolist() if sums_ns[at]}

    def sites_by_cause(self) -> dict[str, list[SiteCost]]:
        """Return the call sites of each cause, the most expensive first."""
        known = self.take(self.site >= 0)
        keys, kind = np.unique(known.cause.astype(np.int64) * len(self.sites) + known.site, return_inverse=True)
        sums_ns = np.zeros(len(keys), np.int64)
        np.add.at(sums_ns, kind, known.end_ns - known.start_ns)
        counts = np.bincount(kind, minlength=len(keys))
        found: dict[str, list[SiteCost]] = {}
        for at in np.argsort(-sums_ns, kind="stable").tolist():
            cause, site = divmod(int(keys[at]), len(self.sites))
            found.setdefault(NAMES[cause], []).append((self.sites[site], int(sums_ns[at]), int(counts[at])))
        return found

    def by_rank(self) -> Iterator[tuple[int, Pieces]]:
        """Yield the ranks, and the pieces of each."""
        firsts = run_starts(self.rank)
        for which in np.split(np.arange(len(self)), firsts[1:]) if len(self) else ():
            yield int(self.rank[which[0]]), self.take(which)

    def by_late(self) -> Iterator[tuple[int, Pieces]]:
        """Yield the ranks that others waited for, and the waits for each; -1 is a rank that is not recorded."""
        waits = self.take(self.is_cause(WAIT))
        for rank in np.unique(waits.late).tolist():
            yield rank, waits.take(waits.late == rank)

    def follow_waits(self, every: Pieces) -> tuple[Pieces, Pieces]:
        """Return the waits, each divided by what the rank did that it is for in the end, and before them all others.

        A late rank that waits itself is followed to the one that it waits for, up to `MAX_CHAIN_RANKS`. Cost: a pass
        over the waits for each rank of the longest chain.

        Args:
            every: The pieces of all ranks, without gaps at the time of the waits; they share the table of call sites.
        """
        waiting = self.is_cause(WAIT) & (self.late >= 0)
        waits = self.take(waiting)
        done = [waits.take(slice(0))]
        passed = waits.rank[:, None]
        while len(waits):
            index, parts = every._cut_to_windows(waits.late, waits.start_ns, waits.end_ns)
            late = waits.late[index]
            passed = np.concatenate([passed[index], late[:, None]], axis=1)
            further = parts.is_cause(WAIT) & (parts.late >= 0) & (passed.shape[1] < MAX_CHAIN_RANKS)
            further &= (passed != parts.late[:, None]).all(axis=1)
            # While nothing is known of a late rank, or it waits in a circle, its program had to come to the operation.
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
        """Return the pieces of ranks in n windows, cut at their edges, and before it the window of each piece."""
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
