"""Simulation of a graph: each piece begins as soon as its waits are over, and transfers share wires of their ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

import numpy as np

from ...errors import UsageError
from ..columnar import NONE, SpanColumns, SpanList
from ..span import Span
from ..spans import Timeline
from .graph import Graph, Node

_NEVER = -1e300
_LOOKS = 500_000
"""Nodes of cycles that are looked at until no node waits for itself: some ten seconds."""

_Side: TypeAlias = tuple[int, str]
"""A rank, and its operation: a rank may send a message to itself."""
_Moved: TypeAlias = tuple[int, int, int, int]
"""Start, end, call, and meeting of the ranks of a span."""


def run_graph(graph: Graph, timeline: Timeline, *, likely: bool) -> Timeline:
    """Return the simulated timeline: the recorded one, if nothing was changed, to a nanosecond for each shared wire.

    Args:
        graph: The pieces to run.
        timeline: The recorded run that it was inferred from.
        likely: Whether to include probable waits.

    Raises:
        UsageError: Pieces wait for each other, and none of these waits was a guess; or more transfers of a lane are
            under way than it may work on at once.
    """
    begins, over = _Run(graph, likely).times()
    if None in over:
        untie(graph)
        begins, over = _Run(graph, likely).times()
    spans: list[Span] = []
    moved: list[_Moved] = []
    arrived: dict[Node, dict[_Side, float]] = {}  # when each side of a transfer had all that it carries
    for node in graph.nodes:
        end_ns = over[node.place]
        if end_ns is None:
            continue
        if node.kind == "compute":
            spans += node.spans
            moved += [_moved(span, begins[node.place], end_ns) for span in node.spans]
        elif node.kind == "end":
            transfer, span = node.after[0][0], node.span
            if transfer not in arrived:
                arrived[transfer] = _arrived(transfer, over)
            spans.append(span)
            moved.append(_carried(span, arrived[transfer][_side(span)], begins[transfer.place], end_ns))
    for first, last, span in graph.steps:
        first_ns, last_ns = over[first.place], over[last.place]
        if first_ns is not None and last_ns is not None:
            spans.append(span)
            moved.append(_moved(span, first_ns, last_ns))
    return _timeline(spans, moved, timeline)


def _side(span: Span) -> _Side:
    return span.rank, span.info.op if span.info else span.name


def _arrived(transfer: Node, over: Sequence[float | None]) -> dict[_Side, float]:
    """Return when each side of a transfer began: a bucket of another cut does when the last of its gradients is."""
    found: dict[_Side, float] = {}
    for node, _ in transfer.after:
        if node.kind == "arrival":
            side = _side(node.span)
            found[side] = max(found.get(side, 0.0), over[node.place] or 0.0)
    return found


def _timeline(spans: list[Span], moved: list[_Moved], timeline: Timeline) -> Timeline:
    columns = SpanColumns.of(spans)
    start_ns, end_ns, issued_ns, met_ns = np.array(moved, np.int64).reshape(-1, 4).T
    columns = replace(columns, start_ns=start_ns, end_ns=end_ns, issued_ns=issued_ns, met_ns=met_ns)
    return replace(timeline, spans=SpanList(columns.take(columns.order())))


def _moved(span: Span, start_ns: float, end_ns: float) -> _Moved:
    start = round(start_ns)
    issued = NONE if span.issued_ns is None else start - (span.start_ns - span.issued_ns)
    return start, max(round(end_ns), start), issued, 0


def _carried(span: Span, start_ns: float, met_ns: float, end_ns: float) -> _Moved:
    start, met, end = round(start_ns), round(met_ns), round(end_ns)
    met, end = max(met, start), max(end, met, start)
    return (start, end, NONE, 0) if span.info is None else (start, end, start - span.info.queue_wait_ns, met)


class _Run:
    def __init__(self, graph: Graph, likely: bool) -> None:
        self._graph = graph
        nodes = graph.nodes
        for position, node in enumerate(nodes):
            node.place = position
        # by place
        self._next: list[list[tuple[int, float]]] = [[] for _ in nodes]
        self._missing = [0] * len(nodes)
        self._ready = [_NEVER] * len(nodes)
        self._events: list[tuple[float, int, Node, int]] = []
        self._number = count()
        self._left: dict[Node, float] = {}  # of active transfers
        self._rate: dict[Node, float] = {}
        self._since: dict[Node, float] = {}
        self._version: dict[Node, int] = {}
        self._hidden: dict[Node, float] = {}
        # Transfers: the rest of the work when a rank has its part, and the position of that end; the next one last
        self._early: dict[Node, list[tuple[float, int]]] = {}
        self._lanes = any(node.lane is not None for node in nodes)
        self._on: dict[int, dict[Node, None]] = {}
        following = self._next
        for position, node in enumerate(nodes):
            self._missing[position] = len(node.after)
            for before, delay_ns in node.after:
                if (
                    delay_ns < 0
                    and before.kind == "transfer"
                    and (share := before.early.get(id(node.span))) is not None
                ):
                    self._early.setdefault(before, []).append(((1 - share) * before.work_ns, position))
                else:  # of a bucket of another cut it is not known which rank has its part first
                    following[before.place].append((position, max(delay_ns, 0.0)))
            if likely and node.likely:
                self._missing[position] += len(node.likely)
                for before in node.likely:
                    following[before.place].append((position, 0.0))
        for parts in self._early.values():
            parts.sort()

    def times(self) -> tuple[list[float], list[float | None]]:
        """Return when each node began, and when it was over; None if it never was."""
        nodes, missing, ready, following = self._graph.nodes, self._missing, self._ready, self._next
        over: list[float | None] = [None] * len(nodes)
        events, push, number = self._events, heappush, self._number
        for position, node in enumerate(nodes):
            if not missing[position]:
                self._begin(node, float(self._graph.start_ns))
        while events:
            at_ns, _, node, version = heappop(events)
            if node.kind == "transfer":
                if version == 0:
                    self._join(node, at_ns)
                    continue
                if version != self._version[node]:
                    continue
                if self._early.get(node):
                    self._reach(node, at_ns)
                    continue
                self._leave(node, at_ns)
            over[node.place] = at_ns
            for position, delay_ns in following[node.place]:
                if at_ns + delay_ns > ready[position]:
                    ready[position] = at_ns + delay_ns
                missing[position] -= 1
                if not missing[position]:
                    later, begin_ns = nodes[position], ready[position]
                    due_ns = begin_ns if later.kind == "transfer" else begin_ns + later.work_ns
                    push(events, (due_ns, next(number), later, 0))
        return ready, over

    def _begin(self, node: Node, at_ns: float) -> None:
        self._ready[node.place] = at_ns
        self._push(at_ns if node.kind == "transfer" else at_ns + node.work_ns, node, 0)

    def _push(self, at_ns: float, node: Node, version: int) -> None:
        heappush(self._events, (at_ns, next(self._number), node, version))

    def _join(self, node: Node, at_ns: float) -> None:
        self._left[node], self._since[node], self._rate[node], self._version[node] = node.work_ns, at_ns, 1.0, 0
        self._hidden[node] = node.hidden_ns
        for rank in node.ranks:
            self._on.setdefault(rank, {})[node] = None
        self._check_room(node)
        self._share(node, at_ns)

    def _reach(self, node: Node, at_ns: float) -> None:
        """Let a rank have its part of a transfer before the other ranks have theirs."""
        left_ns, position = self._early[node].pop()
        end = self._graph.nodes[position]
        self._left[node], self._since[node] = left_ns, at_ns
        self._missing[position] -= 1
        self._ready[position] = max(self._ready[position], at_ns)
        if not self._missing[position]:
            self._push(self._ready[position], end, 0)
        self._push_on(node, at_ns)

    def _push_on(self, node: Node, at_ns: float) -> None:
        """Wait until the next rank has its part of a transfer, or the last one."""
        early = self._early.get(node)
        left_ns = self._left[node] - (early[-1][0] if early else 0.0)
        self._push(at_ns + max(left_ns, 0.0) / self._rate[node], node, self._version[node])

    def _leave(self, node: Node, at_ns: float) -> None:
        for rank in node.ranks:
            del self._on[rank][node]
        del self._left[node]
        self._share(node, at_ns)

    def _check_room(self, node: Node) -> None:
        window = self._graph.windows.get(node.lane)
        if window is not None and sum(each.lane == node.lane for each in self._on[node.ranks[0]]) > window:
            raise UsageError(
                f"with this change more than {window} operations of a stream would be under way, as many as streams "
                "work on at once; which of them would wait cannot be told from a trace: run the changed program"
            )

    def _share(self, changed: Node, at_ns: float) -> None:
        """Recompute the part of the wires of every transfer on the ranks of a changed one."""
        for node in {each: None for rank in changed.ranks for each in self._on[rank]}:
            passed_ns, rate = at_ns - self._since[node], self._rate[node]
            if not rate:  # behind another transfer, whose bytes hide a part of this one
                hidden_ns = min(self._hidden[node], passed_ns)
                self._hidden[node] -= hidden_ns
                self._left[node] -= hidden_ns
            self._left[node] -= passed_ns * rate
            self._since[node] = at_ns
            self._rate[node] = self._rate_of(node)
            self._version[node] += 1
            if self._rate[node]:
                self._push_on(node, at_ns)

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


def untie(graph: Graph) -> None:
    """Remove guessed waits until no node waits for itself: in each cycle, the waits for its first operation.

    A node is taken to have waited for the node after whose end it began. A change may put that end behind the node
    itself: a bucket that is cut larger holds a gradient that was computed after an earlier part of it had come, and
    times of a coarse clock let two pieces wait for each other from the beginning. Certain waits stay: the order of
    calls, of streams, and of an operation's own parts.

    Cost: a look at all waits, and another at the waits of a cycle for each operation that is removed from it.

    Raises:
        UsageError: A cycle has no wait that was a guess, or the cycles are too many.
    """
    knots, looks = _knots(graph.nodes), 0
    while knots:
        knot = knots.pop()
        looks += len(knot)
        if looks > _LOOKS:
            raise UsageError(
                "with this change too many operations would wait for each other to tell which of the waits were none; "
                "run the changed program"
            )
        graph.awaits_later |= _loosen(knot)
        knots += _knots(knot)


def _loosen(knot: Collection[Node]) -> bool:
    """Remove the waits for the first operation of a cycle; return whether a program had waited for it."""
    inside = frozenset(knot)
    guesses: dict[Node, list[tuple[Node, Node]]] = {}  # by the operation, or the compute, that is waited for
    for node in knot:
        for before in (*(each for each, _ in node.after), *node.likely):
            if before in inside and _guessed(node, before):
                guesses.setdefault(before.after[0][0] if before.kind == "end" else before, []).append((node, before))
    if not guesses:
        raise UsageError("with this change operations would wait for each other for ever; try another change")
    first = min(guesses, key=lambda each: (each.kind != "transfer", _began_ns(each)))
    for node, before in guesses[first]:
        forget(node, before)
    return first.kind == "transfer" and any(node.kind == "program" for node, _ in guesses[first])


def _guessed(node: Node, before: Node) -> bool:
    if before.kind != "compute":
        return before.kind == "end" or (before.kind == "transfer" and node.kind == "compute")
    return node.kind != "compute" or node.span.lane != before.span.lane


def _began_ns(node: Node) -> int:
    return min(span.start_ns for span in node.spans)


def forget(node: Node, before: Node) -> None:
    """Remove a wait; the delay after it then follows the other waits."""
    since_ns = max((delay_ns for each, delay_ns in node.after if each is before), default=0)
    node.after = [(each, max(delay_ns, since_ns)) for each, delay_ns in node.after if each is not before]
    node.likely = [each for each in node.likely if each is not before]


def _knots(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the strongly connected components of more than one node (Tarjan 1972, without recursion)."""
    waits = {node: [*(each for each, _ in node.after), *node.likely] for node in nodes}
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    knots: list[list[Node]] = []
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
                    knots += [knot] if len(knot) > 1 else []
    return knots
