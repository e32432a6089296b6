"""Operations on streams of their own, and streams that work on more or fewer of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from ...collectives.generators import GENERATORS
from ...errors import UsageError
from .graph import Graph, Node, release, waited_for_room
from .machine import Machine
from .transfers import streams_of, take_turns

_Lane: TypeAlias = tuple[int, object]
"""A rank, and what names one of its streams."""


def change_window(graph: Graph, window: int, text: str) -> None:
    """Let each stream work on `window` operations at once.

    Raises:
        UsageError: If there are no operations; `text` is what was asked for.
    """
    _released(graph, text)
    _bound(graph, {lane: (nodes, window) for lane, nodes in _arrivals(graph).items()})


def part_streams(graph: Graph, text: str) -> None:
    """Let the operations of each line of the program have a stream of their own.

    Raises:
        UsageError: If there are no operations, or they have one already; `text` is what was asked for.
    """
    arrivals = _arrivals(graph)
    windows = {lane: _window(nodes) for lane, nodes in arrivals.items()}
    mixed = {lane for lane, nodes in arrivals.items() if len({_site(node) for node in nodes}) > 1}
    if arrivals and not mixed:
        raise UsageError(f"--what-if: {text!r}: the operations of each line have a stream of their own already")
    _released(graph, text)
    for node in graph.nodes:
        if node.kind == "transfer" and node.lane is not None:
            node.lane = node.lane, _site(node)
    parted: dict[tuple[_Lane, str], tuple[list[Node], int | None]] = {}
    for lane, nodes in arrivals.items():
        for node in nodes:
            parted.setdefault((lane, _site(node)), ([], windows[lane]))[0].append(node)
    _bound(graph, parted)


def _site(node: Node) -> str:
    return node.spans[0].info.call_site if node.spans[0].info else ""


def _arrivals(graph: Graph) -> dict[_Lane, list[Node]]:
    """Return the arrivals at each stream of each rank, in order of issue."""
    found: dict[_Lane, list[Node]] = {}
    for node in graph.nodes:
        info = node.spans[0].info if node.kind == "arrival" else None
        if info is not None and info.op in GENERATORS:
            found.setdefault((node.ranks[0], node.spans[0].lane), []).append(node)
    for nodes in found.values():
        nodes.sort(key=_issue_order)
    return found


def _issue_order(node: Node) -> tuple[int, int, int]:
    info = node.spans[0].info
    assert info is not None
    return info.issued_ns, info.start_ns, info.seq


def _window(nodes: Sequence[Node]) -> int | None:
    """Return how many were active at once where others waited for room; None if none did."""
    if not any(waited_for_room(node) for node in nodes):
        return None
    edges = sorted(edge for node in nodes for edge in ((node.spans[0].start_ns, 1), (node.spans[0].end_ns, -1)))
    active = most = 0
    for _, change in edges:  # at one instant, ends come first
        active += change
        most = max(most, active)
    return most


def _released(graph: Graph, text: str) -> None:
    """Let operations wait for no room in their streams, but for their input, and share the wires in turn."""
    streams = streams_of(graph, GENERATORS)
    if not streams:
        raise UsageError(f"--what-if: {text!r}: there are no operations on streams")
    told = take_turns(graph, streams)
    for nodes in streams.values():
        _model(graph, nodes, told)
    inputs = _Inputs(graph)
    for (rank, _), nodes in _arrivals(graph).items():
        for step in _by_step(nodes):
            for place, node in enumerate(step):
                if waited_for_room(node):
                    release(node)
                    node.after += [(each, 0.0) for each in inputs.of(rank, step, place)]


def _model(graph: Graph, nodes: Sequence[Node], told: set[Node]) -> None:
    """Ask the machine's model what the trace does not say: what others hide of an operation, and what one takes that
    never had the wires."""
    with suppress(UsageError):
        machine = Machine(graph.meta, graph.world_size, "")
        ended_ns = 0
        for node in sorted(nodes, key=lambda node: node.urgency):
            end_ns = max(span.end_ns for span in node.spans)
            info = node.spans[0].info
            if info is not None and (taken := machine.taken(info, info.algorithm or None)):
                if end_ns <= ended_ns:
                    node.work_ns = taken.alone_s * 1e9
                if node not in told or end_ns <= ended_ns:
                    node.hidden_ns = node.work_ns * (1 - taken.behind_s / taken.alone_s)
            ended_ns = max(ended_ns, end_ns)


def _by_step(nodes: Sequence[Node]) -> list[list[Node]]:
    found: dict[int | None, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.spans[0].step, []).append(node)
    return list(found.values())


class _Inputs:
    """Which compute makes what an operation carries, where that does not show."""

    def __init__(self, graph: Graph) -> None:
        self._computes: dict[tuple[int, int | None], list[Node]] = {}
        for node in graph.nodes:
            if node.kind == "compute":
                self._computes.setdefault((node.ranks[0], node.spans[0].step), []).append(node)
        for nodes in self._computes.values():
            nodes.sort(key=lambda node: node.spans[0].start_ns)

    def of(self, rank: int, step: Sequence[Node], place: int) -> list[Node]:
        """Return the compute called last before an operation.

        Where a program calls all of a step at one instant, as in virtual time, it is the one that is as far behind the
        input of the first operation, of those with its name, as the operation is behind that.
        """
        computes = self._computes.get((rank, step[0].spans[0].step), [])
        called_ns = step[place].spans[0].called_ns
        before = [node for node in computes if node.spans[0].called_ns <= called_ns]
        last_ns = max((node.spans[0].called_ns for node in before), default=0)
        at_once = [node for node in before if node.spans[0].called_ns == last_ns]
        if len(at_once) == 1:
            return at_once
        first = next((each for each, _ in step[0].after if each.kind == "compute"), None)
        if first is None:
            return []
        alike = [node for node in computes if node.spans[0].name == first.spans[0].name]
        at = alike.index(first) + place * (len(alike) - alike.index(first)) // len(step)
        return [alike[at]]


def _bound(graph: Graph, streams: Mapping[Any, tuple[Sequence[Node], int | None]]) -> None:
    """Let the n-th operation of a stream wait for the end of the one that is a window before it."""
    ends = {id(node.spans[0]): node for node in graph.nodes if node.kind == "end"}
    for nodes, window in streams.values():
        if window is not None:
            for node, before in zip(nodes[window:], nodes, strict=False):
                node.after.append((ends[id(before.spans[0])], 0.0))


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
        for step, found in _in_order_of_issue(nodes).items():
            for place, node in enumerate(reversed(found)):
                node.urgency = (place, *node.urgency[1:])
            needs.add(step, found)


def _priority(node: Node) -> int:
    return node.spans[0].info.priority if node.spans[0].info else 0


def _in_order_of_issue(nodes: Iterable[Node]) -> dict[int, list[Node]]:
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
