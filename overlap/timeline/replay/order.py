"""Gradients in the order of the next forward pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from ...errors import UsageError
from ..span import Span
from .buckets import WINDOW
from .graph import Graph, Node, waited_for_room
from .transfers import most_at_once, priority_of, streams_of, take_turns


def forward_first(graph: Graph) -> None:
    """Let the gradients of each step, group and stream overtake gradients that were issued before them.

    The backward pass issues last what the next forward pass needs first. A trace in which they came in another order
    does not show which compute needs which: where a program does not await them in their step, its next forward pass is
    taken to need one after the other, evenly.

    A gradient overtakes only what is in the window of its stream. Where a trace shows no operation that waited for
    room, and so no window, it is taken to be the usual one, or as many as were active at once. A replay in which more
    are under way is refused: the least urgent would fill the window and hold up the most urgent.

    Raises:
        UsageError: If no gradients are reduced, or all are in such an order already.
    """
    streams = streams_of(graph, ("all_reduce", "reduce_scatter"))
    if not streams:
        raise UsageError("there are no gradients that could change their order")
    plain = {lane: nodes for lane, nodes in streams.items() if len({priority_of(node) for node in nodes}) == 1}
    if not plain:
        raise UsageError("all gradients have priorities already")
    take_turns(graph, plain)
    ends = _ends(graph, {node for nodes in plain.values() for node in nodes})
    computes = {key: [node for node in nodes if node.work_ns] for key, nodes in graph.computes().items()}
    until_ns = {(span.rank, span.step): span.end_ns for _, _, span in graph.steps}
    for lane, nodes in plain.items():
        if not any(each.kind == "arrival" and waited_for_room(each) for node in nodes for each, _ in node.after):
            graph.windows[lane] = max(WINDOW, most_at_once(nodes))
        for step, found in _by_step(sorted(nodes, key=lambda node: (node.span.called_ns, _seq(node)))).items():
            for place, node in enumerate(reversed(found)):
                node.urgency = (place, *node.urgency[1:])
            for rank in found[0].ranks:
                later = [] if step is None else computes.get((rank, step + 1), [])
                if later and max(span.end_ns for span in _on(rank, found)) > until_ns.get((rank, step), math.inf):
                    forward = _forward(computes.get((rank, step), ()), _on(rank, found))
                    for place, node in enumerate(reversed(found)):
                        needed_by = later[min(int(place * forward / len(found)), len(later) - 1)]
                        needed_by.likely.append(ends.get((node, rank), node))  # a piece of a cut bucket has no end


def _by_step(nodes: Iterable[Node]) -> dict[int | None, list[Node]]:
    found: dict[int | None, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.span.step, []).append(node)
    return found


def _seq(node: Node) -> int:
    return node.info.seq if node.info else 0


def _on(rank: int, nodes: Iterable[Node]) -> list[Span]:
    return [span for node in nodes for span in node.spans if span.rank == rank]


def _ends(graph: Graph, transfers: Collection[Node]) -> dict[tuple[Node, int], Node]:
    """Return the end of each transfer on each rank, for which no compute probably waits any more.

    What seemed likely was inferred from another order.
    """
    ends = {
        (node.after[0][0], node.ranks[0]): node
        for node in graph.nodes
        if node.kind == "end" and node.after[0][0] in transfers
    }
    gone = set(ends.values())
    for node in graph.nodes:
        if node.kind == "compute":
            node.likely = [each for each in node.likely if each not in gone]
    return ends


def _forward(computes: Collection[Node], gradients: Collection[Span]) -> float:
    """Return how many computes a forward pass has: those before the first gradient, without its own backward."""
    starts_ns = [span.start_ns for span in gradients]
    begun_ns = [node.span.start_ns for node in computes]
    before = sum(at_ns < min(starts_ns) for at_ns in begun_ns)
    between = sum(min(starts_ns) <= at_ns < max(starts_ns) for at_ns in begun_ns)
    return max(before - between / max(len(starts_ns) - 1, 1), 1.0)
