"""Ranks that mean different operations: who says what, and which of them are the odd ones out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..collectives.call import Call
from ..errors import CollectiveMismatchError


class Voice(NamedTuple):
    """What one rank has called."""

    rank: int  # World rank
    call: Call  # What it asked for
    call_site: str  # Where


def few_and_many(voices: Sequence[Voice]) -> tuple[list[Voice], list[Voice]]:
    """Return the smallest and the largest side of those that agree; of equal ones, the later is the odd one out."""
    sides: list[list[Voice]] = []
    for voice in voices:
        side = next((side for side in sides if side[0].call.agrees(voice.call)), None)
        if side is None:
            sides.insert(0, [voice])
        else:
            side.append(voice)
    return min(sides, key=len), max(reversed(sides), key=len)


def mismatch(group: str, seq: int, one: Voice, other: Voice) -> Callable[[], CollectiveMismatchError]:
    """Return what makes the error of two ranks that differ in operation `seq`."""
    return partial(
        CollectiveMismatchError,
        group=group,
        seq=seq,
        ranks=(one.rank, other.rank),
        calls=(str(one.call), str(other.call)),
        call_sites=(one.call_site, other.call_site),
    )
