"""Trees of arrays as bytes, and back: a header of JSON, the arrays' memory, and a checksum of it all. Never pickle.

A tree is an array, a number, a text, a bool or None, or a list, tuple or dict of trees; keys are texts or integers.
What exports its memory, such as a CPU tensor, is an array, and comes back as one of numpy.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.forms import dtype_of
from ..runtime.memory.foreign import as_input

Tree: TypeAlias = Any
"""An array, a number, a text, a bool or None, or a list, tuple or dict of trees."""

_MAGIC = b"OVSTATE1"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_HEADER_LIMIT_BYTES = 256 << 20  # of a tree of millions of arrays: more is damage


class DamagedStateError(ValueError):
    """A file is damaged: its content differs from the written one."""


def encode(tree: Tree) -> Iterator[bytes]:
    """Yield the bytes of a tree; its arrays may not change until the last of them has been taken.

    Raises:
        UsageError: A value cannot be kept; names its place.
    """
    arrays: list[Array] = []
    form = to_json_form(tree, arrays)
    array_forms = [[_dtype_name(array.dtype), array.shape] for array in arrays]
    header = json.dumps({"tree": form, "arrays": array_forms}).encode()
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for chunk in (_MAGIC, _LENGTH.pack(len(header)), header, *map(_array_bytes, arrays)):
        digest.update(chunk)
        yield chunk
    yield digest.digest()


def decode(data: bytearray) -> Tree:
    """Return the tree; its arrays are views of `data`, to be written to as the caller likes.

    Raises:
        DamagedError: If these are not the bytes of a tree.
    """
    body = memoryview(data)[:-_DIGEST_BYTES]
    if len(data) < len(_MAGIC) + _LENGTH.size + _DIGEST_BYTES or not data.startswith(_MAGIC):
        raise DamagedStateError("it is no state")
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        raise DamagedStateError("its checksum is wrong")
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    begin = len(_MAGIC) + _LENGTH.size + length
    if length > _HEADER_LIMIT_BYTES or begin > len(body):
        raise DamagedStateError("its header is too long")
    try:
        header = json.loads(bytes(body[begin - length : begin]))
    except ValueError as error:
        raise DamagedStateError("its header is no JSON") from error
    return from_json_form(header["tree"], list(_read_arrays(body, begin, header["arrays"])))


def _read_arrays(body: memoryview, begin: int, forms: list[tuple[str, list[int]]]) -> Iterator[Array]:
    """Yield the arrays of a file by their forms, as views of its bytes from `begin` on."""
    for name, shape in forms:
        dtype = dtype_of(name)
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        yield np.frombuffer(body[begin : begin + size], np.uint8).view(dtype).reshape(shape)
        begin += size


def _array_bytes(array: Array) -> bytes:
    """Return the memory of an array, without a copy if it is contiguous."""
    return cast("bytes", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


# -- the tree ------------------------------------------------------------------------------------------------------


def to_json_form(tree: Tree, arrays: list[Array], path: str = "") -> object:
    """Return a tree as JSON, with a number in the place of each array, which is appended to `arrays`.

    Raises:
        UsageError: A value cannot be kept; names its place.
    """
    if tree is None or (isinstance(tree, (bool, int, float, str)) and not isinstance(tree, np.generic)):
        return {"value": tree}
    if isinstance(tree, dict):
        return {"dict": [[_check_key(key, path), to_json_form(tree[key], arrays, f"{path}[{key!r}]")] for key in tree]}
    if isinstance(tree, (list, tuple)):
        items = [to_json_form(item, arrays, f"{path}[{index}]") for index, item in enumerate(tree)]
        return {"list" if isinstance(tree, list) else "tuple": items}
    try:
        arrays.append(as_input(tree))
    except UsageError:
        raise UsageError(
            f"tree{path}: cannot keep {type(tree).__name__}; expected arrays, numbers, texts or None, "
            "in lists, tuples and dicts"
        ) from None
    return {"scalar" if isinstance(tree, np.generic) else "array": len(arrays) - 1}


def _check_key(key: object, path: str) -> str | int:
    """Return a key of a dict; refuse anything but texts and integers."""
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise UsageError(f"tree{path}: expected texts or integers as keys, got {key!r}")
    return key


def from_json_form(noted: Mapping[str, Any], arrays: Sequence[Array]) -> Tree:
    """Return the tree of a form that `to_json_form` made, with arrays in the places of their numbers."""
    ((kind, value),) = noted.items()
    match kind:
        case "dict":
            return {key: from_json_form(item, arrays) for key, item in value}
        case "list":
            return [from_json_form(item, arrays) for item in value]
        case "tuple":
            return tuple(from_json_form(item, arrays) for item in value)
        case "array":
            return arrays[value]
        case "scalar":
            return arrays[value][()]
    return value


def _dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return the name of a dtype in a header: numpy's short one, or that of a type of ml_dtypes."""
    return dtype.str if dtype.kind != "V" and np.dtype(dtype.str) == dtype else dtype.name
