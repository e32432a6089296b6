"""Operations that waited for room in their stream's window, and what made what they carry."""

from __future__ import annotations

from .graph import Node

_FOLLOWED = 10_000  # calls of a program in one instant


def waited_for_room(arrival: Node) -> bool:
    """Whether an operation seems to have begun because another one of its stream was over."""
    return any(_is_before(each, arrival) for each, _ in arrival.after)


def release(arrival: Node) -> None:
    """Let it wait for no room."""
    arrival.after = [(each, delay) for each, delay in arrival.after if not _is_before(each, arrival)]


def _is_before(each: Node, arrival: Node) -> bool:
    mine = arrival.spans[0]
    return each.kind == "end" and each.spans[0].lane == mine.lane and each.spans[0] is not mine


def input_of(arrival: Node) -> Node | None:
    """Return the compute that an operation began after, or that its program awaited before the call; None: neither."""
    node: Node | None = arrival
    for _ in range(_FOLLOWED):
        if node is None:
            return None
        if (found := next((each for each, _ in node.after if each.kind == "compute"), None)) is not None:
            return found
        node = next((each for each, delay_ns in node.after if each.kind == "program" and not delay_ns), None)
    return None
