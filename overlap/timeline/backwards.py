"""Events of other tools that end before they start, because a clock went back: they are left out, and told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from .events import Json

ALL_BACKWARDS = "all of its events end before they start"

E = TypeVar("E", bound="Mapping[str, Json]")


def forwards(events: Sequence[E], duration: str) -> tuple[list[E], list[E]]:
    """Part events from those whose field of that name is negative."""
    backwards = [event for event in events if isinstance(took := event.get(duration), int | float) and took < 0]
    gone = set(map(id, backwards))
    return [event for event in events if id(event) not in gone], backwards


def left_out(events: Sequence[Mapping[str, Json]]) -> str:
    """Say which were left out."""
    which = "1 event ends before it starts" if len(events) == 1 else f"{len(events)} events end before they start"
    return f"{which} ({'first: ' * (len(events) > 1)}'{events[0].get('name', '')}'): shown is the rest"
