"""What can be set about a simulation, by an option or by a sweep; all else stays as the program says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import topology

from ... import Faults, Interference, Virtual
from ...config import RunConfig
from ...cost.select import check_algorithm
from ...errors import UsageError
from ...processes.life import DEFAULT_RANKS, cluster_of
from ...settings import Option
from ...simulation import Profile, Roofline
from ...simulation.conditions import ALL
from ...units import count, switch

COMPUTE_CLASSES = ("flops", "memory", "seconds", ALL)
"""Limits of computes: `overlap.simulation.compute_cost.ComputeClass`, or all of them."""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"expected a number, got {text!r}") from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"expected an integer, got {text!r}") from None


def _factor(text: str) -> tuple[str, float]:
    name, equals, factor = text.rpartition("=")
    if not equals or not name:
        raise UsageError(f"expected NAME=FACTOR, such as all_reduce=1.2, got {text!r}")
    return name, _number(factor)


def _slow_compute(text: str) -> tuple[str, float]:
    name, factor = _factor(text)
    if name not in COMPUTE_CLASSES:
        raise UsageError(f"{name!r} is no class of computes; known are {', '.join(COMPUTE_CLASSES)}")
    return name, factor


PARAMETERS: Mapping[str, Option] = {
    "cluster": Option(read=str, metavar="NAME", help='such as "trn2.48xlarge x4"; default: the program\'s'),
    "nodes": Option(read=count, metavar="N", help="how many of them"),
    "lnc": Option(read=count, metavar="N", help="physical cores per logical core"),
    "ranks": Option(read=count, metavar="N", help="how many; default: all that fit if the cluster is set here"),
    "algorithm": Option(read=str, metavar="A", help="use this algorithm wherever it exists, such as ring"),
    "dtype": Option(read=str, metavar="TYPE", help="that ranks compute in"),
    "efficiency": Option(read=_number, metavar="E", help="share of the peak that computes reach"),
    "memory_efficiency": Option(read=_number, metavar="E", help="the same of memory bandwidth"),
    "profile": Option(read=str, metavar="TRACE", help="computes take what those of their name took in TRACE"),
    "peer_direct": Option(
        read=switch, help="network adapters read device memory (default)", off="they copy through the host"
    ),
    "shapes_only": Option(read=switch, help="arrays have shape and dtype, and no data"),
    "alike": Option(
        read=_integer,
        metavar="N",
        help="ranks of each of N equal blocks behave alike, and two of them run for all; shapes only",
    ),
    "startup": Option(read=switch, help="each step starts a compiled program, at its published cost"),
    "faults": Option(read=_integer, metavar="SEED", help="things go wrong, by this seed: see overlap.Faults"),
    "seed": Option(read=_integer, metavar="N", help="of everything random"),
    "jitter": Option(read=_number, metavar="J", help="spread of computes, 0.05 is about 5 %%"),
    "straggler_share": Option(read=_number, metavar="S", help="share of the ranks that are slow"),
    "straggler_factor": Option(read=_number, metavar="F", help="how many times as long they compute"),
    "slow_wire_share": Option(read=_number, metavar="S", help="share of the wires that are slow"),
    "slow_wire_factor": Option(read=_number, metavar="F", help="share of their bandwidth that they have left"),
    "slow_compute": Option(
        read=_slow_compute,
        metavar="CLASS=F",
        repeated=True,
        help=f"computes take F times as long while their rank communicates; CLASS is {', '.join(COMPUTE_CLASSES)}",
    ),
    "slow_comm": Option(
        read=_factor,
        metavar="OP=F",
        repeated=True,
        help=f"collectives take F times as long while their ranks compute; OP is a name, send, or {ALL}",
    ),
}
"""Options of a simulation by name, each of which a sweep can vary."""

_CONDITIONS = ("seed", "jitter", "straggler_share", "straggler_factor", "slow_wire_share", "slow_wire_factor")
_ASSUMED = ("dtype", "efficiency", "memory_efficiency", "profile", "peer_direct", "shapes_only", "alike", "startup")
_SIZE = ("nodes", "lnc", "ranks")
_WHERE = ("cluster", *_SIZE)

LOCAL = "local"


def value_of(name: str, text: str) -> object:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point: what is simulated, and under which assumptions. What it leaves open is the program's."""

    values: Mapping[str, object]  # By name, as `Parameter.read` makes them; several of a repeated one are a list

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Setting:
        """Put parameters together, and refuse what cannot be meant, as far as it does not depend on the program.

        Raises:
            UsageError: If they cannot be meant.
            TopologyError: If there is no such cluster, or it is too small.
        """
        asked = dict(values)
        if "profile" in asked:
            asked["profile"] = Profile.read(str(asked["profile"]))
        if "algorithm" in asked:
            check_algorithm(str(asked["algorithm"]))
        setting = cls(values=asked)
        if "cluster" in asked:
            setting.revise(RunConfig())
        else:
            setting._virtual(Virtual())
        return setting

    def revise(self, asked: RunConfig) -> RunConfig:
        """Return what a run of the program shall be, given what the program asks for.

        Raises:
            UsageError: If the two do not go together.
            TopologyError: If there is no such cluster, or it is too small.
        """
        known = cast("dict[str, Any]", self.values)
        cluster, virtual = self._cluster(asked), self._virtual(asked.virtual or Virtual())
        Roofline.of(
            cluster,
            dtype=virtual.dtype,
            efficiency=virtual.efficiency,
            memory_efficiency=virtual.memory_efficiency,
        )
        fills = any(name in known for name in _WHERE)
        return replace(
            asked,
            cluster=cluster,
            ranks=cluster.world_size if fills else asked.ranks,
            virtual=virtual,
            algorithm=known.get("algorithm", asked.algorithm),
        )

    def _cluster(self, asked: RunConfig) -> topology.Cluster:
        """Return the machine: another one, or the program's in another size."""
        size = self._known(_SIZE)
        if "cluster" in self.values:
            if self.values["cluster"] == LOCAL:
                size.setdefault("ranks", asked.ranks or DEFAULT_RANKS)
            return topology.cluster(str(self.values["cluster"]), **size)
        own = cluster_of(asked.cluster, asked.ranks)
        if not size:
            return own
        any_number = own.machine.devices is None
        same = {"nodes": own.nodes, "lnc": own.lnc, "ranks": own.world_size if any_number else None}
        return topology.Cluster.of(own.machine, **{**same, **size}, strict=own.strict, edition=own.edition)

    def _virtual(self, own: Virtual) -> Virtual:
        """Return the program's assumptions, but for those that are set."""
        interference = Interference(
            compute={**own.interference.compute, **_factors(self.values.get("slow_compute"))},
            communication={**own.interference.communication, **_factors(self.values.get("slow_comm"))},
        )
        conditions = replace(own.conditions, **self._known(_CONDITIONS))
        implied = {"shapes_only": True} if self.values.get("alike") else {}
        assumed = {**implied, **self._known(_ASSUMED)}
        faults = (
            replace(own.faults or Faults(), seed=cast(int, self.values["faults"]))
            if "faults" in self.values
            else own.faults
        )
        return replace(own, **assumed, conditions=conditions, faults=faults, interference=interference)

    def _known(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.values[name] for name in names if name in self.values}


def _factors(told: object) -> dict[str, float]:
    """Read what slows down: a sweep gives one, options a list."""
    pairs = [told] if isinstance(told, tuple) else told or ()
    return dict(cast("Iterable[tuple[str, float]]", pairs))
