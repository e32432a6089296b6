"""Gradients that travel in the order in which the next forward pass needs them, whatever order they come in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import UsageError
from .graph import Graph, Node
from .turns import streams_of, take_turns


def forward_first(graph: Graph, text: str) -> None:
    """Let the gradients of each step, group and stream overtake those that were issued before them.

    The backward pass issues last what the next forward pass needs first. A trace in which they came in another order
    does not show which compute needs which: where a program does not await them in their step, its next forward pass is
    taken to need one after the other, evenly.

    Raises:
        UsageError: If no gradients are reduced, or all are in such an order already; `text` is what was asked for.
    """
    streams = streams_of(graph, ("all_reduce", "reduce_scatter"))
    if not streams:
        raise UsageError(f"--what-if: {text!r}: there are no gradients that could change their order")
    plain = {lane: nodes for lane, nodes in streams.items() if len({_priority(node) for node in nodes}) == 1}
    if not plain:
        raise UsageError(f"--what-if: {text!r}: all gradients have priorities already")
    take_turns(graph, plain)
    needs = _Needs(graph, [node for nodes in plain.values() for node in nodes])
    for nodes in plain.values():
        for step, found in _by_step(nodes).items():
            for place, node in enumerate(reversed(found)):
                node.urgency = (place, *node.urgency[1:])
            needs.add(step, found)


def _priority(node: Node) -> int:
    return node.spans[0].info.priority if node.spans[0].info else 0


def _by_step(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    """Return transfers by step, in the order in which they were issued."""
    found: dict[int, list[Node]] = {}
    for node in sorted(nodes, key=_issued):
        step = node.spans[0].step
        found.setdefault(-1 if step is None else step, []).append(node)
    return found


def _issued(node: Node) -> tuple[int, int]:
    span = node.spans[0]
    return (span.info.issued_ns, span.info.seq) if span.info else (span.start_ns, 0)


class _Needs:
    """Which computes of the next step need which gradients."""

    def __init__(self, graph: Graph, gradients: Sequence[Node]) -> None:
        self._computes: dict[tuple[int, int], list[Node]] = {}  # by rank and step
        self._ends: dict[tuple[Node, int], Node] = {}
        self._until_ns = {(span.rank, span.step): span.end_ns for _, _, span in graph.steps}
        moved = set(gradients)
        for node in graph.nodes:
            if node.kind == "end" and node.after[0][0] in moved:
                self._ends[node.after[0][0], node.ranks[0]] = node
            elif node.kind == "compute" and node.spans[0].step is not None and node.work_ns:
                self._computes.setdefault((node.ranks[0], node.spans[0].step), []).append(node)
        for computes in self._computes.values():
            computes.sort(key=lambda node: (node.spans[0].start_ns, node.spans[0].end_ns))
        ends = set(self._ends.values())
        for node in graph.nodes:  # what seemed likely was read off another order
            if node.kind == "compute":
                node.likely = [each for each in node.likely if each not in ends]

    def add(self, step: int, gradients: Sequence[Node]) -> None:
        """Let the next step's forward pass on each rank need these, in the order of their issue, the last one first."""
        for rank in gradients[0].ranks:
            until_ns = self._until_ns.get((rank, step))
            later = self._computes.get((rank, step + 1), ())
            starts = [span.start_ns for node in gradients for span in node.spans if span.rank == rank]
            ends = [span.end_ns for node in gradients for span in node.spans if span.rank == rank]
            if until_ns is None or not later or max(ends) <= until_ns:
                continue  # awaited in its step
            forward = self._forward(rank, step, starts)
            for place, node in enumerate(reversed(gradients)):
                needed_by = later[min(int(place * forward / len(gradients)), len(later) - 1)]
                needed_by.likely.append(self._ends[node, rank])

    def _forward(self, rank: int, step: int, starts_ns: Sequence[int]) -> float:
        """Return how many computes a forward pass has: those before the first gradient, without its own backward."""
        begun = [node.spans[0].start_ns for node in self._computes.get((rank, step), ())]
        before = sum(at_ns < min(starts_ns) for at_ns in begun)
        between = sum(min(starts_ns) <= at_ns < max(starts_ns) for at_ns in begun)
        return max(before - between / max(len(starts_ns) - 1, 1), 1.0)
