"""Settings of a simulation, by an option or by a sweep; everything else stays as the program says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import topology

from ... import Faults, Interference, Virtual
from ...config import RunConfig
from ...cost.select import check_algorithm
from ...errors import UsageError
from ...processes.life import DEFAULT_RANKS, find_cluster
from ...settings import Option
from ...simulation import Profile, Roofline
from ...simulation.conditions import ALL
from ...units import integer, number, switch
from ..options import shared_option

COMPUTE_CLASSES = ("flops", "memory", "seconds", ALL)
"""Limits of computes: `overlap.simulation.compute_cost.ComputeClass`, or all of them."""


def _read_factor(text: str) -> tuple[str, float]:
    """Read a pair such as `all_reduce=1.2`."""
    name, equals, factor = text.rpartition("=")
    if not equals or not name:
        raise UsageError(f"expected NAME=FACTOR, such as all_reduce=1.2, got {text!r}")
    return name, number(factor)


def _read_slowdown(text: str) -> tuple[str, float]:
    """Read a pair of a class of computes and its factor; raise `UsageError` for an unknown class."""
    name, factor = _read_factor(text)
    if name not in COMPUTE_CLASSES:
        raise UsageError(f"{name!r} is no class of computes; known are {', '.join(COMPUTE_CLASSES)}")
    return name, factor


PARAMETERS: Mapping[str, Option] = {
    "cluster": shared_option("cluster"),
    "nodes": shared_option("nodes"),
    "lnc": shared_option("lnc"),
    "ranks": shared_option("ranks", "default: all that fit if the cluster is set here"),
    "algorithm": shared_option("algorithm"),
    "dtype": shared_option("dtype", "that ranks compute in"),
    "efficiency": Option(read=number, metavar="E", help="share of the peak that computes reach"),
    "memory_efficiency": Option(read=number, metavar="E", help="share of the memory's bandwidth that they reach"),
    "profile": Option(read=str, metavar="TRACE", help="computes take what those of their name took in TRACE"),
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
    "straggler_share": Option(read=number, metavar="S", help="share of the ranks that are slow"),
    "straggler_factor": Option(read=number, metavar="F", help="how many times as long they compute"),
    "slow_wire_share": Option(read=number, metavar="S", help="share of the wires that are slow"),
    "slow_wire_factor": Option(read=number, metavar="F", help="share of their bandwidth that they have left"),
    "slow_compute": Option(
        read=_read_slowdown,
        metavar="CLASS=F",
        repeated=True,
        help=f"computes take F times as long while their rank communicates; CLASS is {', '.join(COMPUTE_CLASSES)}",
    ),
    "slow_comm": Option(
        read=_read_factor,
        metavar="OP=F",
        repeated=True,
        help=f"collectives take F times as long while their ranks compute; OP is a name, send, or {ALL}",
    ),
}
"""Options of a simulation by name, each of which a sweep can vary."""

_CONDITIONS = ("seed", "jitter", "straggler_share", "straggler_factor", "slow_wire_share", "slow_wire_factor")
_ASSUMED = ("dtype", "efficiency", "memory_efficiency", "profile", "peer_direct", "shapes_only", "alike")
_SIZE = ("nodes", "lnc", "ranks")
_WHERE = ("cluster", *_SIZE)

LOCAL = "local"


def read_parameter(name: str, text: str) -> object:
    """Read the value of a parameter.

    Raises:
        UsageError: If the text cannot be read; names the parameter.
    """
    read = PARAMETERS[name].read
    assert read is not None
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def check_setting(values: Mapping[str, object]) -> dict[str, Any]:
    """Read the profile and check the values, as far as they do not depend on the program.

    Raises:
        UsageError: If a value is impossible.
        TopologyError: If there is no such cluster, or it is too small.
    """
    setting = dict(values)
    if "profile" in setting:
        setting["profile"] = Profile.read(str(setting["profile"]))
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
        values: By name, from `check_setting`; a repeated option has a list. Everything else stays as the program asks.
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
    """Return the program's assumptions, changed by the values."""
    interference = Interference(
        compute={**base.interference.compute, **_read_slowdowns(values.get("slow_compute"))},
        communication={**base.interference.communication, **_read_slowdowns(values.get("slow_comm"))},
    )
    conditions = replace(base.conditions, **_select_values(values, _CONDITIONS))
    implied = {"shapes_only": True} if values.get("alike") else {}
    faults = replace(base.faults or Faults(), seed=values["fault_seed"]) if "fault_seed" in values else base.faults
    assumed = {**implied, **_select_values(values, _ASSUMED)}
    return replace(base, **assumed, conditions=conditions, faults=faults, interference=interference)


def _select_values(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _read_slowdowns(value: object) -> dict[str, float]:
    """Return slowdowns by name: a sweep gives one pair, options a list of pairs."""
    pairs = [value] if isinstance(value, tuple) else value or ()
    return dict(cast("Iterable[tuple[str, float]]", pairs))
