"""Inference of dependencies: finds the pieces that each piece of a recorded run waited for.

A trace shows when things happened, not why. A piece that begins when another piece on its rank has ended, or a little
later, is taken to have waited for it. A compute that in no step began before an operation had ended probably waits for
that operation, although it did not have to this time. A replay runs with these probable waits or without them, and the
truth lies between.

A stretch in which a program kept its event loop is a compute of that program, for which every rank of the process waits
and every transfer of theirs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ..measure.activity import keeper_rows
from ..measure.meetings import meetings
from ..span import Span
from ..spans import Timeline
from .graph import Graph, Node
from .transfers import measured_ns, window_ns

_MAX_LATER_COMPUTES = 64
"""Computes after an operation that are searched for the first that may need its result."""

_FETCHES = frozenset({"all_gather", "all_to_all", "broadcast", "scatter"})

_Ends: TypeAlias = "tuple[list[int], list[Node]]"


def graph_of(timeline: Timeline) -> Graph:
    """Return the graph of a recorded run. Cost: a sort, and a look at some neighbours of each span."""
    timeline = _trim_loops(timeline)
    ranks = timeline.by_rank()
    loops = _kept_loops(timeline)
    transfers = _transfers(timeline, loops)
    nodes: list[Node] = list(dict.fromkeys(transfers.values()))
    steps: list[tuple[Node, Node, Span]] = []
    start_ns = min((span.called_ns for span in timeline.spans), default=0)
    for rank, spans in ranks.items():
        _RankInference(rank, spans, transfers, loops, start_ns).infer(nodes, steps)
    return Graph(
        nodes=nodes, steps=steps, start_ns=start_ns, world_size=timeline.world_size,
        virtual=timeline.clock == "virtual", meta=timeline.meta,
    )  # fmt: skip


def _trim_loops(timeline: Timeline) -> Timeline:
    """Return the timeline with kept loops cut where programs of other ranks acted; samples see a change late."""
    columns = timeline.columns
    loops = np.flatnonzero(columns.is_kind("program"))
    if not len(loops):
        return timeline
    marked = columns.is_kind("step")
    called = np.flatnonzero(columns.is_kind("comm") | marked)
    at_ns = np.concatenate([columns.called_ns[called], columns.end_ns[marked]])
    ranks = np.concatenate([columns.rank[called], columns.rank[marked]])
    start_ns, end_ns = columns.start_ns.copy(), columns.end_ns.copy()
    keeper = keeper_rows(columns)
    for row in np.unique(keeper[loops]).tolist():
        turn = loops[keeper[loops] == row]
        first, last = int(columns.start_ns[row]), int(columns.end_ns[row])
        others = np.isin(ranks, columns.rank[turn]) & (ranks != columns.rank[row]) & (first < at_ns) & (at_ns < last)
        late = at_ns[others] > (first + last) // 2
        start_ns[turn] = max(first, at_ns[others][~late].max(initial=first))
        end_ns[turn] = min(last, at_ns[others][late].min(initial=last))
    spans = list(timeline.spans)  # all others stay the objects that they are: users of the graph know them by identity
    for row in loops.tolist():
        spans[row] = replace(spans[row], start_ns=int(start_ns[row]), end_ns=int(end_ns[row]))
    return replace(timeline, spans=spans)


def _kept_loops(timeline: Timeline) -> dict[int, Node]:
    """Return, by identity of each span of a kept event loop, the compute that kept it."""
    rows = np.flatnonzero(timeline.columns.is_kind("program"))
    spans: dict[int, list[Span]] = {}
    for row, keeper in zip(rows.tolist(), keeper_rows(timeline.columns)[rows].tolist(), strict=True):
        spans.setdefault(keeper, []).append(timeline.spans[row])
    nodes: dict[int, Node] = {}
    for keeper, members in spans.items():
        mine = timeline.spans[keeper]
        every = (mine, *(span for span in members if span is not mine))
        node = Node("compute", mine.duration_ns, (mine.rank,), every)
        nodes |= {id(span): node for span in every}
    return nodes


def _add_loop_waits(nodes: Sequence[Node], loops: Sequence[Node]) -> None:
    """Let transfers wait for event loops that were kept while they moved, and were free before they ended."""
    loops = sorted(loops, key=lambda loop: loop.span.end_ns)
    ends_ns = [loop.span.end_ns for loop in loops]
    ranks = [{span.rank for span in loop.spans} for loop in loops]
    for node in nodes:
        begin_ns, end_ns = window_ns(node)
        for at in range(bisect_right(ends_ns, begin_ns), bisect_right(ends_ns, end_ns)):
            if loops[at].span.start_ns < end_ns and not ranks[at].isdisjoint(node.ranks):
                node.held_ns = max(node.held_ns, ends_ns[at])
                node.after.append((loops[at], 0))


def _transfers(timeline: Timeline, loops: dict[int, Node]) -> dict[int, Node]:
    """Return, by identity of each span of communication, its transfer, with the work that it measured."""
    met: dict[int, list[Span]] = {}
    numbers = meetings(timeline.columns).tolist()
    for row, (span, number) in enumerate(zip(timeline.spans, numbers, strict=True)):
        if span.kind == "comm":
            met.setdefault(-1 - row if number < 0 else number, []).append(span)
    nodes = [
        Node("transfer", 0.0, tuple(sorted({span.rank for span in members})), tuple(members))
        for members in met.values()
    ]
    _add_loop_waits(nodes, list(dict.fromkeys(loops.values())))
    early = [(span, number) for number, node in enumerate(nodes) for span in node.spans if span.end_ns < _last_ns(node)]
    work_ns, done_ns = measured_ns(nodes, [(span.end_ns, number) for span, number in early])
    for node, each_ns in zip(nodes, work_ns, strict=True):
        node.work_ns = each_ns
    for (span, number), each_ns in zip(early, done_ns, strict=True):
        nodes[number].early[id(span)] = each_ns / work_ns[number] if work_ns[number] else 0.0
    return {id(span): node for node in nodes for span in node.spans}


def _last_ns(transfer: Node) -> int:
    """Return when the last rank had all of a transfer."""
    return max(span.end_ns for span in transfer.spans)


class _RankInference:
    """The nodes of one rank, while they are inferred from its spans."""

    def __init__(
        self, rank: int, spans: Sequence[Span], transfers: dict[int, Node], loops: dict[int, Node], start_ns: int
    ) -> None:
        self.rank, self.start_ns = rank, start_ns
        self.computes = {id(s): Node("compute", s.duration_ns, (rank,), (s,)) for s in spans if s.kind == "compute"}
        kept_loops = [(span, loops[id(span)]) for span in spans if id(span) in loops]
        self.computes |= {id(span): loop for span, loop in kept_loops if span is loop.span}
        self.own_loops = [loop for span, loop in kept_loops if span is loop.span]
        self.comm = [span for span in spans if span.kind == "comm"]
        self.arrivals = {id(span): Node("arrival", 0, (rank,), (span,)) for span in self.comm}
        self.ends = {id(span): Node("end", 0, (rank,), (span,)) for span in self.comm}
        self.spans, self.transfers = spans, transfers
        over = [(span.end_ns, self.computes[id(span)]) for span in spans if span.kind == "compute"]
        over += [(span.end_ns, loop) for span, loop in kept_loops]
        over += [(span.end_ns, self.ends[id(span)]) for span in self.comm]
        over.sort(key=lambda each: each[0])
        self.nodes_by_end: _Ends = [at for at, _ in over], [node for _, node in over]

    def infer(self, nodes: list[Node], steps: list[tuple[Node, Node, Span]]) -> None:
        """Add the nodes of this rank, each with its waits."""
        issued = self._chain_program(nodes, steps)
        self._add_compute_waits(issued)
        self._add_communication(issued)
        self._add_likely_waits(steps)
        nodes += [*self.computes.values(), *self.arrivals.values(), *self.ends.values()]

    def _last_over(
        self, after_ns: int, until_ns: int, *, issued_by_ns: int, but: Node | None = None
    ) -> tuple[Node, int] | None:
        """Return the node that ended last between two instants, the first one excluded, and when it ended.

        Of several at that instant, take a node that was issued in time to be waited for, if there is one.
        """
        times, nodes = self.nodes_by_end
        last: tuple[Node, int] | None = None
        for index in range(bisect_right(times, until_ns) - 1, bisect_right(times, after_ns) - 1, -1):
            if last is not None and times[index] < last[1]:
                break
            if but is not None and (nodes[index].spans == but.spans or _share_a_stream(nodes[index], but)):
                continue
            if nodes[index].span.called_ns <= issued_by_ns:
                return nodes[index], times[index]
            last = last or (nodes[index], times[index])
        return last

    def _last_awaited(self, after_ns: int, until_ns: int) -> tuple[Node, int] | None:
        """Return the last awaited operation that ended between two instants, and when it ended; None without one."""
        times, nodes = self.nodes_by_end
        for index in range(bisect_right(times, until_ns) - 1, bisect_right(times, after_ns) - 1, -1):
            if _awaited_by(nodes[index], until_ns):
                return nodes[index], times[index]
        return None

    def _chain_program(self, nodes: list[Node], steps: list[tuple[Node, Node, Span]]) -> dict[int, Node]:
        """Add the program's instants, each waiting for the one before or an awaited node; return issues by span."""
        events: list[tuple[int, int, Span]] = []
        for span in self.spans:
            if span.kind == "step":
                events += [(span.start_ns, 0, span), (span.end_ns, 2, span)]
            elif id(span) in self.computes or id(span) in self.arrivals:
                events.append((span.called_ns, 1, span))
        events.sort(key=lambda event: (event[0], -1 if event[2].step is None else event[2].step, event[1]))
        issued: dict[int, Node] = {}
        begins: dict[int, Node] = {}
        before: Node | None = None
        before_ns = self.start_ns
        own_loops = sorted(self.own_loops, key=lambda loop: loop.span.end_ns, reverse=True)
        for at_ns, kind, span in events:
            node = Node("program", 0, (self.rank,))
            while own_loops and own_loops[-1].span.end_ns <= at_ns:
                node.after.append((own_loops.pop(), 0))
            woken = self._last_over(before_ns, at_ns, issued_by_ns=before_ns)
            if woken and woken[0].kind == "end" and not _awaited_by(woken[0], at_ns):
                woken = self._last_awaited(before_ns, at_ns) or woken
            if before is not None:
                node.after.append((before, 0 if woken else at_ns - before_ns))
            elif not woken:
                node.work_ns = at_ns - self.start_ns
            if woken:
                node.after.append((woken[0], at_ns - woken[1]))
            nodes.append(node)
            before, before_ns = node, at_ns
            if kind == 1:
                issued[id(span)] = node
            elif kind == 0:
                begins[id(span)] = node
            else:
                steps.append((begins[id(span)], node, span))
        return issued

    def _add_compute_waits(self, issued: dict[int, Node]) -> None:
        """Add the waits of computes: for their issue, for the compute before on their stream, and for inputs."""
        lanes: dict[str, tuple[Node, int]] = {}
        for span in sorted((s for s in self.spans if id(s) in self.computes), key=lambda s: (s.start_ns, s.end_ns)):
            node, at_ns = self.computes[id(span)], span.called_ns
            before = lanes.get(span.lane)
            ready_ns = at_ns if before is None else max(at_ns, before[1])
            self._add_waits(node, issued[id(span)], before, ready_ns, span.start_ns)
            lanes[span.lane] = node, span.end_ns

    def _add_communication(self, issued: dict[int, Node]) -> None:
        """Add the waits of operations: arrivals for issues, transfers for arrivals, and ends for transfers."""
        for span in self.comm:
            arrival, end, transfer = self.arrivals[id(span)], self.ends[id(span)], self.transfers[id(span)]
            self._add_waits(arrival, issued[id(span)], None, span.called_ns, span.start_ns)
            transfer.after.append((arrival, 0))
            end.after.append((transfer, span.end_ns - _last_ns(transfer)))

    def _add_waits(
        self, node: Node, issue: Node, before: tuple[Node, int] | None, ready_ns: int, start_ns: int
    ) -> None:
        """Add the waits of a node: for its issue, the node before it, and the last node that ended before it began."""
        woken = None
        if start_ns > ready_ns:
            woken = self._last_over(ready_ns, start_ns, issued_by_ns=node.span.called_ns, but=node)
        node.after.append((issue, 0))
        if before is not None:
            node.after.append((before[0], 0))
        if woken is not None:
            node.after.append((woken[0], start_ns - woken[1]))
        elif start_ns > ready_ns:
            node.after = [(each, start_ns - ready_ns) for each, _ in node.after]

    def _add_likely_waits(self, steps: list[tuple[Node, Node, Span]]) -> None:
        """Add probable waits, which the trace does not show because they were always over in time."""
        own_steps = [(end, span) for _, end, span in steps if span.rank == self.rank]
        by_step: dict[int | None, list[Span]] = {}
        for span in self.comm:
            by_step.setdefault(span.step, []).append(span)
        in_time = all(s.end_ns <= step.end_ns for _, step in own_steps for s in by_step.get(step.step, ()))
        for end, step in own_steps if in_time else ():
            end.likely += [self.ends[id(span)] for span in by_step.get(step.step, ())]
        # The next compute needs what was gathered; sums of gradients are needed where they are awaited.
        some = [span for span in self.comm if not in_time or (span.info and span.info.op in _FETCHES)]
        for span, later in self._first_users(some):
            self.computes[id(later)].likely.append(self.ends[id(span)])

    def _first_users(self, operations: Sequence[Span]) -> list[tuple[Span, Span]]:
        """Return, for each operation, the first compute issued after it that began before its end in no step."""
        computes = sorted((s for s in self.spans if s.kind == "compute"), key=lambda s: (s.called_ns, s.start_ns))
        times = [span.called_ns for span in computes]
        follow: dict[tuple[str, str, int], list[tuple[Span, list[Span]]]] = {}
        numbers: dict[tuple[str, str, int | None], int] = {}
        for span in operations:
            site = span.info.call_site if span.info else ""
            number = numbers[span.name, site, span.step] = numbers.get((span.name, site, span.step), -1) + 1
            first = bisect_left(times, span.called_ns)
            later = computes[first : first + _MAX_LATER_COMPUTES]
            follow.setdefault((span.name, site, number), []).append((span, later))
        users = []
        for same in follow.values():
            for place in range(min(len(later) for _, later in same)):
                if all(later[place].start_ns >= span.end_ns for span, later in same):
                    users += [(span, later[place]) for span, later in same]
                    break
        return users


def _awaited_by(node: Node, at_ns: int) -> bool:
    """Whether a node is the end of an operation that the program had begun to wait for at an instant."""
    info = node.info if node.kind == "end" else None
    return info is not None and info.awaited_ns is not None and info.awaited_ns <= at_ns


def _share_a_stream(one: Node, other: Node) -> bool:
    """Whether both are computes of one stream, and so in a known order."""
    return one.kind == other.kind == "compute" and one.span.lane == other.span.lane
