"""Unions of half-open intervals `(start_ns, end_ns)`, the arithmetic under every metric. Exact: integers only.

Unions are columns, so that an operation on a million intervals takes some ten milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Interval: TypeAlias = tuple[int, int]
Instants: TypeAlias = NDArray[np.int64]

_EVER = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Intervals, sorted, non-empty, pairwise disjoint and not touching."""

    start_ns: Instants  # the n instants at which they begin
    end_ns: Instants  # the n instants before which they end

    def __len__(self) -> int:
        return len(self.start_ns)

    def __iter__(self) -> Iterator[Interval]:
        return iter(zip(self.start_ns.tolist(), self.end_ns.tolist(), strict=True))


def merge(intervals: Iterable[Interval]) -> Merged:
    """Return the union of intervals: (0, 4), (2, 6), (8, 9) give (0, 6), (8, 9). Empty ones disappear. O(n log n)."""
    table = np.array(list(intervals), np.int64).reshape(-1, 2)
    return union(table[:, 0], table[:, 1])


def union(start_ns: Instants, end_ns: Instants) -> Merged:
    """Return the union of n intervals, given as columns of starts and ends; see `merge`."""
    real = start_ns < end_ns
    start_ns, end_ns = start_ns[real], end_ns[real]
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
    begins, ends = np.ones(len(order), bool), np.ones(len(order), bool)
    # An interval of the union begins where all intervals before have ended; there the one before it ends.
    begins[1:] = start_ns[1:] > reach_ns[:-1]
    ends[:-1] = begins[1:]
    return Merged(start_ns[begins], reach_ns[ends])


def intersect(left: Merged, right: Merged) -> Merged:
    """Return the intersection of two unions. O(n log m)."""
    if not len(left) or not len(right):
        return Merged(left.start_ns[:0], left.end_ns[:0])
    _, start_ns, end_ns = intersect_each(left.start_ns, left.end_ns, right)
    return Merged(start_ns, end_ns)


def intersect_each(start_ns: Instants, end_ns: Instants, merged: Merged) -> tuple[NDArray[np.intp], Instants, Instants]:
    """Return the parts of n non-empty intervals that a union covers.

    The intervals (0, 4) and (6, 9) and the union (2, 7) give [0, 1], [2, 6] and [4, 7].

    Args:
        start_ns: Starts of the intervals.
        end_ns: Ends of the intervals.
        merged: The union.

    Returns:
        For each part: the index of its interval, its start, and its end.
    """
    # The intervals of the union that touch an interval follow each other: from `first` up to `stop`.
    first = np.searchsorted(merged.end_ns, start_ns, "right")
    stop = np.searchsorted(merged.start_ns, end_ns, "left")
    at, other = expand_ranges(first, stop)
    return at, np.maximum(start_ns[at], merged.start_ns[other]), np.minimum(end_ns[at], merged.end_ns[other])


def covered_ns(start_ns: Instants, end_ns: Instants, merged: Merged) -> Instants:
    """Return, for each of n non-empty intervals, the nanoseconds that a union of m intervals covers. O(n log m).

    Args:
        start_ns: Starts of the intervals.
        end_ns: Ends of the intervals.
        merged: The union.
    """
    if not len(merged):
        return np.zeros(len(start_ns), np.int64)
    before_ns = np.cumsum(merged.end_ns - merged.start_ns)

    def covered_before(at_ns: Instants) -> Instants:
        """Return the length that the union covers before each of some instants."""
        begun = np.searchsorted(merged.start_ns, at_ns, "right") - 1  # last interval that has begun by then
        ahead_ns = np.maximum(merged.end_ns[begun] - at_ns, 0)
        return np.where(begun < 0, 0, before_ns[begun] - ahead_ns)

    return covered_before(end_ns) - covered_before(start_ns)


def expand_ranges(first: NDArray[np.intp], stop: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """List the numbers in n ranges. Returns two columns: the index of the range, and the number.

    Range i goes from `first[i]` up to, not including, `stop[i]`. `expand_ranges([4, 7], [6, 8])` is
    `[0, 0, 1], [4, 5, 7]`.
    """
    sizes = stop - first
    index = np.repeat(np.arange(len(first)), sizes)
    # The offset of a number in its range is its position in the result, less that of the range's first number.
    return index, np.arange(len(index)) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)


def subtract(left: Merged, right: Merged) -> Merged:
    """Return the instants that `left` covers and `right` does not. O(n log m)."""
    return intersect(left, complement(right)) if len(left) and len(right) else left


def complement(merged: Merged) -> Merged:
    """Return the instants that a union does not cover, from the smallest to the largest number of 64 bits."""
    return Merged(np.append(_EVER.min, merged.end_ns), np.append(merged.start_ns, _EVER.max))


def total_length_ns(merged: Merged) -> int:
    """Return the total length that a union covers, in nanoseconds."""
    return int((merged.end_ns - merged.start_ns).sum())


def cut_overlaps(start_ns: Instants, end_ns: Instants) -> tuple[NDArray[np.intp], Instants, Instants]:
    """Cut intervals so that they do not overlap: an instant belongs to the interval that began first.

    (0, 5), (3, 8), (4, 5) give the rows [0, 1] from [0, 5] to [5, 8]: nothing is left of the third interval.

    Returns:
        For each part: the row of its interval, its start, and its end.
    """
    row = np.lexsort((end_ns, start_ns))
    start_ns, end_ns = start_ns[row], end_ns[row]
    start_ns[1:] = np.maximum(start_ns[1:], np.maximum.accumulate(end_ns)[:-1])
    real = start_ns < end_ns
    return row[real], start_ns[real], end_ns[real]
