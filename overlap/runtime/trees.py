"""Trees of arrays (lists, tuples, dicts) in one call: the arrays are packed into one, and unpacked into a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import Any, cast

import numpy as np

from ..collectives.kinds import Collective, Shape, check_input, result_shape
from ..collectives.reduce import Array
from ..errors import OverlapError, UsageError
from .context import Arrays
from .forms import ArrayPlaceholder, is_cut, parse_form, sendable_form
from .future import Future
from .memory.foreign import as_input_array

_FORMS = (list, tuple, dict)
_LENGTH_BYTES = 8  # bytes of the number that stands before a form in a message: the length of the form
_ALIGNED_BYTES = 16  # alignment of the arrays in a message: that of the widest dtype


def is_tree(x: object) -> bool:
    """Whether `x` is a dict, or a list or tuple with arrays or futures at any depth; a list of numbers is an array."""
    if isinstance(x, dict):
        return True
    return isinstance(x, (list, tuple)) and any(map(_holds_arrays, x))


def _holds_arrays(item: object) -> bool:
    """Whether an item is an array, a future, or a tree."""
    if isinstance(item, _FORMS):
        return is_tree(item)
    array = isinstance(item, (np.ndarray, Future)) or hasattr(item, "__array__") or hasattr(item, "__dlpack__")
    return array and not isinstance(item, np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Arrays of one tree that travel packed in one array, and what is needed to unpack the result."""

    indices: Sequence[int]  # Index of each array among the leaves of the tree
    shapes: Sequence[Shape]  # Shape of each array's result
    dtypes: Sequence[np.dtype[np.generic]]  # Dtype of each array
    rows: int  # Number of blocks of the packed result; each contains one block of every array
    packed: Array  # The array that travels

    def unpacked_results(self, packed: Array | None, arrays: Arrays) -> Iterator[tuple[int, Array | None]]:
        """Unpack a packed result: yield (index among the leaves, result) for each array.

        Args:
            packed: The packed result; None: this rank gets none, and each result is None.
            arrays: Makes new arrays, in a simulation without data.
        """
        table = None if packed is None or arrays.shapes_only else packed.reshape(self.rows, -1)
        begin = 0
        for index, shape, dtype in zip(self.indices, self.shapes, self.dtypes, strict=True):
            if packed is None:
                yield index, None
            elif table is None:
                yield index, arrays.empty(shape, dtype)
            else:
                # columns of this array in each row, counted in elements of the packed dtype
                width = prod(shape) * dtype.itemsize // table.dtype.itemsize // self.rows
                yield index, np.ascontiguousarray(table[:, begin : begin + width]).view(dtype).reshape(shape)
                begin += width


def pack_leaves(kind: Collective, leaves: Sequence[Array], size: int, arrays: Arrays) -> list[Pack]:
    """Pack copies of the arrays of a tree: all in one if they are only moved, one for each dtype if they are reduced.

    Args:
        kind: Kind of the collective.
        leaves: The arrays, in the order of the tree.
        size: Number of ranks of the group.
        arrays: Makes new arrays.

    Returns:
        A pack, or one for each dtype in the order of its first array.

    Raises:
        UsageError: If an array cannot be cut into the blocks of the ranks.
    """
    for leaf in leaves:
        check_input(kind, leaf.shape, size)
    alike: dict[object, list[int]] = {}
    for index, leaf in enumerate(leaves):
        alike.setdefault(leaf.dtype if kind.traits.reduces else None, []).append(index)
    return [_pack_arrays(kind, indices, leaves, size, arrays) for indices in alike.values()]


def packed_dtype_and_size(leaves: Sequence[Array | ArrayPlaceholder]) -> tuple[np.dtype[np.generic], int]:
    """Return dtype and number of elements of the array that packs others: their common dtype, or else bytes (uint8).

    Two float32 arrays of 3 and 5 elements give (float32, 8); 3 float32 and 1 int64 give (uint8, 20).
    """
    dtypes = {leaf.dtype for leaf in leaves}
    dtype: np.dtype[np.generic] = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
    return dtype, sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // dtype.itemsize


def _pack_arrays(kind: Collective, indices: Sequence[int], leaves: Sequence[Array], size: int, arrays: Arrays) -> Pack:
    """Pack the leaves with these indices. For a kind that scatters, all blocks for rank 0 come first."""
    leaves = [leaves[index] for index in indices]
    blocks, (dtype, elements) = size if kind.traits.scatters else 1, packed_dtype_and_size(leaves)
    width = elements // blocks
    packed = arrays.empty((blocks * width,), dtype)
    if not arrays.shapes_only:
        _copy_into_rows(packed.reshape(blocks, width), leaves)
    return Pack(
        indices=indices,
        shapes=[result_shape(kind, leaf.shape, size) for leaf in leaves],
        dtypes=[leaf.dtype for leaf in leaves],
        rows=size if kind.traits.gathers else 1,
        packed=packed,
    )


def _copy_into_rows(table: Array, leaves: Sequence[Array]) -> None:
    """Cut each array into as many blocks as the table has rows; row r gets block r of all, in order.

    In two rows, [1, 2] and [3, 4, 5, 6] become [[1, 3, 4], [2, 5, 6]].
    """
    begin = 0
    for leaf in leaves:
        flat = np.ascontiguousarray(leaf).reshape(table.shape[0], -1).view(table.dtype)
        table[:, begin : begin + flat.shape[1]] = flat
        begin += flat.shape[1]


def make_tree_message(tree: object, arrays: Arrays) -> tuple[Array, Array, str]:
    """Make the message that sends a tree.

    Returns:
        The message; the part of it with the packed arrays; the form of the tree.

    Raises:
        UsageError: If the tree is empty, or cannot be sent.
    """
    leaves = arrays_of(tree)
    form = sendable_form(tree, leaves)
    message, data = make_message_buffer(form, leaves, arrays)
    if not arrays.shapes_only:
        _copy_into_rows(data.reshape(1, -1), leaves)
    return message, data, form


def make_message_buffer(form: str, leaves: Sequence[Array], arrays: Arrays) -> tuple[Array, Array]:
    """Make the message of a tree, without the data of the arrays.

    It begins with 8 bytes for the length of the form, the form, and zeros up to a multiple of 16 bytes; then there is
    room for the packed arrays. In a simulation without data it is that room alone.

    Returns:
        The message; the part of it for the packed arrays.
    """
    dtype, elements = packed_dtype_and_size(leaves)
    if arrays.shapes_only:
        data = arrays.empty((elements,), dtype)
        return data, data
    text = form.encode()
    begin = _data_offset(len(text))
    message = arrays.empty((begin + elements * dtype.itemsize,), np.dtype(np.uint8))
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    message[:begin] = np.frombuffer(head.ljust(begin, b"\0"), np.uint8)
    return message, message[begin:].view(dtype)


def split_tree_message(message: Array) -> tuple[str, Array]:
    """Split the message of a tree: return the form, and the packed arrays as bytes. Neither is checked."""
    length = int.from_bytes(message[:_LENGTH_BYTES].tobytes(), "little")
    text = message[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
    return text.decode(errors="replace"), message[_data_offset(length) :]


def _data_offset(form_bytes: int) -> int:
    """Return the offset in bytes of the arrays in a message, behind a form of that many bytes."""
    return -(-(_LENGTH_BYTES + form_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES


def make_unpacker(tree: object, packed: Sequence[Pack], arrays: Arrays) -> Callable[[list[Any]], object]:
    """Return a function that turns packed results into a tree like `tree`.

    Args:
        tree: The tree; its leaves do not matter.
        packed: The packs of the tree's arrays.
        arrays: Makes new arrays.

    Returns:
        Function of a list with one packed result for each pack. It returns None on a rank that gets no result.
    """
    form = replace_leaves(tree, repeat(None))  # a copy without the arrays, which would live as long as the function

    def make(results: list[Any]) -> object:
        """Return None if this rank gets no results."""
        values: dict[int, Array | None] = {}
        for pack, result in zip(packed, results, strict=True):
            values.update(pack.unpacked_results(result, arrays))
        if all(value is None for value in values.values()):
            return None
        return replace_leaves(form, [value for _, value in sorted(values.items())])

    return make


def unpacker_for_form(
    kind: Collective, form: str, size: int, arrays: Arrays, root: str
) -> Callable[[list[Any]], object]:  # fmt: skip
    """Return a function that turns the packed result into a tree like the root's, on a rank that has passed no tree.

    Args:
        kind: The collective.
        form: Form of the root's tree, made by `comparable_form`.
        size: Number of ranks of the group.
        arrays: Makes new arrays.
        root: The root and its operation, for errors.

    Raises:
        UsageError: If the form cannot be read: the tree is too large, or has keys of classes that cannot be sent.
    """
    try:
        tree = parse_form(form)
    except OverlapError as error:
        reason = "has keys other than texts, integers and tuples of these"
        if is_cut(form):
            reason = "has too many arrays for its keys and shapes to come in a message"
        raise UsageError(
            f"x: the tree of {root}, {reason}: {form:.60} ...; pass a tree like the root's on all ranks"
        ) from error
    return unpacker_of(tree, kind, size, arrays)


def unpacker_of(tree: object, kind: Collective, size: int, arrays: Arrays) -> Callable[[list[Any]], object]:
    """Return a function that turns one packed result, in a list, into a tree; see `make_unpacker`.

    Args:
        tree: The tree, with an `ArrayPlaceholder` in place of each input array.
        kind: Kind of the collective, or P2P for a message.
        size: Number of ranks of the group; 2 for a message.
        arrays: Makes new arrays.
    """
    leaves = cast("list[ArrayPlaceholder]", leaves_of(tree))
    shapes, dtypes = [result_shape(kind, leaf.shape, size) for leaf in leaves], [leaf.dtype for leaf in leaves]
    pack = Pack(
        indices=range(len(leaves)), shapes=shapes, dtypes=dtypes, rows=1, packed=arrays.empty((0,), np.dtype(np.uint8))
    )
    return make_unpacker(tree, [pack], arrays)


def arrays_of(tree: object) -> list[Array]:
    """Return the leaves of a tree as arrays. A leaf is an array, a number, or an object with memory for numpy.

    Raises:
        UsageError: If there is no leaf, or one is none of these.
    """
    leaves = [leaf if type(leaf) is np.ndarray else as_input_array(leaf) for leaf in leaves_of(tree)]
    if not leaves:
        raise UsageError("x: there is no array in it; expected an array, or lists and dicts of arrays")
    return leaves


def copy_tree(tree: object, arrays: Arrays) -> object:
    """Return a copy of a tree with copies of its arrays; futures and numbers stay as they are.

    Raises:
        UsageError: If a leaf is neither a future nor can become an array.
    """
    if isinstance(tree, _FORMS):
        return map_items(tree, lambda item: copy_tree(item, arrays))
    if isinstance(tree, Future):
        return tree
    array = as_input_array(tree)
    return tree if not _holds_arrays(tree) or arrays.shapes_only else arrays.copy(array)


def leaves_of(tree: object) -> list[object]:
    """Return the leaves of a tree in order; anything that is no dict, list or tuple is a leaf."""
    if not isinstance(tree, _FORMS):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    return [leaf for item in items for leaf in leaves_of(item)]


def replace_leaves(tree: object, leaves: Iterable[object]) -> object:
    """Return a copy of a tree with other leaves, in order; there must be at least as many as the tree has."""
    rest = iter(leaves)

    def fill(item: object) -> object:
        return map_items(item, fill) if isinstance(item, _FORMS) else next(rest)

    return fill(tree)


def map_items(tree: object, function: Callable[[object], object]) -> object:
    """Return a copy of a dict, list or tuple with `function` applied to each item; return anything else as it is."""
    if isinstance(tree, dict):
        return {key: function(item) for key, item in tree.items()}
    return sequence_like(tree, [function(item) for item in tree]) if isinstance(tree, (list, tuple)) else tree


def sequence_like(form: object, items: list[object]) -> object:
    """Return items in a list, tuple or named tuple, of the type that `form` has."""
    if isinstance(form, tuple) and hasattr(form, "_fields"):  # a named tuple is made from one argument for each field
        return cast("Callable[..., object]", type(form))(*items)
    return tuple(items) if isinstance(form, tuple) else items
