"""TOML in, `Machine` out, with every mistake named in one line: file, key, what was expected.

The built-in machines come through here like a stranger's, from `data/`. A figure is written with its origin,
``latency_s = { value = 1.5e-6, source = "...", confidence = "A" }``, or as a bare number of the user's own
(confidence "E"). ``extends = "trn2.48xlarge"`` starts from a built-in machine: tables are merged key by key, rules
by their id, and everything else replaces what was there.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import cast

from .errors import TopologyError, unknown
from .machine import Machine
from .parse import parse
from .reader import Table

# Not importlib.resources: it costs 7 ms to import, and these files are always installed as files.
_DATA = Path(__file__).parent / "data"


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
    except tomllib.TOMLDecodeError as error:
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
    # A number keeps its origin and a shape its sides: those tables are replaced as a whole.
    if isinstance(old, dict) and isinstance(new, dict) and "value" not in new and "shape" not in new:
        return _merged(cast("Table", old), cast("Table", new))
    return new


def _merged_rules(old: list[object], new: list[object]) -> list[object]:
    """Replace rules of the same id where they stand, and add the others at the end."""
    result = list(old)
    places = {rule.get("id"): index for index, rule in enumerate(old) if isinstance(rule, dict)}
    for rule in new:
        index = places.get(rule.get("id")) if isinstance(rule, dict) else None
        if index is None:
            result.append(rule)
        else:
            result[index] = rule
    return result
