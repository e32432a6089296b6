"""Buckets of another size: the bytes of a step's all-reduces, cut anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from typing import TypeAlias

from ...errors import UsageError
from .graph import Graph, Node, input_of, release
from .machine import Machine
from .transfers import Fit, fits, kind_of, nbytes_of, streams_of, take_turns, window_ns

_Makers: TypeAlias = Callable[[Node], list[Node]]
_Computes: TypeAlias = Mapping[tuple[int, int | None], Sequence[Node]]
_Prices: TypeAlias = Callable[[int], tuple[float, float]]  # from bytes to work, and what of it another may hide

WINDOW = 8
"""Buckets of a stream that move at the same time, as streams do by default; the next one waits for the oldest."""


def rebucket(graph: Graph, nbytes: int) -> None:
    """Cut the all-reduces of each step, group and stream into buckets of `nbytes`, in the order in which they began.

    A bucket travels once all gradients in it exist; a gradient is there when the last bucket with a part of it is. The
    bytes of one all-reduce are taken to come evenly from the computes of one name since the all-reduce before it.

    Raises:
        UsageError: If there are no all-reduces.
    """
    take_turns(graph, streams_of(graph, ("all_reduce",)))
    found = fits(graph)
    series: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        info = node.info if node.kind == "transfer" else None
        if info is not None and info.op == "all_reduce" and info.nbytes:
            key = node.span.step, info.group, node.ranks, node.span.lane, info.dtype
            series.setdefault(key, []).append(node)
    if not series:
        raise UsageError("there are no all-reduces that could be buckets")
    gone: set[Node] = set()
    made: list[Node] = []
    ends: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "end":
            ends.setdefault(node.after[0][0], []).append(node)
    computes, used = graph.computes(), dict[tuple[object, ...], int]()

    def makers(arrival: Node) -> list[Node]:
        return _makers(arrival, computes, used)

    for nodes in series.values():
        nodes.sort(key=lambda node: (window_ns(node)[0], nbytes_of(node)))
        made += _cut(nodes, nbytes, _prices(graph, nodes, found[kind_of(nodes[0])]), ends, makers)
        gone.update(nodes)
    graph.nodes = [node for node in graph.nodes if node not in gone] + made


def least_bytes(graph: Graph) -> int:
    """Return the bytes of the largest gradient, as far as a run shows it: no bucket can be smaller.

    Gradients that came from several computes are several. What came from one compute, or from the program, may be one
    array.
    """
    computes, used = graph.computes(), dict[tuple[object, ...], int]()
    least = 0
    transfers = [node for node in graph.nodes if node.kind == "transfer" and node.info]
    for node in sorted(transfers, key=window_ns):
        if node.info and node.info.op == "all_reduce":
            arrival = next(each for each, _ in node.after if each.kind == "arrival")
            least = max(least, nbytes_of(node) // len(_makers(arrival, computes, used)))
    return least


def _prices(graph: Graph, nodes: Sequence[Node], fit: Fit) -> _Prices:
    """Return the prices of buckets: fitted to several measured sizes, or from the model of the machine."""
    info, hidden_share = nodes[0].info, _share(nodes)
    with suppress(UsageError):
        machine = Machine(graph.meta, graph.world_size)
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
        made = [makers(arrival) for arrival, _ in node.after]
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


def _makers(arrival: Node, computes: _Computes, used: dict[tuple[object, ...], int]) -> list[Node]:
    """Return the computes that have made what an all-reduce carries, in their order; the arrival itself if none show.

    Args:
        arrival: Of the all-reduce on one rank.
        computes: Of all ranks and steps.
        used: How many computes of a rank, step and name have been returned for earlier all-reduces.
    """
    last = input_of(arrival)
    if last is None:
        return [arrival]
    rank, step, name = last.ranks[0], last.span.step, last.span.name
    alike = [node for node in computes[rank, step] if node.span.name == name]
    first, until = used.get((rank, step, name), 0), alike.index(last) + 1
    used[rank, step, name] = until
    return alike[first:until] or [arrival]
