"""Reading of machine files, TOML, to a `Machine`. An error is one line: file, key, expected and found value.

The built-in machines in `data/` are read like files of users. A figure is written with its origin,
``latency_s = { value = 1.5e-6, source = "...", confidence = "A" }``, or as a bare number of the user's own
(confidence "E"). ``extends = "trn2.48xlarge"`` starts from a built-in machine: tables are merged key by key, rules
by their id, and everything else replaces the old value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import cast

from .errors import TopologyError, unknown_name_error
from .figures import Collectives, Overheads
from .keys import contradiction_error
from .machine import LINKED, MAX_DEVICES, Machine, Network, UltraServer, WiringSpec
from .tables import read_record
from .wiring import Wiring

Table = dict[str, object]

# Tables with one of these keys are replaced as a whole, so that a number has its own origin, and a shape its own sides.
_WHOLE = {"value", "points", "shape"}

# Not importlib.resources: it costs 7 ms to import, and these files are always installed as files.
_DATA = Path(__file__).parent / "data"


@cache
def builtin_names() -> tuple[str, ...]:
    """Return the names of the machines that come with the package, sorted."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _DATA.glob("*.toml")))


@cache
def load_builtin(name: str) -> Machine:
    """Read a machine that comes with the package.

    Raises:
        TopologyError: for an unknown name; it lists the known ones.
    """
    return parse(_read_builtin_table(name), where=f"{name}.toml")


def load(path: str | Path) -> Machine:
    """Read a machine from the user's TOML file.

    Raises:
        TopologyError: The file cannot be read, is not TOML, or a value is missing, wrong or contradictory.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(
            f"{path}: cannot be read: {error.strerror or error}; pass the path of a TOML file"
        ) from None
    except UnicodeDecodeError:
        raise TopologyError(f"{path}: is not UTF-8 text: expected a TOML file") from None
    return parse(_resolve_extends(_parse_toml(text, str(path)), where=path.name), where=path.name)


def _read_builtin_table(name: str) -> Table:
    """Return the table of a built-in machine, merged with the machine that it extends.

    Raises `TopologyError` if there is no built-in machine of this name.
    """
    if name not in builtin_names():
        raise unknown_name_error("cluster", name, builtin_names())
    text = (_DATA / f"{name}.toml").read_text(encoding="utf-8")
    return _resolve_extends(_parse_toml(text, name), where=f"{name}.toml")


def _parse_toml(text: str, where: str) -> Table:
    """Return the content of TOML text; raise `TopologyError`, which names `where`, if it is none or too deep."""
    import tomllib  # here, because it takes 15 ms to import, which programs without a machine should not pay

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TopologyError(f"{where}: is not TOML: {error}; correct the file") from None


def _resolve_extends(table: Table, *, where: str) -> Table:
    """Return a table merged with the built-in machine that it extends, if any; the key "extends" is taken out of it.

    Raises `TopologyError` if the machine that it extends does not come with the package.
    """
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str) or base not in builtin_names():
        raise TopologyError(f"{where}: extends: expected one of {', '.join(builtin_names())}, found {base!r}")
    return _merge_tables(_read_builtin_table(base), table)


def _merge_tables(base: Table, changes: Table) -> Table:
    """Return a new table: `base` with `changes`. Tables in it, and rules, are merged; other values are replaced."""
    result = base | changes
    for key, new in changes.items():
        old = base.get(key)
        if key == "rules" and isinstance(old, list) and isinstance(new, list):
            result[key] = _merge_rules(old, new)
        elif isinstance(old, dict) and isinstance(new, dict) and not _WHOLE & new.keys():
            result[key] = _merge_tables(cast("Table", old), cast("Table", new))
    return result


def _merge_rules(old: list[object], new: list[object]) -> list[object]:
    """Return the old rules with those of equal id replaced by new ones, and the other new rules at the end."""
    result = list(old)
    places = {_rule_id(rule): index for index, rule in enumerate(old)}
    for rule in new:
        name = _rule_id(rule)
        index = None if name is None else places.get(name)
        if index is None:
            result.append(rule)
        else:
            result[index] = rule
    return result


def _rule_id(rule: object) -> str | None:
    """Return the id of a rule; None if it has none, which parsing refuses."""
    name = rule.get("id") if isinstance(rule, dict) else None
    return name if isinstance(name, str) else None


def parse(table: Table, *, where: str) -> Machine:
    """Return the machine of a parsed TOML document.

    Args:
        table: The document, `extends` already resolved.
        where: Name of the file, for messages and as the source of figures without one.

    Raises:
        TopologyError: naming `where`, the key, the expected and the found value.
    """
    # A single device needs no [wires], but a file may have the table.
    if table.get("devices") == 1:
        table = {"wires": {"shape": "none"}} | table
    # [collectives] is read separately, because its subtables inherit keys.
    collectives = table.get("collectives", {})
    rest = {key: value for key, value in table.items() if key != "collectives"}
    try:
        wires = table.get("wires")
        link = wires.get("link") if isinstance(wires, dict) else None
        defaults = {"collectives": _read_collectives(collectives, where, link)}
        machine = read_record(Machine, rest, "", where, defaults=defaults)
        _check_tables(machine)
    except ValueError as error:
        raise TopologyError(f"{where}: {error}") from None
    return machine


def _read_collectives(table: object, where: str, link: object) -> Collectives:
    """Read the table `[collectives]`; `link` is the kind of the wires inside a node.

    Its subtables `host_copies` and `between_nodes` inherit its own keys, and override some of them.
    """
    key = "collectives"
    if not isinstance(table, dict):
        return read_record(Collectives, table, key, where)
    parts = {name: table[name] for name in Collectives.__slots__ if name in table}
    if isinstance(library := parts.get("library"), dict):
        parts["library"] = _resolve_library(library)
        _check_library(parts["library"], link)
    usual = {name: value for name, value in table.items() if name not in parts}
    given = {"usual": read_record(Overheads, usual, key, where)}
    for name in ("host_copies", "between_nodes"):
        # Values that are no tables are refused below.
        if isinstance(parts.get(name), dict):
            parts[name] = _merge_tables(usual, parts[name])
    return read_record(Collectives, parts, key, where, defaults=given)


def _resolve_library(table: Table) -> Table:
    """Return the table of a library, merged with the built-in library that its key `use` names, if any.

    The table's own figures take precedence. Raises `ValueError` if there is no such built-in library.
    """
    own_figures = dict(table)
    name = own_figures.pop("use", None)
    if name is None:
        return own_figures
    known = sorted(path.stem for path in (_DATA / "libraries").glob("*.toml"))
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"collectives.library.use: expected {' or '.join(known)}, found {name!r}")
    path = _DATA / "libraries" / f"{name}.toml"
    return _merge_tables(_parse_toml(path.read_text(encoding="utf-8"), path.name), own_figures)


def _check_library(table: Table, link: object) -> None:
    """Refuse a library that does not run over the machine's wires inside a node; `link` is the kind of these wires."""
    wires = table.get("wires")
    if isinstance(wires, list) and wires and link is not None and link not in wires:
        name, kinds = table.get("name", "the machine's library"), " or ".join(map(str, wires))
        raise ValueError(
            f"collectives.library: {name} runs over {kinds} inside a node, and wires.link is {link!r}; "
            "change one of them"
        )


def _check_tables(machine: Machine) -> None:
    """Refuse a machine with tables that contradict each other."""
    if machine.fabric and machine.network is None:
        raise ValueError(
            "fabric: its switches join the nodes of a [network], and there is none; add one, or leave [fabric] out"
        )
    kinds = tuple(link.kind for link in machine.links)
    for key in ("wires", "network", "ultraserver"):
        joined: WiringSpec | Network | UltraServer | None = getattr(machine, key)
        if joined and joined.link not in ("none", *kinds):
            raise contradiction_error(f"{key}.link", f"{LINKED}: {', '.join(kinds) or 'none is declared'}", joined.link)
    for key, overheads in _list_overheads(machine.collectives):
        for wire in overheads.wires:
            if wire.kind not in kinds:
                raise ValueError(f"{key}.wires.{wire.kind}: expected {LINKED}: {', '.join(kinds)}")
    for key, values in (("numa", machine.numa), ("pcie", machine.pcie)):
        if values and len(values) != machine.devices:
            raise ValueError(
                f"{key}: expected one number for each of {machine.devices} devices, found {len(values)} numbers"
            )
    _check_devices(machine.devices, machine.wires)


def _list_overheads(collectives: Collectives) -> Iterator[tuple[str, Overheads]]:
    """Yield the key and the record of each table of overheads of a machine's collectives."""
    yield "collectives", collectives.usual
    for name in ("host_copies", "between_nodes"):
        if (overheads := getattr(collectives, name)) is not None:
            yield f"collectives.{name}", overheads


def _check_devices(devices: int | None, wires: WiringSpec) -> None:
    """Refuse wires that do not fit the number of devices, or do not join all devices."""
    if devices is None:
        if wires.shape not in ("full", "switch"):
            raise contradiction_error("wires.shape", "full or switch, because devices is 'any'", wires.shape)
        return
    if devices > MAX_DEVICES:
        raise contradiction_error("devices", f"at most {MAX_DEVICES}", devices)
    if (sides := wires.sides(devices)) and prod(sides) != devices:
        raise contradiction_error("wires.dims", f"sides whose product is devices = {devices}", wires.dims)
    strange = [pair for pair in wires.pairs if max(pair) >= devices or pair[0] == pair[1]]
    if strange:
        raise contradiction_error("wires.pairs", f"pairs of different devices below {devices}", strange[0])
    if lost := Wiring.from_spec(wires, devices).unreachable_devices():
        key = "pairs" if wires.shape == "links" else "shape"
        raise ValueError(f"wires.{key}: expected a connected graph, found no way from device 0 to {lost[0]}")
