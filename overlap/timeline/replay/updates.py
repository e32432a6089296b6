"""Computes that wait for a reduction at the head of their stream, and hold up the computes issued after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import UsageError
from .graph import Graph, Node, input_compute

_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})

_Line: TypeAlias = tuple[str, str]
"""The name of a compute, and the place of its call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldUp:
    """Computes of one line that wait for a reduction and delay the computes issued after them."""

    name: str
    call_site: str
    operation: str  # For which they wait
    others: tuple[str, ...]  # Names of the computes that they hold up

    @property
    def clause(self) -> str:
        """Clause that names the reduction that the computes wait for, and the computes that they delay."""
        held = " and ".join(f"'{name}'" for name in self.others[:2])
        return f"waits for {self.operation} and holds up {held}"

    @property
    def advice(self) -> str:
        """Sentence with the change to the program that avoids the wait."""
        place = f" ({self.call_site})" if self.call_site else ""
        return f"issue '{self.name}'{place} after the loop, or on a stream of its own: it {self.clause}"


def hold_ups(graph: Graph) -> list[HoldUp]:
    """Return the lines with computes that wait for a reduction and delay others, the most computes first."""
    waiting = _waiting_lines(graph)
    delayed: dict[_Line, Counter[str]] = {}
    for lane in _compute_lanes(graph):
        for node, passed in _overtaking_computes(lane, waiting):
            delayed.setdefault(_compute_line(node), Counter()).update(each.span.name for each in passed)
    found = sorted(delayed.items(), key=lambda item: (-item[1].total(), item[0]))
    return [
        HoldUp(name=line[0], call_site=line[1], operation=waiting[line], others=tuple(n for n, _ in held.most_common()))
        for line, held in found
    ]


def issue_late(graph: Graph) -> None:
    """Let computes that wait for a reduction run after the other computes of their step that were issued by then.

    Raises:
        UsageError: No compute waits for a reduction while others stand behind it.
    """
    waiting = _waiting_lines(graph)
    changed = False
    for lane in _compute_lanes(graph):
        at = {node: place for place, node in enumerate(lane)}
        passed = {node: max(at[each] for each in others) for node, others in _overtaking_computes(lane, waiting)}
        later = sorted(lane, key=lambda node: (passed.get(node, at[node]), node in passed, at[node]))
        changed |= bool(passed)
        _reorder(lane, later)
    if not changed:
        raise UsageError("no compute of a step waits for a reduction and holds up others; leave this change out")


def _compute_line(node: Node) -> _Line:
    return node.span.name, node.span.call_site


def _compute_lanes(graph: Graph) -> list[list[Node]]:
    """Return the computes of each stream of each rank, in the order in which they ran."""
    lanes: dict[tuple[int, str], list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "compute" and node.span.kind == "compute":
            lanes.setdefault((node.ranks[0], node.span.lane), []).append(node)
    return [sorted(nodes, key=lambda node: (node.span.start_ns, node.span.end_ns)) for nodes in lanes.values()]


def _waiting_lines(graph: Graph) -> dict[_Line, str]:
    """Return the lines whose computes mostly waited for a reduction, each with the name of the reduction.

    Lines whose results travel are left out: such computes are part of a chain, and others need what they return. So are
    the updates of strategies, which wait for buckets: the program does not issue these.
    """
    computes = [node for node in graph.nodes if node.kind == "compute" and node.span.kind == "compute"]
    count = Counter(map(_compute_line, computes))
    sent = Counter(_compute_line(node) for node in _input_computes(graph))
    waits: dict[_Line, Counter[str]] = {}
    for node in computes:
        for end in [each for each, _ in node.after if each.kind == "end"]:
            if end.info is not None and end.info.op in _REDUCTIONS and end.spans[0].role != "bucket":
                waits.setdefault(_compute_line(node), Counter())[end.info.op] += 1
    return {
        line: found.most_common(1)[0][0]
        for line, found in waits.items()
        if 2 * found.total() >= count[line] > 2 * sent[line]
    }


def _input_computes(graph: Graph) -> Iterable[Node]:
    """Yield the computes whose results operations carry."""
    for node in graph.nodes:
        if node.kind == "arrival" and (found := input_compute(node)) is not None and found.span.kind == "compute":
            yield found


def _overtaking_computes(lane: Sequence[Node], waiting: dict[_Line, str]) -> list[tuple[Node, list[Node]]]:
    """Return each waiting compute of a stream with the later computes of its step that could have run before it.

    A compute that was issued only after it had begun, perhaps because the program awaited it, stays behind it.
    """
    overtaking = []
    for place, node in enumerate(lane):
        if _compute_line(node) not in waiting or node.span.step is None:
            continue
        later = []
        for each in lane[place + 1 :]:
            if each.span.step != node.span.step or each.span.called_ns > node.span.start_ns:
                break
            if _compute_line(each) not in waiting:
                later.append(each)
        if later:
            overtaking.append((node, later))
    return overtaking


def _reorder(lane: Sequence[Node], later: Sequence[Node]) -> None:
    """Let the computes of a stream run in another order; each keeps the delay that it had after the one before it."""
    before: dict[Node, Node] = dict(zip(lane[1:], lane, strict=False))
    for previous, node in zip((None, *later), later, strict=False):
        delay_ns = next((delay_ns for each, delay_ns in node.after if each is before.get(node)), 0)
        node.after = [(each, delay_ns) for each, delay_ns in node.after if each is not before.get(node)]
        if previous is not None:
            node.after.append((previous, delay_ns))
