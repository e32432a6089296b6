"""Receives of trees, and of messages without `like`: they unpack the arrived bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import numpy as np

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import Array
from ..errors import UsageError, shown
from .context import Arrays
from .forms import Absent, parse_form, text_of
from .memory.foreign import as_output
from .trees import fill_tree, leaves_of, make_message, packed_type, read_message, unpacker_of, with_items


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveBuffers:
    """Arrays that a receive fills, for all but a single array."""

    tree: object = None  # The caller's tree, with an array for each (shape, dtype); None: the sender's tree
    leaves: Sequence[object] = ()  # Leaves of the tree
    arrays: Sequence[Array] = ()  # Memory of each leaf
    views: Sequence[Array] = ()  # Views of that memory, which stay writable
    message: Array | None = None  # Memory of the arriving message, which begins with the form
    packed: Array | None = None  # Its part for the arrays
    call: Call  # Call of the receiver


ANY_TREE = ReceiveBuffers(call=call(P2P.text, None, None, None, 2))
"""Buffers of a receive that accepts any array or tree."""


def buffers_for(like: object, arrays: Arrays) -> ReceiveBuffers:
    """Return the buffers of a tree of writable arrays, or of (shape, dtype) for new ones.

    Raises:
        UsageError: If a leaf has no memory that may be written, or the tree is too large for one message.
    """
    tree = _with_arrays(like, arrays)
    leaves = leaves_of(tree)
    if not leaves:
        raise UsageError("like: there is no array in it; expected an array, or lists and dicts of arrays")
    memory = [as_output(leaf, "like") if not arrays.shapes_only else cast(Array, leaf) for leaf in leaves]
    form = text_of(tree, memory, "like")
    message, packed = make_message(form, memory, arrays)
    return ReceiveBuffers(
        tree=tree,
        leaves=leaves,
        arrays=memory,
        views=[leaf.view() for leaf in memory],
        message=message,
        packed=packed,
        call=_call_of(packed.dtype, packed.size, form),
    )


def _call_of(dtype: np.dtype[np.generic], elements: int, form: str) -> Call:
    """Return the call of a message of a tree."""
    return call(P2P.text, None, dtype, (elements,), 2, 0, (), (), False, False, None, form)


def new_array(pair: tuple[Any, Any], arrays: Arrays) -> Array:
    """Return a new array of a (shape, dtype).

    Raises:
        TypeError: If such an array is impossible; or `ValueError`.
    """
    shape, dtype = pair
    return arrays.empty(tuple(map(index, (shape,) if isinstance(shape, int) else shape)), np.dtype(dtype))


def _with_arrays(like: object, arrays: Arrays) -> object:
    """Return a tree with a new array in place of each (shape, dtype)."""
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], (str, type, np.dtype)):
        try:
            return new_array(like, arrays)
        except (TypeError, ValueError) as error:
            raise UsageError(f"like: expected an array or (shape, dtype), got {shown(like)}: {error}") from error
    return with_items(like, lambda item: _with_arrays(item, arrays))


def read_tree(message: Array) -> tuple[Call, Array]:
    """Return the call of an arrived message of a tree, and its packed arrays.

    Raises:
        OverlapError: If it does not begin with the form of a tree.
        ValueError: If its arrays are not those of the form.
    """
    form, data = read_message(message)
    dtype, elements = packed_type(cast("list[Absent]", leaves_of(parse_form(form))))
    return _call_of(dtype, elements, form), data.view(dtype).reshape(elements)


def unpack(buffers: ReceiveBuffers, form: str, packed: Array | None, arrays: Arrays) -> object:
    """Return the tree of arrived bytes, in the arrays of `like` if there is one."""
    tree = unpacker_of(parse_form(form), P2P, 2, arrays)([packed])
    if buffers.tree is None:  # arrays of their own
        return tree if arrays.shapes_only else fill_tree(tree, [np.array(leaf) for leaf in leaves_of(tree)])
    if not arrays.shapes_only:
        for view, part in zip(buffers.views, cast("list[Array]", leaves_of(tree)), strict=True):
            view[...] = part
    return fill_tree(buffers.tree, buffers.leaves)
