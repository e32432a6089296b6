"""Collectives of Python objects, which are packed as msgpack or pickle and sent by one or two operations."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from sys import _getframe
from typing import Any, cast

import msgpack
import numpy as np

from ..collectives.kinds import ALL_REDUCE, SCATTER, Collective
from ..collectives.reduce import Array
from ..errors import UsageError
from .arguments import check_one_a_rank, check_rank
from .derived import Derived
from .future import Future
from .memory.arrays import metadata
from .memory.foreign import as_input
from .outstanding import CallSite, checked_name
from .port import Ports
from .stream import Stream

_HEADER = np.dtype(np.int64).itemsize  # of each object: how many bytes follow
_TUPLE, _COMPLEX, _ARRAY, _SCALAR = range(4)  # msgpack's extension types


def give(
    ports: Ports,
    kind: Collective,
    value: object,
    root: int,
    pickled: bool,
    stream: Stream | str | None,
    priority: int,
    name: str,
    timeout_s: float | None,
    call_site: CallSite | None,
) -> Future[Any]:
    """Send the root's object to all, or one of its objects to each rank; the size goes with each object."""
    caller = _getframe(2) if call_site is None else call_site
    check_rank(ports.group, "root", root)
    rows = None
    if root == ports.group.rank:
        if kind is SCATTER:
            check_one_a_rank(ports.group, "values", value)
        values = cast("Sequence[object]", value) if kind is SCATTER else [value]
        rows = _rows([pack(item, pickled=pickled) for item in values])
    operation = ports.issue(kind, rows, None, stream, priority, name, timeout_s, caller, root=root)
    return Derived([operation], lambda got: _unpack_objects(got[0], 1, pickled)[0], ports.context).begin()


def gather(
    ports: Ports,
    kind: Collective,
    value: object,
    root: int,
    pickled: bool,
    stream: Stream | str | None,
    priority: int,
    name: str,
    timeout_s: float | None,
    call_site: CallSite | None,
) -> Future[Any]:
    """Agree on the size of the largest object, then gather rows of that size."""
    caller = _getframe(2) if call_site is None else call_site
    packed, context, size = pack(value, pickled=pickled), ports.context, ports.group.size
    checked_name(name, kind.text)  # before the first of two operations
    check_rank(ports.group, "root", root)
    row = metadata([len(packed)])
    longest = ports.issue(ALL_REDUCE, row, None, stream, priority, f"{name}: size", timeout_s, caller, op="max")
    padded = Derived([longest], lambda got: _rows([packed], int(got[0][0])), context).begin()
    operation = ports.issue(kind, padded, None, stream, priority, name, timeout_s, caller, root=root)
    return Derived([operation], lambda got: _unpack_objects(got[0], size, pickled), context).begin()


def _rows(packed: Sequence[bytes], longest: int = 0) -> Array:
    """Return objects in rows of one length, each with its own length in front, one after the other."""
    longest = max(longest, *map(len, packed))
    rows = np.zeros((len(packed), _HEADER + longest), np.uint8)
    for row, data in zip(rows, packed, strict=True):
        row[:_HEADER] = np.array([len(data)], np.int64).view(np.uint8)
        row[_HEADER : _HEADER + len(data)] = np.frombuffer(data, np.uint8)
    return metadata(rows.reshape(-1))


def _unpack_objects(rows: Array | None, count: int, pickled: bool) -> Any:
    """Return the objects of all rows, each with its length before it; None where nothing was received."""
    if rows is None:  # not the root
        return None
    if rows.strides == (0,) and rows.size > 1:
        raise UsageError("value: where arrays have no data, objects have none either; run with data, or send arrays")

    table = rows.reshape(count, -1)
    lengths = table[:, :_HEADER].copy().view(np.int64)[:, 0].tolist()
    return [
        unpack(row[_HEADER : _HEADER + length].tobytes(), pickled=pickled)
        for row, length in zip(table, lengths, strict=True)
    ]


def pack(value: object, *, pickled: bool) -> bytes:
    """Return the bytes of an object.

    Raises:
        UsageError: If it cannot be packed.
    """
    try:
        if pickled:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return cast("bytes", msgpack.packb(value, default=_to_extension, strict_types=True))
    except UsageError:
        raise
    except Exception as error:  # a program's own methods are called here
        raise UsageError(f"value: cannot pack {type(value).__name__}: {error}") from error


def unpack(data: bytes, *, pickled: bool) -> object:
    """Return the object in packed bytes; with `pickled`, its sender can make this process run any code."""
    if pickled:
        return pickle.loads(data)
    return msgpack.unpackb(data, ext_hook=_from_extension, strict_map_key=False)


def _to_extension(value: object) -> msgpack.ExtType:
    """Return a value that msgpack does not know as one of our extensions."""
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value), pickled=False))
    if type(value) is complex:
        return msgpack.ExtType(_COMPLEX, pack([value.real, value.imag], pickled=False))
    if isinstance(value, (bytearray, memoryview)) or not hasattr(value, "__array__"):
        raise UsageError(
            f"value: msgpack cannot pack {type(value).__name__}; pass numbers, texts, bytes, arrays and lists, tuples "
            "and dicts of them, or pickle=True if every rank trusts every other"
        )
    array = as_input(value)
    fields = [array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes()]
    return msgpack.ExtType(_SCALAR if isinstance(value, np.generic) else _ARRAY, pack(fields, pickled=False))


def _from_extension(kind: int, data: bytes) -> object:
    """Return the value of one of our extensions."""
    fields: Any = unpack(data, pickled=False)
    if kind == _TUPLE:
        return tuple(fields)
    if kind == _COMPLEX:
        return complex(*fields)
    name, shape, memory = fields
    array = np.frombuffer(bytearray(memory), _dtype(name)).reshape(shape)
    return array[()] if kind == _SCALAR else array


def _dtype(name: str) -> np.dtype[np.generic]:
    """Return the dtype of a name, also of `ml_dtypes`."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # only its types need it

        dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return dtype
