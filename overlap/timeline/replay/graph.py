"""Graph of a replay: pieces of work, and the pieces that each of them waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..span import CollectiveInfo, Span

NodeKind = Literal["program", "compute", "arrival", "transfer", "end"]


@dataclass(slots=True, eq=False)
class Node:
    """A piece of work that begins when all it waits for is over."""

    # An instant of a program; a compute; an operation that becomes active on a rank; an operation that moves its bytes,
    # on all ranks at once; its end on a rank.
    kind: NodeKind
    work_ns: float  # How long it takes; of a transfer, if no other shares a rank with it
    ranks: tuple[int, ...]  # On which it runs
    spans: tuple[Span, ...] = ()  # spans of the timeline: of a transfer one of each rank, of a program's instant none
    after: list[tuple[Node, float]] = field(default_factory=list)  # nodes that it waits for, and the delay after them
    likely: list[Node] = field(
        default_factory=list
    )  # nodes that it probably waits for too, although the trace shows it not
    # Lane of a transfer: the most urgent one of a lane has the wires to itself; None: it shares them with all others.
    lane: object = None
    urgency: tuple[int, ...] = ()  # In its lane; lower comes first
    hidden_ns: float = 0.0  # part of its work that passes while another of its lane has the wires, if it waits for one
    held_ns: int = 0  # instant until which busy event loops delayed a transfer; 0 without one
    # Parts of a transfer: how much of its work was done when a rank had its part, by the identity of the rank's
    # span, for the ranks that had theirs before the last one
    early: dict[int, float] = field(default_factory=dict)
    place: int = -1  # Its number, while a graph runs

    @property
    def span(self) -> Span:
        """Its span, or of a transfer the span of one of its ranks."""
        return self.spans[0]

    @property
    def info(self) -> CollectiveInfo | None:
        """The known facts of its operation; None for a compute, or if nothing is known."""
        return self.spans[0].info if self.spans else None


@dataclass(slots=True)
class Graph:
    """All pieces of a run."""

    nodes: list[Node]  # In any order
    steps: list[tuple[Node, Node, Span]]  # The instants at which a program begins and ends a step, with its span
    start_ns: int  # When the run began
    # The part of a transfer that counts as latency where all transfers are of one size; None: all of it where they are
    # small, nothing where they are not
    latency_share: float | None = None
    modelled: bool = False  # Whether the model of the machine has priced transfers that the trace could not
    recut: bool = False  # Whether operations differ from those of the spans
    awaits_later: bool = False  # Whether it could only run because programs await some operations later than they did
    # By lane: how many transfers it works on at once; no more may be under way
    windows: dict[object, int] = field(default_factory=dict)
    world_size: int = 0  # Ranks of the run
    virtual: bool = False  # Whether its time is that of a model
    meta: Mapping[str, str] = field(default_factory=dict)  # metadata of the timeline

    def kept_loops(self) -> list[Node]:
        """Return the computes that programs ran on their event loops, in order of start."""
        found = [node for node in self.nodes if node.kind == "compute" and node.span.kind == "program"]
        return sorted(found, key=lambda node: node.span.start_ns)

    def computes(self) -> dict[tuple[int, int | None], list[Node]]:
        """Return the computes of each rank and step, in order of start."""
        by_step: dict[tuple[int, int | None], list[Node]] = {}
        for node in self.nodes:
            if node.kind == "compute":
                by_step.setdefault((node.ranks[0], node.span.step), []).append(node)
        for nodes in by_step.values():
            nodes.sort(key=lambda node: (node.span.start_ns, node.span.end_ns))
        return by_step


_MAX_INSTANTS = 10_000  # calls of a program in one instant


def waited_for_window(arrival: Node) -> bool:
    """Whether an operation seems to have begun because another one of its stream ended and left it a place."""
    return any(_ends_on_stream(each, arrival) for each, _ in arrival.after)


def release_window_wait(arrival: Node) -> float:
    """Remove an operation's waits for a place in its stream; return its delay after it had one, 0.0 without waits."""
    late_ns = max((delay_ns for each, delay_ns in arrival.after if _ends_on_stream(each, arrival)), default=0.0)
    arrival.after = [(each, delay_ns) for each, delay_ns in arrival.after if not _ends_on_stream(each, arrival)]
    return late_ns


def _ends_on_stream(node: Node, arrival: Node) -> bool:
    """Whether a node is the end of another operation on the stream of an arrival."""
    return node.kind == "end" and node.span.lane == arrival.span.lane and node.span is not arrival.span


def input_compute(arrival: Node) -> Node | None:
    """Return the compute that an operation began after, or that its program awaited before the call; or None."""
    node: Node | None = arrival
    for _ in range(_MAX_INSTANTS):
        if node is None:
            return None
        if (found := next((each for each, _ in node.after if each.kind == "compute"), None)) is not None:
            return found
        node = next((each for each, delay_ns in node.after if each.kind == "program" and not delay_ns), None)
    return None
