"""Objects as bytes: msgpack, with tuples, complex numbers and numpy's arrays; or pickle, where callers ask for it."""

from __future__ import annotations

import pickle
from typing import Any, cast

import msgpack
import numpy as np

from ..errors import UsageError
from .memory.foreign import as_input

_TUPLE, _COMPLEX, _ARRAY, _SCALAR = range(4)


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
    """Return the object; with `pickled`, whoever has packed it can make this process do anything."""
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
