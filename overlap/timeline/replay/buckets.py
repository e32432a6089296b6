"""Gradients in buckets of another size: the bytes of a step's all-reduces, cut anew."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .graph import Graph, Node
from .wires import Fit, fits, kind_of, nbytes_of

__all__ = ["rebucket"]

WINDOW = 8
"""Buckets of a stream that move at the same time, as streams do by default; the next one waits for the oldest."""


def rebucket(graph: Graph, nbytes: int, text: str) -> None:
    """Cut the all-reduces of each step, group and stream into buckets of `nbytes`, in the order in which they began.

    A bucket travels once all gradients in it exist; a gradient is there when the last bucket is with a part of it.

    Raises:
        UsageError: If there are no all-reduces; `text` is what was asked for.
    """
    found = fits(graph)
    series: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        info = node.spans[0].info if node.kind == "transfer" else None
        if info is not None and info.op == "all_reduce" and info.nbytes:
            key = node.spans[0].step, info.group, node.ranks, node.spans[0].lane, info.dtype
            series.setdefault(key, []).append(node)
    if not series:
        raise UsageError(f"--what-if: {text!r}: there are no all-reduces that could be buckets")
    gone: set[Node] = set()
    made: list[Node] = []
    for nodes in series.values():
        nodes.sort(key=_began_ns)
        made += _cut(nodes, nbytes, found[kind_of(nodes[0])], graph)
        gone.update(nodes)
    graph.nodes = [node for node in graph.nodes if node not in gone] + made


def _began_ns(node: Node) -> tuple[int, int]:
    return max(span.info.met_ns if span.info else span.start_ns for span in node.spans), nbytes_of(node)


def _cut(nodes: Sequence[Node], nbytes: int, fit: Fit, graph: Graph) -> list[Node]:
    total = sum(map(nbytes_of, nodes))
    buckets = [Node("transfer", fit.work_ns(min(nbytes, total - at)), nodes[0].ranks) for at in range(0, total, nbytes)]
    for bucket, before in zip(buckets[WINDOW:], buckets, strict=False):
        bucket.after.append((before, 0))
    last: dict[Node, Node] = {}
    at = 0
    for node in nodes:
        first, final = at // nbytes, (at + nbytes_of(node) - 1) // nbytes
        for bucket in buckets[first : final + 1]:
            bucket.after += node.after
            bucket.spans += node.spans
        last[node] = buckets[final]
        at += nbytes_of(node)
    for node in graph.nodes:
        if node.kind == "end" and node.after[0][0] in last:
            node.after[0] = (last[node.after[0][0]], node.after[0][1])
    return buckets
