"""Pieces of a graph that wait for each other: which of their waits were guesses, and go.

What a piece was seen to begin after is taken for what it waited for. A change may put that behind the piece itself: a
bucket that is cut larger holds a gradient that was computed after an earlier part of it had come, and times of a coarse
clock let two pieces wait for each other from the beginning. What was certain stays: order of calls, of streams, and of
an operation's own parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...errors import UsageError
from .graph import Graph, Node


def untie(graph: Graph) -> None:
    """Let nothing wait for itself: in each knot, what waits for the end of its first operation no longer does.

    Cost: a look at all waits, and another at those of a knot for each operation that has to be let go.

    Raises:
        UsageError: If a knot has no wait that was a guess.
    """
    knots = _knots(graph.nodes)
    while knots:
        knot = knots.pop()
        _loosen(knot)
        knots += _knots(knot)


def _loosen(knot: Collection[Node]) -> None:
    inside = frozenset(knot)
    guesses: dict[Node, list[tuple[Node, Node]]] = {}  # by the operation, or the compute, that is waited for
    for node in knot:
        for before in (*(each for each, _ in node.after), *node.likely):
            if before in inside and _guessed(node, before):
                guesses.setdefault(before.after[0][0] if before.kind == "end" else before, []).append((node, before))
    if not guesses:
        raise UsageError("--what-if: with this change operations would wait for each other for ever")
    first = min(guesses, key=lambda each: (each.kind != "transfer", _began_ns(each)))
    for node, before in guesses[first]:
        _forget(node, before)


def _guessed(node: Node, before: Node) -> bool:
    if before.kind != "compute":
        return before.kind == "end"
    return node.kind != "compute" or node.spans[0].lane != before.spans[0].lane


def _began_ns(node: Node) -> int:
    return min(span.start_ns for span in node.spans)


def _forget(node: Node, before: Node) -> None:
    """Wait no longer; what passed since then passes after what else is waited for."""
    since_ns = max((delay_ns for each, delay_ns in node.after if each is before), default=0)
    node.after = [(each, max(delay_ns, since_ns)) for each, delay_ns in node.after if each is not before]
    node.likely = [each for each in node.likely if each is not before]


def _knots(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the strongly connected components of more than one node (Tarjan 1972, without recursion)."""
    waits = {node: [*(each for each, _ in node.after), *node.likely] for node in nodes}
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    found: list[list[Node]] = []
    done: set[Node] = set()
    for root in waits:
        calls = [] if root in number else [(root, iter(waits[root]))]
        while calls:
            node, rest = calls[-1]
            if node not in number:
                number[node] = low[node] = len(number)
                path.append(node)
            for before in rest:
                if before not in waits or before in done:
                    continue
                if before not in number:
                    calls.append((before, iter(waits[before])))
                    break
                low[node] = min(low[node], number[before])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[node])
                if low[node] == number[node]:
                    knot = path[path.index(node) :] if path[-1] is not node else [node]
                    del path[-len(knot) :]
                    done.update(knot)
                    found += [knot] if len(knot) > 1 else []
    return found
