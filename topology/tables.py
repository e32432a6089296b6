"""Conversion of the tables of a machine file to records, by the annotations of the records' fields.

Every error is a ValueError that begins with the full key, and names the expected and the found value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .figures import Confidence, Curve, Figure
from .keys import ByName, Numbers, Parsed, Words, replace_tuples

Record = TypeVar("Record")

_SHOWN = 60  # characters of a value that a message shows
_PLAIN = {str: "a text", bool: "true or false"}
_OF_CHIPS = "products attention_flops_per_s sustained beside_collectives memory_efficiency power_w power_limit_w"
_OF_LIBRARIES = "version generation processor protocols_between without chunk_bytes chunk_since channels_of_rail models"
_OF_COLLECTIVES = (
    "cached_bytes cached_bytes_per_s phase_s piece_s inline_bytes handing_s spread_bytes spread_bytes_per_s "
    "copied_bytes_per_s shared_memory"
)
GONE = {
    "fabric.sums",
    *(f"chip.{name}" for name in _OF_CHIPS.split()),
    *(f"collectives.library.{name}" for name in _OF_LIBRARIES.split()),
    *(f"collectives{part}.{name}" for part in ("", ".between_nodes") for name in _OF_COLLECTIVES.split()),
}
"""Keys of the previous version that only the predictor of training steps and its calibration read."""
_USERS_OWN: Confidence = "E"  # confidence of a number that the file gives without its origin; see `Figure`


def read_record(
    kind: type[Record], table: object, key: str, where: str, *, defaults: Mapping[str, object] | None = None
) -> Record:
    """Convert a table to a record.

    Args:
        kind: The dataclass of the record.
        table: The parsed table.
        key: Path of the table in its file, such as "chip"; empty for the whole file.
        where: Name of the file: the source of figures that are written as bare numbers.
        defaults: Values of fields that are not read from the table.

    Raises:
        ValueError: A key is missing or unknown, or a value is wrong or contradictory.
    """
    return _read_annotated(kind, table, key, where, _field_annotations(cast("type", kind)), defaults or {})


@cache
def _field_annotations(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read_annotated(
    kind: type[Record],
    table: object,
    key: str,
    where: str,
    annotations: Mapping[str, Any],
    defaults: Mapping[str, object],
) -> Record:
    """Return the record of a table; each key is read by the annotation of its field.

    `key` is the path of the table in its file, empty for the whole file. The file's name, `where`, is the source of
    figures that are written as bare numbers. The table must not have the keys in `defaults`.
    """
    if not isinstance(table, dict):
        raise _value_error(key, "a table", table)
    annotations = {name: annotation for name, annotation in annotations.items() if name not in defaults}
    origin = {"source": where, "confidence": _USERS_OWN}
    values = {name: origin[name] for name in annotations if name in origin} | dict(defaults)
    for name, value in table.items():
        inside = _join_key(key, name)
        if name not in annotations:
            raise _unknown_key_error(inside, name, annotations)
        # For an empty source, the name of the file stays.
        if name != "source" or value != "":
            values[name] = _read_value(annotations[name], value, inside, where)
    for field in fields(cast("Any", kind)):
        if field.name not in values and field.default is MISSING:
            raise ValueError(
                f"{_join_key(key, field.name)}: missing, expected {_describe_form(annotations[field.name])}"
            )
    try:
        return kind(**values)
    except ValueError as error:
        # The error begins with the key within the table; put the path of the table before it.
        raise ValueError(_join_key(key, str(error))) from None


def _read_value(annotation: Any, value: object, key: str, where: str) -> object:
    """Return the value of a key in the form that its annotation asks for; raise `ValueError` if it has another form.

    For `key` and `where` see `_read_annotated`.
    """
    kinds, form = _split_annotation(annotation)
    kind = kinds[0]
    if kind is Figure:
        return _read_figure(kinds, cast("Numbers", form), value, key, where)
    if isinstance(form, Numbers):
        return _read_number(kind, form, value, key)
    if isinstance(form, Parsed):
        return _read_text(form, value, key)
    if isinstance(form, ByName):
        return _read_named_items(get_args(kind)[0], form, value, key, where)
    if is_dataclass(kind):
        return read_record(cast("type", kind), value, key, where)
    if get_origin(kind) is tuple:
        return _read_items(kind, annotation, value, key, where)
    # The remaining kinds: a choice of words, a text, or a boolean. `type`, because True is an instance of int.
    known = get_args(kind) if get_origin(kind) is Literal else None
    if type(value) is not kind if known is None else not isinstance(value, str) or value not in known:
        raise _value_error(key, _describe_form(annotation), value)
    return value


def _split_annotation(annotation: Any) -> tuple[tuple[Any, ...], Words | None]:
    """Return the types that an annotation allows, without None, and the `Words` in it, if there are any.

    `Annotated[int, _ONE] | None` gives (int,) and _ONE.
    """
    form = None
    while get_origin(annotation) in (Annotated, Union, UnionType):
        if get_origin(annotation) is Annotated:
            # The first item of an `Annotated` is the type, the second the `Words`.
            annotation, form = get_args(annotation)[:2]
            continue
        kinds = tuple(kind for kind in get_args(annotation) if kind is not NoneType)
        if len(kinds) > 1:
            return kinds, form
        annotation = kinds[0]
    return (annotation,), form


def _describe_form(annotation: Any) -> str:
    """Return a description of the values that an annotation allows, for messages."""
    (kind, *_), form = _split_annotation(annotation)
    if kind is Figure and form is not None:
        return f"{form.expected}, or {{ value, source, confidence }}"
    if form is not None:
        return form.expected
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return _PLAIN.get(kind, "a table" if is_dataclass(kind) else "a list")


def _read_figure(kinds: tuple[Any, ...], numbers: Numbers, value: object, key: str, where: str) -> Figure | Curve:
    """Return a figure or, if `kinds` has `Curve`, a curve; the source of a bare number is the file `where`."""
    if not isinstance(value, dict):
        if not numbers.allows(value):
            raise _value_error(key, _describe_form(Annotated[Figure, numbers]), value)
        return Figure(value=float(cast("float", value)), source=where, confidence=_USERS_OWN)
    if Curve in kinds:
        if ("value" in value) == ("points" in value):
            raise ValueError(f"{key}.value: expected a share, or points = [[bytes, share], ...], one of the two")
        if "points" in value:
            return read_record(Curve, value, key, where)
    annotations = _field_annotations(Figure) | {"value": Annotated[float, numbers]}  # with the limits of this key
    return _read_annotated(Figure, value, key, where, annotations, defaults={})


def _read_number(kind: type, numbers: Numbers, value: object, key: str) -> float | None:
    """Return a number within its limits; None for the word `numbers.text`, which may stand instead of a number."""
    if numbers.text is not None and value == numbers.text:
        return None
    if not numbers.allows(value):
        raise _value_error(key, numbers.expected, value)
    number = cast("float", value)
    return number if kind is int else float(number)


def _read_text(converter: Parsed, value: object, key: str) -> object:
    """Return the text of a key as `converter` converts it."""
    if not isinstance(value, str):
        raise _value_error(key, converter.expected, value)
    try:
        return converter.parse(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _read_named_items(item: Any, known_names: ByName, value: object, key: str, where: str) -> tuple[object, ...]:
    """Return the items of a table whose keys are names: records, or pairs of a name and a figure.

    They are in the order of `known_names.known` if that is given, else of the table. `item` is the class of the
    records, which get their name as the field `kind`, or the type of the pairs.
    """
    if not isinstance(value, dict):
        raise _value_error(key, known_names.expected, value)
    for name in value:
        if known_names.known and name not in known_names.known:
            raise _unknown_key_error(_join_key(key, name), name, known_names.known)
    names = [name for name in known_names.known or value if name in value]
    inside = ((name, value[name], _join_key(key, name)) for name in names)
    if is_dataclass(item):
        kind = cast("type", item)
        return tuple(read_record(kind, entry, at, where, defaults={"kind": name}) for name, entry, at in inside)
    return tuple((name, _read_value(get_args(item)[1], entry, at, where)) for name, entry, at in inside)


def _read_items(kind: Any, annotation: Any, value: object, key: str, where: str) -> tuple[object, ...]:
    """Return the items of a list, each read by the annotation of its place in `kind`, tuple[X, ...] or tuple[X, Y].

    `annotation` is the whole annotation, for errors.
    """
    items = get_args(kind)
    many = items[-1] is Ellipsis
    if not isinstance(value, list) or (not many and len(value) != len(items)):
        raise _value_error(key, _describe_form(annotation), value)
    return tuple(
        _read_value(items[0 if many else index], item, f"{key}[{index}]", where) for index, item in enumerate(value)
    )


def _join_key(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _value_error(key: str, expected: str, value: object) -> ValueError:
    """Return the error of a value, with the expected and the found value."""
    shown = repr(replace_tuples(value))
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ValueError(f"{key}: expected {expected}, found {shown}")


def _unknown_key_error(key: str, name: str, known_keys: Mapping[str, object] | tuple[str, ...]) -> ValueError:
    """Return the error of an unknown key, with the known keys; for a key of an earlier version, with the advice.

    `key` is its path in the file, `name` the key itself.
    """
    if key in GONE:
        return ValueError(f"{key}: unknown key; read by the planner, which is gone: delete it")
    close = get_close_matches(name, known_keys, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ValueError(f"{key}: unknown key; {hint}known here: {', '.join(known_keys)}")
