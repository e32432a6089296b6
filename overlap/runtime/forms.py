"""Forms of trees as text: the dicts, lists and tuples around the arrays of a message.

Such a text is a Python literal, the tree itself with a text such as 'float32 (2, 3)' in place of each array. Classes do
not travel: a named tuple is a tuple there.
"""

from __future__ import annotations

import re
import zlib
from ast import literal_eval
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from ..collectives.kinds import Shape
from ..collectives.reduce import Array, check_dtype
from ..errors import OverlapError, UsageError

_LIMIT_BYTES = 32 * 1024  # of a packed form: half of a control message
_LONGEST = 4 << 20  # characters of a form, about 100,000 arrays: a bound for forms that pack well
_OUTLINE = 2_000  # characters of a form that ranks compare, and that messages show
_LEAF = re.compile(r"(\w+) \(([\d, ]*)\)")
_KEYS = (str, int, bool, bytes, type(None))


def text_of(tree: object, leaves: Sequence[Array], argument: str = "x") -> str:
    """Return the form of a tree that has `leaves` as arrays, in its order.

    Raises:
        UsageError: Naming `argument`, if a key or the dtype of an array does not travel, or the tree is too large.
    """
    text = repr(_outline(tree, iter(leaves), argument))
    if not _fits_message(text):
        raise UsageError(f"{argument}: a tree of {len(leaves)} arrays is too large for one message; send its parts")
    return text


def outline_of(tree: object, leaves: Sequence[Array], *, parsable: bool) -> str:
    """Return the form of a tree for ranks to compare: a large one is cut, and has a checksum.

    Args:
        leaves: Its arrays, in its order.
        parsable: Whether `parse_form` must read it; then it is cut only if it is too large for a message.
    """
    text = repr(_outline(tree, iter(leaves), ""))
    if len(text) <= _OUTLINE or (parsable and _fits_message(text)):
        return text
    return f"{text[:_OUTLINE]} ... {len(leaves)} arrays, crc {zlib.crc32(text.encode(errors='replace')):08x}"


def _fits_message(text: str) -> bool:
    """Whether the text of a form is short enough for a message, perhaps packed."""
    return len(text) <= _LONGEST and (len(text) <= _LIMIT_BYTES or len(pack_form(text)) <= _LIMIT_BYTES)


def _outline(tree: object, leaves: Iterator[Array], argument: str) -> object:
    """Return a tree with short texts in place of its arrays; `argument` names one in which all must travel."""
    if isinstance(tree, dict):
        return {_outline_key(key, argument): _outline(item, leaves, argument) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_outline(item, leaves, argument) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    leaf = next(leaves)
    if argument:
        check_dtype(leaf.dtype, argument)
    return _outline_array(leaf.dtype, leaf.shape)


class _Foreign:
    """Key of a class that does not travel; its text is the same in every process, and no literal."""

    def __init__(self, key: object) -> None:
        self._name = type(key).__name__

    def __repr__(self) -> str:
        return f"<{self._name}>"


def _outline_key(key: object, argument: str) -> object:
    """Return a key as messages can have it; refuse others, or return a text that no message has."""
    if type(key) in _KEYS or (type(key) is tuple and all(type(part) in _KEYS for part in key)):
        return key
    if argument:
        raise UsageError(
            f"{argument}: keys of dicts in messages are texts, integers or tuples of these, got {key!r:.60}"
        )
    return _Foreign(key)


@lru_cache(maxsize=1024)
def _outline_array(dtype: np.dtype[np.generic], shape: Shape) -> str:
    return f"{dtype.name} {shape}"  # cached: numpy makes the name of a dtype in Python, each time


@lru_cache(maxsize=256)
def parse_form(text: str) -> object:
    """Return the tree of a form, with (shape, dtype) in an `Absent` for each array.

    Raises:
        OverlapError: If the text is no form.
    """
    try:
        return _placeholders(literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise OverlapError(
            f"a message has an invalid form of a tree; use one version of overlap on all ranks: {error}"
        ) from error


class Absent:
    """The place of an array in a tree.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Shape, dtype: np.dtype[np.generic]) -> None:
        self.shape: Shape = shape
        self.dtype: np.dtype[np.generic] = dtype


def _placeholders(node: object) -> object:
    """Return a tree with an `Absent` for each text of an array."""
    if isinstance(node, dict):
        return {key: _placeholders(item) for key, item in node.items()}
    if isinstance(node, (list, tuple)):
        items = [_placeholders(item) for item in node]
        return tuple(items) if isinstance(node, tuple) else items
    match = _LEAF.fullmatch(node) if isinstance(node, str) else None
    if match is None:
        raise ValueError(f"{node!r:.60} is no array")
    return Absent(tuple(int(size) for size in match[2].split(",") if size.strip()), dtype_of(match[1]))


def dtype_of(name: str) -> np.dtype[np.generic]:
    """Return the dtype of a name, of numpy or ml_dtypes."""
    if name.startswith(("bfloat", "float8", "float6", "float4", "int2", "int4", "uint2", "uint4")):
        import ml_dtypes  # only these types need it

        return np.dtype(getattr(ml_dtypes, name, None) or name)
    return np.dtype(name)


def pack_form(text: str) -> bytes:
    """Return the bytes of a form for a control message."""
    return zlib.compress(text.encode()) if text else b""


def unpack_form(packed: bytes) -> str:
    """Return the form in a control message.

    Raises:
        OverlapError: If the message has no form.
    """
    if not packed:
        return ""
    try:
        reading = zlib.decompressobj()
        text = reading.decompress(packed, _LONGEST * 4).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise OverlapError(
            f"a message has an invalid form of a tree; use one version of overlap on all ranks: {error}"
        ) from error
    return text
