"""Gradients in buckets of another size: the bytes of a step's all-reduces, cut anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from typing import TypeAlias

from ...errors import UsageError
from .graph import Graph, Node, input_of, release
from .machine import Machine
from .transfers import Fit, fits, kind_of, nbytes_of, streams_of, take_turns

_Prices: TypeAlias = Callable[[int], tuple[float, float]]  # from bytes to work, and what of it another may hide

WINDOW = 8
"""Buckets of a stream that move at the same time, as streams do by default; the next one waits for the oldest."""


def rebucket(graph: Graph, nbytes: int, text: str) -> None:
    """Cut the all-reduces of each step, group and stream into buckets of `nbytes`, in the order in which they began.

    A bucket travels once all gradients in it exist; a gradient is there when the last bucket is with a part of it. What
    one all-reduce carries is taken to come evenly from the computes of one name since the one before it.

    Raises:
        UsageError: If there are no all-reduces; `text` is what was asked for.
    """
    take_turns(graph, streams_of(graph, ("all_reduce",)))
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
    ends: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "end":
            ends.setdefault(node.after[0][0], []).append(node)
    makers = _Makers(graph)
    for nodes in series.values():
        nodes.sort(key=_began_ns)
        made += _cut(nodes, nbytes, _prices(graph, nodes, found[kind_of(nodes[0])]), ends, makers)
        gone.update(nodes)
    graph.nodes = [node for node in graph.nodes if node not in gone] + made


def _began_ns(node: Node) -> tuple[int, int]:
    return max(span.moved_ns for span in node.spans), nbytes_of(node)


def _prices(graph: Graph, nodes: Sequence[Node], fit: Fit) -> _Prices:
    """Return what tells what a bucket takes: what was measured of several sizes, or the model of the machine."""
    info, hidden_share = nodes[0].spans[0].info, _share(nodes)
    with suppress(UsageError):
        machine = Machine(graph.meta, graph.world_size, "")
        if fit.sizes == 1 and not graph.latency_share and info and (seen := machine.taken(info, None)):
            alone_ns = fit.work_ns(info.nbytes)
            alone, behind = alone_ns / seen.alone_s, (1 - hidden_share) * alone_ns / seen.behind_s

            graph.modelled = True

            def modelled(nbytes: int) -> tuple[float, float]:
                told = machine.taken(info, None, nbytes=nbytes) or seen
                return told.alone_s * alone, max(told.alone_s * alone - told.behind_s * behind, 0.0)

            return modelled
    return lambda nbytes: (fit.work_ns(nbytes), hidden_share * fit.work_ns(nbytes))


def _share(nodes: Sequence[Node]) -> float:
    return sum(node.hidden_ns for node in nodes) / max(sum(node.work_ns for node in nodes), 1.0)


def _cut(
    nodes: Sequence[Node], nbytes: int, prices: _Prices, ends: Mapping[Node, Sequence[Node]], makers: _Makers
) -> list[Node]:
    total = sum(map(nbytes_of, nodes))
    buckets = []
    for number, start in enumerate(range(0, total, nbytes)):
        work_ns, hidden_ns = prices(min(nbytes, total - start))
        buckets.append(Node("transfer", work_ns, nodes[0].ranks, hidden_ns=hidden_ns))
        buckets[-1].lane, buckets[-1].urgency = nodes[0].lane, (*nodes[0].urgency, number)
    for bucket, before in zip(buckets[WINDOW:], buckets, strict=False):
        bucket.after.append((before, 0))
    at = 0
    for node in nodes:
        first, final = at // nbytes, (at + nbytes_of(node) - 1) // nbytes
        made = [makers.of(arrival) for arrival, _ in node.after]
        for arrival, _ in node.after:
            release(arrival)  # or a bucket could wait for its own end
        for number in range(first, final + 1):
            buckets[number].spans += node.spans
            share = min(((number + 1) * nbytes - at) / max(nbytes_of(node), 1), 1.0)
            whole = number == final
            buckets[number].after += node.after if whole else [(by[ceil(share * len(by)) - 1], 0.0) for by in made]
        at += nbytes_of(node)
        for end in ends.get(node, ()):
            end.after[0] = (buckets[final], end.after[0][1])
    return buckets


class _Makers:
    """Which computes have made what an all-reduce carries; each is asked for once, in the order of their streams."""

    def __init__(self, graph: Graph) -> None:
        self._alike: dict[tuple[int, int | None, str], list[Node]] = {}
        self._used: dict[tuple[int, int | None, str], int] = {}
        for node in graph.nodes:
            if node.kind == "compute":
                self._alike.setdefault(_alike(node), []).append(node)
        for nodes in self._alike.values():
            nodes.sort(key=lambda node: node.spans[0].start_ns)

    def of(self, arrival: Node) -> list[Node]:
        """Return them in their order; the arrival itself if none show."""
        last = input_of(arrival)
        if last is None:
            return [arrival]
        key = _alike(last)
        first, until = self._used.get(key, 0), self._alike[key].index(last) + 1
        self._used[key] = until
        return self._alike[key][first:until] or [arrival]


def _alike(node: Node) -> tuple[int, int | None, str]:
    return node.ranks[0], node.spans[0].step, node.spans[0].name
