"""Unions of half-open intervals `(start_ns, end_ns)`, the arithmetic under every metric. Exact: integers only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Merged: TypeAlias = list[Interval]
"""Sorted, non-empty, pairwise disjoint and not touching."""


def merge(intervals: Iterable[Interval]) -> Merged:
    """Return the union. Empty intervals disappear. O(n log n)."""
    merged: Merged = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Merged, right: Merged) -> Merged:
    """Return what is covered by both. O(n + m)."""
    both: Merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            both.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(left: Merged, right: Merged) -> Merged:
    """Return what `left` covers and `right` does not. O(n + m)."""
    rest: Merged = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = right[k][1]
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def clip(merged: Merged, window: Interval) -> Merged:
    """Return what lies in a window. O(log n), and what is returned."""
    low, high = window
    first = bisect_right(merged, low, key=lambda interval: interval[1])
    last = bisect_left(merged, high, key=lambda interval: interval[0])
    return [(max(start, low), min(end, high)) for start, end in merged[first:last]]


def length(merged: Merged) -> int:
    """Total covered length."""
    return sum(end - start for start, end in merged)
