"""One kind of node as records: what a TOML file in `data/` says, typed.

Nothing here computes; `wiring` and `cluster` do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .grouprules import Confidence, Rule
from .overheads import Collectives, Figure

__all__ = [
    "Chip",
    "Figure",
    "LinkKind",
    "LinkSpec",
    "Machine",
    "Network",
    "Shape",
    "UltraServer",
    "WiringSpec",
]

LinkKind = Literal["self", "chip", "neuronlink", "roce", "nvlink", "ultraserver", "efa", "ethernet", "none"]

Shape = Literal["none", "ring", "chain", "torus", "grid", "full", "switch", "links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device (a Trainium chip, say) and what it computes with.

    Attributes:
        name: the vendor's name of the chip.
        cores: physical cores.
        lnc: how many physical cores may form one logical core; the first is the default.
        cc_cores: collective processors on the chip.
        memory_bytes: device memory.
        memory_bytes_per_s: its bandwidth.
        dma_bytes_per_s: what the DMA engines of one physical core move in practice.
        flops_per_s: peak per dtype, for the whole chip.
    """

    name: str
    cores: int
    lnc: tuple[int, ...] = (1,)
    cc_cores: Figure | None = None
    memory_bytes: Figure | None = None
    memory_bytes_per_s: Figure | None = None
    dma_bytes_per_s: Figure | None = None
    flops_per_s: tuple[tuple[str, Figure], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Figures of one kind of wire, for one direction.

    Attributes:
        kind: the name by which wiring and network refer to it.
        latency_s: from the send to the first byte's arrival, per hop.
        bandwidth_bytes_per_s: one way; the other direction has the same again.
        per_core: the bandwidth is that of a physical core, so a logical core of two has twice.
    """

    kind: LinkKind
    latency_s: Figure
    bandwidth_bytes_per_s: Figure
    per_core: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WiringSpec:
    """How the devices of one node are joined.

    Attributes:
        shape: "ring", "chain", "torus" and "grid" have `dims`; "full" joins every pair by a wire of its own,
            "switch" every device to one switch; "links" lists the pairs.
        dims: sides of the grid, slowest first; device d has the row-major coordinates of d.
        pairs: undirected pairs for "links".
        link: kind of these wires.
        source: where the wiring is published.
        confidence: as in `Figure`.
    """

    shape: Shape
    dims: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    link: LinkKind = "none"
    source: str = ""
    confidence: Confidence = "E"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins nodes: `nics` adapters in each, all equal."""

    nics: Figure
    link: LinkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class UltraServer:
    """Nodes joined device by device: device d of one server to device d of the next, in a ring.

    Attributes:
        servers: how many nodes may be coupled, ascending; the last is the full machine.
        link: kind of these wires.
        source: where it is published.
    """

    servers: tuple[int, ...]
    link: LinkKind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of node: everything a file says about it.

    Attributes:
        name: as the user writes it.
        description: one line.
        devices: devices in a node; None means any number (the local machine).
        chip: what each device is.
        wires: how the devices are joined.
        links: figures per kind of wire.
        network: what joins nodes, None if nothing does.
        ultraserver: device-to-device wires between nodes, if there are any.
        collectives: what collectives cost beyond bytes on wires.
        rules: which groups are legal, in the order in which they are checked.
        strict: whether a violated rule is an error or a warning, unless the caller says otherwise.
        numa: NUMA node of each device, where known.
        pcie: PCIe switch or host bus of each device, where known.
    """

    name: str
    description: str = ""
    devices: int | None
    chip: Chip
    wires: WiringSpec
    links: tuple[LinkSpec, ...]
    network: Network | None = None
    ultraserver: UltraServer | None = None
    collectives: Collectives = field(default=Collectives())
    rules: tuple[Rule, ...] = ()
    strict: bool = False
    numa: tuple[int, ...] = field(default=())
    pcie: tuple[int, ...] = field(default=())
