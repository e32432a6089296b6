"""Runs a graph: everything begins as soon as what it waits for is over, and transfers share wires of their ranks."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from ..spans import Span, Timeline, span_order
from .graph import Graph, Node

__all__ = ["run_graph"]


def run_graph(graph: Graph, timeline: Timeline, *, likely: bool) -> Timeline:
    """Return the timeline that comes of it: as it was, if nothing was changed, to a nanosecond for each shared wire.

    Args:
        graph: What to run.
        timeline: Where it came from.
        likely: Whether to wait for what nothing shows but is likely.
    """
    begun, over = _Run(graph, likely).times()
    spans = []
    for node in graph.nodes:
        if node.kind == "compute" and node in over:
            spans.append(_moved(node.spans[0], begun[node], over[node]))
        elif node.kind == "end" and node in over:
            transfer = node.after[0][0]
            arrival = next(each for each, _ in transfer.after if each.kind == "arrival" and each.spans == node.spans)
            spans.append(_carried(node.spans[0], over[arrival], begun[transfer], over[node]))
    for first, last, span in graph.steps:
        if first in over and last in over:
            spans.append(_moved(span, over[first], over[last]))
    return replace(timeline, spans=sorted(spans, key=span_order))


def _moved(span: Span, start_ns: float, end_ns: float) -> Span:
    issued_ns = None if span.issued_ns is None else round(start_ns) - (span.start_ns - span.issued_ns)
    return replace(span, start_ns=round(start_ns), end_ns=max(round(end_ns), round(start_ns)), issued_ns=issued_ns)


def _carried(span: Span, start_ns: float, met_ns: float, end_ns: float) -> Span:
    start, met, end = round(start_ns), round(met_ns), round(end_ns)
    met, end = max(met, start), max(end, met, start)
    info = span.info and replace(
        span.info, issued_ns=start - span.info.queue_wait_ns, start_ns=start, met_ns=met, end_ns=end
    )
    return replace(span, start_ns=start, end_ns=end, info=info)


class _Run:
    def __init__(self, graph: Graph, likely: bool) -> None:
        self._graph = graph
        self._next: dict[Node, list[tuple[Node, float]]] = {}
        self._missing: dict[Node, int] = {}
        self._ready: dict[Node, float] = {}
        self._events: list[tuple[float, int, Node, int]] = []
        self._number = count()
        self._left: dict[Node, float] = {}  # of active transfers
        self._rate: dict[Node, float] = {}
        self._since: dict[Node, float] = {}
        self._version: dict[Node, int] = {}
        self._hidden: dict[Node, float] = {}
        self._lanes = any(node.lane is not None for node in graph.nodes)
        self._on: dict[int, dict[Node, None]] = {}
        for node in graph.nodes:
            after = [*node.after, *((each, 0.0) for each in node.likely)] if likely and node.likely else node.after
            self._missing[node] = len(after)
            for before, delay_ns in after:
                self._next.setdefault(before, []).append((node, delay_ns))

    def times(self) -> tuple[dict[Node, float], dict[Node, float]]:
        """Return when each node began, and when it was over."""
        begun, over = self._ready, dict[Node, float]()
        for node in self._graph.nodes:
            if not self._missing[node]:
                self._begin(node, float(self._graph.start_ns))
        while self._events:
            at_ns, _, node, version = heappop(self._events)
            if node.kind == "transfer":
                if version == 0:
                    self._join(node, at_ns)
                    continue
                if version != self._version[node]:
                    continue
                self._leave(node, at_ns)
            over[node] = at_ns
            for later, delay_ns in self._next.get(node, ()):
                self._ready[later] = max(self._ready.get(later, -1e300), at_ns + delay_ns)
                self._missing[later] -= 1
                if not self._missing[later]:
                    self._begin(later, self._ready[later])
        return begun, over

    def _begin(self, node: Node, at_ns: float) -> None:
        self._ready[node] = at_ns
        self._push(at_ns if node.kind == "transfer" else at_ns + node.work_ns, node, 0)

    def _push(self, at_ns: float, node: Node, version: int) -> None:
        heappush(self._events, (at_ns, next(self._number), node, version))

    def _join(self, node: Node, at_ns: float) -> None:
        self._left[node], self._since[node], self._rate[node], self._version[node] = node.work_ns, at_ns, 1.0, 0
        self._hidden[node] = node.hidden_ns
        for rank in node.ranks:
            self._on.setdefault(rank, {})[node] = None
        self._share(node, at_ns)

    def _leave(self, node: Node, at_ns: float) -> None:
        for rank in node.ranks:
            del self._on[rank][node]
        del self._left[node]
        self._share(node, at_ns)

    def _share(self, changed: Node, at_ns: float) -> None:
        """Give every transfer on these ranks its part of the wires anew."""
        for node in {each: None for rank in changed.ranks for each in self._on[rank]}:
            self._left[node] -= (at_ns - self._since[node]) * self._rate[node]
            self._since[node] = at_ns
            self._rate[node] = self._rate_of(node)
            self._version[node] += 1
            if not self._rate[node]:
                self._left[node] -= self._hidden.pop(node, 0.0)
            else:
                self._push(at_ns + max(self._left[node], 0.0) / self._rate[node], node, self._version[node])

    def _rate_of(self, node: Node) -> float:
        if not self._lanes:
            return 1 / max(len(self._on[rank]) for rank in node.ranks)
        if self._behind(node):
            return 0.0
        return 1 / max(sum(not self._behind(each) for each in self._on[rank]) for rank in node.ranks)

    def _behind(self, node: Node) -> bool:
        """Whether a more urgent transfer of its lane is under way."""
        lane = node.lane
        return lane is not None and any(
            each.lane == lane and each.urgency < node.urgency for each in self._on[node.ranks[0]]
        )
