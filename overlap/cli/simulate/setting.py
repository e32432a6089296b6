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
from ...simulation.compute_cost import Roofline
from ...units import parse_integer, parse_number, parse_yes_no
from ..options import shared_option

PARAMETERS: Mapping[str, Option] = {
    "cluster": shared_option("cluster"),
    "nodes": shared_option("nodes"),
    "lnc": shared_option("lnc"),
    "ranks": shared_option("ranks", "default: all that fit if the cluster is set here"),
    "algorithm": shared_option("algorithm"),
    "dtype": shared_option("dtype", "that ranks compute in"),
    "efficiency": Option(read=parse_number, metavar="E", help="share of the peak that computes reach"),
    "memory_efficiency": Option(read=parse_number, metavar="E", help="share of the memory's bandwidth that they reach"),
    "peer_direct": shared_option("peer_direct", "by network adapters"),
    "shapes_only": Option(read=parse_yes_no, help="arrays have shape and dtype, and no data"),
    "alike": Option(
        read=parse_integer,
        metavar="N",
        help="ranks of each of N equal blocks behave alike, and two of them run for all; shapes only",
    ),
    "fault_seed": Option(read=parse_integer, metavar="N", help="faults happen, by this seed: see overlap.Faults"),
    "seed": shared_option("seed"),
    "jitter": Option(read=parse_number, metavar="J", help="spread of computes, 0.05 is about 5 %%"),
}
"""Options of a simulation by name."""

_CONDITIONS = ("seed", "jitter")
_ASSUMED = ("dtype", "efficiency", "memory_efficiency", "peer_direct", "shapes_only", "alike")
_SIZE = ("nodes", "lnc", "ranks")
_WHERE = ("cluster", *_SIZE)

LOCAL = "local"


def check_setting(values: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of a setting, after the checks that are possible without the program.

    Args:
        values: Values of options of a simulation, by name.

    Raises:
        UsageError: A value is impossible.
        TopologyError: There is no such cluster, or it is too small.
    """
    setting = dict(values)
    if "algorithm" in setting:
        check_algorithm(str(setting["algorithm"]))
    if "cluster" in setting:
        revise_config(setting, RunConfig())
    else:
        _override_virtual(setting, Virtual())
    return setting


def revise_config(values: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Return the configuration of a program, changed by the values of a setting.

    Args:
        values: Result of `check_setting`: values by name. Everything else stays as in the program.
        config: The configuration of the program.

    Raises:
        UsageError: The two do not fit together.
        TopologyError: There is no such cluster, or it is too small.
    """
    cluster, virtual = _override_cluster(values, config), _override_virtual(values, config.virtual or Virtual())
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


def _override_cluster(values: Mapping[str, Any], config: RunConfig) -> topology.Cluster:
    """Return the cluster that a setting names, or the program's cluster in the size that the setting names.

    Raises `TopologyError` if there is no such cluster, or it is too small.
    """
    size = _select_values(values, _SIZE)
    if "cluster" in values:
        if values["cluster"] == LOCAL:
            size.setdefault("ranks", config.ranks or DEFAULT_RANKS)
        return topology.cluster(str(values["cluster"]), **size)
    chosen = find_cluster(config.cluster, config.ranks)
    if not size:
        return chosen
    # a machine without a fixed number of devices has as many as the ranks need, so the number of ranks is kept
    has_fixed_devices = chosen.machine.devices is not None
    ranks = None if has_fixed_devices else chosen.world_size
    kept_size = {"nodes": chosen.nodes, "lnc": chosen.lnc, "ranks": ranks}
    return topology.Cluster.of(chosen.machine, **{**kept_size, **size}, strict=chosen.strict, edition=chosen.edition)


def _override_virtual(setting: Mapping[str, Any], program_virtual: Virtual) -> Virtual:
    """Return the program's assumptions on virtual time, overridden by the values that a setting names."""
    conditions = replace(program_virtual.conditions, **_select_values(setting, _CONDITIONS))
    # --alike simulates ranks that do not run, and have no data
    implied = {"shapes_only": True} if setting.get("alike") else {}
    faults = program_virtual.faults
    if "fault_seed" in setting:
        faults = replace(faults or Faults(), seed=setting["fault_seed"])
    assumed = {**implied, **_select_values(setting, _ASSUMED)}
    return replace(program_virtual, **assumed, conditions=conditions, faults=faults)


def _select_values(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
