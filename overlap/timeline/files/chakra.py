"""Chakra execution traces (mlcommons/chakra): one file for each rank, a graph of operations with durations.

Operations come from protobuf messages or from the variant in JSON. Their times are the recorded ones, or else the
earliest that their dependencies allow, because the converter from PyTorch writes durations only. Numbers of fields and
kinds: mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Literal, TypeAlias

from ...errors import UsageError
from ..span import CollectiveInfo, Kind, Span
from ..spans import ORIGIN, REPLAYED, Timeline
from .events import Json
from .protobuf import Value, fields, floating, messages, numbers

_NAME = re.compile(r"(?P<prefix>.*?)(?:\.(?P<rank>\d+))?\.(?:et|json)(?:\.gz)?")


def is_chakra(path: Path) -> bool:
    """Whether a file is named as files of messages are: `name.RANK.et`, compressed or not."""
    return path.name.endswith((".et", ".et.gz"))


def is_chakra_json(document: object) -> bool:
    """Whether a document is the variant in JSON."""
    return isinstance(document, Mapping) and isinstance(document.get("workload_graph"), list)


def from_chakra(path: Path, data: bytes) -> tuple[Timeline, bool]:
    """Read the messages of a file; return also whether the last one was cut off.

    Raises:
        UsageError: If it has no durations, or its dependencies go round in a circle.
        ValueError: If it is damaged.
    """
    nodes, cut = nodes_of_messages(data)
    return timeline_of(nodes, *_place(path)), cut


def from_chakra_json(path: Path, document: Mapping[str, Json]) -> Timeline:
    """Read the variant in JSON; errors are those of `from_chakra`."""
    return timeline_of(nodes_of_json(document), *_place(path))


def _place(path: Path) -> tuple[int, int]:
    """Return rank and size of the world, from the names of the file and of the files beside it."""
    match = _NAME.fullmatch(path.name)
    if match is None or match["rank"] is None:
        return 0, 1
    beside = (_NAME.fullmatch(each.name) for each in path.parent.iterdir())
    ranks = [int(other["rank"]) for other in beside if other and other["rank"] and other["prefix"] == match["prefix"]]
    return int(match["rank"]), max([*ranks, int(match["rank"])]) + 1


Work: TypeAlias = Literal["compute", "comm", "other"]
_Plain: TypeAlias = int | float | str

_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip
_JSON_KINDS = {"COMP_NODE": _COMPUTE, "COMM_SEND_NODE": _SEND, "COMM_RECV_NODE": _RECV, "COMM_COLL_NODE": _COLLECTIVE}
_GROUPS = "process_group:init"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operation of one rank."""

    id: int  # By which dependencies name it
    name: str
    work: Work
    op: str = ""  # Of communication: the operation
    start_ns: int | None = None  # None if the start was not recorded
    length_ns: int = 0
    after: tuple[int, ...] = ()  # The operations that have to be over before it begins
    on_cpu: bool = False  # Whether a processor of the host carries it out
    lane: str = ""  # Its stream or thread
    nbytes: int = 0  # Of communication: the bytes that go in on this rank
    peer: int | None = None  # Of a message: the other rank, if it is recorded
    group: str = "world"  # Of communication: the name of its group
    # Ranks of groups, if the operation creates some; an empty list means all.
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def nodes_of_messages(data: bytes) -> tuple[list[Node], bool]:
    """Return the operations of a file of messages, and whether it was cut off behind them.

    Raises:
        ValueError: If it is damaged.
    """
    found, cut = list(messages(data)), False
    if found and found[-1] is None:
        cut = bool(found.pop() is None)
    return [_node(message) for message in found[1:] if message is not None], cut  # the first tells of the file


def _node(message: bytes) -> Node:
    name, kind, numbered = "", 0, {1: 0, 6: 0, 7: 0}
    after: list[int] = []
    attributes: dict[str, _Plain] = {}
    said: list[str] = []
    for number, value in fields(message):
        if number == 2:
            name = _text(value)
        elif number == 3 and isinstance(value, int):
            kind = value
        elif number in (4, 5):
            after += numbers(value)
        elif number in numbered and isinstance(value, int):
            numbered[number] = value
        elif number == 8 and isinstance(value, bytes):
            said += [_text(each) for inner, each in fields(value) if inner == 1]
        elif number == 10 and isinstance(value, bytes):
            attributes.update(_attribute(value))
    groups = _groups(said) if _GROUPS in name else {}
    return _made(numbered[1], name, kind, numbered[6], numbered[7], after, attributes, groups)


def _made(
    id: int, name: str, kind: int, start_us: float, length_us: float, after: list[int],
    attributes: Mapping[str, _Plain], groups: Mapping[str, tuple[int, ...]],
) -> Node:  # fmt: skip
    op = {_SEND: "send", _RECV: "recv"}.get(kind, "")
    if kind == _COLLECTIVE:
        which = _whole(attributes, "comm_type")
        op = _COLLECTIVES[which] if 0 <= which < len(_COLLECTIVES) else name
    on_cpu = bool(attributes.get("is_cpu_op", False))
    return Node(
        id=id,
        name=name,
        work="comm" if op else "compute" if kind == _COMPUTE else "other",
        op=op,
        start_ns=round(start_us * 1000) if start_us else None,
        length_ns=round(length_us * 1000),
        after=tuple(after),
        on_cpu=on_cpu,
        lane=f"thread {attributes.get('tid', 0)}" if on_cpu else f"stream {attributes.get('stream', op and 'comm')}",
        nbytes=_whole(attributes, "comm_size"),
        peer=_peer(attributes, op),
        group=str(attributes.get("pg_name") or "world"),
        groups=groups,
    )


def _attribute(message: bytes) -> Iterator[tuple[str, _Plain]]:
    """Yield name and value; writers differ in signed and unsigned types, so any type counts."""
    name, found = "", None
    for number, value in fields(message):
        if number == 1:
            name = _text(value)
        elif number >= 3 and number % 2:  # even ones are lists
            found = _plain(number, value)
    if found is not None:
        yield name, found


def _plain(number: int, value: Value) -> _Plain:
    if isinstance(value, int):
        if number in (15, 17):  # zigzag
            return (value >> 1) ^ -(value & 1)
        return value - (1 << 64) if value >= 1 << 63 else value
    if number in (3, 5):
        return floating(value)
    return int.from_bytes(value, "little") if number in (19, 21, 23, 25) else _text(value)


def _text(value: Value) -> str:
    return str(value) if isinstance(value, int) else value.decode("utf-8", "replace")


def _whole(attributes: Mapping[str, object], name: str) -> int:
    value = attributes.get(name, 0)
    return int(value) if isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal()) else 0


def _peer(attributes: Mapping[str, object], op: str) -> int | None:
    name = {"send": "comm_dst", "recv": "comm_src"}.get(op, "")
    return _whole(attributes, name) if name in attributes else None


def _groups(said: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group in texts that hold JSON, texts in it included."""
    found: dict[str, tuple[int, ...]] = {}

    def look(value: object) -> None:
        if isinstance(value, str):
            try:
                look(json.loads(value))
            except (ValueError, RecursionError):
                return
        elif isinstance(value, dict) and "pg_name" in value and isinstance(value.get("ranks"), list):
            found[str(value["pg_name"])] = tuple(rank for rank in value["ranks"] if isinstance(rank, int))
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                if not isinstance(each, int | float):
                    look(each)

    for text in said:
        look(text)
    return found


def nodes_of_json(document: Mapping[str, Json]) -> list[Node]:
    """Return the operations of the variant in JSON.

    Raises:
        ValueError: If one is no object, or has no number.
    """
    graph = document["workload_graph"]
    assert isinstance(graph, list)
    return [_node_of_json(each) for each in graph]


def _node_of_json(given: Json) -> Node:
    if not isinstance(given, Mapping) or not isinstance(given.get("Id"), int):
        raise ValueError("workload_graph has a node without a number in 'Id'")
    kind, after = given.get("NodeType", 0), given.get("data_deps")
    length_us = given.get("runtime", 0)
    attributes = {name: value for name, value in given.items() if isinstance(value, int | float | str)}
    return _made(
        _whole(given, "Id"), str(given.get("Name", "")), _JSON_KINDS.get(str(kind), _whole(given, "NodeType")), 0,
        length_us if isinstance(length_us, int | float) else 0,
        [each for each in after if isinstance(each, int)] if isinstance(after, list) else [], attributes, {},
    )  # fmt: skip


def timeline_of(nodes: Sequence[Node], rank: int, world_size: int) -> Timeline:
    """Make the timeline of one rank.

    If anything runs on a device, only work on devices counts as compute. Durations of communication contain the
    waiting for other ranks.

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
    meta = {ORIGIN: "Chakra execution trace"} | ({} if recorded else {REPLAYED: "by dependencies"})
    return Timeline(spans=spans, world_size=world_size, meta=meta)


def _replayed(nodes: Sequence[Node]) -> dict[int, int]:
    """Let each operation begin as soon as its dependencies are over and its lane is free, ties in the order of ids."""
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
