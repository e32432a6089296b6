"""What can be set about a simulation, by an option or by a sweep: the cluster, and what is assumed of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import topology

from ... import Conditions, Interference, Virtual
from ...collectives.select import check_algorithm
from ...errors import UsageError
from ...virtual import Profile, Roofline
from ...virtual.interference import ALL
from ..nodeoptions import count

__all__ = ["PARAMETERS", "Parameter", "Setting", "add_options", "given"]

Value: TypeAlias = "str | int | float | bool | tuple[str, float]"

COMPUTE_CLASSES = ("flops", "memory", "seconds", ALL)
"""What computes can be limited by: `overlap.virtual.compute_cost.ComputeClass`, or all of them."""

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Something that can be set.

    Attributes:
        name: As a sweep calls it; as an option it has dashes.
        metavar: What a value is; None for a switch.
        help: What it does.
        read: Makes a value of text; raises argparse.ArgumentTypeError if it cannot be meant.
        repeated: Whether the option may be given several times.
    """

    name: str
    help: str
    read: Callable[[str], Value]
    metavar: str | None = None
    repeated: bool = False

    @property
    def option(self) -> str:
        """The option of the command line."""
        return "--" + self.name.replace("_", "-")

    def value(self, text: str) -> Value:
        """Read a value.

        Raises:
            UsageError: If it cannot be meant; names the parameter.
        """
        try:
            return self.read(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{self.name}: {error}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _yes_or_no(text: str) -> bool:
    if text.lower() not in _YES + _NO:
        raise argparse.ArgumentTypeError(f"expected yes or no, got {text!r}")
    return text.lower() in _YES


def _factor(text: str) -> tuple[str, float]:
    name, equals, factor = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=FACTOR, such as all_reduce=1.2, got {text!r}")
    return name, _number(factor)


def _slow_compute(text: str) -> tuple[str, float]:
    name, factor = _factor(text)
    if name not in COMPUTE_CLASSES:
        raise argparse.ArgumentTypeError(f"{name!r} is no class of computes; known are {', '.join(COMPUTE_CLASSES)}")
    return name, factor


_ALL = (
    Parameter(name="cluster", read=str, metavar="NAME", help='such as "trn2.48xlarge x4"; default: the program\'s'),
    Parameter(name="nodes", read=count, metavar="N", help="how many of them"),
    Parameter(name="lnc", read=count, metavar="N", help="physical cores per logical core"),
    Parameter(name="ranks", read=count, metavar="N", help="how many ranks; default: all that the cluster has"),
    Parameter(name="algorithm", read=str, metavar="A", help="use this algorithm wherever it exists, such as ring"),
    Parameter(name="dtype", read=str, metavar="TYPE", help="that ranks compute in; default: bfloat16"),
    Parameter(name="efficiency", read=_number, metavar="E", help="share of the peak that computes reach; default: 1"),
    Parameter(name="memory_efficiency", read=_number, metavar="E", help="the same of memory bandwidth; default: 1"),
    Parameter(name="profile", read=str, metavar="TRACE", help="computes take what those of their name took in TRACE"),
    Parameter(name="peer_direct", read=_yes_or_no, help="network adapters read device memory (default)"),
    Parameter(name="shapes_only", read=_yes_or_no, help="arrays have shape and dtype, and no data"),
    Parameter(name="seed", read=_integer, metavar="N", help="of everything random; default: 0"),
    Parameter(name="jitter", read=_number, metavar="J", help="spread of computes, 0.05 is about 5 %%; default: 0"),
    Parameter(name="straggler_share", read=_number, metavar="S", help="share of the ranks that are slow; default: 0"),
    Parameter(name="straggler_factor", read=_number, metavar="F", help="how many times as long they compute"),
    Parameter(name="slow_wire_share", read=_number, metavar="S", help="share of the wires that are slow; default: 0"),
    Parameter(name="slow_wire_factor", read=_number, metavar="F", help="share of their bandwidth that they have left"),
    Parameter(
        name="slow_compute",
        read=_slow_compute,
        metavar="CLASS=F",
        repeated=True,
        help=f"computes take F times as long while their rank communicates; CLASS is {', '.join(COMPUTE_CLASSES)}",
    ),
    Parameter(
        name="slow_comm",
        read=_factor,
        metavar="OP=F",
        repeated=True,
        help=f"collectives take F times as long while their ranks compute; OP is a name, send, or {ALL}",
    ),
)  # fmt: skip

PARAMETERS: Mapping[str, Parameter] = {parameter.name: parameter for parameter in _ALL}
"""Everything that can be set, by name."""

_CONDITIONS = ("seed", "jitter", "straggler_share", "straggler_factor", "slow_wire_share", "slow_wire_factor")
_ASSUMED = ("dtype", "efficiency", "memory_efficiency", "profile", "peer_direct", "shapes_only")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each parameter."""
    group = parser.add_argument_group("the cluster and what is assumed of it; each NAME can also be swept")
    for each in _ALL:
        if each.metavar is None:
            group.add_argument(each.option, dest=each.name, action="store_true", default=None, help=each.help)
        else:
            action = "append" if each.repeated else "store"
            group.add_argument(
                each.option, dest=each.name, type=each.read, metavar=each.metavar, action=action, help=each.help
            )
    group.add_argument(
        "--no-peer-direct", dest="peer_direct", action="store_false", default=None, help="they copy through the host"
    )


def given(args: argparse.Namespace) -> dict[str, object]:
    """Return the parameters that the command line sets."""
    values = {name: getattr(args, name) for name in PARAMETERS}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point: what is simulated, and under which assumptions.

    Attributes:
        cluster: The machine; None leaves it to the program.
        ranks: How many; None leaves it to the program.
        algorithm: The one to use wherever it exists; None for the fastest.
        virtual: The assumptions.
    """

    cluster: topology.Cluster | None
    ranks: int | None
    algorithm: str | None
    virtual: Virtual

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Setting:
        """Put parameters together.

        Args:
            values: By name, as `Parameter.read` makes them; several of a repeated one are a list.

        Raises:
            UsageError: If they cannot be meant.
            TopologyError: If there is no such cluster, or it is too small.
        """
        asked = cast("dict[str, Any]", dict(values))
        cluster, algorithm = _cluster(asked), asked.get("algorithm")
        if algorithm is not None:
            check_algorithm(algorithm)
        interference = Interference(
            compute=_factors(asked.get("slow_compute")), communication=_factors(asked.get("slow_comm"))
        )
        if "profile" in asked:
            asked["profile"] = Profile.read(asked["profile"])
        virtual = Virtual(
            **_of(asked, _ASSUMED), conditions=Conditions(**_of(asked, _CONDITIONS)), interference=interference
        )
        if cluster is not None:  # else the run finds out
            rates = _of(asked, ("dtype", "efficiency", "memory_efficiency"))
            Roofline.of(cluster, **rates)
        ranks = asked.get("ranks") if cluster is None else cluster.world_size
        return cls(cluster=cluster, ranks=ranks, algorithm=algorithm, virtual=virtual)


def _of(asked: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: asked[name] for name in names if name in asked}


def _cluster(asked: dict[str, Any]) -> topology.Cluster | None:
    size = _of(asked, ("nodes", "lnc", "ranks"))
    if "cluster" not in asked:
        if lost := [name for name in size if name != "ranks"]:
            raise UsageError(f"{lost[0]}: of which machine? Say so with cluster")
        return None
    if asked["cluster"] == "local" and "ranks" not in asked:
        raise UsageError("ranks: how many? The local machine has any number")
    return topology.cluster(asked["cluster"], **size)


def _factors(told: tuple[str, float] | list[tuple[str, float]] | None) -> dict[str, float]:
    """Read what slows down: a sweep gives one, options a list."""
    return dict([told] if isinstance(told, tuple) else told or ())
