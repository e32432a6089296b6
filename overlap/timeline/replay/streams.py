"""Changes of streams: a stream for each line of a program, other windows, and gradients in the order of forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from ...collectives.generators import GENERATORS
from ...defaults import DEFAULT_WINDOW
from ...errors import UsageError
from ..span import Span
from .graph import Graph, Node, release_window_wait, waited_for_window
from .machine import ReplayMachine
from .transfers import most_at_once, operation_priority, take_turns, transfers_by_stream

_Lane: TypeAlias = tuple[int, object]
"""A rank, and what names one of its streams."""


def change_window(graph: Graph, window: int) -> None:
    """Let each stream work on `window` operations at once.

    Raises:
        UsageError: If there are no operations, or they would begin when they did.
    """
    arrivals = _stream_arrivals(graph)
    if arrivals and not any(_window_matters(nodes, window) for nodes in arrivals.values()):
        raise UsageError(
            "streams work on as many operations at once already, or on all that there are; try another window"
        )
    late_ns = _release_windows(graph)
    _limit_by_window(graph, {lane: (nodes, window) for lane, nodes in arrivals.items()}, late_ns)


def part_streams(graph: Graph) -> None:
    """Let the operations of each line of the program have a stream of their own.

    Raises:
        UsageError: If there are no operations, or they have one already.
    """
    arrivals = _stream_arrivals(graph)
    windows = {lane: _observed_window(nodes) for lane, nodes in arrivals.items()}
    mixed = {lane for lane, nodes in arrivals.items() if len({_call_site(node) for node in nodes}) > 1}
    if arrivals and not mixed:
        raise UsageError("the operations of each line have a stream of their own already; leave this change out")
    late_ns = _release_windows(graph)
    for node in graph.nodes:
        if node.kind == "transfer" and node.lane is not None:
            node.lane = node.lane, _call_site(node)
    parted: dict[tuple[_Lane, str], tuple[list[Node], int | None]] = {}
    for lane, nodes in arrivals.items():
        for node in nodes:
            parted.setdefault((lane, _call_site(node)), ([], windows[lane]))[0].append(node)
    _limit_by_window(graph, parted, late_ns)


def _call_site(node: Node) -> str:
    return node.info.call_site if node.info else ""


def _stream_arrivals(graph: Graph) -> dict[_Lane, list[Node]]:
    """Return, by rank and stream, the arrivals of collectives in the order of their issue."""
    arrivals: dict[_Lane, list[Node]] = {}
    for node in graph.nodes:
        info = node.info if node.kind == "arrival" else None
        if info is not None and info.op in GENERATORS:
            arrivals.setdefault((node.ranks[0], node.span.lane), []).append(node)
    for nodes in arrivals.values():
        nodes.sort(key=_issue_order)
    return arrivals


def _issue_order(node: Node) -> tuple[int, int, int]:
    """Return the sort key that puts arrivals in the order of their issue."""
    info = node.info
    assert info is not None
    return info.issued_ns, info.start_ns, info.seq


def _observed_window(nodes: Sequence[Node]) -> int | None:
    """Return a stream's window: the most operations active at once, if others waited for a place; None if unknown.

    Where no step has more operations than were active at once, another reason held those up that seem to have waited.
    """
    most = most_at_once(nodes)
    several = max(Counter(node.span.step for node in nodes).values()) > most
    return most if several and any(waited_for_window(node) for node in nodes) else None


def _window_matters(nodes: Sequence[Node], window: int) -> bool:
    """Whether another window would let some operations of a stream begin sooner or later."""
    now = _observed_window(nodes)
    return window < most_at_once(nodes) if now is None else window != now


def _release_windows(graph: Graph) -> dict[Node, float]:
    """Let operations wait for their input only, not for a place in their streams, and have the wires in turn.

    Returns:
        The arrivals that had waited for room, and how long after there was some they began.
    """
    streams = transfers_by_stream(graph, GENERATORS)
    if not streams:
        raise UsageError("there are no operations on streams; leave this change out")
    fresh = [[node for node in nodes if node.lane is None] for nodes in streams.values()]
    unseen = take_turns(graph, streams)
    for nodes in fresh:
        _model_hidden(graph, nodes, unseen)
    computes, late_ns = graph.computes(), dict[Node, float]()
    for (rank, _), nodes in _stream_arrivals(graph).items():
        for step, arrivals in _by_step(nodes if _observed_window(nodes) else ()).items():
            for place, node in enumerate(arrivals):
                if waited_for_window(node):
                    late_ns[node] = release_window_wait(node)
                    node.after += [
                        (each, 0.0) for each in _likely_input(computes.get((rank, step), []), arrivals, place)
                    ]
    return late_ns


def _model_hidden(graph: Graph, nodes: Sequence[Node], unseen: set[Node]) -> None:
    """Complete what the trace does not show, by the model of the machine; nothing if the machine is unknown.

    That is the part of an operation that others hide, and the time of an operation that never had the wires.
    """
    with suppress(UsageError):
        machine = ReplayMachine(graph.meta, graph.world_size)
        ended_ns = 0
        for node in sorted(nodes, key=lambda node: node.urgency):
            end_ns = max(span.end_ns for span in node.spans)
            info = node.info
            if info is not None and (price := machine.price(info, info.algorithm or None)):
                if end_ns <= ended_ns:
                    node.work_ns = price.alone_s * 1e9
                if node in unseen or end_ns <= ended_ns:
                    node.hidden_ns = node.work_ns * (1 - price.behind_s / price.alone_s)
            ended_ns = max(ended_ns, end_ns)


def _by_step(nodes: Iterable[Node]) -> dict[int | None, list[Node]]:
    """Return nodes by step, each in the given order."""
    found: dict[int | None, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.span.step, []).append(node)
    return found


def _likely_input(computes: Sequence[Node], arrivals: Sequence[Node], position: int) -> list[Node]:
    """Return the compute that was probably the input of an operation, as a list; empty if none can be named.

    Where a program calls all of a step at one instant, as in virtual time, take the computes named like the input of
    the step's first operation: the one that is as far behind that input as the operation is behind the first operation.

    Args:
        computes: Of the rank in the step.
        arrivals: Of the rank at the stream in the step, in order of issue.
        place: Of the operation in `arrivals`.
    """
    called_ns = arrivals[position].span.called_ns
    before = [node for node in computes if node.span.called_ns <= called_ns]
    last_ns = max((node.span.called_ns for node in before), default=0)
    at_once = [node for node in before if node.span.called_ns == last_ns]
    if len(at_once) == 1:
        return at_once
    first = next((each for each, _ in arrivals[0].after if each.kind == "compute"), None)
    if first is None:
        return []
    alike = [node for node in computes if node.span.name == first.span.name]
    return [alike[alike.index(first) + position * (len(alike) - alike.index(first)) // len(arrivals)]]


def _limit_by_window(
    graph: Graph, streams: Mapping[Any, tuple[Sequence[Node], int | None]], late_ns: Mapping[Node, float]
) -> None:
    """Let each operation of a stream wait for the end of the operation that is a window before it."""
    ends = {id(node.span): node for node in graph.nodes if node.kind == "end"}
    for nodes, window in streams.values():
        if window is not None:
            for node, before in zip(nodes[window:], nodes, strict=False):
                node.after.append((ends[id(before.span)], late_ns.get(node, 0.0)))


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
    streams = transfers_by_stream(graph, ("all_reduce", "reduce_scatter"))
    if not streams:
        raise UsageError("there are no gradients that could change their order; leave this change out")
    plain = {lane: nodes for lane, nodes in streams.items() if len({operation_priority(node) for node in nodes}) == 1}
    if not plain:
        raise UsageError("all gradients have priorities already; leave this change out")
    take_turns(graph, plain)
    ends = _transfer_ends(graph, {node for nodes in plain.values() for node in nodes})
    computes = {key: [node for node in nodes if node.work_ns] for key, nodes in graph.computes().items()}
    until_ns = {(span.rank, span.step): span.end_ns for _, _, span in graph.steps}
    for lane, nodes in plain.items():
        if not any(each.kind == "arrival" and waited_for_window(each) for node in nodes for each, _ in node.after):
            graph.windows[lane] = max(DEFAULT_WINDOW, most_at_once(nodes))
        for step, in_step in _by_step(
            sorted(nodes, key=lambda node: (node.span.called_ns, _sequence_number(node)))
        ).items():
            for position, node in enumerate(reversed(in_step)):
                node.urgency = (position, *node.urgency[1:])
            for rank in in_step[0].ranks:
                later = [] if step is None else computes.get((rank, step + 1), [])
                if later and max(span.end_ns for span in _rank_spans(rank, in_step)) > until_ns.get(
                    (rank, step), math.inf
                ):
                    forward = _forward_length(computes.get((rank, step), ()), _rank_spans(rank, in_step))
                    for position, node in enumerate(reversed(in_step)):
                        needed_by = later[min(int(position * forward / len(in_step)), len(later) - 1)]
                        needed_by.likely.append(ends.get((node, rank), node))  # a piece of a cut bucket has no end


def _sequence_number(node: Node) -> int:
    """Return the sequence number of an operation; 0 if it is unknown."""
    return node.info.seq if node.info else 0


def _rank_spans(rank: int, nodes: Iterable[Node]) -> list[Span]:
    """Return the spans of one rank among those of some nodes."""
    return [span for node in nodes for span in node.spans if span.rank == rank]


def _transfer_ends(graph: Graph, transfers: Collection[Node]) -> dict[tuple[Node, int], Node]:
    """Return, by transfer and rank, its end; computes lose their probable waits for these ends.

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


def _forward_length(computes: Sequence[Node], gradients: Sequence[Span]) -> float:
    """Return how many computes a forward pass has: those before the first gradient, without its own backward."""
    starts_ns = [span.start_ns for span in gradients]
    begun_ns = [node.span.start_ns for node in computes]
    before = sum(at_ns < min(starts_ns) for at_ns in begun_ns)
    between = sum(min(starts_ns) <= at_ns < max(starts_ns) for at_ns in begun_ns)
    return max(before - between / max(len(starts_ns) - 1, 1), 1.0)
