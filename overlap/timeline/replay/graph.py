"""What a replay runs: pieces of work, and what each waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..spans import Span

__all__ = ["Graph", "Node", "NodeKind"]

NodeKind = Literal["program", "compute", "arrival", "transfer", "end"]


@dataclass(slots=True, eq=False)
class Node:
    """A piece of work that begins when all it waits for is over.

    Attributes:
        kind: An instant of a program; a compute; an operation that becomes active on a rank; one that moves its bytes,
            on all ranks at once; its end on a rank.
        work_ns: How long it takes; of a transfer, if no other shares a rank with it.
        after: What it waits for, and how long it takes to begin then.
        ranks: On which it runs.
        spans: Of the timeline; of a transfer those of all ranks.
        likely: Of `after`, those that nothing shows but that most programs have.
        lane: Of the transfers of one, the most urgent has the wires to itself; None: it shares them with all others.
        urgency: In its lane; lower comes first.
        hidden_ns: Of its work, what passes while another of its lane has the wires, if it ever waits for one.
        place: Its number, while a graph runs.
    """

    kind: NodeKind
    work_ns: float
    ranks: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    after: list[tuple[Node, float]] = field(default_factory=list)
    likely: list[Node] = field(default_factory=list)
    lane: object = None
    urgency: tuple[int, ...] = ()
    hidden_ns: float = 0.0
    place: int = -1


@dataclass(slots=True)
class Graph:
    """All pieces of a run.

    Attributes:
        nodes: In any order.
        steps: The instants at which the program of a rank begins and ends a step, with its span.
        start_ns: When the run began.
        latency_share: What part of a transfer is taken for latency where all are of one size, so that nobody can tell.
        modelled: Whether the model of the machine has told those that the trace could not.
        world_size: Ranks of the run.
        meta: What the timeline says of it.
    """

    nodes: list[Node]
    steps: list[tuple[Node, Node, Span]]
    start_ns: int
    latency_share: float = 0.0
    modelled: bool = False
    world_size: int = 0
    meta: Mapping[str, str] = field(default_factory=dict)
