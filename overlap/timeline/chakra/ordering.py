"""When the operations of a Chakra trace run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from ...errors import UsageError
from ..span import CollectiveInfo, Kind, Span, span_order
from ..spans import Timeline
from .nodes import Node

REPLAYED = "replayed"
"""In `meta` of a timeline whose times were not recorded."""


def timeline_of(nodes: Sequence[Node], rank: int, world_size: int) -> Timeline:
    """Make the timeline of one rank.

    Where anything runs on a device, computes are what does, and the host only takes time. Durations of communication
    contain what was waited for others.

    Raises:
        UsageError: If nothing takes any time, or dependencies go round in a circle.
    """
    if not any(node.length_ns for node in nodes):
        raise UsageError(
            "a Chakra trace without durations: a workload for a simulator, not what was measured; convert one that "
            "PyTorch's profiler has timed"
        )
    recorded = any(node.start_ns is not None for node in nodes)
    begun = {node.id: node.start_ns or 0 for node in nodes} if recorded else _replayed(nodes)
    on_device = any(node.work != "other" and not node.on_cpu for node in nodes)
    groups = {name: ranks for node in nodes for name, ranks in node.groups.items()}
    world_size = max(world_size, *(max(ranks, default=-1) + 1 for ranks in groups.values())) if groups else world_size
    numbers: dict[tuple[str, str], int] = {}
    spans = []
    for node in sorted(nodes, key=lambda node: (begun[node.id], node.id)):
        if node.work != "other" and not (node.on_cpu and on_device):
            spans.append(_span(node, rank, begun[node.id], numbers, groups, world_size))
    meta = {"origin": "Chakra execution trace"} | ({} if recorded else {REPLAYED: "by dependencies"})
    return Timeline(spans=sorted(spans, key=span_order), world_size=world_size, meta=meta)


def _replayed(nodes: Sequence[Node]) -> dict[int, int]:
    """Let each begin as soon as what it depends on is over and its lane is free, in the order of that and of ids."""
    known = {node.id: node for node in nodes}
    missing = {node.id: len({each for each in node.after if each in known}) for node in nodes}
    later: dict[int, list[int]] = {}
    for node in known.values():
        for each in {each for each in node.after if each in known}:
            later.setdefault(each, []).append(node.id)
    ready_ns = dict.fromkeys(known, 0)
    free_ns: dict[str, int] = {}
    begun: dict[int, int] = {}
    waiting = [(0, id) for id in known if not missing[id]]
    waiting.sort()
    while waiting:
        at_ns, id = heappop(waiting)
        node = known[id]
        begun[id] = max(at_ns, free_ns.get(node.lane, 0)) if node.length_ns else at_ns
        over_ns = begun[id] + node.length_ns
        if node.length_ns:
            free_ns[node.lane] = over_ns
        for other in later.get(id, ()):
            ready_ns[other] = max(ready_ns[other], over_ns)
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (ready_ns[other], other))
    if len(begun) < len(known):
        stuck = len(known) - len(begun)
        raise UsageError(f"{stuck} of its {len(known)} operations never begin: their dependencies go round in a circle")
    return begun


def _span(
    node: Node,
    rank: int,
    start_ns: int,
    numbers: dict[tuple[str, str], int],
    groups: Mapping[str, tuple[int, ...]],
    world_size: int,
) -> Span:
    end_ns = start_ns + node.length_ns
    kind: Kind = "comm" if node.work == "comm" else "compute"
    info = None
    if kind == "comm":
        number = numbers[node.op, node.group] = numbers.get((node.op, node.group), -1) + 1
        ranks = groups.get(node.group, ()) or tuple(range(world_size))
        if node.peer is not None:
            ranks = (rank, node.peer) if node.op == "send" else (node.peer, rank)
        info = CollectiveInfo(
            op=node.op, algorithm="", group=node.group, seq=number,
            nbytes=node.nbytes * (len(ranks) if node.op == "all_gather" else 1), dtype="", issued_ns=start_ns,
            met_ns=start_ns, priority=0, call_site="", start_ns=start_ns, end_ns=end_ns, ranks=ranks,
        )  # fmt: skip
    return Span(
        rank=rank, kind=kind, lane="comm" if kind == "comm" else f"compute {node.lane}", name=node.name or node.op,
        start_ns=start_ns, end_ns=end_ns, info=info,
    )  # fmt: skip
