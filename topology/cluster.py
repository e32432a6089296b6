"""Clusters, by name or from a file, which answer questions: places of ranks, routes, rings, legal groups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import groups, machinefile, routes, rules
from .errors import MAX_RANKS, TopologyError, unknown_name_error
from .figures import Figure
from .groups import Axis
from .machine import LATEST, Machine
from .routes import Link, RankMap
from .rules import LOCAL_KINDS, Finding
from .wiring import Grid, Wiring

_SUFFIX = re.compile(r"(?P<rest>.*\S)\s+(?:x(?P<nodes>\d+)|lnc=(?P<lnc>\d+))", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)  # the map compares
class Cluster(RankMap):
    """Nodes of one kind. Make it with `topology.cluster` or `Cluster.load`."""

    @staticmethod
    def load(
        path: str | Path,
        *,
        nodes: int | None = None,
        lnc: int | None = None,
        ranks: int | None = None,
        strict: bool | None = None,
        edition: int | None = None,
    ) -> Cluster:
        """Make a cluster of a machine in a TOML file.

        Args:
            path: Path of the file.
            nodes: Number of nodes; this and the other arguments are explained at `topology.cluster`.
            lnc: Physical cores of a logical core.
            ranks: Size of the world.
            strict: Whether an illegal group is an error.
            edition: Year of the rules that apply.

        Raises:
            TopologyError: The file is wrong; the error is one line with the file, the key and the expected value. Or a
                number does not fit the machine.
        """
        return Cluster.of(machinefile.load(path), nodes=nodes, lnc=lnc, ranks=ranks, strict=strict, edition=edition)

    @classmethod
    def of(
        cls,
        machine: Machine,
        *,
        nodes: int | None = None,
        lnc: int | None = None,
        ranks: int | None = None,
        strict: bool | None = None,
        edition: int | None = None,
    ) -> Cluster:
        """Make a cluster of a machine that has been read; all other arguments, and errors, are as for
        `topology.cluster`.
        """
        coupled = machine.ultraserver
        nodes = _positive_or_default("nodes", nodes, coupled.servers[-1] if coupled else 1)
        # Several UltraServers must be whole ones.
        if coupled and nodes not in coupled.servers and nodes % coupled.servers[-1]:
            allowed = ", ".join(map(str, coupled.servers))
            raise TopologyError(
                f"{machine.name}: nodes: expected {allowed} or a multiple of {coupled.servers[-1]}, found {nodes} "
                f"[{coupled.source}]"
            )
        lnc = _positive_or_default("lnc", lnc, machine.chip.lnc[0])
        if lnc not in machine.chip.lnc:
            raise TopologyError(f"{machine.name}: lnc: expected {' or '.join(map(str, machine.chip.lnc))}, found {lnc}")
        devices, world_size = _count_devices_and_ranks(machine, nodes, lnc, ranks)
        return cls(
            machine=machine,
            nodes=nodes,
            lnc=lnc,
            world_size=world_size,
            strict=machine.strict if strict is None else strict,
            edition=LATEST if edition is None else _check_edition(machine, edition),
            wiring=Wiring.from_spec(machine.wires, devices),
        )

    def route(self, a: int, b: int) -> tuple[Link, ...]:
        """Return the directed links that bytes cross from rank a to rank b; none if a equals b.

        Routes between devices are shortest (see `Wiring.path`). Inside an UltraServer bytes first move to the right
        device of their own server, then from server to server. Over the network they leave through the adapters of
        a's device and arrive through those of b's.

        Raises:
            TopologyError: if no wire joins the two nodes.
        """
        return routes.route(self, a, b)

    def nic_share_bytes_per_s(self, ranks: Iterable[int] | None = None) -> float:
        """Return the network bandwidth in bytes/s, one way, of a rank when all ranks send at once.

        If ranks get different shares, the smallest one. 6.25e9 (50 Gbit/s) on trn2.48xlarge with LNC=2; 0.0 without a
        network.

        Args:
            ranks: The ranks that send; None: all ranks of a node.
        """
        if self.machine.network is None:
            return 0.0
        senders = range(self.ranks_per_node) if ranks is None else ranks  # all nodes are equal
        # Number of senders on each adapter. If a device uses several adapters, `nic_of` counts these as one.
        users = Counter((self.place(rank).node, self.nic_of(rank)) for rank in senders)
        bandwidth = self.bandwidth_bytes_per_s(self.machine.network.link) * self.nics_used_by_device
        return bandwidth / max(users.values(), default=1)

    def bisection_bytes_per_s(self) -> float:
        """Return the bandwidth across the narrowest cut of the cluster into halves, one way, over any wires."""
        return groups.bisection_bytes_per_s(self)

    @property
    def cc_cores_per_rank(self) -> int:
        """Number of collective processors (CC-cores) of each rank; 0 if the machine has none, or none is known."""
        figure = self.machine.chip.cc_cores
        return int(figure.value) // self.ranks_per_device if figure else 0

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak of one rank in operations per second, for a dtype ("bf16", "fp8", "fp32", ...).

        Raises:
            TopologyError: No figure is known for that dtype; the error lists the known dtypes.
        """
        peaks = dict(self.machine.chip.flops_per_s)
        if dtype not in peaks:
            raise unknown_name_error(f"dtype on {self.machine.chip.name}", dtype, list(peaks) or ["none"])
        return peaks[dtype].value / self.ranks_per_device

    def memory_bytes_per_s(self) -> float | None:
        """Return a rank's equal share of the memory bandwidth of its device, in bytes/s; None if it is unknown."""
        return self._share_of_rank(self.machine.chip.memory_bytes_per_s)

    def rank_memory_bytes_per_s(self) -> float | None:
        """Return the memory bandwidth for copies of a rank, in bytes/s; None if it is unknown.

        It is the rank's share of its device's memory or, if that is unknown, the bandwidth of the memory that all ranks
        of a node share.
        """
        shared = self.machine.collectives.usual.memory_bytes_per_s
        return self.memory_bytes_per_s() or (shared.value if shared else None)

    def memory_bytes(self) -> float | None:
        """Return a rank's equal share of the memory of its device, in bytes; None if it is unknown."""
        return self._share_of_rank(self.machine.chip.memory_bytes)

    def _share_of_rank(self, figure: Figure | None) -> float | None:
        return figure.value / self.ranks_per_device if figure else None

    @property
    def restricted(self) -> bool:
        """Whether some rule restricts which ranks of one node may form a group."""
        return any(rule.kind in LOCAL_KINDS and rule.severity == "error" for rule in self.rules)

    def judge(self, ranks: Sequence[int]) -> tuple[Finding, ...]:
        """Return the rules that a group breaks, without raising for them.

        Raises:
            TopologyError: The ranks are no group: there are none, one occurs twice, or one does not exist.
        """
        return rules.judge(self, ranks)

    def check_group(
        self, ranks: Sequence[int], *, strict: bool | None = None, warn: bool = True
    ) -> tuple[Finding, ...]:
        """Refuse an illegal group.

        Args:
            ranks: the group, in any order.
            strict: whether a broken rule is an error; None takes the cluster's own setting.
            warn: whether each finding is also a `TopologyWarning`.

        Returns:
            Findings that do not forbid the group.

        Raises:
            TopologyError: for the first broken rule, with its source and the nearest legal groups.
        """
        return rules.check_group(self, ranks, strict=self.strict if strict is None else strict, warn=warn)

    def check_groups(self, partition: Sequence[Sequence[int]], *, strict: bool | None = None) -> tuple[Finding, ...]:
        """Check groups that run one collective at the same time: they must be equally long, disjoint, and legal.

        Args:
            partition: the groups.
            strict: whether a broken rule is an error; None takes the cluster's own setting.

        Returns:
            Findings that do not forbid the groups.

        Raises:
            TopologyError: as `check_group`; also naming two groups that overlap or differ in length.
        """
        return rules.check_groups(self, partition, strict=self.strict if strict is None else strict)

    def legal_groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the legal groups of a size on node 0, among runs of consecutive ranks and sets that a rule names."""
        return rules.legal_groups(self, size)

    def rings(self, ranks: Iterable[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """Find edge-disjoint Hamiltonian cycles in the devices of some ranks; see `groups.rings`."""
        return groups.rings(self, range(self.world_size) if ranks is None else ranks)

    def ring_order(self, ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Order ranks for a ring even where no cycle of wires exists; see `groups.ring_order`."""
        return groups.ring_order(self, range(self.world_size) if ranks is None else ranks)

    def grid(self, ranks: Iterable[int] | None = None) -> Grid | None:
        """Return the torus or grid that the devices of some ranks fill, None if they fill none; see `groups.grid`.

        Args:
            ranks: The ranks; None: all of the world.
        """
        return groups.grid(self, range(self.world_size) if ranks is None else ranks)

    def hypercube_axes(self, ranks: Iterable[int] | None = None) -> tuple[Axis, ...]:
        """Pair ranks along each bit of their index, for recursive halving and doubling; see `groups.hypercube_axes`."""
        return groups.hypercube_axes(self, range(self.world_size) if ranks is None else ranks)

    def whole_devices(self, ranks: Iterable[int]) -> bool:
        """Whether the given ranks include all ranks of each device that they are on, which KangaRing needs.

        Example, with 4 ranks on a device: True for 0-3 and 0-7, False for 0-5.
        """
        used: dict[tuple[int, int], set[int]] = {}
        for rank in ranks:
            place = self.place(rank)
            used.setdefault((place.node, place.device), set()).add(place.core)
        return all(len(cores) == self.ranks_per_device for cores in used.values())


def _check_edition(machine: Machine, edition: int) -> int:
    """Refuse a year before the machine's oldest rules; a year after the newest has the newest rules."""
    # 0 and `LATEST` stand for rules without a beginning or an end.
    years = sorted({year for rule in machine.rules for year in (rule.since, rule.until)} - {0, LATEST})
    if years and edition < years[0]:
        raise TopologyError(f"{machine.name}: edition: expected {', '.join(map(str, years))} or later, found {edition}")
    return edition


def _positive_or_default(key: str, value: int | None, default: int) -> int:
    """Return a number, or its default for None; refuse one below 1."""
    if value is not None and value < 1:
        raise TopologyError(f"{key}: expected 1 or more, found {value}")
    return default if value is None else value


def _count_devices_and_ranks(machine: Machine, nodes: int, lnc: int, ranks: int | None) -> tuple[int, int]:
    """Return the number of devices in a node, and the number of ranks; refuse a number that does not fit.

    A machine that may have any number of devices gets as many as the ranks need. If `ranks` is None, there are as many
    as fit, or, if any number fits, those of one device on each node.
    """
    per_device = machine.chip.cores // lnc
    if machine.devices is None:
        ranks = _positive_or_default("ranks", ranks, nodes * per_device)
        capacity = ranks // nodes if ranks % nodes == 0 else ranks // nodes + 1
        # As many as the ranks of a node need, rounded up.
        devices = -(-capacity // per_device)
    else:
        devices, capacity = machine.devices, machine.devices * per_device
        ranks = _positive_or_default("ranks", ranks, nodes * capacity)
    if ranks > MAX_RANKS:
        raise TopologyError(
            f"{machine.name} x{nodes}: {ranks} ranks are more than any cluster has; pass at most ranks={MAX_RANKS}"
        )
    if ranks > nodes * capacity:
        raise TopologyError(
            f"{ranks} ranks do not fit: {machine.name} x{nodes} holds {nodes * capacity}; "
            f"nodes={-(-ranks // capacity)} would hold them"
        )
    if ranks % nodes:
        raise TopologyError(
            f"{ranks} ranks do not spread evenly over {nodes} nodes of {machine.name}; choose a multiple of {nodes}"
        )
    return devices, ranks


def cluster(
    name: str,
    *,
    nodes: int | None = None,
    lnc: int | None = None,
    ranks: int | None = None,
    strict: bool | None = None,
    edition: int | None = None,
) -> Cluster:
    """Make a cluster of a named machine, or of a machine in a ``.toml`` file.

    Args:
        name: a built-in name, optionally with its nodes and logical cores: ``"trn2.48xlarge x4 lnc=1"``.
            ``"local"`` is this computer: any number of ranks, no rules.
        nodes: their number; one by default, a full UltraServer where the machine is part of one.
        lnc: physical cores per logical core; the machine's default if None.
        ranks: size of the world, spread evenly over the nodes; None fills a named machine, and is one rank per node
            on "local".
        strict: whether an illegal group is an error; named Neuron machines are strict, "local" has nothing to
            violate.
        edition: year of the rules that apply; the newest by default.

    Raises:
        TopologyError: for an unknown name, a world that does not fit, an impossible or contradictory number.
    """
    if not isinstance(name, str):
        raise TopologyError(f"name: expected the name of a cluster, got {name!r}")
    name, suffixes = _parse_name(name)
    nodes = _agreed_number("nodes", suffixes.get("nodes"), nodes)
    lnc = _agreed_number("lnc", suffixes.get("lnc"), lnc)
    machine = machinefile.load(name) if name.endswith(".toml") else machinefile.load_builtin(name)
    return Cluster.of(machine, nodes=nodes, lnc=lnc, ranks=ranks, strict=strict, edition=edition)


def names() -> tuple[str, ...]:
    """List the built-in machines."""
    return machinefile.builtin_names()


def _parse_name(name: str) -> tuple[str, dict[str, int]]:
    """Return the name of a cluster without suffixes such as " x4" and " lnc=1", and their numbers by "nodes", "lnc".

    Raises `TopologyError` if two suffixes contradict each other, or if something else follows a known name.
    """
    suffixes: dict[str, int] = {}
    base_name = name.strip()
    while match := _SUFFIX.fullmatch(base_name):
        for key in ("nodes", "lnc"):
            if match[key] is not None:
                number = int(match[key])
                if suffixes.setdefault(key, number) != number:
                    raise TopologyError(f"{key}: {name!r} says {number} and {suffixes[key]}; give it once")
        base_name = match["rest"]
    first, _, more = base_name.partition(" ")
    if more and (first in names() or first.endswith(".toml")):
        raise TopologyError(
            f"cluster: expected nodes or cores after {first!r}, such as x4 or lnc=1, got {more.strip()!r}"
        )
    return base_name, suffixes


def _agreed_number(key: str, first: int | None, second: int | None) -> int | None:
    """Return the number in the cluster's name (`first`) or the argument (`second`); None if neither gives one.

    Raises `TopologyError` if both give a number, and the numbers differ.
    """
    if first is not None and second is not None and first != second:
        raise TopologyError(f"{key}: the cluster's name says {first}, the argument {second}; give it once")
    return second if first is None else first
