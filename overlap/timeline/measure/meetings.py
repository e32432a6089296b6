"""Which spans are one operation on several ranks, and who came last to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..columnar import SpanColumns
from ..span import Span

Key: TypeAlias = tuple[object, ...]

PAIRED = frozenset({"send", "recv", "send/recv"})
"""Operations between two ranks, whose sequence numbers do not match a whole group."""


@dataclass(frozen=True, slots=True)
class Last:
    """The rank that came last to an operation, and where it had called it ("file:line", or "")."""

    rank: int
    start_ns: int
    call_site: str


def number_of(span: Span) -> Key | None:
    """Return group, stream, operation and number of it; None if they are not known."""
    info = span.info
    return None if info is None else (info.group, _number(info.ranks), span.lane, info.op, info.seq)


_SMALL = 16
"""Ranks of a group that take no longer to hash than to look for."""

_numbers: dict[tuple[int, ...], int] = {}  # of the large groups that were seen
_seen: dict[int, tuple[tuple[int, ...], int]] = {}  # the same by identity


def _number(ranks: tuple[int, ...]) -> object:
    """Return what stands for a group in a key: hashing a thousand ranks for each span is what takes longest."""
    if len(ranks) <= _SMALL:
        return ranks
    known = _seen.get(id(ranks))
    if known is not None and known[0] is ranks:
        return known[1]
    if len(_seen) > 10_000:
        _seen.clear()
    number = _numbers.setdefault(ranks, len(_numbers))
    _seen[id(ranks)] = ranks, number
    return number


def key_of(span: Span) -> Key | None:
    """Return what the spans of one operation have in common; None if that is not known.

    Messages of different tags between two ranks have the same numbers, but have met at different instants.
    """
    number = number_of(span)
    if number is None or span.info is None or span.info.op not in PAIRED:
        return number
    return (*number, span.info.met_ns)


def last_ranks(spans: Iterable[Span]) -> dict[Key, Last]:
    """Return who came last to each operation that several ranks recorded; of several last ones, the lowest rank."""
    found: dict[Key, Last] = {}
    ranks: dict[Key, set[int]] = {}
    for span in spans:
        key = key_of(span)
        if key is None or span.info is None:
            continue
        ranks.setdefault(key, set()).add(span.rank)
        known = found.get(key)
        if known is None or (span.start_ns, -span.rank) > (known.start_ns, -known.rank):
            found[key] = Last(span.rank, span.start_ns, span.info.call_site)
    return {key: last for key, last in found.items() if len(ranks[key]) > 1}


def last_rows(columns: SpanColumns) -> NDArray[np.intp]:
    """Return, for each of n spans, the number of the span of whom `last_ranks` names; -1 where that is not known.

    The columns number no text and no group twice. Cost: a sort of the operations.
    """
    rows = np.flatnonzero(columns.is_operation)
    found = np.full(len(columns), -1, np.intp)
    if not len(rows):
        return found
    keys = _key_columns(columns.take(rows))
    order = np.lexsort(keys)
    rows = rows[order]
    begins = np.ones(len(rows), bool)
    begins[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    firsts, of = np.flatnonzero(begins), np.cumsum(begins) - 1
    start_ns, rank = columns.start_ns[rows], columns.rank[rows]
    is_last = start_ns == np.maximum.reduceat(start_ns, firsts)[of]
    lowest = np.minimum.reduceat(np.where(is_last, rank, np.iinfo(np.int64).max), firsts)
    is_last &= rank == lowest[of]
    last = np.minimum.reduceat(np.where(is_last, rows, len(columns)), firsts)
    is_shared = np.minimum.reduceat(rank, firsts) != np.maximum.reduceat(rank, firsts)
    found[rows] = np.where(is_shared, last, -1)[of]
    return found


def _key_columns(operations: SpanColumns) -> list[NDArray[np.int64]]:
    """Return what `key_of` puts together."""
    texts, index = len(operations.texts) + 1, operations.index.astype(np.int64)
    paired = [number for number, text in enumerate(operations.texts) if text in PAIRED]
    met_ns = np.where(np.isin(index[3], paired), operations.met_ns, 0)
    keys = [(index[7] * texts + index[1]) * texts + index[3], operations.whole[4]]
    return [*keys, met_ns] if met_ns.any() else keys
