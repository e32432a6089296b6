"""Legal groups of ranks: checks of a group by the rules of the machine, and the nearest legal groups.

The *local part* of a group is the set of its ranks on one node, as indices in the node. Most rules are about local
parts; those of kind "node", "symmetric" and "servers" are about the whole group. A local part of one rank needs no wire
of the node, so rules on sizes and places do not apply to it.
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

_SUGGESTIONS = 3  # legal groups that an error proposes

Parts = Mapping[int, Local]  # local parts of a group, by node

SHOWN_RANGES = 8
"""Most ranges of ranks of a group that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule, and a group that breaks it."""

    rule: Rule
    severity: Severity
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.severity}: rule {self.rule.id}: {self.rule.text} [{self.rule.source}]"

    def warn(self, *, stacklevel: int) -> None:
        """Issue the finding as a `TopologyWarning`, at the line `stacklevel` frames up, as in `warnings.warn`."""
        group = f"group {format_ranks(self.ranks, most=SHOWN_RANGES)} of {len(self.ranks)} ranks"
        warnings.warn(f"{group}: {self}", TopologyWarning, stacklevel=stacklevel + 1)


def _find_broken_rules(cluster: RankMap, group: Local) -> Iterator[Rule]:
    """Yield the rules that a sorted group breaks."""
    rules, local = cluster.rules, _indices_by_node(cluster, group)
    parts = sorted(set(local.values()))
    # A "peers" rule applies only to groups of the form that it describes, and exempts these from other rules.
    peers = [
        rule
        for rule in rules
        if rule.kind == "peers" and all(is_column_of_tiles(rule, part, cluster) for part in parts)
    ]
    exempt = {kind for rule in peers for kind in rule.exempts}
    for rule in rules:
        if rule.kind in exempt or (rule.kind == "peers" and rule not in peers):
            continue
        check = _WHOLE.get(rule.kind)
        obeyed = check(rule, local, cluster) if check is not None else _all_parts_obey(rule, parts, cluster)
        if not obeyed:
            yield rule


def _all_parts_obey(rule: Rule, parts: list[Local], cluster: RankMap) -> bool:
    """Whether every local part of a group obeys a rule; parts of one rank, and of sizes that it excludes, always do."""
    return all(
        len(part) == 1 or (rule.for_sizes and len(part) not in rule.for_sizes) or _LOCAL[rule.kind](rule, part, cluster)
        for part in parts
    )


def list_tilings(rule: Rule, ranks_per_node: int) -> list[tuple[Local, ...]]:
    """Return the ways in which a "peers" rule cuts a node into equal tiles.

    Each of the rule's sizes that divides the node gives tiles of consecutive ranks: size 2 on 8 ranks gives (0, 1),
    (2, 3), (4, 5), (6, 7). The `sets` of the rule, if it has any, are the tiles of one more way.
    """
    consecutive = [
        tuple(tuple(range(start, start + size)) for start in range(0, ranks_per_node, size))
        for size in rule.sizes
        if ranks_per_node % size == 0
    ]
    return [*consecutive, rule.sets] if rule.sets else consecutive


def is_column_of_tiles(rule: Rule, part: Local, cluster: RankMap) -> bool:
    """Whether a local part is in one column of the node's tiles, as the data-parallel groups of a mesh are.

    Column i has the i-th rank of each tile. With `rule.complete`, the part must be a whole column.

    Args:
        rule: A "peers" rule, which says how a node is cut into tiles.
        part: Local indices, ascending. The result is False for a single one.
        cluster: The machine.
    """
    for tiles in list_tilings(rule, cluster.capacity_per_node):
        if len(part) < 2 or len(part) > len(tiles) or (rule.complete and len(part) != len(tiles)):
            continue
        if any(set(part) <= set(column) for column in zip(*tiles, strict=True)):
            return True
    return False


def _is_aligned_run(rule: Rule, part: Local, cluster: RankMap) -> bool:
    """Whether a part is n consecutive indices that begin at a multiple of n; see `Rule.kind`, "tiles"."""
    return part == tuple(range(part[0], part[0] + len(part))) and part[0] % len(part) == 0


def _is_whole_devices(rule: Rule, part: Local, cluster: RankMap) -> bool:
    """Whether a part has all cores of consecutive devices."""
    first, last, cores = part[0], part[-1] + 1, cluster.ranks_per_device
    return part == tuple(range(first, last)) and first % cores == 0 and last % cores == 0


def _is_connected(rule: Rule, part: Local, cluster: RankMap) -> bool:
    """Whether all ranks of a part are joined by wires between their devices, directly or through others of the part."""
    reached, remaining = [part[0]], set(part[1:])
    # The list grows in the loop, until no further rank is reached.
    for rank in reached:
        near = {other for other in remaining if _are_linked(cluster, rank, other)}
        remaining -= near
        reached.extend(sorted(near))
    return not remaining


def _are_linked(cluster: RankMap, a: int, b: int) -> bool:
    device_a, device_b = a // cluster.ranks_per_device, b // cluster.ranks_per_device
    return device_a == device_b or cluster.wiring.are_adjacent(device_a, device_b)


def _has_allowed_servers(rule: Rule, local: Parts, cluster: RankMap) -> bool:
    """Whether a group is, in each UltraServer that it is on, on an allowed number of neighbouring servers.

    The allowed numbers are the `sizes` of `rule`, a "servers" rule.
    """
    servers = cluster.machine.ultraserver.servers[-1] if cluster.machine.ultraserver else 1
    touched: dict[int, list[int]] = {}
    for node in sorted(local):
        touched.setdefault(node // servers, []).append(node % servers)
    return all(_are_coupled(nodes, rule.sizes, servers) for nodes in touched.values())


def _are_coupled(nodes: list[int], allowed: tuple[int, ...], servers: int) -> bool:
    """Whether the number of servers is allowed; two servers must be neighbours in the ring.

    `nodes` has the indices of the servers in their UltraServer, ascending; `servers` is the number of all.
    """
    neighbours = len(nodes) != 2 or (nodes[1] - nodes[0]) % servers in (1, servers - 1)
    return len(nodes) in allowed and neighbours


_LOCAL: dict[RuleKind, Callable[[Rule, Local, RankMap], bool]] = {
    # Checks of a local part, by the kind of the rule. `_WHOLE`, below, has the checks of whole groups.
    "sizes": lambda rule, part, cluster: len(part) in rule.sizes,
    "multiple": lambda rule, part, cluster: len(part) % rule.sizes[0] == 0,
    "tiles": _is_aligned_run,
    "sets": lambda rule, part, cluster: part in rule.sets,
    "devices": _is_whole_devices,
    "peers": _is_connected,
}
_WHOLE: dict[RuleKind, Callable[[Rule, Parts, RankMap], bool]] = {
    "node": lambda rule, local, cluster: len(local) == 1,
    "symmetric": lambda rule, local, cluster: len(set(local.values())) == 1,
    "servers": _has_allowed_servers,
}


def judge(cluster: RankMap, ranks: Sequence[int]) -> tuple[Finding, ...]:
    """Return the rules that a group breaks; see `Cluster.judge`."""
    group = _sorted_group(cluster, ranks)
    return tuple(Finding(rule=rule, severity=rule.severity, ranks=group) for rule in _find_broken_rules(cluster, group))


def check_group(cluster: RankMap, ranks: Sequence[int], *, strict: bool, warn: bool = True) -> tuple[Finding, ...]:
    """Raise for an illegal group, warn about a doubtful one; see `Cluster.check_group`.

    Args:
        cluster: The machine.
        ranks: The group, in any order.
        strict: Whether a broken rule is an error.
        warn: Whether each finding is also a `TopologyWarning`.
    """
    findings = judge(cluster, ranks)
    for finding in findings:
        if strict and finding.severity == "error":
            raise _rule_error(cluster, finding)
    for finding in findings if warn else ():
        # The warning shows the line that called `Cluster.check_group`.
        finding.warn(stacklevel=3)
    return findings


def check_groups(cluster: RankMap, partition: Sequence[Sequence[int]], *, strict: bool) -> tuple[Finding, ...]:
    """Raise unless groups are equally long, disjoint and each legal; see `Cluster.check_groups`.

    Args:
        cluster: The machine.
        partition: The groups.
        strict: Whether a broken rule is an error.

    Returns:
        The findings of all groups.
    """
    owner: dict[int, int] = {}
    for index, group in enumerate(partition):
        if len(group) != len(partition[0]):
            raise TopologyError(
                f"groups 0 and {index} differ in length: {len(partition[0])} and {len(group)} ranks; use one length"
            )
        for rank in group:
            if owner.setdefault(rank, index) != index:
                raise TopologyError(
                    f"rank {rank} is in groups {owner[rank]} and {index} of one collective; leave it out of one of them"
                )
    return tuple(finding for group in partition for finding in check_group(cluster, group, strict=strict))


def _sorted_group(cluster: RankMap, ranks: Sequence[int]) -> Local:
    """Return a group in ascending order; refuse empty ones, ranks that do not exist, and repeated ranks."""
    if not ranks:
        raise TopologyError("ranks: a group needs at least one rank, found none")
    for rank in ranks:
        cluster.place(rank)
    group = tuple(sorted(ranks))
    twice = [rank for rank, following in pairwise(group) if rank == following]
    if twice:
        raise TopologyError(f"rank {twice[0]} is in the group twice; name each rank once")
    return group


def _indices_by_node(cluster: RankMap, group: Local) -> Parts:
    """Return the local parts of a group, by node."""
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
    """Return up to three legal groups that are nearest in size to a group; of equal sizes, those that differ least.

    Candidates are runs of consecutive ranks, and sets that rules name, on all nodes of the group, on its first node
    alone, and on the first node and the next one.
    """
    ranks, per_node = set(group), cluster.ranks_per_node
    nodes = sorted({rank // per_node for rank in group})
    # The node after the last one is node 0.
    spans = {tuple(nodes), (nodes[0],), (nodes[0], (nodes[0] + 1) % cluster.nodes)}
    candidates = {
        tuple(sorted({node * per_node + index for node in span for index in local}))
        for span in spans
        for local in _legal_groups_in_node(cluster)
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
    # A generator: candidates are checked only until there are enough.
    return tuple(candidate for candidate, _ in zip(legal, range(_SUGGESTIONS), strict=False))


def legal_groups(cluster: RankMap, size: int) -> tuple[Local, ...]:
    """Return the legal runs of consecutive ranks, and sets that rules name, of a size on node 0."""
    return tuple(local for local in _legal_groups_in_node(cluster) if len(local) == size)


def _is_legal(cluster: RankMap, group: Local) -> bool:
    return not any(rule.severity == "error" for rule in _find_broken_rules(cluster, group))


@lru_cache(maxsize=64)
def _legal_groups_in_node(cluster: RankMap) -> tuple[Local, ...]:
    """Return the legal groups of two ranks or more inside one node, the smallest first."""
    return tuple(local for local in _list_candidates_in_node(cluster) if len(local) > 1 and _is_legal(cluster, local))


def _list_candidates_in_node(cluster: RankMap) -> Iterator[Local]:
    """Yield groups inside one node that rules name or may allow, the smallest first."""
    ranks, rules = cluster.ranks_per_node, cluster.rules
    named_sets = {members for rule in rules if rule.kind == "sets" for members in rule.sets if members[-1] < ranks}
    listed = [
        set(rule.sizes) for rule in rules if rule.kind == "sizes" and not rule.for_sizes and rule.severity == "error"
    ]
    # If rules list the allowed sizes, only runs of these sizes are candidates; otherwise all runs.
    sizes = sorted(set.intersection(*listed)) if listed else range(2, ranks + 1)
    runs = {tuple(range(start, start + size)) for size in sizes for start in range(ranks - size + 1)}
    yield from sorted(named_sets | runs, key=lambda members: (len(members), members))
