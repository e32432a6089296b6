"""The shape of a machine file: which keys there are, what each must hold, and which may not contradict."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import cast

from .errors import parse_ranks, unknown
from .machine import LINK_KINDS, SHAPES, Chip, LinkKind, LinkSpec, Machine, Network, Shape, UltraServer, Wires
from .reader import Reader
from .rules import KINDS, LATEST, MARKS, Confidence, Kind, Rule, Severity
from .wiring import Wiring

MAX_DEVICES = 4096
"""Devices in one node: far beyond any machine, and few enough that a file cannot exhaust memory."""


def parse(table: Mapping[str, object], *, where: str) -> Machine:
    """Turn a parsed TOML document into a machine.

    Args:
        table: the document, `extends` already resolved.
        where: name of the file, for messages.

    Raises:
        TopologyError: naming `where`, the key and what was expected.
    """
    reader = Reader(dict(table), where)
    links = _links(reader.table("links"))
    machine = _machine(reader, links)
    reader.finish()
    return machine


def _machine(reader: Reader, links: tuple[LinkSpec, ...]) -> Machine:
    kinds = tuple(spec.kind for spec in links)
    devices = reader.count_or_any("devices")
    if (devices or 0) > MAX_DEVICES:
        raise reader.bad("devices", f"at most {MAX_DEVICES}", devices)
    wires = _wires(reader, devices, kinds)
    return Machine(
        name=reader.text("name"),
        description=reader.text("description", ""),
        devices=devices,
        chip=_chip(reader.table("chip")),
        wires=wires,
        links=links,
        network=_network(reader, kinds),
        ultraserver=_ultraserver(reader, kinds),
        rules=tuple(_rule(entry) for entry in reader.tables("rules")),
        strict=reader.flag("strict", default=False),
        numa=_per_device(reader, "numa", devices),
        pcie=_per_device(reader, "pcie", devices),
    )


def _per_device(reader: Reader, key: str, devices: int | None) -> tuple[int, ...]:
    values = reader.integers(key, (), minimum=0)
    if values and len(values) != devices:
        raise reader.bad(key, f"one number for each of {devices} devices", f"{len(values)} numbers")
    return values


def _chip(reader: Reader) -> Chip:
    flops = reader.table("flops_per_s", {})
    cores, lnc = reader.integer("cores"), reader.integers("lnc", (1,), minimum=1)
    wrong = [size for size in lnc if cores % size]
    if wrong or not lnc:
        raise reader.bad("lnc", f"divisors of the {cores} cores", list(lnc))
    chip = Chip(
        name=reader.text("name"),
        cores=cores,
        lnc=lnc,
        cc_cores=reader.figure_or_none("cc_cores"),
        memory_bytes=reader.figure_or_none("memory_bytes"),
        memory_bytes_per_s=reader.figure_or_none("memory_bytes_per_s"),
        dma_bytes_per_s=reader.figure_or_none("dma_bytes_per_s"),
        flops_per_s=tuple((dtype, flops.figure(dtype)) for dtype in flops.names()),
    )
    reader.finish()
    return chip


def _links(reader: Reader) -> tuple[LinkSpec, ...]:
    return tuple(_link(reader, kind) for kind in reader.names())


def _link(reader: Reader, name: str) -> LinkSpec:
    if name not in LINK_KINDS or name in ("self", "none"):
        known = [kind for kind in LINK_KINDS if kind not in ("self", "none")]
        raise unknown(f"link kind in {reader.where}: {reader.at(name)}:", name, known)
    table = reader.table(name)
    spec = LinkSpec(
        kind=name,
        latency_s=table.figure("latency_s", zero=True),
        bandwidth_bytes_per_s=table.figure("bandwidth_bytes_per_s"),
        per_core=table.flag("per_core", default=False),
    )
    table.finish()
    return spec


def _wires(reader: Reader, devices: int | None, kinds: tuple[LinkKind, ...]) -> Wires:
    table = reader.table("wires", {"shape": "none"} if devices == 1 else None)
    shape = cast("Shape", table.choice("shape", SHAPES))
    side = (devices or 1,) if shape in ("ring", "chain") else None
    wires = Wires(
        shape=shape,
        dims=table.integers("dims", side, minimum=1) if shape in ("ring", "chain", "torus", "grid") else (),
        pairs=table.pairs("pairs") if shape == "links" else (),
        link="none" if shape == "none" else _known_link(table, kinds),
        source=table.text("source", reader.where),
        confidence=cast("Confidence", table.choice("confidence", MARKS, "E")),
    )
    table.finish()
    if devices is not None:
        _check_wires(table, wires, devices)
    return wires


def _check_wires(table: Reader, wires: Wires, devices: int) -> None:
    if wires.dims and prod(wires.dims) != devices:
        raise table.bad("dims", f"sides whose product is devices = {devices}", list(wires.dims))
    strange = [pair for pair in wires.pairs if max(pair) >= devices or pair[0] == pair[1]]
    if strange:
        raise table.bad("pairs", f"pairs of different devices below {devices}", list(strange[0]))
    if lost := Wiring.of(wires, devices).unreached():
        key = "pairs" if wires.shape == "links" else "shape"
        raise table.bad(key, "a connected graph", f"no way from device 0 to {lost[0]}")


def _known_link(reader: Reader, kinds: tuple[LinkKind, ...]) -> LinkKind:
    return cast("LinkKind", reader.choice("link", kinds, explain="a kind that has a [links.*] table"))


def _network(reader: Reader, kinds: tuple[LinkKind, ...]) -> Network | None:
    if "network" not in reader.names():
        return None
    table = reader.table("network")
    network = Network(nics=table.figure("nics"), link=_known_link(table, kinds))
    if network.nics.value != int(network.nics.value):
        raise table.bad("nics", "a whole number", network.nics.value)
    table.finish()
    return network


def _ultraserver(reader: Reader, kinds: tuple[LinkKind, ...]) -> UltraServer | None:
    if "ultraserver" not in reader.names():
        return None
    table = reader.table("ultraserver")
    servers = table.integers("servers", minimum=1)
    if list(servers) != sorted(set(servers)) or len(servers) < 1:
        raise table.bad("servers", "ascending numbers of servers", list(servers))
    coupled = UltraServer(servers=servers, link=_known_link(table, kinds), source=table.text("source", reader.where))
    table.finish()
    return coupled


def _rule(reader: Reader) -> Rule:
    rule = Rule(
        id=reader.text("id"),
        kind=cast("Kind", reader.choice("kind", KINDS)),
        text=reader.text("text"),
        source=reader.text("source", reader.where),
        confidence=cast("Confidence", reader.choice("confidence", MARKS, "E")),
        severity=cast("Severity", reader.choice("severity", ("error", "warning"), "error")),
        since=reader.integer("since", 0, minimum=0),
        until=reader.integer("until", LATEST),
        lnc=reader.integer("lnc", 0, minimum=0) or None,
        for_sizes=reader.integers("for_sizes", (), minimum=1),
        sizes=reader.integers("sizes", (), minimum=1),
        sets=tuple(parse_ranks(text) for text in reader.texts("sets", ())),
        exempts=tuple(cast("Kind", kind) for kind in reader.texts("exempts", (), known=KINDS)),
        complete=reader.flag("complete", default=False),
    )
    _needs(reader, rule)
    reader.finish()
    return rule


def _needs(reader: Reader, rule: Rule) -> None:
    if rule.kind in ("sizes", "multiple", "servers") and not rule.sizes:
        raise reader.bad("sizes", f"numbers, because the kind is {rule.kind!r}", "none")
    if rule.kind == "sets" and not rule.sets:
        raise reader.bad("sets", "groups such as '0-15,48-63', because the kind is 'sets'", "none")
    if rule.since > rule.until:
        raise reader.bad("until", f"a year not before since = {rule.since}", rule.until)
