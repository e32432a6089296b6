"""Which spans are one operation on several ranks, and who came last to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .spans import Span

__all__ = ["PAIRED", "Key", "Last", "key_of", "last_ranks", "number_of"]

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
