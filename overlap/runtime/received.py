"""Receives of trees, and of messages without `like`: they unpack the arrived bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, cast

import numpy as np

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import Array
from ..errors import UsageError, shown
from ..timeline.recording import RawMatch
from .context import Arrays
from .failure import Failure
from .forms import Absent, parse_form, text_of
from .memory.foreign import as_output
from .receive import LEFT_STATES, ReceiveFuture
from .state import DONE
from .trees import fill_tree, leaves_of, with_items


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
    dtypes = {leaf.dtype for leaf in memory}
    dtype: np.dtype[Any] = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
    shape = (sum(leaf.nbytes for leaf in memory) // dtype.itemsize,)
    return ReceiveBuffers(
        tree=tree,
        leaves=leaves,
        arrays=memory,
        views=[leaf.view() for leaf in memory],
        packed=arrays.empty(shape, dtype),
        call=call(P2P.text, None, dtype, shape, 2, 0, (), (), False, False, None, text_of(tree, memory, "like")),
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


class TreeReceive(ReceiveFuture[object]):
    """Receive of a tree, or of a message without `like`."""

    __slots__ = ("_form", "_pattern", "_tree_locked", "buffers")

    buffers: ReceiveBuffers

    def expect(self, buffers: ReceiveBuffers) -> None:
        """Set its buffers, before it is issued."""
        self.buffers, self._form, self._tree_locked, self._pattern = buffers, buffers.call.form, False, buffers.call

    def fit(self, pattern: Call) -> None:
        """Make the array for the bytes, unless there is one, and note the form of its tree."""
        super().fit(pattern)
        self._form, self._pattern = pattern.form, pattern

    def lock(self) -> None:
        """Make the arrays of the tree read-only for everybody else until it ends."""
        super().lock()
        if not self._tree_locked and self.buffers.arrays and not self.context.arrays.shapes_only:
            self._tree_locked = True
            self.locked += self.context.locks.lock(tuple(self.buffers.arrays))

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Unpack the arrived bytes, and set the result."""
        if self.state in LEFT_STATES and self.put_back_if_left():
            return
        if self.state < DONE and self._form:
            try:
                self.caller_out = self._unpack()
            except Exception as error:  # no memory, or an invalid form
                self.fail(Failure(error))
                return
        self._tree_locked = False
        super().finish(end_ns, meeting)

    def call_and_bytes(self, value: object) -> tuple[Call, Array | None]:
        """Return the expected call, and the leaves of a tree as one flat copy of bytes; an array as a plain receive."""
        if value is None or not self._form or self.context.arrays.shapes_only:
            return self._pattern, super().call_and_bytes(value)[1]
        flat = np.concatenate([as_output(leaf, "like").reshape(-1).view(np.uint8) for leaf in leaves_of(value)])
        assert self._pattern.dtype is not None, "this is a bug in overlap: a received message has no type"
        return self._pattern, flat.view(self._pattern.dtype)

    def release(self) -> None:
        """Unlock the arrays: no bytes move any more."""
        super().release()
        self._tree_locked = False

    def _unpack(self) -> object:
        """Return the tree of the arrived bytes, in the arrays of `like` if there is one."""
        buffers, arrays = self.buffers, self.context.arrays
        tree = parse_form(self._form) if buffers.tree is None else buffers.tree
        slots = leaves_of(tree) if buffers.tree is None else buffers.views
        shapes_only = arrays.shapes_only
        flat = None if shapes_only else cast(Array, self.out).view(np.uint8).reshape(-1)
        begin, items = 0, []
        for slot in cast("Sequence[Absent | Array]", slots):
            nbytes = prod(slot.shape) * slot.dtype.itemsize
            if flat is None:
                items.append(arrays.empty(slot.shape, slot.dtype))
            else:
                part = flat[begin : begin + nbytes].view(slot.dtype).reshape(slot.shape)
                items.append(part.copy() if isinstance(slot, Absent) else part)
            begin += nbytes
        if buffers.tree is None:
            return fill_tree(tree, items)
        if not shapes_only:
            for view, part in zip(buffers.views, items, strict=True):
                view[...] = part
        return fill_tree(tree, buffers.leaves)
