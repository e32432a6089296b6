"""Records of one kind of node: the contents of a machine file, such as those in `data/`.

The annotation of a field declares its key in a file (see `keys`). A record refuses values that contradict each other
with a ValueError that begins with the key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from .errors import parse_ranks
from .figures import Amount, Collectives, Confidence, Duration, Factor, Whole
from .keys import ByName, Count, Counts, Index, Indices, Numbers, Pairs, Parsed, Words, contradiction_error

LinkKind = Literal["self", "chip", "neuronlink", "roce", "nvlink", "xgmi", "ultraserver", "efa", "ethernet", "none"]
WIRED = ("chip", "neuronlink", "roce", "nvlink", "xgmi", "ultraserver", "efa", "ethernet")
"""The kinds of links that have figures: all but "self" and "none"."""

Shape = Literal["none", "ring", "chain", "torus", "grid", "full", "switch", "links"]
_GRIDS = ("ring", "chain", "torus", "grid")

Severity = Literal["error", "warning"]
RuleKind = Literal["sizes", "multiple", "tiles", "sets", "devices", "node", "symmetric", "servers", "peers"]
Local = tuple[int, ...]
"""The ranks of a group on one node, as indices in the node."""

LATEST = 9999
"""Stands for the last year of a rule that still holds."""

MAX_DEVICES = 4096
"""Most devices in one node: far beyond any machine, and few enough that a file cannot exhaust memory."""

LINKED = "a kind that has a [links.*] table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One sentence of a platform's documentation on legal groups, in a form that can be checked."""

    id: str  # name of the rule in messages
    # The kind of check. For the local part, the ranks of the group on one node: "sizes" (it has one of `sizes` ranks),
    # "multiple" (a multiple of `sizes[0]`), "tiles" (n consecutive ranks from a multiple of n on), "sets" (it is one of
    # `sets`), "devices" (all cores of consecutive devices), "peers" (see `rules.is_column_of_tiles`). For the group:
    # "node" (it is on one node), "symmetric" (it has equal indices on every node), "servers" (it is on one of `sizes`
    # neighbouring servers of an UltraServer).
    kind: RuleKind
    text: str  # the rule in words
    source: str  # the document that states it
    confidence: Confidence  # as for figures
    severity: Severity = "error"  # of a violation on a strict cluster
    since: Index = 0  # first year of this rule in the platform's documents
    until: Count = LATEST  # last such year
    lnc: Count | None = None  # the logical-core setting to which it applies, None for all
    for_sizes: Counts = ()  # the rule applies only to local parts of these sizes; empty: of all sizes
    # parameter of "sizes", "multiple" and "servers"; for "peers" the sizes of tiles (see `rules.list_tilings`).
    sizes: Counts = ()
    # parameter of "sets"; for "peers" one more set of tiles.
    sets: Annotated[
        tuple[Annotated[Local, Parsed("ranks such as '0-15,48-63'", parse_ranks)], ...], Words("a list of texts")
    ] = ()
    # for "peers": kinds of rules from which groups that obey this rule are exempt.
    exempts: Annotated[tuple[RuleKind, ...], Words("a list of kinds")] = ()
    complete: bool = False  # for "peers": the group must take a rank from every tile of the node

    def __post_init__(self) -> None:
        if self.kind in ("sizes", "multiple", "servers") and not self.sizes:
            raise ValueError(f"sizes: expected numbers, because the kind is {self.kind!r}, found none")
        if self.kind == "sets" and not self.sets:
            raise ValueError("sets: expected groups such as '0-15,48-63', because the kind is 'sets', found none")
        if self.since > self.until:
            raise contradiction_error("until", f"a year not before since = {self.since}", self.until)

    def in_force(self, *, edition: int, lnc: int) -> bool:
        """Whether this rule applies.

        Args:
            edition: year of the platform's documents.
            lnc: physical cores of a logical core.
        """
        return self.since <= edition <= self.until and self.lnc in (None, lnc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device (a Trainium chip, say) and its processors."""

    name: str  # the vendor's name of the chip
    cores: Count  # physical cores
    lnc: Counts = (1,)  # how many physical cores may form one logical core; the first is the default
    cc_cores: Amount | None = None  # collective processors on the chip
    memory_bytes: Amount | None = None  # device memory
    memory_bytes_per_s: Amount | None = None  # its bandwidth
    dma_bytes_per_s: Amount | None = None  # rate of the DMA engines of one physical core, in practice
    # peak rate per dtype, for the whole chip.
    flops_per_s: Annotated[tuple[tuple[str, Amount], ...], ByName("a table")] = ()

    def __post_init__(self) -> None:
        if not self.lnc or any(self.cores % size for size in self.lnc):
            raise contradiction_error("lnc", f"divisors of the {self.cores} cores", self.lnc)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Figures of one kind of wire, for one direction."""

    kind: LinkKind  # the name by which wiring and network refer to it
    latency_s: Duration  # from the send to the first byte's arrival, per hop
    bandwidth_bytes_per_s: Amount  # one way; the other direction has as much again
    per_core: bool = False  # whether the bandwidth is for each physical core: a logical core of two has twice as much


@dataclass(frozen=True, slots=True, kw_only=True)
class WiringSpec:
    """The wires between the devices of one node."""

    # "ring", "chain", "torus" and "grid" use `dims`; "full" joins every pair of devices by a wire, "switch" every
    # device to one switch; "links" uses `pairs`.
    shape: Shape
    # sides of the grid, slowest first; empty: one side of all devices. Device d has the row-major coordinates of d.
    dims: Counts = ()
    pairs: Pairs = ()  # undirected pairs for "links"
    link: Annotated[LinkKind, Words(LINKED)] = "none"  # kind of these wires
    source: str = ""  # where the wiring is published
    confidence: Confidence = "E"  # as in `Figure`

    def __post_init__(self) -> None:
        if self.shape in ("torus", "grid") and not self.dims:
            raise ValueError("dims: missing, expected a list of whole numbers, 1 or more")
        if self.shape == "links" and not self.pairs:
            raise ValueError("pairs: missing, expected a list of pairs such as [[0, 1], [1, 2]]")
        if self.shape != "none" and self.link == "none":
            raise ValueError(f"link: missing, expected {LINKED}")
        for key, value, belongs in (
            ("dims", self.dims, self.shape in _GRIDS),
            ("pairs", self.pairs, self.shape == "links"),
            ("link", "" if self.link == "none" else self.link, self.shape != "none"),
        ):
            if value and not belongs:
                raise contradiction_error(key, f"nothing, because the shape is {self.shape!r}", value)

    def sides(self, devices: int) -> tuple[int, ...]:
        """Return the sides of the grid that `devices` devices form; () if the shape is no grid."""
        return self.dims or ((devices,) if self.shape in _GRIDS else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The adapters that join nodes: `nics` in each, all equal."""

    nics: Whole
    link: Annotated[LinkKind, Words(LINKED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the switches between nodes, which joins blocks of nodes.

    Messages inside a block do not leave it. Other messages use its way out, the connection to higher levels. Either
    `oversubscription` or `bandwidth_bytes_per_s` must be given.
    """

    name: str  # such as "leaf", "rail" or "pod"
    nodes: Count  # nodes in a block
    rails: Count = 1  # number of separate planes of switches, each for the adapters of one index
    oversubscription: Factor | None = None  # bandwidth of all adapters of a block / bandwidth of its way out
    bandwidth_bytes_per_s: Amount | None = None  # bandwidth of a block's way out, of all rails together, one way

    def __post_init__(self) -> None:
        if (self.oversubscription is None) == (self.bandwidth_bytes_per_s is None):
            found = "neither" if self.oversubscription is None else "both"
            raise ValueError(
                f"bandwidth_bytes_per_s: expected the bandwidth out of a block of {self.name!r}, or its "
                f"oversubscription, one of the two, found {found}"
            )

    def out_bytes_per_s(self, of_a_node: float) -> float:
        """Return the bandwidth of a block's way out in bytes/s, given that of all adapters of a node."""
        if self.bandwidth_bytes_per_s is not None:
            return self.bandwidth_bytes_per_s.value
        assert self.oversubscription is not None
        return self.nodes * of_a_node / self.oversubscription.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The switches between nodes. Without levels, messages never compete for switches."""

    levels: Annotated[tuple[Level, ...], Words("tables")] = ()  # from the nodes upwards

    def __post_init__(self) -> None:
        nodes = [level.nodes for level in self.levels]
        if any(above % below or above == below for below, above in pairwise(nodes)):
            raise contradiction_error(
                "levels", "blocks of ascending nodes, each a multiple of the one below", tuple(nodes)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UltraServer:
    """Nodes joined device by device: device d of one server to device d of the next, in a ring."""

    servers: Counts  # how many nodes may be coupled, ascending; the last is the full machine
    link: Annotated[LinkKind, Words(LINKED)]  # kind of these wires
    source: str  # where it is published

    def __post_init__(self) -> None:
        if not self.servers or list(self.servers) != sorted(set(self.servers)):
            raise contradiction_error("servers", "ascending numbers of servers", self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of node: a whole machine file."""

    name: str  # as the user writes it
    description: str = ""  # one line
    # devices in a node; None means any number (the local machine).
    devices: Annotated[int | None, Numbers('a whole number, 1 or more, or "any"', least=1, whole=True, text="any")]
    chip: Chip  # the kind of device
    wires: WiringSpec  # between devices
    links: Annotated[tuple[LinkSpec, ...], ByName("a table", known=WIRED)]  # figures per kind of wire
    network: Network | None = None  # adapters between nodes, None if nothing joins them
    fabric: Fabric | None = None  # the switches of that network, None if nothing is known of them
    ultraserver: UltraServer | None = None  # device-to-device wires between nodes, if there are any
    collectives: Collectives = field(default=Collectives())  # the cost of collectives beyond bytes on wires
    rules: Annotated[tuple[Rule, ...], Words("tables")] = ()  # rules of legal groups, in the order of their checks
    strict: bool = False  # whether a violated rule is an error or a warning, unless the caller says otherwise
    numa: Indices = field(default=())  # NUMA node of each device, where known
    pcie: Indices = field(default=())  # PCIe switch or host bus of each device, where known
