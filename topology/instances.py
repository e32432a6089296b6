"""From a name to a cluster: ``"trn2.48xlarge x4"`` and what may be said about it."""

from __future__ import annotations

import re

from .cluster import Cluster
from .errors import TopologyError

_SUFFIX = re.compile(r"(?P<rest>.*\S)\s+(?:x(?P<nodes>\d+)|lnc=(?P<lnc>\d+))", re.IGNORECASE)


def cluster(
    name: str,
    *,
    nodes: int | None = None,
    lnc: int | None = None,
    ranks: int | None = None,
    strict: bool | None = None,
    edition: int | None = None,
) -> Cluster:
    """Make a cluster of a named machine, or of one in a file whose name ends in ``.toml``.

    Args:
        name: a built-in name, optionally with its nodes and logical cores: ``"trn2.48xlarge x4 lnc=1"``.
            ``"local"`` is this computer: any number of ranks, no rules.
        nodes: how many; one by default, a full UltraServer where the machine is part of one.
        lnc: physical cores per logical core; the machine's default if None.
        ranks: size of the world, spread evenly over the nodes; None fills a named machine, and is one rank per node
            on "local".
        strict: whether an illegal group is an error; named Neuron machines are strict, "local" has nothing to
            violate.
        edition: the year whose rules apply; the newest by default.

    Raises:
        TopologyError: for an unknown name, a world that does not fit, an impossible or contradictory number.
    """
    # Here, because reading TOML needs modules that importing this package should not pay for.
    from . import machinefile

    if not isinstance(name, str):
        raise TopologyError(f"name: expected the name of a cluster, got {name!r}")
    name, said = _split(name)
    nodes = _agreed("nodes", said.get("nodes"), nodes)
    lnc = _agreed("lnc", said.get("lnc"), lnc)
    machine = machinefile.load(name) if name.endswith(".toml") else machinefile.builtin(name)
    return Cluster.of(machine, nodes=nodes, lnc=lnc, ranks=ranks, strict=strict, edition=edition)


def names() -> tuple[str, ...]:
    """List the built-in machines."""
    from . import machinefile

    return machinefile.builtin_names()


def _split(name: str) -> tuple[str, dict[str, int]]:
    said: dict[str, int] = {}
    rest = name.strip()
    while match := _SUFFIX.fullmatch(rest):
        for key in ("nodes", "lnc"):
            if match[key] is not None:
                said[key] = _agreed(key, said.get(key), int(match[key])) or 0
        rest = match["rest"]
    first, _, more = rest.partition(" ")
    if more and (first in names() or first.endswith(".toml")):
        raise TopologyError(
            f"cluster: expected nodes or cores after {first!r}, such as x4 or lnc=1, got {more.strip()!r}"
        )
    return rest, said


def _agreed(what: str, first: int | None, second: int | None) -> int | None:
    if first is not None and second is not None and first != second:
        raise TopologyError(f"{what} is said twice: {first} and {second}")
    return second if first is None else first
