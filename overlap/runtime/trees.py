"""Trees of arrays (lists, tuples, dicts) in one call: their arrays travel as one, and come back as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np

from ..collectives.kinds import Collective, Shape, check_input, result_shape
from ..collectives.reduce import Array
from ..errors import OverlapError, UsageError
from .context import Arrays
from .forms import Absent, parse_form, text_of
from .future import Future
from .memory.foreign import as_input

_FORMS = (list, tuple, dict)
_LENGTH_BYTES = 8  # length of a form, before it in a message
_ALIGNED_BYTES = 16  # alignment of the arrays in a message: that of the widest dtype


def is_tree(x: object) -> bool:
    """Whether it is a dict, or a list or tuple that holds arrays at any depth; numbers in lists are one array."""
    if isinstance(x, dict):
        return True
    return isinstance(x, (list, tuple)) and any(map(_holds_arrays, x))


def _holds_arrays(item: object) -> bool:
    """Whether an item is an array, a future, or a tree with one."""
    if isinstance(item, _FORMS):
        return is_tree(item)
    array = isinstance(item, (np.ndarray, Future)) or hasattr(item, "__array__") or hasattr(item, "__dlpack__")
    return array and not isinstance(item, np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Arrays of one tree that travel together."""

    indices: Sequence[int]  # Indices of the arrays among the leaves of the tree
    shapes: Sequence[Shape]  # Shapes of their results
    dtypes: Sequence[np.dtype[np.generic]]  # Their dtypes
    rows: int  # Blocks of the packed result, each of which holds a block of every array
    packed: Array  # The array that travels

    def results(self, packed: Array | None, arrays: Arrays) -> Iterator[tuple[int, Array | None]]:
        """Yield the index and the value of each array in a packed result; None where this rank gets none."""
        table = None if packed is None or arrays.shapes_only else packed.reshape(self.rows, -1)
        begin = 0
        for index, shape, dtype in zip(self.indices, self.shapes, self.dtypes, strict=True):
            if packed is None:
                yield index, None
            elif table is None:
                yield index, arrays.empty(shape, dtype)
            else:
                width = prod(shape) * dtype.itemsize // table.dtype.itemsize // self.rows
                yield index, np.ascontiguousarray(table[:, begin : begin + width]).view(dtype).reshape(shape)
                begin += width


def packs(kind: Collective, leaves: Sequence[Array], size: int, arrays: Arrays) -> list[Pack]:
    """Return the arrays of a tree packed, as copies: all together if they are only moved, by dtype if they are reduced.

    Raises:
        UsageError: If an array cannot be cut into the blocks of the ranks.
    """
    for leaf in leaves:
        check_input(kind, leaf.shape, size)
    alike: dict[object, list[int]] = {}
    for index, leaf in enumerate(leaves):
        alike.setdefault(leaf.dtype if kind.traits.reduces else None, []).append(index)
    return [
        _pack_arrays(kind, indices, [leaves[index] for index in indices], size, arrays) for indices in alike.values()
    ]


def packed_type(leaves: Sequence[Array | Absent]) -> tuple[np.dtype[np.generic], int]:
    """Return the dtype of arrays packed in one, which is that of all or bytes, and its number of elements."""
    dtypes = {leaf.dtype for leaf in leaves}
    dtype: np.dtype[np.generic] = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
    return dtype, sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // dtype.itemsize


def _pack_arrays(kind: Collective, indices: list[int], leaves: list[Array], size: int, arrays: Arrays) -> Pack:
    """Return the arrays of one dtype as a single one, block after block of each rank."""
    blocks, (dtype, elements) = size if kind.traits.scatters else 1, packed_type(leaves)
    width = elements // blocks
    packed = arrays.empty((blocks * width,), dtype)
    if not arrays.shapes_only:
        _copy_into(packed.reshape(blocks, width), leaves)
    return Pack(
        indices=indices,
        shapes=[result_shape(kind, leaf.shape, size) for leaf in leaves],
        dtypes=[leaf.dtype for leaf in leaves],
        rows=size if kind.traits.gathers else 1,
        packed=packed,
    )


def _copy_into(table: Array, leaves: Sequence[Array]) -> None:
    """Copy arrays into the rows of a table, side by side: block r of each array into row r."""
    begin = 0
    for leaf in leaves:
        flat = np.ascontiguousarray(leaf).reshape(table.shape[0], -1).view(table.dtype)
        table[:, begin : begin + flat.shape[1]] = flat
        begin += flat.shape[1]


def message_of(tree: object, arrays: Arrays) -> tuple[Array, Array, str]:
    """Return the message with the arrays of a tree, as `make_message` does, and the form of the tree.

    Raises:
        UsageError: If it is empty, or cannot travel.
    """
    leaves = arrays_of(tree)
    form = text_of(tree, leaves)
    message, data = make_message(form, leaves, arrays)
    if not arrays.shapes_only:
        _copy_into(data.reshape(1, -1), leaves)
    return message, data, form


def make_message(form: str, leaves: Sequence[Array], arrays: Arrays) -> tuple[Array, Array]:
    """Return memory for the message of a tree, which begins with the form of the tree, and its part for the arrays.

    The form has its length before it, and zeros after it up to the alignment of the arrays.
    """
    dtype, elements = packed_type(leaves)
    if arrays.shapes_only:
        data = arrays.empty((elements,), dtype)
        return data, data
    text = form.encode()
    begin = _data_offset(len(text))
    message = arrays.empty((begin + elements * dtype.itemsize,), np.dtype(np.uint8))
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    message[:begin] = np.frombuffer(head.ljust(begin, b"\0"), np.uint8)
    return message, message[begin:].view(dtype)


def read_message(message: Array) -> tuple[str, Array]:
    """Return the form of a tree in a message, and the memory of the arrays, as bytes."""
    length = int.from_bytes(message[:_LENGTH_BYTES].tobytes(), "little")
    text = message[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
    return text.decode(errors="replace"), message[_data_offset(length) :]


def _data_offset(form_bytes: int) -> int:
    """Return the offset of the arrays in the message of a tree."""
    return -(-(_LENGTH_BYTES + form_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES


def make_unpacker(tree: object, packed: Sequence[Pack], arrays: Arrays) -> Callable[[list[Any]], object]:
    """Return a function that makes a tree of results, in the form of a tree, from packed results."""

    form = _form(tree)

    def make(results: list[Any]) -> object:
        values: dict[int, Array | None] = {}
        for pack, result in zip(packed, results, strict=True):
            values.update(pack.results(result, arrays))
        if all(value is None for value in values.values()):
            return None
        return fill_tree(form, [value for _, value in sorted(values.items())])

    return make


def unpacked_as(kind: Collective, form: str, size: int, arrays: Arrays) -> Callable[[list[Any]], object]:
    """Return a function that makes a tree of the result on a rank that has passed none, from the form of the root's
    tree.

    Raises:
        UsageError: If the form is not known: the tree is too large, or has keys of classes that do not travel.
    """
    try:
        tree = parse_form(form)
    except OverlapError as error:
        raise UsageError(
            "x: the form of the root's tree is too large for a message, or has keys other than texts, integers and "
            "tuples of these; pass a tree of that form on all ranks"
        ) from error
    return unpacker_of(tree, kind, size, arrays)


def unpacker_of(tree: object, kind: Collective, size: int, arrays: Arrays) -> Callable[[list[Any]], object]:
    """Return a function that makes a tree of one packed result; `tree` has an `Absent` for each input."""
    leaves = cast("list[Absent]", leaves_of(tree))
    shapes, dtypes = [result_shape(kind, leaf.shape, size) for leaf in leaves], [leaf.dtype for leaf in leaves]
    pack = Pack(
        indices=range(len(leaves)), shapes=shapes, dtypes=dtypes, rows=1, packed=arrays.empty((0,), np.dtype(np.uint8))
    )
    return make_unpacker(tree, [pack], arrays)


def arrays_of(tree: object) -> list[Array]:
    """Return the leaves of a tree as arrays; each is an array, exports its memory, or is a number.

    Raises:
        UsageError: If there is none, or one is no array.
    """
    leaves = [leaf if type(leaf) is np.ndarray else as_input(leaf) for leaf in _leaves(tree)]
    if not leaves:
        raise UsageError("x: there is no array in it; expected an array, or lists and dicts of arrays")
    return leaves


def copy_tree(tree: object, arrays: Arrays) -> object:
    """Return a tree with copies of its arrays; its futures and numbers as they are.

    Raises:
        UsageError: If a leaf can be no array.
    """
    if isinstance(tree, _FORMS):
        return map_items(tree, lambda item: copy_tree(item, arrays))
    if isinstance(tree, Future):
        return tree
    array = as_input(tree)
    return tree if not _holds_arrays(tree) or arrays.shapes_only else arrays.copy(array)


def leaves_of(tree: object) -> list[object]:
    """Return the leaves of a tree, in its order."""
    return list(_leaves(tree))


def fill_tree(tree: object, leaves: Sequence[object]) -> object:
    """Return a tree of the form of another, with new leaves."""
    rest = iter(leaves)

    def fill(item: object) -> object:
        return map_items(item, fill) if isinstance(item, _FORMS) else next(rest)

    return fill(tree)


def _leaves(tree: object) -> Iterator[object]:
    """Yield the leaves of a tree in order."""
    if not isinstance(tree, _FORMS):
        yield tree
        return
    for item in tree.values() if isinstance(tree, dict) else tree:
        yield from _leaves(item)


def map_items(tree: object, function: Callable[[object], object]) -> object:
    """Return a dict, list or tuple with `function` applied to its items; anything else as it is."""
    if isinstance(tree, dict):
        return {key: function(item) for key, item in tree.items()}
    return sequence_like(tree, [function(item) for item in tree]) if isinstance(tree, (list, tuple)) else tree


def _form(tree: object) -> object:
    """Return the tree without its arrays, which need not live on for its form."""
    return map_items(tree, _form) if isinstance(tree, _FORMS) else None


def sequence_like(form: object, items: list[object]) -> object:
    """Return items as a list, tuple or named tuple, as `form` is one."""
    if isinstance(form, tuple) and hasattr(form, "_fields"):  # a named tuple takes its fields
        return cast("Callable[..., object]", type(form))(*items)
    return tuple(items) if isinstance(form, tuple) else items
