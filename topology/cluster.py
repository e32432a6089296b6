"""A number of equal nodes: where each rank sits, which wires join two ranks, and what those wires carry.

Ranks count cores, then devices, then nodes: on two nodes of 16 devices with 2 cores, rank 35 is node 1, device 1,
core 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import groups, legality, routes
from .errors import TopologyError, unknown
from .grid import Grid
from .groups import Axis
from .machine import Figure, LinkKind, LinkSpec, Machine
from .routes import Link, Place
from .rules import LOCAL_KINDS, Finding, Rule
from .wiring import Wiring


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Cluster:
    """Nodes of one kind. Make it with `topology.cluster` or `Cluster.load`.

    Attributes:
        machine: what a node is.
        nodes: how many.
        lnc: physical cores per logical core.
        world_size: number of ranks, spread evenly over the nodes.
        strict: whether an illegal group is an error (otherwise a warning).
        edition: the year whose rules apply.
        wiring: the graph of one node's devices.
    """

    machine: Machine
    nodes: int
    lnc: int
    world_size: int
    strict: bool
    edition: int
    wiring: Wiring = field(compare=False)

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
        """Read a machine from a TOML file; the other arguments are those of `topology.cluster`.

        Raises:
            TopologyError: in one line, naming the file, the key and what was expected.
        """
        # Here, because `instances` builds clusters and so imports this file.
        from . import files, instances

        return instances.assemble(files.load(path), nodes=nodes, lnc=lnc, ranks=ranks, strict=strict, edition=edition)

    def __repr__(self) -> str:
        lnc = f" lnc={self.lnc}" if len(self.machine.chip.lnc) > 1 else ""
        return f"<Cluster {self.name}{lnc}: {self.world_size} ranks>"

    def __hash__(self) -> int:
        return hash((self.machine.name, self.nodes, self.lnc, self.world_size))

    @property
    def name(self) -> str:
        """The one-string form: ``trn2.48xlarge x4``."""
        return f"{self.machine.name} x{self.nodes}" if self.nodes > 1 else self.machine.name

    @property
    def devices_per_node(self) -> int:
        """Devices in a node, used or not."""
        return self.wiring.devices

    @property
    def ranks_per_device(self) -> int:
        """Logical cores of a device."""
        return self.machine.chip.cores // self.lnc

    @property
    def capacity_per_node(self) -> int:
        """Ranks that fit on a node."""
        return self.devices_per_node * self.ranks_per_device

    @property
    def ranks_per_node(self) -> int:
        """Ranks of this world on each node: its first cores."""
        return self.world_size // self.nodes

    @property
    def servers(self) -> int:
        """Nodes in one UltraServer; 1 where nodes are joined by the network only."""
        return min(self.nodes, self.machine.ultraserver.servers[-1]) if self.machine.ultraserver else 1

    def place(self, rank: int) -> Place:
        """Tell where a rank sits.

        Raises:
            TopologyError: if there is no such rank.
        """
        self._check_rank(rank)
        node, local = divmod(rank, self.ranks_per_node)
        return Place(node, *divmod(local, self.ranks_per_device))

    def rank_at(self, place: Place) -> int:
        """Tell which rank sits at a place, the reverse of `place`.

        Raises:
            TopologyError: if the place is not on this cluster, or no rank of this world sits there.
        """
        local = place.device * self.ranks_per_device + place.core
        fits = 0 <= place.node < self.nodes and 0 <= place.core < self.ranks_per_device
        if not fits or not 0 <= local < self.ranks_per_node:
            raise TopologyError(f"{place} holds no rank of {self!r}")
        return place.node * self.ranks_per_node + local

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not in the world of {self!r}: expected 0 to {self.world_size - 1}")

    def link_kind(self, a: int, b: int) -> LinkKind:
        """Name the slowest kind of wire on the way between two ranks; "none" if no wire joins their nodes."""
        here, there = self.place(a), self.place(b)
        if a == b:
            return "self"
        if here.node == there.node:
            return "chip" if here.device == there.device else self.machine.wires.link
        if here.node // self.servers == there.node // self.servers:
            assert self.machine.ultraserver is not None
            return self.machine.ultraserver.link
        return self.machine.network.link if self.machine.network else "none"

    def route(self, a: int, b: int) -> tuple[Link, ...]:
        """List the directed links that bytes cross from rank a to rank b; none for a == b.

        Ways between devices are shortest (see `Wiring.path`). Inside an UltraServer bytes first move to the right
        device of their own server, then from server to server. Over the network they leave through the adapters of
        a's device and arrive through those of b's.

        Raises:
            TopologyError: if no wire joins the two nodes.
        """
        return routes.route(self, a, b)

    def link(self, kind: LinkKind) -> LinkSpec:
        """Give the published figures of a kind of wire, with their sources.

        Raises:
            TopologyError: if this machine has no such wire.
        """
        for spec in self.machine.links:
            if spec.kind == kind:
                return spec
        raise unknown(f"link kind on {self.machine.name}", kind, [spec.kind for spec in self.machine.links])

    def latency_s(self, kind: LinkKind) -> float:
        """Give the latency of one hop over a kind of wire."""
        return self.link(kind).latency_s.value

    def bandwidth_bytes_per_s(self, kind: LinkKind) -> float:
        """Give what one wire of a kind (one adapter, for the network) carries in one direction."""
        spec = self.link(kind)
        return spec.bandwidth_bytes_per_s.value * (self.lnc if spec.per_core else 1)

    @property
    def nics_per_node(self) -> int:
        """Network adapters of a node; 0 without a network."""
        return int(self.machine.network.nics.value) if self.machine.network else 0

    @property
    def nics_per_bundle(self) -> int:
        """Adapters that one device uses together; 1 where devices share one."""
        return max(1, self.nics_per_node // self.devices_per_node)

    def nic_of(self, rank: int) -> int:
        """Number the adapter, or bundle of adapters, of a rank's device: devices in order share the adapters evenly."""
        bundles = min(self.nics_per_node, self.devices_per_node)
        return self.place(rank).device * bundles // self.devices_per_node

    def nic_share_bytes_per_s(self, ranks: Iterable[int] | None = None) -> float:
        """Give the network bandwidth of a rank, one way, when all ranks (or all of a group) send at once: the
        smallest share.

        50 Gbit/s on trn2.48xlarge with LNC=2; 0.0 without a network.
        """
        if self.machine.network is None:
            return 0.0
        users: dict[tuple[int, int], int] = {}
        for rank in range(self.world_size) if ranks is None else ranks:
            nic = (self.place(rank).node, self.nic_of(rank))
            users[nic] = users.get(nic, 0) + 1
        whole = self.bandwidth_bytes_per_s(self.machine.network.link) * self.nics_per_bundle
        return whole / max(users.values(), default=1)

    def bisection_bytes_per_s(self) -> float:
        """Give what crosses the narrowest cut of the cluster in two halves, one way, whichever wires it cuts."""
        return groups.bisection_bytes_per_s(self)

    @property
    def cc_cores_per_rank(self) -> int:
        """Collective processors that a logical core has to itself; 0 where none are known."""
        figure = self.machine.chip.cc_cores
        return int(figure.value) // self.ranks_per_device if figure else 0

    def flops_per_s(self, dtype: str) -> float:
        """Give the peak of one rank for a dtype ("bf16", "fp8", "fp32", ...).

        Raises:
            TopologyError: if no figure is known for that dtype; it lists the known ones.
        """
        peaks = dict(self.machine.chip.flops_per_s)
        if dtype not in peaks:
            raise unknown(f"dtype on {self.machine.chip.name}", dtype, list(peaks) or ["none"])
        return peaks[dtype].value / self.ranks_per_device

    def memory_bytes_per_s(self) -> float | None:
        """Give a rank's even share of its device's memory bandwidth, None if unknown."""
        return self._share(self.machine.chip.memory_bytes_per_s)

    def memory_bytes(self) -> float | None:
        """Give a rank's even share of its device's memory, None if unknown."""
        return self._share(self.machine.chip.memory_bytes)

    def _share(self, figure: Figure | None) -> float | None:
        return figure.value / self.ranks_per_device if figure else None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in force for this edition and logical-core setting."""
        return tuple(rule for rule in self.machine.rules if rule.in_force(edition=self.edition, lnc=self.lnc))

    @property
    def restricted(self) -> bool:
        """Whether any rule says which ranks of one node may form a group."""
        return any(rule.kind in LOCAL_KINDS and rule.severity == "error" for rule in self.rules)

    def judge(self, ranks: Sequence[int]) -> tuple[Finding, ...]:
        """List the rules that a group breaks, without raising for them.

        Raises:
            TopologyError: if it is not a group at all: empty, a rank twice, or a rank that does not exist.
        """
        return legality.judge(self, ranks)

    def check_group(
        self, ranks: Sequence[int], *, strict: bool | None = None, warn: bool = True
    ) -> tuple[Finding, ...]:
        """Refuse an illegal group.

        Args:
            ranks: the group, in any order.
            strict: whether a broken rule is an error; None takes the cluster's own setting.
            warn: whether each finding is also a `TopologyWarning`.

        Returns:
            What was found but does not forbid the group.

        Raises:
            TopologyError: for the first broken rule, with its source and the nearest legal groups.
        """
        return legality.check_group(self, ranks, strict=self.strict if strict is None else strict, warn=warn)

    def check_groups(self, partition: Sequence[Sequence[int]], *, strict: bool | None = None) -> tuple[Finding, ...]:
        """Refuse a list of groups that run one collective together: equally long, disjoint, each legal.

        Raises:
            TopologyError: as `check_group`; also naming the two groups that overlap or differ in length.
        """
        return legality.check_groups(self, partition, strict=self.strict if strict is None else strict)

    def legal_groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """List the legal groups of a size on node 0 that are runs of ranks or sets named by a rule."""
        return legality.legal_groups(self, size)

    def rings(self, ranks: Iterable[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """Find edge-disjoint Hamiltonian cycles in the devices of some ranks; see `groups.rings`."""
        return groups.rings(self, range(self.world_size) if ranks is None else ranks)

    def ring_order(self, ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Order ranks for a ring even where no cycle of wires exists; see `groups.ring_order`."""
        return groups.ring_order(self, range(self.world_size) if ranks is None else ranks)

    def grid(self, ranks: Iterable[int] | None = None) -> Grid | None:
        """Give the sides of the torus or grid that the devices of some ranks fill, None if they fill none."""
        return groups.grid(self, range(self.world_size) if ranks is None else ranks)

    def hypercube_axes(self, ranks: Iterable[int] | None = None) -> tuple[Axis, ...]:
        """Pair ranks along the bits of their place for recursive halving and doubling; see `groups.hypercube_axes`."""
        return groups.hypercube_axes(self, range(self.world_size) if ranks is None else ranks)

    def whole_devices(self, ranks: Iterable[int]) -> bool:
        """Tell whether every device that some ranks touch is theirs entirely, which KangaRing needs."""
        used: dict[tuple[int, int], set[int]] = {}
        for rank in ranks:
            place = self.place(rank)
            used.setdefault((place.node, place.device), set()).add(place.core)
        return all(len(cores) == self.ranks_per_device for cores in used.values())
