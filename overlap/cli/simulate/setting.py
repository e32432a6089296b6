"""Settings of a simulation, by options; everything else stays as the program says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import topology

from ... import Faults, Virtual
from ...config import RunConfig
from ...cost.select import check_algorithm
from ...processes.real_time import DEFAULT_RANKS, find_cluster
from ...settings import Option
from ...simulation import Roofline
from ...units import integer, number, switch
from ..options import shared_option

PARAMETERS: Mapping[str, Option] = {
    "cluster": shared_option("cluster"),
    "nodes": shared_option("nodes"),
    "lnc": shared_option("lnc"),
    "ranks": shared_option("ranks", "default: all that fit if the cluster is set here"),
    "algorithm": shared_option("algorithm"),
    "dtype": shared_option("dtype", "that ranks compute in"),
    "efficiency": Option(read=number, metavar="E", help="share of the peak that computes reach"),
    "memory_efficiency": Option(read=number, metavar="E", help="share of the memory's bandwidth that they reach"),
    "peer_direct": shared_option("peer_direct", "by network adapters"),
    "shapes_only": Option(read=switch, help="arrays have shape and dtype, and no data"),
    "alike": Option(
        read=integer,
        metavar="N",
        help="ranks of each of N equal blocks behave alike, and two of them run for all; shapes only",
    ),
    "fault_seed": Option(read=integer, metavar="N", help="faults happen, by this seed: see overlap.Faults"),
    "seed": shared_option("seed"),
    "jitter": Option(read=number, metavar="J", help="spread of computes, 0.05 is about 5 %%"),
}
"""Options of a simulation by name."""

_CONDITIONS = ("seed", "jitter")
_ASSUMED = ("dtype", "efficiency", "memory_efficiency", "peer_direct", "shapes_only", "alike")
_SIZE = ("nodes", "lnc", "ranks")
_WHERE = ("cluster", *_SIZE)

LOCAL = "local"


def check_setting(values: Mapping[str, object]) -> dict[str, Any]:
    """Check the values, except for those checks that need the program's own cluster and assumptions.

    Raises:
        UsageError: If a value is impossible.
        TopologyError: If there is no such cluster, or it is too small.
    """
    setting = dict(values)
    if "algorithm" in setting:
        check_algorithm(str(setting["algorithm"]))
    if "cluster" in setting:
        revise_config(setting, RunConfig())
    else:
        _revised_virtual(setting, Virtual())
    return setting


def revise_config(values: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Return the configuration that a program asks for, changed by the values of a setting.

    Args:
        values: By name, from `check_setting`. Everything else stays as the program asks.
        config: The configuration of the program.

    Raises:
        UsageError: If the two do not go together.
        TopologyError: If there is no such cluster, or it is too small.
    """
    cluster, virtual = _revised_cluster(values, config), _revised_virtual(values, config.virtual or Virtual())
    Roofline.of(
        cluster,
        dtype=virtual.dtype,
        efficiency=virtual.efficiency,
        memory_efficiency=virtual.memory_efficiency,
    )
    fills = any(name in values for name in _WHERE)
    return replace(
        config,
        cluster=cluster,
        ranks=cluster.world_size if fills else config.ranks,
        virtual=virtual,
        algorithm=values.get("algorithm", config.algorithm),
    )


def _revised_cluster(values: Mapping[str, Any], config: RunConfig) -> topology.Cluster:
    """Return the cluster of the setting, or the program's cluster in another size."""
    size = _select_values(values, _SIZE)
    if "cluster" in values:
        if values["cluster"] == LOCAL:
            size.setdefault("ranks", config.ranks or DEFAULT_RANKS)
        return topology.cluster(str(values["cluster"]), **size)
    chosen = find_cluster(config.cluster, config.ranks)
    if not size:
        return chosen
    anynumber = chosen.machine.devices is None
    same = {"nodes": chosen.nodes, "lnc": chosen.lnc, "ranks": chosen.world_size if anynumber else None}
    return topology.Cluster.of(chosen.machine, **{**same, **size}, strict=chosen.strict, edition=chosen.edition)


def _revised_virtual(values: Mapping[str, Any], base: Virtual) -> Virtual:
    conditions = replace(base.conditions, **_select_values(values, _CONDITIONS))
    implied = {"shapes_only": True} if values.get("alike") else {}
    faults = replace(base.faults or Faults(), seed=values["fault_seed"]) if "fault_seed" in values else base.faults
    assumed = {**implied, **_select_values(values, _ASSUMED)}
    return replace(base, **assumed, conditions=conditions, faults=faults)


def _select_values(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
