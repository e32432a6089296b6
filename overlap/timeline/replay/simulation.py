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
_MAX_CYCLE_NODES = 500_000
"""Nodes of cycles that are looked at until no node waits for itself: some ten seconds."""

_Side: TypeAlias = tuple[int, str]
"""A rank, and its operation: a rank may send a message to itself."""
_SpanTimes: TypeAlias = tuple[int, int, int, int]
"""Start, end, call, and meeting of the ranks of a span."""


def run_graph(graph: Graph, timeline: Timeline, *, likely: bool) -> Timeline:
    """Return the simulated timeline; without a change it is the recorded one, to a nanosecond for each shared wire.

    Args:
        graph: The pieces to run.
        timeline: The recorded run that it was inferred from.
        likely: Whether to include probable waits.

    Raises:
        UsageError: Pieces wait for each other, and none of these waits was a guess; or more transfers of a lane are
            under way than it may work on at once.
    """
    begins, ends = _Simulation(graph, likely).times()
    if None in ends:
        break_cycles(graph)
        begins, ends = _Simulation(graph, likely).times()
    spans: list[Span] = []
    times: list[_SpanTimes] = []
    side_starts: dict[Node, dict[_Side, float]] = {}  # when each side of a transfer had all that it carries
    for node in graph.nodes:
        end_ns = ends[node.place]
        if end_ns is None:
            continue
        if node.kind == "compute":
            spans += node.spans
            times += [_simulated_compute(span, begins[node.place], end_ns) for span in node.spans]
        elif node.kind == "end":
            transfer, span = node.after[0][0], node.span
            if transfer not in side_starts:
                side_starts[transfer] = _side_starts(transfer, ends)
            spans.append(span)
            times.append(
                _simulated_operation(span, side_starts[transfer][_transfer_side(span)], begins[transfer.place], end_ns)
            )
    for first, last, span in graph.steps:
        first_ns, last_ns = ends[first.place], ends[last.place]
        if first_ns is not None and last_ns is not None:
            spans.append(span)
            times.append(_simulated_compute(span, first_ns, last_ns))
    return _simulated_timeline(spans, times, timeline)


def _transfer_side(span: Span) -> _Side:
    """Return the side of a transfer that a span shows: its rank and operation."""
    return span.rank, span.info.op if span.info else span.name


def _side_starts(transfer: Node, over: Sequence[float | None]) -> dict[_Side, float]:
    """Return when each side of a transfer had its last arrival: a bucket has one arrival for each gradient."""
    starts_ns: dict[_Side, float] = {}
    for node, _ in transfer.after:
        if node.kind == "arrival":
            side = _transfer_side(node.span)
            starts_ns[side] = max(starts_ns.get(side, 0.0), over[node.place] or 0.0)
    return starts_ns


def _simulated_timeline(spans: list[Span], times: list[_SpanTimes], timeline: Timeline) -> Timeline:
    """Return the recorded timeline with the simulated times of its spans, in order of start."""
    columns = SpanColumns.from_spans(spans)
    start_ns, end_ns, issued_ns, met_ns = np.array(times, np.int64).reshape(-1, 4).T
    columns = replace(columns, start_ns=start_ns, end_ns=end_ns, issued_ns=issued_ns, met_ns=met_ns)
    return replace(timeline, spans=SpanList(columns.take(columns.timeline_order())))


def _simulated_compute(span: Span, start_ns: float, end_ns: float) -> _SpanTimes:
    """Return the times of a simulated span that is no operation; its call moves with its start."""
    start = round(start_ns)
    issued = NONE if span.issued_ns is None else start - (span.start_ns - span.issued_ns)
    return start, max(round(end_ns), start), issued, 0


def _simulated_operation(span: Span, start_ns: float, met_ns: float, end_ns: float) -> _SpanTimes:
    """Return the times of a simulated operation; it is queued as long as recorded, and met between start and end."""
    start, met, end = round(start_ns), round(met_ns), round(end_ns)
    met, end = max(met, start), max(end, met, start)
    return (start, end, NONE, 0) if span.info is None else (start, end, start - span.info.queue_wait_ns, met)


class _Simulation:
    """State of a running graph: waits that each node still has, and the transfers that share each rank's wires."""

    def __init__(self, graph: Graph, likely: bool) -> None:
        self._graph = graph
        nodes = graph.nodes
        for position, node in enumerate(nodes):
            node.place = position
        # By the place of a node: the nodes that wait for it, its own waits left, and the earliest instant of its begin.
        self._followers: list[list[tuple[int, float]]] = [[] for _ in nodes]
        self._waits_left = [0] * len(nodes)
        self._begins_ns = [_NEVER] * len(nodes)
        self._events: list[tuple[float, int, Node, int]] = []  # instant, number, node and version; a heap
        self._event_numbers = count()
        # Of active transfers: the work left at the last update, when that was, the share of the wires since then, and
        # the work that another transfer can still hide. An event of an older version is void: the share has changed.
        self._work_left_ns: dict[Node, float] = {}
        self._updated_ns: dict[Node, float] = {}
        self._wire_shares: dict[Node, float] = {}
        self._hidden_left_ns: dict[Node, float] = {}
        self._versions: dict[Node, int] = {}
        # Transfers: the rest of the work when a rank has its part, and the position of that end; the next one last
        self._early_parts: dict[Node, list[tuple[float, int]]] = {}
        self._has_lanes = any(node.lane is not None for node in nodes)
        self._active_by_rank: dict[int, dict[Node, None]] = {}
        following = self._followers
        for position, node in enumerate(nodes):
            self._waits_left[position] = len(node.after)
            for before, delay_ns in node.after:
                if (
                    delay_ns < 0
                    and before.kind == "transfer"
                    and (share := before.early.get(id(node.span))) is not None
                ):
                    self._early_parts.setdefault(before, []).append(((1 - share) * before.work_ns, position))
                else:  # of a bucket of another cut it is not known which rank has its part first
                    following[before.place].append((position, max(delay_ns, 0.0)))
            if likely and node.likely:
                self._waits_left[position] += len(node.likely)
                for before in node.likely:
                    following[before.place].append((position, 0.0))
        for parts in self._early_parts.values():
            parts.sort()

    def times(self) -> tuple[list[float], list[float | None]]:
        """Return when each node began, and when each was over; None for a node that never was."""
        nodes, missing, ready, following = self._graph.nodes, self._waits_left, self._begins_ns, self._followers
        over: list[float | None] = [None] * len(nodes)
        events, push, number = self._events, heappush, self._event_numbers
        for position, node in enumerate(nodes):
            if not missing[position]:
                self._begin_node(node, float(self._graph.start_ns))
        while events:
            at_ns, _, node, version = heappop(events)
            if node.kind == "transfer":
                if version == 0:
                    self._start_transfer(node, at_ns)
                    continue
                if version != self._versions[node]:
                    continue
                if self._early_parts.get(node):
                    self._end_part(node, at_ns)
                    continue
                self._end_transfer(node, at_ns)
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

    def _begin_node(self, node: Node, begin_ns: float) -> None:
        """Begin a node whose waits are over: schedule the start of a transfer, and the end of any other node."""
        self._begins_ns[node.place] = begin_ns
        self._schedule(begin_ns if node.kind == "transfer" else begin_ns + node.work_ns, node, 0)

    def _schedule(self, at_ns: float, node: Node, version: int) -> None:
        heappush(self._events, (at_ns, next(self._event_numbers), node, version))

    def _start_transfer(self, node: Node, at_ns: float) -> None:
        """Let a transfer join the wires of its ranks; raise UsageError if its stream has no place for it."""
        self._work_left_ns[node], self._updated_ns[node], self._wire_shares[node], self._versions[node] = (
            node.work_ns,
            at_ns,
            1.0,
            0,
        )
        self._hidden_left_ns[node] = node.hidden_ns
        for rank in node.ranks:
            self._active_by_rank.setdefault(rank, {})[node] = None
        self._check_window(node)
        self._share_wires(node, at_ns)

    def _end_part(self, node: Node, at_ns: float) -> None:
        """Let one rank's part of a transfer end before those of the other ranks."""
        left_ns, position = self._early_parts[node].pop()
        end = self._graph.nodes[position]
        self._work_left_ns[node], self._updated_ns[node] = left_ns, at_ns
        self._waits_left[position] -= 1
        self._begins_ns[position] = max(self._begins_ns[position], at_ns)
        if not self._waits_left[position]:
            self._schedule(self._begins_ns[position], end, 0)
        self._push_next_end(node, at_ns)

    def _push_next_end(self, node: Node, at_ns: float) -> None:
        """Schedule the next end of a transfer, of a rank's part or of the whole, at its present share of the wires."""
        early = self._early_parts.get(node)
        left_ns = self._work_left_ns[node] - (early[-1][0] if early else 0.0)
        self._schedule(at_ns + max(left_ns, 0.0) / self._wire_shares[node], node, self._versions[node])

    def _end_transfer(self, node: Node, at_ns: float) -> None:
        """Take a transfer off the wires of its ranks, and share them anew."""
        for rank in node.ranks:
            del self._active_by_rank[rank][node]
        del self._work_left_ns[node]
        self._share_wires(node, at_ns)

    def _check_window(self, node: Node) -> None:
        """Raise UsageError if more transfers of a lane are under way than its window allows."""
        window = self._graph.windows.get(node.lane)
        if window is not None and sum(each.lane == node.lane for each in self._active_by_rank[node.ranks[0]]) > window:
            raise UsageError(
                f"with this change more than {window} operations of a stream would be under way, as many as streams "
                "work on at once; which of them would wait cannot be told from a trace: run the changed program"
            )

    def _share_wires(self, changed: Node, at_ns: float) -> None:
        """Recompute the share of the wires of each transfer on the ranks of a changed one, after its work so far."""
        for node in {each: None for rank in changed.ranks for each in self._active_by_rank[rank]}:
            passed_ns, rate = at_ns - self._updated_ns[node], self._wire_shares[node]
            if not rate:  # behind another transfer, whose bytes hide a part of this one
                hidden_ns = min(self._hidden_left_ns[node], passed_ns)
                self._hidden_left_ns[node] -= hidden_ns
                self._work_left_ns[node] -= hidden_ns
            self._work_left_ns[node] -= passed_ns * rate
            self._updated_ns[node] = at_ns
            self._wire_shares[node] = self._wire_share(node)
            self._versions[node] += 1
            if self._wire_shares[node]:
                self._push_next_end(node, at_ns)

    def _wire_share(self, node: Node) -> float:
        """Return the share of the wires, from 0 to 1, that a transfer has: 0 behind another one of its lane."""
        if not self._has_lanes:
            return 1 / max(len(self._active_by_rank[rank]) for rank in node.ranks)
        if self._is_behind(node):
            return 0.0
        return 1 / max(sum(not self._is_behind(each) for each in self._active_by_rank[rank]) for rank in node.ranks)

    def _is_behind(self, node: Node) -> bool:
        """Whether a more urgent transfer of the same lane is under way."""
        lane = node.lane
        return lane is not None and any(
            each.lane == lane and each.urgency < node.urgency for each in self._active_by_rank[node.ranks[0]]
        )


def break_cycles(graph: Graph) -> None:
    """Remove guessed waits until no node waits for itself: in each cycle, the waits for its first operation.

    A node is taken to have waited for the node after whose end it began. A change may put that end behind the node
    itself: a bucket that is cut larger holds a gradient that was computed after an earlier part of it had come, and
    times of a coarse clock let two pieces wait for each other from the beginning. Certain waits stay: the order of
    calls, of streams, and of an operation's own parts.

    Cost: a look at all waits, and another at the waits of a cycle for each operation that is removed from it.

    Raises:
        UsageError: A cycle has no wait that was a guess, or the cycles are too many.
    """
    cycles, looks = _wait_cycles(graph.nodes), 0
    while cycles:
        cycle = cycles.pop()
        looks += len(cycle)
        if looks > _MAX_CYCLE_NODES:
            raise UsageError(
                "with this change too many operations would wait for each other to tell which of the waits were none; "
                "run the changed program"
            )
        graph.awaits_later |= _remove_guesses(cycle)
        cycles += _wait_cycles(cycle)


def _remove_guesses(cycle: Collection[Node]) -> bool:
    """Remove the guessed waits for the first operation of a cycle; return whether a program had waited for it."""
    inside = frozenset(cycle)
    guesses: dict[Node, list[tuple[Node, Node]]] = {}  # by the operation, or the compute, that is waited for
    for node in cycle:
        for before in (*(each for each, _ in node.after), *node.likely):
            if before in inside and _is_guess(node, before):
                guesses.setdefault(before.after[0][0] if before.kind == "end" else before, []).append((node, before))
    if not guesses:
        raise UsageError("with this change operations would wait for each other for ever; try another change")
    first = min(guesses, key=lambda each: (each.kind != "transfer", _began_ns(each)))
    for node, before in guesses[first]:
        remove_wait(node, before)
    return first.kind == "transfer" and any(node.kind == "program" for node, _ in guesses[first])


def _is_guess(node: Node, before: Node) -> bool:
    """Whether a wait was inferred from times, not from the order of calls, of streams or of an operation's parts."""
    if before.kind != "compute":
        return before.kind == "end" or (before.kind == "transfer" and node.kind == "compute")
    return node.kind != "compute" or node.span.lane != before.span.lane


def _began_ns(node: Node) -> int:
    return min(span.start_ns for span in node.spans)


def remove_wait(node: Node, before: Node) -> None:
    """Remove a wait of a node; the delay after that wait then follows its other waits."""
    since_ns = max((delay_ns for each, delay_ns in node.after if each is before), default=0)
    node.after = [(each, max(delay_ns, since_ns)) for each, delay_ns in node.after if each is not before]
    node.likely = [each for each in node.likely if each is not before]


def _wait_cycles(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the strongly connected components of more than one node (Tarjan 1972, without recursion)."""
    waits = {node: [*(each for each, _ in node.after), *node.likely] for node in nodes}
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    cycles: list[list[Node]] = []
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
                    cycle = path[path.index(node) :] if path[-1] is not node else [node]
                    del path[-len(cycle) :]
                    done.update(cycle)
                    cycles += [cycle] if len(cycle) > 1 else []
    return cycles
