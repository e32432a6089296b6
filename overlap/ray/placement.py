"""Placement group of a job: one bundle for each actor, in the order of nodes; the wait for its resources."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import OverlapError, UsageError
from ..notice import notify

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_PROBE_S = 1.0  # limit of the connection to a node's raylet, which is in the same network
# Seconds of waiting for resources until the first report, and between later ones.
FIRST_S, EVERY_S = 1.0, 30.0
_ROUNDING = 1e-6  # allowance for the rounding of amounts of resources


class ResourcesError(OverlapError):
    """Ray did not have the resources for all processes of a job in time; nothing has run.

    Args:
        message: Text of the error.
        missing: Description of the missing resources.
        waited_s: Seconds of waiting.

    Attributes:
        missing: Description of the missing resources.
        waited_s: Seconds of waiting.
    """

    def __init__(self, message: str, *, missing: str, waited_s: float) -> None:
        self.missing: str = missing
        self.waited_s: float = waited_s
        super().__init__(message)


def check_placement(resources: Mapping[str, float], strategy: str) -> None:
    """Refuse resources that are not names with amounts from 0, or are all 0, and unknown strategies."""
    if not any(resources.values()) or not all(isinstance(x, (int, float)) and x >= 0 for x in resources.values()):
        raise UsageError(f"resources: expected names and amounts such as {{'CPU': 4}}, got {dict(resources)!r}")
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")


def actor_nodes_and_options(
    group: PlacementGroup, resources: Mapping[str, float]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the node id of each member, and the options of each member's actor; members are sorted by node.

    Args:
        group: The placement group, which Ray has placed.
        resources: Resources of each actor.
    """
    amounts = dict(resources)
    options = {
        "num_cpus": amounts.pop("CPU", 0),
        "num_gpus": amounts.pop("GPU", 0),
        "memory": amounts.pop("memory", None),
        "resources": amounts,
    }
    at = placement_group_table(group)["bundles_to_node_id"]
    bundles = sorted(at, key=lambda bundle: (str(at[bundle]), int(bundle)))
    placed = [PlacementGroupSchedulingStrategy(group, int(bundle)) for bundle in bundles]
    return [str(at[bundle]) for bundle in bundles], [{"scheduling_strategy": each, **options} for each in placed]


def wait_for_resources(demand: str, limit_s: float, ready: Callable[[float], bool], missing: Callable[[], str]) -> None:
    """Wait until the resources of a job are available, and report missing ones on stderr.

    Args:
        demand: Description of the job and its resources.
        limit_s: Longest wait in seconds.
        ready: Function that waits up to the given seconds, and returns whether all resources are available.
        missing: Function that returns a description of the missing resources.

    Raises:
        ResourcesError: The wait took longer than `limit_s`.
    """
    begun_s, next_report_s = time.monotonic(), FIRST_S
    while not ready(max(0.0, min(next_report_s, limit_s) - (time.monotonic() - begun_s))):
        waited_s = time.monotonic() - begun_s
        if waited_s >= next_report_s:
            notify(f"{demand}: waiting for resources, up to {limit_s:.3g} s: {missing()}")
            next_report_s += EVERY_S
        if waited_s >= limit_s:
            text = f"{demand}: not there within {limit_s:.3g} s: {missing()}; free some, or pass a longer wait_s"
            raise ResourcesError(text, missing=missing(), waited_s=limit_s)


def describe_missing_resources(
    demand: Mapping[str, float], count: int, nodes: Mapping[str, Mapping[str, float]]
) -> str:
    """Return a description of how many of `count` places lack resources, and of the free resources.

    Args:
        demand: Resources of one place.
        count: Number of places.
        nodes: Free resources of each node, by the node's description.

    >>> describe_missing_resources({"CPU": 2}, 3, {"a": {"CPU": 3}, "b": {"CPU": 1}})
    '2 places with CPU: 2; free: CPU 3 on a, CPU 1 on b'
    """
    places = [min(int(free.get(name, 0) / demand[name] + _ROUNDING) for name in demand) for free in nodes.values()]
    lacking = count - sum(places)
    place = f"{lacking} place{'s' * (lacking > 1)} with {', '.join(f'{name}: {demand[name]:g}' for name in demand)}"
    having = {
        node: ", ".join(f"{name} {free[name]:g}" for name in demand if free.get(name)) for node, free in nodes.items()
    }
    free_text = ", ".join(f"{amounts} on {node}" for node, amounts in having.items() if amounts)
    return f"{place if lacking > 0 else 'a place that fits the strategy'}; free: {free_text or 'nothing of that'}"


def free_resources_by_node(without: Collection[str]) -> dict[str, Mapping[str, float]]:
    """Return the free resources of each node, by the node's address and the beginning of its id.

    Args:
        without: Ids of nodes to leave out.
    """
    available = ray._private.state.available_resources_per_node()  # no public function has it for each node
    nodes = [node for node in ray.nodes() if node["NodeID"] not in without]
    return {f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": available.get(node["NodeID"], {}) for node in nodes}


def lost_nodes(nodes: Collection[str]) -> set[str]:
    """Return those of the given node ids whose nodes do not run any more; Ray itself may notice seconds later."""
    return {node["NodeID"] for node in ray.nodes() if node["NodeID"] in nodes and not _is_running(node)}


def _is_running(node: Mapping[str, Any]) -> bool:
    """Whether Ray takes a node for alive, and the node accepts a connection; `node` is an entry of `ray.nodes()`."""
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_PROBE_S).close()
        return bool(node["Alive"])
    return False
