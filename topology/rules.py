"""Legal groups of ranks: the rules of the machine, applied, and the nearest groups that pass.

A rule is about the *local part* of a group, the indices that it has on one node, except for "node", "symmetric" and
"servers". A local part of one rank needs no wire of the node, so the rules about sizes and places leave it alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from .errors import TopologyError, TopologyWarning, format_ranks
from .machine import Local, Rule, RuleKind, Severity
from .routes import RankMap

LOCAL_KINDS: tuple[RuleKind, ...] = ("sizes", "multiple", "tiles", "sets", "devices")
"""Kinds that restrict the ranks that a group has on one node."""

_SUGGESTIONS = 3

Parts = Mapping[int, Local]  # local part of a group, by node that it touches

SHOWN_RANGES = 8
"""Ranges of ranks of a group in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violated rule and the group that violated it."""

    rule: Rule
    severity: Severity
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.severity}: rule {self.rule.id}: {self.rule.text} [{self.rule.source}]"

    def warn(self, *, stacklevel: int) -> None:
        """Issue the finding as a `TopologyWarning`."""
        group = f"group {format_ranks(self.ranks, most=SHOWN_RANGES)} of {len(self.ranks)} ranks"
        warnings.warn(f"{group}: {self}", TopologyWarning, stacklevel=stacklevel + 1)


def _broken_rules(cluster: RankMap, group: Local) -> Iterator[Rule]:
    rules, local = cluster.rules, _indices_by_node(cluster, group)
    parts = sorted(set(local.values()))
    peers = [
        rule
        for rule in rules
        if rule.kind == "peers" and all(is_column_of_tiles(rule, part, cluster) for part in parts)
    ]
    exempt = {kind for rule in peers for kind in rule.exempts}
    for rule in rules:
        if rule.kind in exempt or (rule.kind == "peers" and rule not in peers):
            continue
        if not (
            _WHOLE[rule.kind](rule, local, cluster) if rule.kind in _WHOLE else _all_parts_obey(rule, parts, cluster)
        ):
            yield rule


def _all_parts_obey(rule: Rule, parts: list[Local], cluster: RankMap) -> bool:
    """Whether every local part of a group obeys a rule; a single rank on a node always does."""
    return all(
        len(part) == 1 or (rule.for_sizes and len(part) not in rule.for_sizes) or _LOCAL[rule.kind](rule, part, cluster)
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


def is_column_of_tiles(rule: Rule, part: Local, cluster: RankMap) -> bool:
    """Tell whether a local part holds the same-index ranks of different tiles, as data-parallel groups do."""
    for tiles in tilings(rule, cluster.capacity_per_node):
        if len(part) < 2 or len(part) > len(tiles) or (rule.complete and len(part) != len(tiles)):
            continue
        if any(set(part) <= set(column) for column in zip(*tiles, strict=True)):
            return True
    return False


def _is_aligned_run(rule: Rule, part: Local, cluster: RankMap) -> bool:
    return part == tuple(range(part[0], part[0] + len(part))) and part[0] % len(part) == 0


def _is_whole_devices(rule: Rule, part: Local, cluster: RankMap) -> bool:
    first, last, cores = part[0], part[-1] + 1, cluster.ranks_per_device
    return part == tuple(range(first, last)) and first % cores == 0 and last % cores == 0


def _is_linked(rule: Rule, part: Local, cluster: RankMap) -> bool:
    """Whether wires between ranks of a part join all of them, directly or through others."""
    reached, remaining = [part[0]], set(part[1:])
    for rank in reached:
        near = {other for other in remaining if _are_linked(cluster, rank, other)}
        remaining -= near
        reached.extend(sorted(near))
    return not remaining


def _are_linked(cluster: RankMap, a: int, b: int) -> bool:
    device_a, device_b = a // cluster.ranks_per_device, b // cluster.ranks_per_device
    return device_a == device_b or cluster.wiring.are_adjacent(device_a, device_b)


def _has_allowed_servers(rule: Rule, local: Parts, cluster: RankMap) -> bool:
    """Whether a group has nodes on an allowed number of neighbouring servers in each UltraServer."""
    servers = cluster.machine.ultraserver.servers[-1] if cluster.machine.ultraserver else 1
    touched: dict[int, list[int]] = {}
    for node in sorted(local):
        touched.setdefault(node // servers, []).append(node % servers)
    return all(_are_coupled(nodes, rule.sizes, servers) for nodes in touched.values())


def _are_coupled(nodes: list[int], allowed: tuple[int, ...], servers: int) -> bool:
    """Whether nodes are an allowed number of servers, two of them neighbours in the ring."""
    neighbours = len(nodes) != 2 or (nodes[1] - nodes[0]) % servers in (1, servers - 1)
    return len(nodes) in allowed and neighbours


_LOCAL: dict[RuleKind, Callable[[Rule, Local, RankMap], bool]] = {
    "sizes": lambda rule, part, cluster: len(part) in rule.sizes,
    "multiple": lambda rule, part, cluster: len(part) % rule.sizes[0] == 0,
    "tiles": _is_aligned_run,
    "sets": lambda rule, part, cluster: part in rule.sets,
    "devices": _is_whole_devices,
    "peers": _is_linked,
}
_WHOLE: dict[RuleKind, Callable[[Rule, Parts, RankMap], bool]] = {
    "node": lambda rule, local, cluster: len(local) == 1,
    "symmetric": lambda rule, local, cluster: len(set(local.values())) == 1,
    "servers": _has_allowed_servers,
}


def judge(cluster: RankMap, ranks: Sequence[int]) -> tuple[Finding, ...]:
    """List the rules that a group breaks; see `Cluster.judge`."""
    group = _sorted_group(cluster, ranks)
    return tuple(Finding(rule=rule, severity=rule.severity, ranks=group) for rule in _broken_rules(cluster, group))


def check_group(cluster: RankMap, ranks: Sequence[int], *, strict: bool, warn: bool = True) -> tuple[Finding, ...]:
    """Raise for an illegal group, warn about a doubtful one; see `Cluster.check_group`."""
    findings = judge(cluster, ranks)
    for finding in findings:
        if strict and finding.severity == "error":
            raise _rule_error(cluster, finding)
    for finding in findings if warn else ():
        finding.warn(stacklevel=3)
    return findings


def check_groups(cluster: RankMap, partition: Sequence[Sequence[int]], *, strict: bool) -> tuple[Finding, ...]:
    """Raise unless groups are equally long, disjoint and each legal; see `Cluster.check_groups`."""
    owner: dict[int, int] = {}
    for index, group in enumerate(partition):
        if len(group) != len(partition[0]):
            raise TopologyError(
                f"groups 0 and {index} differ in length: {len(partition[0])} and {len(group)} ranks; use one length"
            )
        for rank in group:
            if owner.setdefault(rank, index) != index:
                raise TopologyError(
                    f"rank {rank} is in groups {owner[rank]} and {index}: groups of one collective must be disjoint"
                )
    return tuple(finding for group in partition for finding in check_group(cluster, group, strict=strict))


def _sorted_group(cluster: RankMap, ranks: Sequence[int]) -> Local:
    """Return a group in ascending order; refuse empty ones, ranks that do not exist, and repeated ranks."""
    if not ranks:
        raise TopologyError("a group needs at least one rank, found none; pass ranks")
    for rank in ranks:
        cluster.place(rank)
    group = tuple(sorted(ranks))
    twice = [rank for rank, following in pairwise(group) if rank == following]
    if twice:
        raise TopologyError(f"rank {twice[0]} is in the group twice; name each rank once")
    return group


def _indices_by_node(cluster: RankMap, group: Local) -> Parts:
    parts: dict[int, list[int]] = {}
    for rank in group:
        node, index = divmod(rank, cluster.ranks_per_node)
        parts.setdefault(node, []).append(index)
    return {node: tuple(indices) for node, indices in parts.items()}


def _rule_error(cluster: RankMap, finding: Finding) -> TopologyError:
    """Return the error of a broken rule, with the nearest legal groups."""
    rule, group = finding.rule, finding.ranks
    return TopologyError(
        f"group {format_ranks(group, most=SHOWN_RANGES)} of {len(group)} ranks is not legal on {cluster.name}",
        rule=rule.id,
        rule_text=rule.text,
        source=rule.source,
        nearest=nearest_groups(cluster, group),
    )


def nearest_groups(cluster: RankMap, group: Local) -> tuple[Local, ...]:
    """Return at most three legal groups nearest in size to a group and, among equal sizes, with most ranks of it.

    Candidates are runs of consecutive ranks and the sets that rules name, on the nodes of the group, on its first
    node alone, and on that node and the next.
    """
    ranks, per_node = set(group), cluster.ranks_per_node
    nodes = sorted({rank // per_node for rank in group})
    spans = {tuple(nodes), (nodes[0],), (nodes[0], (nodes[0] + 1) % cluster.nodes)}
    candidates = {
        tuple(sorted({node * per_node + index for node in span for index in local}))
        for span in spans
        for local in _legal_local(cluster)
    }
    ranked = sorted(
        candidates,
        key=lambda candidate: (
            abs(len(ranks) - len(candidate)),
            len(ranks.symmetric_difference(candidate)),
            candidate,
        ),
    )
    legal = (candidate for candidate in ranked if _is_legal(cluster, candidate))
    return tuple(candidate for candidate, _ in zip(legal, range(_SUGGESTIONS), strict=False))


def legal_groups(cluster: RankMap, size: int) -> tuple[Local, ...]:
    """List the legal runs and named sets of a size on node 0."""
    return tuple(local for local in _legal_local(cluster) if len(local) == size)


def _is_legal(cluster: RankMap, group: Local) -> bool:
    return not any(rule.severity == "error" for rule in _broken_rules(cluster, group))


@lru_cache(maxsize=64)
def _legal_local(cluster: RankMap) -> tuple[Local, ...]:
    return tuple(local for local in _local_candidates(cluster) if len(local) > 1 and _is_legal(cluster, local))


def _local_candidates(cluster: RankMap) -> Iterator[Local]:
    """Yield groups inside one node that rules name or may allow, the smallest first."""
    ranks, rules = cluster.ranks_per_node, cluster.rules
    named_sets = {members for rule in rules if rule.kind == "sets" for members in rule.sets if members[-1] < ranks}
    listed = [
        set(rule.sizes) for rule in rules if rule.kind == "sizes" and not rule.for_sizes and rule.severity == "error"
    ]
    # Without a list of sizes every run is a candidate; with one, only runs of its sizes.
    sizes = sorted(set.intersection(*listed)) if listed else range(2, ranks + 1)
    runs = {tuple(range(start, start + size)) for size in sizes for start in range(ranks - size + 1)}
    yield from sorted(named_sets | runs, key=lambda members: (len(members), members))
