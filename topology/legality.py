"""Judging groups: the rules of the machine, applied, and the nearest groups that pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from .errors import TopologyError, format_ranks
from .grouprules import SHOWN_RANGES, Finding, GroupView, Local, violations
from .rankmap import RankMap

_SUGGESTIONS = 3


def judge(cluster: RankMap, ranks: Sequence[int]) -> tuple[Finding, ...]:
    """List the rules that a group breaks; see `Cluster.judge`."""
    group = _group(cluster, ranks)
    view = _view(cluster, group)
    return tuple(Finding(rule=rule, severity=rule.severity, ranks=group) for rule in violations(cluster.rules, view))


def check_group(cluster: RankMap, ranks: Sequence[int], *, strict: bool, warn: bool = True) -> tuple[Finding, ...]:
    """Raise for an illegal group, warn about a doubtful one; see `Cluster.check_group`."""
    findings = judge(cluster, ranks)
    for finding in findings:
        if strict and finding.severity == "error":
            raise _refusal(cluster, finding)
    for finding in findings if warn else ():
        finding.warn(stacklevel=3)
    return findings


def check_groups(cluster: RankMap, partition: Sequence[Sequence[int]], *, strict: bool) -> tuple[Finding, ...]:
    """Raise unless groups are equally long, disjoint and each legal; see `Cluster.check_groups`."""
    owner: dict[int, int] = {}
    for index, group in enumerate(partition):
        if len(group) != len(partition[0]):
            raise TopologyError(f"groups 0 and {index} differ in length: {len(partition[0])} and {len(group)} ranks")
        for rank in group:
            if owner.setdefault(rank, index) != index:
                raise TopologyError(
                    f"rank {rank} is in groups {owner[rank]} and {index}: groups of one collective must be disjoint"
                )
    return tuple(finding for group in partition for finding in check_group(cluster, group, strict=strict))


def _group(cluster: RankMap, ranks: Sequence[int]) -> Local:
    if not ranks:
        raise TopologyError("a group needs at least one rank, found none")
    for rank in ranks:
        cluster.place(rank)
    group = tuple(sorted(ranks))
    twice = [rank for rank, following in pairwise(group) if rank == following]
    if twice:
        raise TopologyError(f"rank {twice[0]} is in the group twice")
    return group


def _view(cluster: RankMap, group: Local) -> GroupView:
    local: dict[int, list[int]] = {}
    for rank in group:
        node, index = divmod(rank, cluster.ranks_per_node)
        local.setdefault(node, []).append(index)
    coupled = cluster.machine.ultraserver

    def linked(a: int, b: int) -> bool:
        here, there = a // cluster.ranks_per_device, b // cluster.ranks_per_device
        return here == there or cluster.wiring.linked(here, there)

    return GroupView(
        local={node: tuple(indices) for node, indices in local.items()},
        ranks_per_node=cluster.capacity_per_node,
        cores=cluster.ranks_per_device,
        servers=coupled.servers[-1] if coupled else 1,
        linked=linked,
    )


def _refusal(cluster: RankMap, finding: Finding) -> TopologyError:
    rule, group = finding.rule, finding.ranks
    return TopologyError(
        f"group {format_ranks(group, most=SHOWN_RANGES)} of {len(group)} ranks is not legal on {cluster.name}",
        rule=rule.id,
        rule_text=rule.text,
        source=rule.source,
        nearest=nearest(cluster, group),
    )


def nearest(cluster: RankMap, group: Local) -> tuple[Local, ...]:
    """Find the legal groups nearest in size to a group and, of those, the ones that share most with it; at most three.

    Candidates are runs of consecutive ranks and the sets that rules name, on the nodes of the group, on its first
    node alone, and on that node and the next.
    """
    wanted, per_node = set(group), cluster.ranks_per_node
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
            abs(len(wanted) - len(candidate)),
            len(wanted.symmetric_difference(candidate)),
            candidate,
        ),
    )
    legal = (candidate for candidate in ranked if _passes(cluster, candidate))
    return tuple(candidate for candidate, _ in zip(legal, range(_SUGGESTIONS), strict=False))


def legal_groups(cluster: RankMap, size: int) -> tuple[Local, ...]:
    """List the legal runs and named sets of a size on node 0."""
    return tuple(local for local in _legal_local(cluster) if len(local) == size)


def _passes(cluster: RankMap, group: Local) -> bool:
    return not any(rule.severity == "error" for rule in violations(cluster.rules, _view(cluster, group)))


@lru_cache(maxsize=64)
def _legal_local(cluster: RankMap) -> tuple[Local, ...]:
    return tuple(local for local in _local_candidates(cluster) if len(local) > 1 and _passes(cluster, local))


def _local_candidates(cluster: RankMap) -> Iterator[Local]:
    ranks, rules = cluster.ranks_per_node, cluster.rules
    named = {members for rule in rules if rule.kind == "sets" for members in rule.sets if members[-1] < ranks}
    listed = [
        set(rule.sizes) for rule in rules if rule.kind == "sizes" and not rule.for_sizes and rule.severity == "error"
    ]
    # Without a list of sizes every run is a candidate; with one, the few sizes that it names.
    sizes = sorted(set.intersection(*listed)) if listed else range(2, ranks + 1)
    runs = {tuple(range(start, start + size)) for size in sizes for start in range(ranks - size + 1)}
    yield from sorted(named | runs, key=lambda members: (len(members), members))
