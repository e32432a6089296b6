"""TOML in, `Machine` out, with every mistake named in one line: file, key, what was expected, what was found.

The built-in machines come through here like a stranger's, from `data/`. A figure is written with its origin,
``latency_s = { value = 1.5e-6, source = "...", confidence = "A" }``, or as a bare number of the user's own
(confidence "E"). ``extends = "trn2.48xlarge"`` starts from a built-in machine: tables are merged key by key, rules
by their id, and everything else replaces what was there.
"""

from __future__ import annotations

import threading
import tomllib
from functools import cache
from pathlib import Path
from typing import cast

from msgspec import ValidationError, convert
from msgspec.structs import asdict

from .document import ChipTable, Document, LinkTable, RuleTable
from .errors import TopologyError, unknown
from .grouprules import Rule
from .keys import figure, figure_or_none
from .machine import Chip, LinkKind, LinkSpec, Machine, Network, UltraServer, WiringSpec
from .overheads import Collectives

Table = dict[str, object]

# Tables with one of these are replaced as a whole: a number keeps its origin and a shape its sides.
_WHOLE = {"value", "points", "shape"}

# Not importlib.resources: it costs 7 ms to import, and these files are always installed as files.
_DATA = Path(__file__).parent / "data"

# msgspec learns a type when it first reads one, in Python: two threads that do so at once crash the process.
_reading = threading.Lock()


@cache
def builtin_names() -> tuple[str, ...]:
    """Names of the machines that come with the package, sorted."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _DATA.glob("*.toml")))


@cache
def builtin(name: str) -> Machine:
    """Read a machine that comes with the package.

    Raises:
        TopologyError: for an unknown name; it lists the known ones.
    """
    return parse(_builtin_table(name), where=f"{name}.toml")


def load(path: str | Path) -> Machine:
    """Read a machine from the user's TOML file.

    Raises:
        TopologyError: if the file cannot be read, is not TOML, or says something missing, wrong or contradictory.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TopologyError(f"{path}: is not UTF-8 text: expected a TOML file") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TopologyError(f"{path}: is not TOML: {error}") from None
    return parse(_extended(table, where=path.name), where=path.name)


def _builtin_table(name: str) -> Table:
    if name not in builtin_names():
        raise unknown("cluster", name, builtin_names())
    text = (_DATA / f"{name}.toml").read_text(encoding="utf-8")
    return _extended(tomllib.loads(text), where=f"{name}.toml")


def _extended(table: Table, *, where: str) -> Table:
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str) or base not in builtin_names():
        raise TopologyError(f"{where}: extends: expected one of {', '.join(builtin_names())}, found {base!r}")
    return _merged(_builtin_table(base), table)


def _merged(base: Table, over: Table) -> Table:
    result = dict(base)
    for key, value in over.items():
        result[key] = _merged_value(key, result.get(key), value)
    return result


def _merged_value(key: str, old: object, new: object) -> object:
    if key == "rules" and isinstance(old, list) and isinstance(new, list):
        return _merged_rules(old, new)
    if isinstance(old, dict) and isinstance(new, dict) and not _WHOLE & new.keys():
        return _merged(cast("Table", old), cast("Table", new))
    return new


def _merged_rules(old: list[object], new: list[object]) -> list[object]:
    """Replace rules of the same id where they stand, and add the others at the end."""
    result = list(old)
    places = {_id(rule): index for index, rule in enumerate(old)}
    for rule in new:
        name = _id(rule)
        index = None if name is None else places.get(name)
        if index is None:
            result.append(rule)
        else:
            result[index] = rule
    return result


def _id(rule: object) -> str | None:
    """Return the id of a rule, None if it has none: that is complained of when the whole is read."""
    name = rule.get("id") if isinstance(rule, dict) else None
    return name if isinstance(name, str) else None


def parse(table: Table, *, where: str) -> Machine:
    """Turn a parsed TOML document into a machine.

    Args:
        table: the document, `extends` already resolved.
        where: name of the file, for messages and as the source of figures without one.

    Raises:
        TopologyError: naming `where`, the key, what was expected and what was found.
    """
    try:
        with _reading:
            document = convert(table, Document)
    except ValidationError as error:
        from .complaint import complaint  # here, for few files have anything wrong with them

        raise complaint(error, table, Document, where=where) from None
    devices = None if document.devices == "any" else document.devices
    network, coupled = document.network, document.ultraserver
    return Machine(
        name=document.name,
        description=document.description,
        devices=devices,
        chip=_chip(document.chip, where),
        wires=document.wires.spec(devices, where) if document.wires else WiringSpec(shape="none", source=where),
        links=tuple(_link(kind, spec, where) for kind, spec in document.links.all().items()),
        network=Network(nics=figure(network.nics, where), link=cast("LinkKind", network.link)) if network else None,
        ultraserver=UltraServer(
            servers=coupled.servers, link=cast("LinkKind", coupled.link), source=coupled.source or where
        )
        if coupled
        else None,
        collectives=document.collectives.record(where) if document.collectives else Collectives(),
        rules=tuple(_rule(rule, where) for rule in document.rules),
        strict=document.strict,
        numa=document.numa,
        pcie=document.pcie,
    )


def _chip(table: ChipTable, where: str) -> Chip:
    return Chip(
        name=table.name,
        cores=table.cores,
        lnc=table.lnc,
        cc_cores=figure_or_none(table.cc_cores, where),
        memory_bytes=figure_or_none(table.memory_bytes, where),
        memory_bytes_per_s=figure_or_none(table.memory_bytes_per_s, where),
        dma_bytes_per_s=figure_or_none(table.dma_bytes_per_s, where),
        flops_per_s=tuple((dtype, figure(peak, where)) for dtype, peak in table.flops_per_s.items()),
    )


def _link(kind: LinkKind, table: LinkTable, where: str) -> LinkSpec:
    return LinkSpec(
        kind=kind,
        latency_s=figure(table.latency_s, where),
        bandwidth_bytes_per_s=figure(table.bandwidth_bytes_per_s, where),
        per_core=table.per_core,
    )


def _rule(table: RuleTable, where: str) -> Rule:
    return Rule(**asdict(table) | {"source": table.source or where, "sets": table.groups()})
