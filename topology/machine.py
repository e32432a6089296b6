"""One kind of node as records: what a TOML file in `data/` says, typed.

Nothing here computes; `wiring` and `cluster` do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .grouprules import Confidence, Rule
from .overheads import Collectives, Figure

LinkKind = Literal["self", "chip", "neuronlink", "roce", "nvlink", "ultraserver", "efa", "ethernet", "none"]

Shape = Literal["none", "ring", "chain", "torus", "grid", "full", "switch", "links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device (a Trainium chip, say) and what it computes with."""

    name: str  # the vendor's name of the chip
    cores: int  # physical cores
    lnc: tuple[int, ...] = (1,)  # how many physical cores may form one logical core; the first is the default
    cc_cores: Figure | None = None  # collective processors on the chip
    memory_bytes: Figure | None = None  # device memory
    memory_bytes_per_s: Figure | None = None  # its bandwidth
    dma_bytes_per_s: Figure | None = None  # what the DMA engines of one physical core move in practice
    flops_per_s: tuple[tuple[str, Figure], ...] = ()  # peak per dtype, for the whole chip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Figures of one kind of wire, for one direction."""

    kind: LinkKind  # the name by which wiring and network refer to it
    latency_s: Figure  # from the send to the first byte's arrival, per hop
    bandwidth_bytes_per_s: Figure  # one way; the other direction has the same again
    per_core: bool = False  # the bandwidth is that of a physical core, so a logical core of two has twice


@dataclass(frozen=True, slots=True, kw_only=True)
class WiringSpec:
    """How the devices of one node are joined."""

    # "ring", "chain", "torus" and "grid" have `dims`; "full" joins every pair by a wire of its own, "switch" every
    # device to one switch; "links" lists the pairs.
    shape: Shape
    dims: tuple[int, ...] = ()  # sides of the grid, slowest first; device d has the row-major coordinates of d
    pairs: tuple[tuple[int, int], ...] = ()  # undirected pairs for "links"
    link: LinkKind = "none"  # kind of these wires
    source: str = ""  # where the wiring is published
    confidence: Confidence = "E"  # as in `Figure`


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins nodes: `nics` adapters in each, all equal."""

    nics: Figure
    link: LinkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class UltraServer:
    """Nodes joined device by device: device d of one server to device d of the next, in a ring."""

    servers: tuple[int, ...]  # how many nodes may be coupled, ascending; the last is the full machine
    link: LinkKind  # kind of these wires
    source: str  # where it is published


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of node: everything a file says about it."""

    name: str  # as the user writes it
    description: str = ""  # one line
    devices: int | None  # devices in a node; None means any number (the local machine)
    chip: Chip  # what each device is
    wires: WiringSpec  # how the devices are joined
    links: tuple[LinkSpec, ...]  # figures per kind of wire
    network: Network | None = None  # what joins nodes, None if nothing does
    ultraserver: UltraServer | None = None  # device-to-device wires between nodes, if there are any
    collectives: Collectives = field(default=Collectives())  # what collectives cost beyond bytes on wires
    rules: tuple[Rule, ...] = ()  # which groups are legal, in the order in which they are checked
    strict: bool = False  # whether a violated rule is an error or a warning, unless the caller says otherwise
    numa: tuple[int, ...] = field(default=())  # NUMA node of each device, where known
    pcie: tuple[int, ...] = field(default=())  # PCIe switch or host bus of each device, where known
