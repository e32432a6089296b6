"""Collectives of Python objects: packs them as msgpack or pickle, and issues one or two operations for each call."""

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
from .issue import Issuer
from .memory.arrays import metadata
from .memory.foreign import as_input
from .operation import CollectiveFuture
from .outstanding import CallSite
from .stream import Stream

_HEADER = np.dtype(np.int64).itemsize  # of each object: how many bytes follow
_TUPLE, _COMPLEX, _ARRAY, _SCALAR = range(4)  # msgpack's extension types


def give(
    issuer: Issuer,
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
    """Send the root's object to all, or one of its objects to each rank; the sizes go with them."""
    caller = _getframe(2) if call_site is None else call_site
    check_rank(issuer.group, "root", root)
    mine = None
    if root == issuer.group.rank:
        if kind is SCATTER:
            check_one_a_rank(issuer.group, "values", value)
        values = cast("Sequence[object]", value) if kind is SCATTER else [value]
        mine = _rows([pack(each, pickled=pickled) for each in values])
    sent: CollectiveFuture[Array] = CollectiveFuture(kind, mine, None, caller, priority, name, None, root)
    found = Derived([sent], lambda got: _objects(got[0], 1, pickled)[0], issuer.context).begin()
    issuer.start(sent, stream, timeout_s)
    return found


def gather(
    issuer: Issuer,
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
    mine, context, size = pack(value, pickled=pickled), issuer.context, issuer.group.size
    check_rank(issuer.group, "root", root)
    longest: CollectiveFuture[Array] = CollectiveFuture(
        ALL_REDUCE, metadata([len(mine)]), None, caller, priority, f"{name}: size", "max"
    )
    padded = Derived([longest], lambda got: _rows([mine], int(got[0][0])), context).begin()
    sent: CollectiveFuture[Array] = CollectiveFuture(kind, padded, None, caller, priority, name, None, root)
    found = Derived([sent], lambda got: _objects(got[0], size, pickled), context).begin()
    issuer.start(longest, stream, timeout_s)
    issuer.start(sent, stream, timeout_s)
    return found


def _rows(packed: Sequence[bytes], longest: int = 0) -> Array:
    """Return objects in rows of one length, each with its own length in front, one after the other."""
    longest = max(longest, *map(len, packed))
    rows = np.zeros((len(packed), _HEADER + longest), np.uint8)
    for row, data in zip(rows, packed, strict=True):
        row[:_HEADER] = np.array([len(data)], np.int64).view(np.uint8)
        row[_HEADER : _HEADER + len(data)] = np.frombuffer(data, np.uint8)
    return metadata(rows.reshape(-1))


def _objects(rows: Array | None, count: int, pickled: bool) -> Any:
    if rows is None:  # not the root
        return None
    if rows.strides == (0,) and rows.size > 1:
        raise UsageError("value: where arrays have no data, objects have none either")

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
        return cast("bytes", msgpack.packb(value, default=_noted, strict_types=True))
    except UsageError:
        raise
    except Exception as error:  # a program's own methods are called here
        raise UsageError(f"value: cannot pack {type(value).__name__}: {error}") from error


def unpack(data: bytes, *, pickled: bool) -> object:
    """Return the object; with `pickled`, its sender can make this process run any code."""
    if pickled:
        return pickle.loads(data)
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


def _noted(value: object) -> msgpack.ExtType:
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
    told = [array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes()]
    return msgpack.ExtType(_SCALAR if isinstance(value, np.generic) else _ARRAY, pack(told, pickled=False))


def _restored(kind: int, data: bytes) -> object:
    told: Any = unpack(data, pickled=False)
    if kind == _TUPLE:
        return tuple(told)
    if kind == _COMPLEX:
        return complex(*told)
    name, shape, memory = told
    array = np.frombuffer(bytearray(memory), _dtype(name)).reshape(shape)
    return array[()] if kind == _SCALAR else array


def _dtype(name: str) -> np.dtype[np.generic]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # only its types need it

        known: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return known
