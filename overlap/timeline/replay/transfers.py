"""Transfers of a replay: how long each had the wires, how they share them, and how long other sizes would take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ..why.verdict import SMALL_CALL_BYTES
from .graph import Graph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Line of a transfer's time by its bytes: `latency_ns + nbytes * ns_per_byte`."""

    latency_ns: float  # The part that does not depend on the size
    ns_per_byte: float
    sizes: int  # How many sizes it is fitted to; one alone does not show what is latency (`Graph.latency_share`)

    def work_ns(self, nbytes: float) -> float:
        """Return how long a transfer takes that has the wires to itself."""
        return self.latency_ns + nbytes * self.ns_per_byte


def transfer_kind(node: Node) -> tuple[str, int]:
    """Return the operation and the group's size of a transfer: one fit covers all transfers of a kind."""
    info = node.info
    return (node.span.name, len(node.ranks)) if info is None else (info.op, len(info.ranks) or len(node.ranks))


def transfer_bytes(node: Node) -> int:
    """Return the bytes of a transfer; 0 if they are unknown."""
    return node.info.nbytes if node.info else 0


def fit_transfers(graph: Graph) -> dict[tuple[str, int], Fit]:
    """Return a fit for each kind of transfer, through the medians of the smallest and of the largest size."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for node in graph.nodes:
        if node.kind == "transfer":
            found.setdefault(transfer_kind(node), {}).setdefault(transfer_bytes(node), []).append(node.work_ns)
    medians = {kind: {size: median(works) for size, works in by_size.items()} for kind, by_size in found.items()}
    return {kind: _fit_line(by_size, graph.latency_share) for kind, by_size in medians.items()}


def _fit_line(medians: dict[int, float], latency_share: float | None) -> Fit:
    """Return the line through the medians of the smallest and largest size; the latency share splits a single size."""
    least, most = min(medians), max(medians)
    if most < 2 * least or not most:
        latency_ns = (float(most < SMALL_CALL_BYTES) if latency_share is None else latency_share) * medians[most]
        return Fit(latency_ns=latency_ns, ns_per_byte=(medians[most] - latency_ns) / max(most, 1), sizes=1)
    slope = max((medians[most] - medians[least]) / (most - least), 0.0)
    return Fit(latency_ns=max(medians[least] - slope * least, 0.0), ns_per_byte=slope, sizes=len(medians))


def transfers_by_stream(graph: Graph, ops: Iterable[str]) -> dict[object, list[Node]]:
    """Return transfers of some operations that carry bytes, by group and stream."""
    known, streams = frozenset(ops), dict[object, list[Node]]()
    for node in graph.nodes:
        info = node.info if node.kind == "transfer" else None
        if info is not None and info.op in known and info.nbytes:
            streams.setdefault((info.group, node.ranks, node.span.lane), []).append(node)
    return streams


def take_turns(graph: Graph, streams: dict[object, list[Node]]) -> set[Node]:
    """Let the transfers of each stream have the wires one after the other, the most urgent and then the oldest first.

    The measured times are divided again: the time of a transfer alone, and the part of it that the bytes of another
    transfer hide while it waits behind that. Cost: a look at all that move at each begin and end.

    Transfers that take turns already, because of an earlier change, stay as that change left them.

    Returns:
        The transfers that now take turns and of whose kind none was seen alone, or none behind another: the trace does
        not show what of them is hidden.
    """
    unordered = []
    for lane, nodes in streams.items():
        for node in nodes:
            if node.lane is None:
                unordered.append(node)
                node.lane, node.urgency = lane, (operation_priority(node), *window_ns(node))
    if not unordered:
        return set()
    transfers = [node for node in graph.nodes if node.kind == "transfer"]
    measured = dict(zip(transfers, measured_ns(transfers)[0], strict=True))
    for node in unordered:  # a transfer that ended while an older one moved has no time of its own
        node.work_ns = measured[node] or node.work_ns
    return set(unordered) - _separate_hidden(unordered)


def operation_priority(node: Node) -> int:
    """Return the priority of an operation; 0 if it is unknown."""
    return node.info.priority if node.info else 0


def window_ns(node: Node) -> tuple[int, int]:
    """Return when a transfer's bytes began to move, with no kept event loop in the way, and when all had moved."""
    return max(node.held_ns, *(span.moved_ns for span in node.spans)), max(span.end_ns for span in node.spans)


def most_at_once(nodes: Sequence[Node]) -> int:
    """Return the largest number of operations that were active at one instant."""
    edges = sorted(edge for node in nodes for edge in ((node.span.start_ns, 1), (node.span.end_ns, -1)))
    active = most = 0
    for _, change in edges:  # at one instant, ends come first
        active += change
        most = max(most, active)
    return most


def measured_ns(nodes: Sequence[Node], looks: Sequence[tuple[int, int]] = ()) -> tuple[list[float], list[float]]:
    """Return how long each transfer had the wires: transfers of one lane in turn, others at the same time.

    Transfers that have the wires of a rank at the same time slow each other down.

    Args:
        nodes: The transfers.
        looks: Instants at which to look at one of them, given by its index.

    Returns:
        How long each transfer had wires; and how long the one of each look had had them by then.
    """
    edges = [(at_ns, -1, look) for look, (at_ns, _) in enumerate(looks)]
    for number, node in enumerate(nodes):
        begin_ns, end_ns = window_ns(node)
        edges += [(end_ns, 0, number), (begin_ns, 1, number)] if begin_ns < end_ns else []
    in_lanes = any(node.lane is not None for node in nodes)
    work, looked_ns, since_ns, running = [0.0] * len(nodes), [0.0] * len(looks), 0, set[int]()
    for at_ns, kind, number in sorted(edges):
        moving = _first_of_lanes(nodes, running) if in_lanes else running
        busy: dict[int, int] = {}
        for each in moving:
            for rank in nodes[each].ranks:
                busy[rank] = busy.get(rank, 0) + 1
        for each in moving:
            work[each] += (at_ns - since_ns) / max(busy[rank] for rank in nodes[each].ranks)
        since_ns = at_ns
        if kind < 0:
            looked_ns[number] = work[looks[number][1]]
        else:
            (running.add if kind else running.discard)(number)
    return work, looked_ns


def _first_of_lanes(nodes: Sequence[Node], running: Collection[int]) -> list[int]:
    """Return the numbers of the most urgent transfer of each lane, and of all transfers without a lane."""
    first: dict[object, int] = {}
    for number in sorted(running, key=lambda number: nodes[number].urgency):
        lane = nodes[number].lane
        first.setdefault(("alone", number) if lane is None else lane, number)
    return list(first.values())


def _separate_hidden(nodes: Iterable[Node]) -> set[Node]:
    """Set the hidden part of kinds of transfers seen alone and behind others; return the transfers of these kinds."""
    ended_ns: dict[object, int] = {}
    alone_by_kind: dict[object, list[Node]] = {}
    behind_by_kind: dict[object, list[Node]] = {}
    for node in sorted(nodes, key=window_ns):
        begin_ns, end_ns = window_ns(node)
        last_ns = ended_ns.get(node.lane, begin_ns)
        by_kind = alone_by_kind if begin_ns >= last_ns else behind_by_kind
        by_kind.setdefault((*transfer_kind(node), transfer_bytes(node)), []).append(node)
        ended_ns[node.lane] = max(last_ns, end_ns)
    marked: set[Node] = set()
    for kind in alone_by_kind.keys() & behind_by_kind.keys():
        medians = [median(node.work_ns for node in some[kind]) for some in (alone_by_kind, behind_by_kind)]
        hidden_ns = max(medians[0] - medians[1], 0.0)
        for node in behind_by_kind[kind]:
            node.work_ns += hidden_ns
        for node in (*alone_by_kind[kind], *behind_by_kind[kind]):
            node.hidden_ns = hidden_ns
            marked.add(node)
    return marked
