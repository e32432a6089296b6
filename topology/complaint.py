"""From what msgspec says of a document to one line of ours: which key of which file, what was expected, what was found.

msgspec names the place (``$.links.efa.latency_s``) and the rule that was broken, but not what stands there, nor the
names that are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import fields

from .errors import TopologyError

_SAID = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")

_SHOWN = 60  # characters of what was found


def complaint(
    error: ValidationError, document: Mapping[str, object], kind: type[Struct], *, where: str
) -> TopologyError:
    """Build the error of a document.

    Args:
        error: What converting it to `kind` raised.
        document: As TOML gives it.
        kind: What it was to be.
        where: Name of the file.
    """
    said = _SAID.fullmatch(str(error))
    assert said is not None
    key, found, kinds = _place(said["path"] or "", document, kind)
    if unknown := _UNKNOWN.fullmatch(said["what"]):
        return TopologyError(f"{where}: {_joined(key, unknown[1])}: unknown key; {_hint(unknown[1], _keys(kinds[-1]))}")
    if missing := _MISSING.fullmatch(said["what"]):
        inside = _keys(kinds[-1])[missing[1]]
        return TopologyError(f"{where}: {_joined(key, missing[1])}: missing, expected {_expected([inside])}")
    if isinstance(error.__cause__, ValueError):
        return TopologyError(f"{where}: {_joined(key, said['what'])}")
    shown = repr(found)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return TopologyError(f"{where}: {key}: expected {_expected(kinds)}, found {shown}")


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _hint(key: str, known: dict[str, Any]) -> str:
    close = get_close_matches(key, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known here: {', '.join(known)}"


def _place(path: str, document: Any, kind: Any) -> tuple[str, Any, list[Any]]:
    """Follow a path: return the key in full, what stands there, and the kinds of all that it leads through."""
    key, kinds = "", [kind]
    for name, index in _STEP.findall(path):
        if name:
            key, document, kind = _joined(key, name), document[name], _keys(kind)[name]
        elif index == "...":  # some key of a table with free keys
            kind = next(get_args(one)[1] for one in _choices(kind) if get_origin(one) is dict)
            name = next(name for name, value in document.items() if not _fits(value, kind))
            key, document = _joined(key, name), document[name]
        else:
            items = next(get_args(one) for one in _choices(kind) if get_origin(one) is tuple)
            kind = items[0 if items[-1] is Ellipsis else int(index)]
            key, document = f"{key}[{index}]", document[int(index)]
        kinds.append(kind)
    return key, document, kinds


def _choices(kind: Any) -> Iterator[Any]:
    """Yield what a kind may be: itself, what it annotates, the members of a union."""
    yield kind
    if get_origin(kind) is Annotated:
        yield from _choices(get_args(kind)[0])
    elif get_origin(kind) not in (tuple, dict, Literal):
        for one in get_args(kind):
            yield from _choices(one)


def _keys(kind: Any) -> dict[str, Any]:
    """Return the kinds of the keys of a table."""
    tables = (one for one in _choices(kind) if isinstance(one, type) and issubclass(one, Struct))
    return {field.name: field.type for field in fields(next(tables))}


def _fits(value: object, kind: Any) -> bool:
    try:
        convert(value, kind)
    except ValidationError:
        return False
    return True


def _expected(kinds: list[Any]) -> str:
    """Return what the innermost kind that says so expects."""
    for kind in reversed(kinds):
        for one in _choices(kind):
            if get_origin(one) is Literal:
                return f"one of {', '.join(map(str, get_args(one)))}"
            for note in get_args(one)[1:] if get_origin(one) is Annotated else ():
                if isinstance(note, Meta) and note.description:
                    return note.description
    raise AssertionError(f"{kinds[-1]} says nothing of what it expects")
