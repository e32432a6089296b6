"""From a name to a cluster: ``"trn2.48xlarge x4"`` and what may be said about it."""

from __future__ import annotations

import re
from functools import lru_cache

from .cluster import Cluster
from .errors import TopologyError
from .machine import Machine
from .rules import LATEST
from .wiring import Wiring

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
    from . import files

    name, said = _split(name)
    nodes = _agreed("nodes", said.get("nodes"), nodes)
    lnc = _agreed("lnc", said.get("lnc"), lnc)
    machine = files.load(name) if name.endswith(".toml") else files.builtin(name)
    return assemble(machine, nodes=nodes, lnc=lnc, ranks=ranks, strict=strict, edition=edition)


def names() -> tuple[str, ...]:
    """List the built-in machines."""
    from . import files

    return files.builtin_names()


def _split(name: str) -> tuple[str, dict[str, int]]:
    said: dict[str, int] = {}
    rest = name.strip()
    while match := _SUFFIX.fullmatch(rest):
        for key in ("nodes", "lnc"):
            if match[key] is not None:
                said[key] = _agreed(key, said.get(key), int(match[key])) or 0
        rest = match["rest"]
    return rest, said


def _agreed(what: str, first: int | None, second: int | None) -> int | None:
    if first is not None and second is not None and first != second:
        raise TopologyError(f"{what} is said twice: {first} and {second}")
    return second if first is None else first


def assemble(
    machine: Machine,
    *,
    nodes: int | None,
    lnc: int | None,
    ranks: int | None,
    strict: bool | None,
    edition: int | None,
) -> Cluster:
    """Put nodes of a machine together; arguments and errors are those of `cluster`."""
    coupled = machine.ultraserver
    nodes = _at_least_one("nodes", nodes, coupled.servers[-1] if coupled else 1)
    if coupled and nodes not in coupled.servers and nodes % coupled.servers[-1]:
        allowed = ", ".join(map(str, coupled.servers))
        raise TopologyError(
            f"{machine.name}: nodes: expected {allowed} or a multiple of {coupled.servers[-1]}, found {nodes} "
            f"[{coupled.source}]"
        )
    lnc = _at_least_one("lnc", lnc, machine.chip.lnc[0])
    if lnc not in machine.chip.lnc:
        raise TopologyError(f"{machine.name}: lnc: expected {' or '.join(map(str, machine.chip.lnc))}, found {lnc}")
    devices, world_size = _fitted(machine, nodes, lnc, ranks)
    return Cluster(
        machine=machine,
        nodes=nodes,
        lnc=lnc,
        world_size=world_size,
        strict=machine.strict if strict is None else strict,
        edition=LATEST if edition is None else edition,
        wiring=_wiring(machine, devices),
    )


def _at_least_one(what: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise TopologyError(f"{what}: expected 1 or more, found {value}")
    return default if value is None else value


def _fitted(machine: Machine, nodes: int, lnc: int, ranks: int | None) -> tuple[int, int]:
    """Give devices per node and the size of the world."""
    per_device = machine.chip.cores // lnc
    if machine.devices is None:
        ranks = _at_least_one("ranks", ranks, nodes * per_device)
        capacity = ranks // nodes if ranks % nodes == 0 else ranks // nodes + 1
        devices = -(-capacity // per_device)
    else:
        devices, capacity = machine.devices, machine.devices * per_device
        ranks = _at_least_one("ranks", ranks, nodes * capacity)
    if ranks > nodes * capacity:
        raise TopologyError(
            f"{ranks} ranks do not fit: {machine.name} x{nodes} holds {nodes * capacity}; "
            f"nodes={-(-ranks // capacity)} would hold them"
        )
    if ranks % nodes:
        raise TopologyError(f"{ranks} ranks do not spread evenly over {nodes} nodes of {machine.name}")
    return devices, ranks


@lru_cache(maxsize=256)
def _wiring(machine: Machine, devices: int) -> Wiring:
    return Wiring.of(machine.wires, devices)
