"""A machine file as tables: which keys there are, what each holds, and which may not contradict.

What a key expects is its `description`, in the words of messages; `complaint` puts them together. A table refuses what
contradicts itself with a ValueError that begins with the key.
"""

# Annotations are objects in this file: evaluating them from text takes msgspec longer than everything else here.

from math import prod
from typing import Annotated, Literal, cast

from msgspec import Meta, field

from .errors import TopologyError, parse_ranks
from .grouprules import LATEST, Confidence, Kind, Local, Severity
from .keys import (
    Amount,
    AmountKey,
    Count,
    Counts,
    DurationKey,
    Flag,
    Index,
    Indices,
    Pairs,
    Text,
    Texts,
    TomlTable,
    wrong,
)
from .machine import LinkKind, Shape, WiringSpec
from .overheadtables import CollectivesTable
from .wiring import Wiring

MAX_DEVICES = 4096
"""Devices in one node: far beyond any machine, and few enough that a file cannot exhaust memory."""

_GRIDS = ("ring", "chain", "torus", "grid")
_LINKED = "a kind that has a [links.*] table"
Link = Annotated[str, Meta(description=_LINKED)]


class ChipTable(TomlTable):
    """`[chip]`."""

    name: Text
    cores: Count
    lnc: Counts = (1,)
    cc_cores: AmountKey | None = None
    memory_bytes: AmountKey | None = None
    memory_bytes_per_s: AmountKey | None = None
    dma_bytes_per_s: AmountKey | None = None
    flops_per_s: Annotated[dict[str, AmountKey], Meta(description="a table")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.lnc or any(self.cores % size for size in self.lnc):
            raise wrong("lnc", f"divisors of the {self.cores} cores", self.lnc)


class LinkTable(TomlTable):
    """`[links.KIND]`."""

    latency_s: DurationKey
    bandwidth_bytes_per_s: AmountKey
    per_core: Flag = False


LinkTableKey = Annotated[LinkTable | None, Meta(description="a table")]


class LinksTable(TomlTable):
    """`[links]`: the kinds of wires, but for "self" and "none", which have no figures."""

    chip: LinkTableKey = None
    neuronlink: LinkTableKey = None
    roce: LinkTableKey = None
    nvlink: LinkTableKey = None
    ultraserver: LinkTableKey = None
    efa: LinkTableKey = None
    ethernet: LinkTableKey = None

    def all(self) -> dict[LinkKind, LinkTable]:
        """Return those that the file has."""
        found = {cast("LinkKind", kind): getattr(self, kind) for kind in self.__struct_fields__}
        return {kind: table for kind, table in found.items() if table is not None}


class WiresTable(TomlTable):
    """`[wires]`."""

    shape: Shape
    dims: Counts | None = None
    pairs: Pairs | None = None
    link: Link | None = None
    source: Text = ""
    confidence: Confidence = "E"

    def __post_init__(self) -> None:
        if self.shape in ("torus", "grid") and self.dims is None:
            raise ValueError("dims: missing, expected a list of whole numbers, 1 or more")
        if self.shape == "links" and self.pairs is None:
            raise ValueError("pairs: missing, expected a list of pairs such as [[0, 1], [1, 2]]")
        if self.shape != "none" and self.link is None:
            raise ValueError(f"link: missing, expected {_LINKED}")
        has = {"dims": self.shape in _GRIDS, "pairs": self.shape == "links", "link": self.shape != "none"}
        for key, belongs in has.items():
            if getattr(self, key) is not None and not belongs:
                raise wrong(key, f"nothing, because the shape is {self.shape!r}", getattr(self, key))

    def spec(self, devices: int | None, where: str) -> WiringSpec:
        """Return the record; a ring or a chain is of all devices."""
        side = (devices or 1,) if self.shape in _GRIDS else ()
        return WiringSpec(
            shape=self.shape,
            dims=self.dims or side,
            pairs=self.pairs or (),
            link=cast("LinkKind", self.link or "none"),
            source=self.source or where,
            confidence=self.confidence,
        )

    def check(self, devices: int) -> None:
        """Refuse wires that do not join so many devices."""
        if self.dims and prod(self.dims) != devices:
            raise wrong("wires.dims", f"sides whose product is devices = {devices}", self.dims)
        strange = [pair for pair in self.pairs or () if max(pair) >= devices or pair[0] == pair[1]]
        if strange:
            raise wrong("wires.pairs", f"pairs of different devices below {devices}", strange[0])
        if lost := Wiring.of(self.spec(devices, ""), devices).unreached():
            key = "pairs" if self.shape == "links" else "shape"
            raise ValueError(f"wires.{key}: expected a connected graph, found no way from device 0 to {lost[0]}")


class NetworkTable(TomlTable):
    """`[network]`."""

    nics: AmountKey
    link: Link

    def __post_init__(self) -> None:
        nics = self.nics.value if isinstance(self.nics, Amount) else self.nics
        if nics != int(nics):
            raise wrong("nics", "a whole number", nics)


class UltraServerTable(TomlTable):
    """`[ultraserver]`."""

    servers: Counts
    link: Link
    source: Text = ""

    def __post_init__(self) -> None:
        if not self.servers or list(self.servers) != sorted(set(self.servers)):
            raise wrong("servers", "ascending numbers of servers", self.servers)


class RuleTable(TomlTable):
    """One of `[[rules]]`."""

    id: Text
    kind: Kind
    text: Text
    source: Text = ""
    confidence: Confidence = "E"
    severity: Severity = "error"
    since: Index = 0
    until: Count = LATEST
    lnc: Count | None = None
    for_sizes: Counts = ()
    sizes: Counts = ()
    sets: Texts = ()
    exempts: Annotated[tuple[Kind, ...], Meta(description="a list of kinds")] = ()
    complete: Flag = False

    def __post_init__(self) -> None:
        if self.kind in ("sizes", "multiple", "servers") and not self.sizes:
            raise ValueError(f"sizes: expected numbers, because the kind is {self.kind!r}, found none")
        if self.kind == "sets" and not self.sets:
            raise ValueError("sets: expected groups such as '0-15,48-63', because the kind is 'sets', found none")
        if self.since > self.until:
            raise wrong("until", f"a year not before since = {self.since}", self.until)
        self.groups()

    def groups(self) -> tuple[Local, ...]:
        """Return the ranks that `sets` names."""
        try:
            return tuple(parse_ranks(text) for text in self.sets)
        except TopologyError as error:
            raise ValueError(f"sets: {error}") from None


class Document(TomlTable):
    """A whole file, with what it extends."""

    name: Text
    devices: Annotated[Count | Literal["any"], Meta(description='a whole number, 1 or more, or "any"')]
    chip: Annotated[ChipTable, Meta(description="a table")]
    links: Annotated[LinksTable, Meta(description="a table")]
    description: Text = ""
    wires: Annotated[WiresTable | None, Meta(description="a table")] = None
    network: Annotated[NetworkTable | None, Meta(description="a table")] = None
    ultraserver: Annotated[UltraServerTable | None, Meta(description="a table")] = None
    collectives: Annotated[CollectivesTable | None, Meta(description="a table")] = None
    rules: Annotated[tuple[Annotated[RuleTable, Meta(description="a table")], ...], Meta(description="tables")] = ()
    strict: Flag = False
    numa: Indices = ()
    pcie: Indices = ()

    def __post_init__(self) -> None:
        self._check_devices()
        kinds = self.links.all()
        for key in ("wires", "network", "ultraserver"):
            link = getattr(getattr(self, key), "link", None)
            if link is not None and link not in kinds:
                raise wrong(f"{key}.link", f"{_LINKED}: {', '.join(kinds) or 'none is declared'}", link)
        for key, link in self.collectives.kinds() if self.collectives else ():
            if link not in kinds:
                raise ValueError(f"{key}.{link}: expected {_LINKED}: {', '.join(kinds)}")
        for key in ("numa", "pcie"):
            if (values := getattr(self, key)) and len(values) != self.devices:
                raise ValueError(
                    f"{key}: expected one number for each of {self.devices} devices, found {len(values)} numbers"
                )

    def _check_devices(self) -> None:
        if self.wires is None:
            if self.devices != 1:
                raise ValueError("wires: missing, expected a table")
        elif self.devices == "any":
            if self.wires.shape not in ("full", "switch"):
                raise wrong("wires.shape", "full or switch, because devices is 'any'", self.wires.shape)
        elif self.devices > MAX_DEVICES:
            raise wrong("devices", f"at most {MAX_DEVICES}", self.devices)
        else:
            self.wires.check(self.devices)
