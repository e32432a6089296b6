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
from .trees import fill_tree, leaves_of, packed_type, unpacker_of, with_items


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveBuffers:
    """Arrays that a receive fills, for all but a single array."""

    tree: object = None  # The caller's tree, with an array for each (shape, dtype); None: the sender's tree
    leaves: Sequence[object] = ()  # Leaves of the tree
    arrays: Sequence[Array] = ()  # Memory of each leaf
    views: Sequence[Array] = ()  # Views of that memory, which stay writable
    packed: Array | None = None  # Array for the arriving bytes
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
    dtype, elements = packed_type(memory)
    return ReceiveBuffers(
        tree=tree,
        leaves=leaves,
        arrays=memory,
        views=[leaf.view() for leaf in memory],
        packed=arrays.empty((elements,), dtype),
        call=call(P2P.text, None, dtype, (elements,), 2, 0, (), (), False, False, None, text_of(tree, memory, "like")),
    )


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


def call_of_form(form: str) -> Call:
    """Return the call of the data of a tree of a form.

    Raises:
        OverlapError: If the text is no form.
    """
    dtype, elements = packed_type(cast("list[Absent]", leaves_of(parse_form(form))))
    return call(P2P.text, None, dtype, (elements,), 2, 0, (), (), False, False, None, form)


def unpack(buffers: ReceiveBuffers, form: str, packed: Array | None, arrays: Arrays) -> object:
    """Return the tree of arrived bytes, in the arrays of `like` if there is one."""
    tree = unpacker_of(parse_form(form), P2P, 2, arrays)([packed])
    if buffers.tree is None:  # arrays of their own
        return tree if arrays.shapes_only else fill_tree(tree, [np.array(leaf) for leaf in leaves_of(tree)])
    if not arrays.shapes_only:
        for view, part in zip(buffers.views, cast("list[Array]", leaves_of(tree)), strict=True):
            view[...] = part
    return fill_tree(buffers.tree, buffers.leaves)
