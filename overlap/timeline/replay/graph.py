"""What a replay runs: pieces of work, and what each waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..span import Span

NodeKind = Literal["program", "compute", "arrival", "transfer", "end"]


@dataclass(slots=True, eq=False)
class Node:
    """A piece of work that begins when all it waits for is over."""

    # An instant of a program; a compute; an operation that becomes active on a rank; one that moves its bytes, on all
    # ranks at once; its end on a rank.
    kind: NodeKind
    work_ns: float  # How long it takes; of a transfer, if no other shares a rank with it
    ranks: tuple[int, ...]  # On which it runs
    spans: tuple[Span, ...] = ()  # Of the timeline; of a transfer those of all ranks
    # What it waits for, and how long it takes to begin then.
    after: list[tuple[Node, float]] = field(default_factory=list)
    likely: list[Node] = field(default_factory=list)  # Of `after`, those that nothing shows but that most programs have
    # Of the transfers of one, the most urgent has the wires to itself; None: it shares them with all others.
    lane: object = None
    urgency: tuple[int, ...] = ()  # In its lane; lower comes first
    hidden_ns: float = 0.0  # Of its work, what passes while another of its lane has the wires, if it ever waits for one
    place: int = -1  # Its number, while a graph runs


@dataclass(slots=True)
class Graph:
    """All pieces of a run."""

    nodes: list[Node]  # In any order
    # The instants at which the program of a rank begins and ends a step, with its span.
    steps: list[tuple[Node, Node, Span]]
    start_ns: int  # When the run began
    # What part of a transfer is taken for latency where all are of one size, so that nobody can tell.
    latency_share: float = 0.0
    modelled: bool = False  # Whether the model of the machine has told those that the trace could not
    world_size: int = 0  # Ranks of the run
    meta: Mapping[str, str] = field(default_factory=dict)  # What the timeline says of it


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
