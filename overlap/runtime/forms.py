"""Forms of trees: texts that describe the dicts, lists and tuples around the arrays of a message.

A form is a Python literal: the tree with a text in place of each array, such as "{'w': 'float32 (2, 3)'}". It contains
no classes: a named tuple becomes a tuple.
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

_LIMIT_BYTES = 32 * 1024  # most bytes of a compressed form: half of a control message
_LONGEST = 4 << 20  # most characters of a form, about 100,000 arrays: a bound for forms that compress well
_COMPARED = 2_000  # most characters of a form that ranks compare, and that errors show; a longer one is cut
_CUT = re.compile(r" \.\.\. \d+ arrays, crc [0-9a-f]{8}$")  # end of a form that `comparable_form` has cut
_LEAF = re.compile(r"(\w+) \(([\d, ]*)\)")
_KEYS = (str, int, bool, bytes, type(None))


def sendable_form(tree: object, leaves: Sequence[Array], argument: str = "x") -> str:
    """Return the form of a tree, for a message.

    Args:
        tree: Dicts, lists and tuples. Its own leaves are not read.
        leaves: An array for each leaf, in the order of the tree.
        argument: Name of the argument that has the tree, for errors.

    Raises:
        UsageError: If a key, or the dtype of an array, cannot be sent, or the tree is too large.
    """
    text = repr(_describe_tree(tree, iter(leaves), argument))
    if not _fits_message(text):
        raise UsageError(f"{argument}: a tree of {len(leaves)} arrays is too large for one message; send its parts")
    return text


def comparable_form(tree: object, leaves: Sequence[Array], *, parsable: bool) -> str:
    """Return the form of a tree for ranks to compare. A long form is cut, and ends with a checksum of the whole.

    Args:
        tree: The tree; see `sendable_form`.
        leaves: An array for each leaf, in the order of the tree.
        parsable: Whether `parse_form` must be able to read the form; then it is cut only if it does not fit a message.
    """
    text = repr(_describe_tree(tree, iter(leaves), ""))
    if len(text) <= _COMPARED or (parsable and _fits_message(text)):
        return text
    return f"{text[:_COMPARED]} ... {len(leaves)} arrays, crc {zlib.crc32(text.encode(errors='replace')):08x}"


def is_cut(form: str) -> bool:
    """Whether `comparable_form` has cut a form because of its length."""
    return _CUT.search(form) is not None


def _fits_message(text: str) -> bool:
    """Whether the text of a form is short enough for a message, if need be compressed."""
    return len(text) <= _LONGEST and (len(text) <= _LIMIT_BYTES or len(pack_form(text)) <= _LIMIT_BYTES)


def _describe_tree(tree: object, leaves: Iterator[Array], argument: str) -> object:
    """Return a tree with a text such as "float32 (2, 3)" in place of each array; take one of `leaves` for each.

    A key or dtype that cannot be sent raises `UsageError`, which names `argument`; with "" that is no error.
    """
    if isinstance(tree, dict):
        return {_check_key(key, argument): _describe_tree(item, leaves, argument) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_describe_tree(item, leaves, argument) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    leaf = next(leaves)
    if argument:
        check_dtype(leaf.dtype, argument)
    return _describe_array(leaf.dtype, leaf.shape)


class _UnsendableKey:
    """Stands for a key that cannot be sent. Its text, such as <MyKey>, is no literal: `parse_form` refuses it."""

    def __init__(self, key: object) -> None:
        self._name = type(key).__name__

    def __repr__(self) -> str:
        return f"<{self._name}>"


def _check_key(key: object, argument: str) -> object:
    """Return a key of a dict; raise `UsageError`, which names `argument`, if its class cannot be sent.

    With "" as `argument` that is no error, and the key becomes an `_UnsendableKey`.
    """
    if type(key) in _KEYS or (type(key) is tuple and all(type(part) in _KEYS for part in key)):
        return key
    if argument:
        raise UsageError(
            f"{argument}: keys of dicts in messages are texts, integers or tuples of these, got {key!r:.60}"
        )
    return _UnsendableKey(key)


@lru_cache(maxsize=1024)
def _describe_array(dtype: np.dtype[np.generic], shape: Shape) -> str:
    """Return a text such as "float32 (2, 3)"."""
    return f"{dtype.name} {shape}"  # cached, because numpy builds the name of a dtype in Python, each time


@lru_cache(maxsize=256)
def parse_form(text: str) -> object:
    """Return the tree that a form describes, with an `ArrayPlaceholder` in place of each array.

    Raises:
        OverlapError: If the text is no form.
    """
    try:
        return _insert_placeholders(literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _invalid_form(error) from error


def _invalid_form(error: Exception) -> OverlapError:
    return OverlapError(f"a message has a tree of invalid structure: {error}; use one version of overlap on all ranks")


class ArrayPlaceholder:
    """Placeholder for an array in a tree, with the shape and dtype of the array.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Shape, dtype: np.dtype[np.generic]) -> None:
        self.shape: Shape = shape
        self.dtype: np.dtype[np.generic] = dtype


def _insert_placeholders(node: object) -> object:
    """Return a tree with an `ArrayPlaceholder` in place of each text such as "float32 (2, 3)".

    Raises ValueError if anything else stands in place of an array, and TypeError if numpy has no such dtype.
    """
    if isinstance(node, dict):
        return {key: _insert_placeholders(item) for key, item in node.items()}
    if isinstance(node, (list, tuple)):
        items = [_insert_placeholders(item) for item in node]
        return tuple(items) if isinstance(node, tuple) else items
    match = _LEAF.fullmatch(node) if isinstance(node, str) else None
    if match is None:
        raise ValueError(f"{node!r:.60} is no array")
    return ArrayPlaceholder(tuple(int(size) for size in match[2].split(",") if size.strip()), dtype_of(match[1]))


def dtype_of(name: str) -> np.dtype[np.generic]:
    """Return the dtype with this name, from numpy or ml_dtypes. Raises TypeError if there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # only its types need it

        found = getattr(ml_dtypes, name, None)
        if not (isinstance(found, type) and issubclass(found, np.generic)):
            raise
        return np.dtype(found)


def pack_form(text: str) -> bytes:
    """Return a form compressed for a control message; b"" for "", the form of a call without a tree."""
    return zlib.compress(text.encode()) if text else b""


def unpack_form(packed: bytes) -> str:
    """Return the form that `pack_form` has compressed.

    Raises:
        OverlapError: If the bytes are not a packed form.
    """
    if not packed:
        return ""
    try:
        # with a bound, because few bytes may expand to any length; a character takes four bytes at most
        return zlib.decompressobj().decompress(packed, _LONGEST * 4).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise _invalid_form(error) from error
