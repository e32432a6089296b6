"""Collectives of Python objects: each object is packed as msgpack or pickle, and travels as an array of bytes."""

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
from .arguments import check_rank, check_value_per_rank
from .derived import Derived
from .forms import dtype_of
from .future import Future
from .memory.arrays import metadata
from .memory.foreign import as_input_array
from .outstanding import CallSite, checked_name
from .port import Ports
from .stream import Stream

_HEADER_BYTES = np.dtype(np.int64).itemsize  # bytes of an object's length, which stands before the object
_TUPLE, _COMPLEX, _ARRAY, _SCALAR = range(4)  # codes of our extension types in msgpack
_ADVICE = (
    "pass numbers, texts, bytes, arrays and lists, tuples and dicts of them, or pickle=True if every rank trusts every "
    "other"
)


def send_objects(
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
    """Send the root's object to all ranks, or one of its objects to each. Return the future of the received object.

    Args:
        ports: Ports of the rank on the group.
        kind: BROADCAST, or SCATTER.
        value: On the root, the object, or for a scatter a list with one object for each rank; ignored on other ranks.
        root: Group rank of the sender.
        pickled: Whether objects are packed as pickles; else as msgpack.
        stream: This and the other options: see `GroupCalls`.
        call_site: Line that errors name; None: that of the caller's caller.

    Raises:
        UsageError: If an object cannot be packed, there is not one for each rank, or `root` is no rank.
    """
    caller = _getframe(2) if call_site is None else call_site
    check_rank(ports.group, "root", root)
    rows = None
    if root == ports.group.rank:
        if kind is SCATTER:
            check_value_per_rank(ports.group, "values", value)
        values = cast("Sequence[object]", value) if kind is SCATTER else [value]
        rows = _pack_rows([pack_object(item, pickled=pickled) for item in values])
    operation = ports.issue(kind, rows, None, stream, priority, name, timeout_s, caller, root=root)
    return Derived([operation], lambda got: _unpack_objects(got[0], 1, pickled)[0], ports.context).watch_parts()


def gather_objects(
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
    """Gather one object of each rank. Return the future of their list.

    Two operations: an all-reduce finds the size of the largest object, then rows of that size are gathered.

    Args:
        ports: Ports of the rank on the group.
        kind: GATHER, or ALL_GATHER.
        value: The object of this rank.
        root: Group rank that gets the objects in a gather; the others get None.
        pickled: Whether objects are packed as pickles; else as msgpack.
        stream: This and the other options: see `GroupCalls`.
        call_site: Line that errors name; None: that of the caller's caller.

    Raises:
        UsageError: If the object cannot be packed, or `root` is no rank.
    """
    caller = _getframe(2) if call_site is None else call_site
    packed, context, size = pack_object(value, pickled=pickled), ports.context, ports.group.size
    checked_name(name, kind.text)  # so that an error comes before the first of the two operations
    check_rank(ports.group, "root", root)
    row = metadata([len(packed)])
    longest = ports.issue(ALL_REDUCE, row, None, stream, priority, f"{name}: size", timeout_s, caller, op="max")
    padded = Derived([longest], lambda got: _pack_rows([packed], int(got[0][0])), context).watch_parts()
    operation = ports.issue(kind, padded, None, stream, priority, name, timeout_s, caller, root=root)
    return Derived([operation], lambda got: _unpack_objects(got[0], size, pickled), context).watch_parts()


def _pack_rows(packed: Sequence[bytes], longest: int = 0) -> Array:
    """Return a flat array with a row for each object: 8 bytes with its length, its bytes, zeros.

    All rows have the same length, for objects of `longest` bytes or more.
    """
    longest = max(longest, *map(len, packed))
    rows = np.zeros((len(packed), _HEADER_BYTES + longest), np.uint8)
    for row, data in zip(rows, packed, strict=True):
        row[:_HEADER_BYTES] = np.array([len(data)], np.int64).view(np.uint8)
        row[_HEADER_BYTES : _HEADER_BYTES + len(data)] = np.frombuffer(data, np.uint8)
    return metadata(rows.reshape(-1))


def _unpack_objects(rows: Array | None, count: int, pickled: bool) -> Any:
    """Return the objects in `count` rows of `_pack_rows`, or None if `rows` is None: this rank receives nothing.

    Raise `UsageError` if the array has a shape and no data, as in a simulation without data.
    """
    if rows is None:  # in a gather, a rank other than the root
        return None
    if rows.strides == (0,) and rows.size > 1:  # an array without data: one element stands for all, see `shape_only`
        raise UsageError("value: with shapes_only, objects have no data either; leave out shapes_only, or send arrays")

    table = rows.reshape(count, -1)
    lengths = table[:, :_HEADER_BYTES].copy().view(np.int64)[:, 0].tolist()
    return [
        unpack_object(row[_HEADER_BYTES : _HEADER_BYTES + length].tobytes(), pickled=pickled)
        for row, length in zip(table, lengths, strict=True)
    ]


def pack_object(value: object, *, pickled: bool) -> bytes:
    """Return the bytes of an object, as msgpack with our extensions, or as a pickle if `pickled`.

    Raises:
        UsageError: If the object cannot be packed.
    """
    try:
        if pickled:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return cast("bytes", msgpack.packb(value, default=_encode_extension, strict_types=True))
    except UsageError:
        raise
    except Exception as error:  # of any class: pickle and msgpack call methods of the object
        advice = "pass an object that pickle takes" if pickled else _ADVICE
        raise UsageError(f"value: cannot pack {type(value).__name__}: {error}; {advice}") from error


def unpack_object(data: bytes, *, pickled: bool) -> object:
    """Return the object that `pack_object` packed. With `pickled`, the sender can make this process run any code."""
    if pickled:
        return pickle.loads(data)
    return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False)


def _encode_extension(value: object) -> msgpack.ExtType:
    """Return a value that msgpack does not know as one of our extension types, or raise `UsageError`."""
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack_object(list(value), pickled=False))
    if type(value) is complex:
        return msgpack.ExtType(_COMPLEX, pack_object([value.real, value.imag], pickled=False))
    if isinstance(value, (bytearray, memoryview)) or not hasattr(value, "__array__"):
        raise UsageError(f"value: msgpack cannot pack {type(value).__name__}; {_ADVICE}")
    array = as_input_array(value)
    fields = [array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes()]
    return msgpack.ExtType(_SCALAR if isinstance(value, np.generic) else _ARRAY, pack_object(fields, pickled=False))


def _decode_extension(kind: int, data: bytes) -> object:
    """Return the value of one of our extension types; `kind` is the code of the type."""
    fields: Any = unpack_object(data, pickled=False)
    if kind == _TUPLE:
        return tuple(fields)
    if kind == _COMPLEX:
        return complex(*fields)
    name, shape, memory = fields
    array = np.frombuffer(bytearray(memory), dtype_of(name)).reshape(shape)
    return array[()] if kind == _SCALAR else array
