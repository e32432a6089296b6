"""Placement group of a gang: one bundle for each actor, in the order of nodes."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..engines.demand import lacking, wait_for_resources
from ..errors import UsageError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_NODE_LABEL = "ray.io/node-id"
_PROBE_S = 1.0  # for the connection to a node's raylet: those of a cluster are near


def check_resources(resources: Mapping[str, float] | None) -> dict[str, float]:
    """Return the resources of one actor, one CPU by default; refuse anything but names and amounts."""
    amounts = {"CPU": 1.0} if resources is None else dict(resources)
    for name, amount in amounts.items():
        if not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
            raise UsageError(f"resources: expected names and amounts such as {{'CPU': 4}}, got {name!r}: {amount!r}")
    amounts = {name: amount for name, amount in amounts.items() if amount}
    if not amounts:
        raise UsageError("resources: an actor without any has no place; give it at least {'CPU': 0.001}")
    return amounts


def check_strategy(strategy: str) -> None:
    """Refuse unknown strategies."""
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")


class GangPlacement:
    """The placement group of one attempt; `nodes` has the node of each member."""

    def __init__(self, group: PlacementGroup, resources: Mapping[str, float]) -> None:
        self._group, self._resources = group, resources
        at = placement_group_table(group)["bundles_to_node_id"]
        order = sorted(at, key=lambda bundle: (str(at[bundle]), int(bundle)))
        self._bundles = [int(bundle) for bundle in order]
        self.nodes: list[str] = [str(at[bundle]) for bundle in order]

    def options(self, member: int) -> dict[str, Any]:
        """Return the options of a member's actor."""
        strategy = PlacementGroupSchedulingStrategy(self._group, self._bundles[member])
        rest = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU", "memory")}
        return {
            "scheduling_strategy": strategy,
            "num_cpus": self._resources.get("CPU", 0),
            "num_gpus": self._resources.get("GPU", 0),
            "memory": self._resources.get("memory"),
            "resources": rest,
        }


@contextmanager
def reserve_placement(
    gang: str,
    members: int,
    resources: Mapping[str, float],
    *,
    strategy: str,
    limit_s: float,
    without: Collection[str] = (),
) -> Iterator[GangPlacement]:
    """Reserve a placement group for the block, all bundles or none; report missing resources, up to `limit_s` seconds.

    Nodes in `without` are lost, though Ray may not know it yet.
    """
    selectors = [{_NODE_LABEL: f"!in({','.join(without)})"}] * members if without else None
    bundles = [dict(resources)] * members
    group = placement_group(bundles, strategy=strategy, **({"bundle_label_selector": selectors} if selectors else {}))
    try:
        demand = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
        wait_for_resources(
            f"{gang}, {members} x {{{demand}}}, {strategy}",
            limit_s,
            lambda seconds: bool(group.wait(seconds)),
            lambda: lacking(bundles, _free_resources(without)),
        )
        yield GangPlacement(group, resources)
    finally:
        with suppress(Exception):  # the cluster is gone, and the group with it
            remove_placement_group(group)


def _free_resources(without: Collection[str]) -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by its address and the beginning of its id."""
    names = {node["NodeID"]: f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})" for node in ray.nodes()}
    # no public function has it for each node
    available: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return {names.get(node, node[:6]): dict(free) for node, free in available.items() if node not in without}


def local_nodes() -> set[str]:
    """Return the nodes on the machine of this process."""
    own = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {node for node, address in addresses.items() if address == addresses.get(own)}


def lost_nodes(nodes: Collection[str]) -> list[str]:
    """Return the nodes that do not run any more; Ray itself notices some of them only seconds later."""
    nodes_by_id = {node["NodeID"]: node for node in ray.nodes()}
    return [node for node in sorted(set(nodes)) if node not in nodes_by_id or not _is_running(nodes_by_id[node])]


def _is_running(node: Mapping[str, Any]) -> bool:
    """Whether a node is alive for Ray, and its port answers."""
    if not node["Alive"]:
        return False
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_PROBE_S):
            return True
    except OSError:
        return False
