"""Which groups of ranks a machine accepts, as versioned data, and the handful of checks that the data names.

A rule is about the *local part* of a group, the indices that it has on one node, except for "node", "symmetric" and
"servers". A local part of one rank needs no wire of the node, so the rules about sizes and places leave it alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import TopologyWarning, format_ranks

Confidence = Literal["A", "B", "C", "D", "E"]
Severity = Literal["error", "warning"]
Kind = Literal["sizes", "multiple", "tiles", "sets", "devices", "node", "symmetric", "servers", "peers"]

LOCAL_KINDS: tuple[Kind, ...] = ("sizes", "multiple", "tiles", "sets", "devices")
"""Kinds that restrict the ranks that a group has on one node."""

LATEST = 9999
"""Year that no edition reaches: the end of a rule that still holds."""

SHOWN_RANGES = 8
"""How many ranges of ranks a message names of a group."""

Local = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One sentence of a platform's documentation, in a form that can be checked."""

    id: str  # its name in messages
    # which check applies: "sizes" (local part has one of `sizes` ranks), "multiple" (a multiple of `sizes[0]`), "tiles"
    # (consecutive and starting at a multiple of its own size), "sets" (one of `sets`), "devices" (all cores of
    # consecutive devices), "node" (one node only), "symmetric" (the same local indices on every node), "servers" (spans
    # one of `sizes` neighbouring servers of an UltraServer), "peers" (see `is_peers`).
    kind: Kind
    text: str  # the rule in words
    source: str  # who says so
    confidence: Confidence  # as for figures
    severity: Severity = "error"  # what a violation is on a strict cluster
    since: int = 0  # first year in which the platform's documents say this
    until: int = LATEST  # last such year
    lnc: int | None = None  # the logical-core setting to which it applies, None for all
    for_sizes: tuple[int, ...] = ()  # applies only to local parts of these sizes; empty means all
    # parameter of "sizes", "multiple", "servers"; for "peers" the sizes of the tilings whose peers are meant.
    sizes: tuple[int, ...] = ()
    sets: tuple[Local, ...] = ()  # parameter of "sets"; for "peers" further tilings
    exempts: tuple[Kind, ...] = ()  # for "peers": kinds of rules that do not apply to such a group
    complete: bool = False  # for "peers": the group must take a rank from every tile of the node

    def in_force(self, *, edition: int, lnc: int) -> bool:
        """Tell whether the documents of that year hold this rule for that logical-core setting."""
        return self.since <= edition <= self.until and self.lnc in (None, lnc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violated rule and the group that violated it."""

    rule: Rule
    severity: Severity
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.severity}: rule {self.rule.id}: {self.rule.text} [{self.rule.source}]"

    def warn(self, *, stacklevel: int) -> None:
        """Issue it as a `TopologyWarning`."""
        group = f"group {format_ranks(self.ranks, most=SHOWN_RANGES)} of {len(self.ranks)} ranks"
        warnings.warn(f"{group}: {self}", TopologyWarning, stacklevel=stacklevel + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What the checks need to know of a group."""

    local: Mapping[int, Local]  # local indices on each node that the group touches, ascending
    ranks_per_node: int  # indices that a full node has
    cores: int  # ranks per device
    servers: int  # nodes of one UltraServer; 1 where there is none
    linked: Callable[[int, int], bool]  # whether two local indices share a device or a wire


def violations(rules: tuple[Rule, ...], view: GroupView) -> Iterator[Rule]:
    """Yield the rules that the group breaks, in the order of the file."""
    parts = sorted(set(view.local.values()))
    peers = [rule for rule in rules if rule.kind == "peers" and all(is_peers(rule, part, view) for part in parts)]
    exempt = {kind for rule in peers for kind in rule.exempts}
    for rule in rules:
        if rule.kind in exempt or (rule.kind == "peers" and rule not in peers):
            continue
        if not _holds(rule, parts, view):
            yield rule


def _holds(rule: Rule, parts: list[Local], view: GroupView) -> bool:
    if rule.kind in _WHOLE:
        return _WHOLE[rule.kind](rule, view)
    return all(
        len(part) == 1 or (rule.for_sizes and len(part) not in rule.for_sizes) or _LOCAL[rule.kind](rule, part, view)
        for part in parts
    )


def tilings(rule: Rule, ranks_per_node: int) -> list[tuple[Local, ...]]:
    """List the ways in which a "peers" rule cuts a node in equal tiles: consecutive ones per size, and its `sets`."""
    even = [
        tuple(tuple(range(start, start + size)) for start in range(0, ranks_per_node, size))
        for size in rule.sizes
        if ranks_per_node % size == 0
    ]
    return [*even, rule.sets] if rule.sets else even


def is_peers(rule: Rule, part: Local, view: GroupView) -> bool:
    """Tell whether a local part holds the same-index ranks of different tiles, as data-parallel groups do."""
    for tiles in tilings(rule, view.ranks_per_node):
        if len(part) < 2 or len(part) > len(tiles) or (rule.complete and len(part) != len(tiles)):
            continue
        if any(set(part) <= set(column) for column in zip(*tiles, strict=True)):
            return True
    return False


def _tiles(rule: Rule, part: Local, view: GroupView) -> bool:
    return part == tuple(range(part[0], part[0] + len(part))) and part[0] % len(part) == 0


def _devices(rule: Rule, part: Local, view: GroupView) -> bool:
    first, last = part[0], part[-1] + 1
    return part == tuple(range(first, last)) and first % view.cores == 0 and last % view.cores == 0


def _peers(rule: Rule, part: Local, view: GroupView) -> bool:
    reached, left = [part[0]], set(part[1:])
    for rank in reached:
        near = {other for other in left if view.linked(rank, other)}
        left -= near
        reached.extend(sorted(near))
    return not left


def _servers(rule: Rule, view: GroupView) -> bool:
    touched: dict[int, list[int]] = {}
    for node in sorted(view.local):
        touched.setdefault(node // view.servers, []).append(node % view.servers)
    return all(_coupled(nodes, rule.sizes, view.servers) for nodes in touched.values())


def _coupled(nodes: list[int], allowed: tuple[int, ...], servers: int) -> bool:
    neighbours = len(nodes) != 2 or (nodes[1] - nodes[0]) % servers in (1, servers - 1)
    return len(nodes) in allowed and neighbours


_LOCAL: dict[Kind, Callable[[Rule, Local, GroupView], bool]] = {
    "sizes": lambda rule, part, view: len(part) in rule.sizes,
    "multiple": lambda rule, part, view: len(part) % rule.sizes[0] == 0,
    "tiles": _tiles,
    "sets": lambda rule, part, view: part in rule.sets,
    "devices": _devices,
    "peers": _peers,
}
_WHOLE: dict[Kind, Callable[[Rule, GroupView], bool]] = {
    "node": lambda rule, view: len(view.local) == 1,
    "symmetric": lambda rule, view: len(set(view.local.values())) == 1,
    "servers": _servers,
}
