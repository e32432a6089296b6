"""Receives of trees, and of what the sender sends: they take apart what has arrived."""

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
from .forms import Absent, parsed, text_of
from .memory.foreign import as_output
from .receive import LEFT, ReceiveFuture
from .state import DONE
from .trees import filled, leaves_of, with_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The arrays that a receive fills where it is not given a single one."""

    tree: object = None  # As the caller gave it, with an array for each (shape, dtype); None: what the sender sends
    leaves: Sequence[object] = ()  # Of the tree
    arrays: Sequence[Array] = ()  # The memory of each leaf
    views: Sequence[Array] = ()  # Of the memory of each leaf; they stay writable
    packed: Array | None = None  # Where the arrays arrive
    call: Call  # What the receiver expects


NO_ROOM = Room(call=call(P2P.text, None, None, None, 2))
"""Any array or tree."""


def room_for(like: object, arrays: Arrays) -> Room:
    """Return the room of a tree of writable arrays, or of (shape, dtype) for new ones.

    Raises:
        UsageError: If a leaf has no memory that may be written, or the tree is too large for one message.
    """
    tree = _with_arrays(like, arrays)
    leaves = leaves_of(tree)
    if not leaves:
        raise UsageError("like: there is no array in it")
    found = [as_output(leaf, "like") if not arrays.shapes_only else cast(Array, leaf) for leaf in leaves]
    dtypes = {each.dtype for each in found}
    dtype: np.dtype[Any] = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
    shape = (sum(each.nbytes for each in found) // dtype.itemsize,)
    return Room(
        tree=tree,
        leaves=leaves,
        arrays=found,
        views=[each.view() for each in found],
        packed=arrays.empty(shape, dtype),
        call=call(P2P.text, None, dtype, shape, 2, 0, (), (), False, False, None, text_of(tree, found, "like")),
    )


def new_array(pair: tuple[Any, Any], arrays: Arrays) -> Array:
    """Return a new array of a (shape, dtype).

    Raises:
        TypeError: If there can be no such array; or `ValueError`.
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


class Received(ReceiveFuture[object]):
    """The receive of a tree, or of what the sender sends."""

    __slots__ = ("_form", "_lent", "_pattern", "room")

    room: Room

    def expect(self, room: Room) -> None:
        """Say what it fills, before it is issued."""
        self.room, self._form, self._lent, self._pattern = room, room.call.form, False, room.call

    def fit(self, pattern: Call) -> None:
        """Make the array that arrives, unless there is one, and keep in mind the form of its tree."""
        super().fit(pattern)
        self._form, self._pattern = pattern.form, pattern

    def lock(self) -> None:
        """Make the arrays of the tree read-only for everybody else until it ends."""
        super().lock()
        if not self._lent and self.room.arrays and not self.context.arrays.shapes_only:
            self._lent = True
            self.locked += self.context.locks.lock(tuple(self.room.arrays))

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Take apart what has arrived, and hand it over."""
        if self.state in LEFT and self.puts_back():
            return
        if self.state < DONE and self._form:
            try:
                self.caller_out = self._taken_apart()
            except Exception as error:  # no memory, or a form that cannot be meant
                self.fail(Failure(error))
                return
        super().finish(end_ns, meeting)

    def received(self, value: object) -> tuple[Call, Array | None]:
        """Return the call and the bytes of the message, as a flat copy."""
        if value is None or not self._form or self.context.arrays.shapes_only:
            return self._pattern, super().received(value)[1]
        flat = np.concatenate([as_output(leaf, "like").reshape(-1).view(np.uint8) for leaf in leaves_of(value)])
        assert self._pattern.dtype is not None, "a message that was received has a type"
        return self._pattern, flat.view(self._pattern.dtype)

    def release(self) -> None:
        """Give the arrays back: nothing moves any more."""
        super().release()
        self._lent = False

    def _taken_apart(self) -> object:
        room, arrays = self.room, self.context.arrays
        tree = parsed(self._form) if room.tree is None else room.tree
        places = leaves_of(tree) if room.tree is None else room.views
        shapes_only = arrays.shapes_only
        flat = None if shapes_only else cast(Array, self.out).view(np.uint8).reshape(-1)
        begin, found = 0, []
        for place in cast("Sequence[Absent | Array]", places):
            nbytes = prod(place.shape) * place.dtype.itemsize
            if flat is None:
                found.append(arrays.empty(place.shape, place.dtype))
            else:
                part = flat[begin : begin + nbytes].view(place.dtype).reshape(place.shape)
                found.append(part.copy() if isinstance(place, Absent) else part)
            begin += nbytes
        if room.tree is None:
            return filled(tree, found)
        if not shapes_only:
            for view, part in zip(room.views, found, strict=True):
                view[...] = part
        return filled(tree, room.leaves)
