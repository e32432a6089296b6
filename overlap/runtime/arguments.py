"""Checks of the arguments of calls: arrays, roots, peers, pairs, options. They also set the arrays that are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..collectives.call import Call, call, uneven_call
from ..collectives.kinds import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    GATHER,
    P2P,
    PERMUTE,
    REDUCE,
    SCATTER,
    Counts,
    agreed_shape,
)
from ..collectives.reduce import OPS, Array, check_dtype
from ..errors import UsageError, argument_text
from .context import Arrays
from .memory.buffer_locks import BufferLocks
from .memory.foreign import as_input_array, as_output_array, make_change_check
from .operation import CollectiveFuture, GroupLike
from .transfer import ANY_TREE, make_receive_buffers, new_array
from .tree_operation import TreeOperation
from .trees import is_tree, make_tree_message

if TYPE_CHECKING:
    from .message import Message

_ELEMENTWISE = (ALL_REDUCE, REDUCE, BROADCAST)
TAGS: int = 1 << 24
"""Number of tags of messages that programs may use."""
_INTEGERS = int, np.integer


def prepare_input(operation: CollectiveFuture[Any]) -> None:
    """Check an operation's input, and set its `call` and `source`, the array to read.

    Without an input only `call` is set. The arrays of a tree are packed into a new array, which becomes `source`. For
    an object of a library that counts changes of its data, `input_changed` is set, too.

    Raises:
        UsageError: For invalid arguments.
    """
    x, kind, out = operation.input, operation.kind, operation.out
    if x is None:
        operation.call = _call_without_input(operation)
        return
    if type(x) is not np.ndarray:
        if isinstance(x, (dict, list, tuple)) and is_tree(x):
            if kind is P2P:
                message = cast("Message[Any]", operation)
                message.tree_memory, operation.source, form = make_tree_message(x, operation.context.arrays)
                dtype, shape = operation.source.dtype, operation.source.shape
                # no operator; two ends; no root, pairs, counts, exact, shared and algorithm
                operation.call = call(kind.text, None, dtype, shape, 2, 0, (), (), False, False, None, form)
                return
            if isinstance(operation, TreeOperation):
                operation.pack_tree(x, _call_with_array)
                return
        operation.input_changed = make_change_check(x)
        x = as_input_array(x)
    operation.call = requested = (
        call(kind.text, None, x.dtype, x.shape, 2) if kind is P2P else _call_with_array(operation, x)
    )
    operation.source = x if x.flags.carray else _contiguous_input(operation, x)
    # `x` as the `out` of an elementwise collective always fits. With counts the shape differs by rank: check it fully.
    if out is not None and (out is not x or kind not in _ELEMENTWISE):
        if out.shape != requested.result_shape or out.dtype is not requested.dtype or requested.counts:
            check_out_fits(out, requested, operation.member.rank)
        check_overlap(requested, operation.member.rank, out, x)


def prepare_late_input(operation: CollectiveFuture[Any]) -> None:
    """Prepare an operation whose input was a future, now that the value of the future is its input.

    Raises:
        UsageError: As in `prepare_input`; the text also has the line of the call and the value of the future.
    """
    x, kind = operation.input, operation.kind
    try:
        if x is None and kind is P2P:
            raise UsageError("x: send needs an array or a tree of arrays, got None")
        if x is None and kind.traits.rooted:
            check_root(operation.member, operation)
        prepare_input(operation)
    except UsageError as error:
        which = f"{operation.name} at {operation.call_site}"
        raise UsageError(f"{error} (the future that {which} was given has become {describe_value(x)})") from error


def describe_value(x: object) -> str:
    """Return a short text for messages, such as "float32 (4,)", "a list of 3", or "an object of type int"."""
    if x is None:
        return "None"
    if isinstance(x, np.ndarray):
        return f"{x.dtype} {x.shape}"
    if isinstance(x, (dict, list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return f"an object of type {type(x).__name__}"


def _call_with_array(operation: CollectiveFuture[Any], x: Array, form: str = "") -> Call:
    """Return the call with an array, or with the packed arrays of a tree of this form; `form` is "" without a tree.

    Only `op` is not checked before: `UsageError` is raised if it cannot be looked up, or if the array does not fit the
    counts.
    """
    kind, shape, size, given = operation.kind, x.shape, operation.member.size, operation.arguments
    counts: Counts = ()
    if given.counts is not None:
        shape, counts = agreed_shape(kind, shape, cast(Counts, given.counts), size, operation.member.rank)
    try:
        return (uneven_call if counts else call)(
            kind.text, given.op, x.dtype, shape, size, given.root, given.pairs, counts, given.exact, given.shared,
            given.algorithm, form,
        )  # fmt: skip
    except TypeError as error:  # not hashable
        raise UsageError(f"op: {argument_text(given.op)} is unknown; known are {', '.join(OPS)}") from error


def _call_without_input(operation: CollectiveFuture[Any]) -> Call:
    """Return the call of a rank that passes no input; raise `UsageError` if every rank needs one in this collective.

    The call of a receive has the dtype and shape of its target, if there is one. That of a collective has neither.
    """
    kind = operation.kind
    if kind is P2P:
        buffers = getattr(operation, "buffers", None)
        if buffers is not None:
            return cast(Call, buffers.call)
        out = operation.out
        return call(kind.text, None, None, None, 2) if out is None else call(kind.text, None, out.dtype, out.shape, 2)
    if not kind.traits.rooted and kind is not BARRIER:
        raise UsageError(f"x: {operation.op} needs an array, got None")
    given = operation.arguments
    return call(
        kind.text, None, None, None, operation.member.size, given.root, given.pairs, (), given.exact, given.shared,
        given.algorithm,
    )  # fmt: skip


def infer_call_from_out(operation: CollectiveFuture[Any]) -> Call | None:
    """Infer the call of a rank that only receives in a broadcast or scatter, from dtype and shape of its `out`.

    With an `out` of shape (3, 2), a scatter to 4 ranks has the shape (12, 2). Return None if `out` is no array, or has
    no dimensions.
    """
    out = operation.out
    if not isinstance(out, np.ndarray) or out.ndim == 0:
        return None
    shape, size, known = out.shape, operation.member.size, operation.call
    shape = (shape[0] * size, *shape[1:]) if operation.kind is SCATTER else shape
    return call(
        known.kind.text, None, out.dtype, shape, size, known.root, known.pairs, (), known.exact, known.shared,
        known.algorithm,
    )  # fmt: skip


def _contiguous_input(operation: CollectiveFuture[Any], x: Array) -> Array:
    """Return a read-only or non-contiguous input as a C-contiguous array, copied if needed.

    Raises `UsageError` if an operation that has not ended still writes it.
    """
    if not x.flags.writeable and x is not operation.out:
        check_no_pending_writes(operation.context.locks, (x,), "x")
    arrays = operation.context.arrays
    return x if x.flags.c_contiguous or arrays.shapes_only else arrays.copy(x)


def set_output_array(operation: CollectiveFuture[Any]) -> None:
    """Replace `operation.out`, an object of any library, by an array of numpy on the same memory.

    The caller's object is kept as `caller_out`, and is the result in the end. If it is also the input, the array
    becomes the input, too.

    Raises:
        UsageError: If `out` has no memory that numpy can use.
    """
    out = operation.out
    if isinstance(out, np.ndarray) and operation.context.arrays.shapes_only:
        return  # there is nothing to write
    target = as_output_array(out, "out" if operation.kind is not P2P else "like")
    if target is not out:
        operation.caller_out, operation.out = out, target
        if operation.input is out:
            operation.input, operation.input_changed = target, make_change_check(out)


# -- arrays ----------------------------------------------------------------------------------------------------------


def check_out_fits(out: Array | None, pattern: Call, rank: int) -> None:
    """Check that `out` has the dtype and shape of the result of a call.

    Args:
        out: The array; None: nothing is checked.
        pattern: The call; if it has no dtype, nothing is checked.
        rank: Group rank that gets the result.

    Raises:
        UsageError: If dtype or shape differs; the text has both.
    """
    if out is None or pattern.dtype is None:
        return
    shape = pattern.result_shape_at(rank)
    if out.shape != shape or out.dtype != pattern.dtype:
        raise UsageError(f"out: expected {pattern.dtype} {shape}, got {out.dtype} {out.shape}")


def check_no_pending_writes(locks: BufferLocks, arrays: Iterable[Array], reader: str) -> None:
    """Refuse to read arrays that another operation still writes: they could hold any mixture of old and new data.

    Args:
        locks: The locks of the world.
        arrays: The arrays to read.
        reader: Argument or operation that reads them, for the error.

    Raises:
        UsageError: If one of the arrays is the `out` of an operation that has not ended.
    """
    for array in arrays:
        if not array.flags.writeable and locks.is_written(array):
            raise UsageError(f"{reader}: an operation that has not ended still writes this array; pass its future")


def check_overlap(call: Call, rank: int, out: Array, x: Array) -> None:
    """Refuse an `out` that shares memory with `x` so that it is overwritten before all of `x` has been read.

    Args:
        call: The call of the operation.
        rank: Group rank that issues it.
        out: The array for the result.
        x: The input.

    Raises:
        UsageError: If `out` and `x` overlap in such a way.
    """
    source, dest = x if x.base is None else x.base, out if out.base is None else out.base
    if source is not dest and type(source) is type(dest) is np.ndarray and source.flags.owndata and dest.flags.owndata:
        return  # most pairs have different owners, and cannot overlap; to compare bounds takes three times as long
    if np.may_share_memory(out, x) and not _is_safe_in_place(call, rank, out, x):
        kind = call.kind.text
        raise UsageError(f"out: overlaps x, which {kind} still reads; pass x itself or an array of its own")


def _is_safe_in_place(call: Call, rank: int, out: Array, x: Array) -> bool:
    """Whether `x` lies in `out` at the one offset at which the operation reads it before it writes there.

    If the result is gathered, that is the block of this rank: with 4 ranks of 8 bytes each, rank 2 passes `x` at byte
    16 of `out`. Otherwise it is the beginning of `out`.
    """
    traits = call.kind.traits
    if not x.flags.c_contiguous or traits.scatters or call.kind is PERMUTE:
        return x.nbytes == 0  # no place is safe, but nothing of an empty array is overwritten
    offset = x.__array_interface__["data"][0] - out.__array_interface__["data"][0]
    if call.counts:
        before = sum(call.counts[:rank])
        return bool(offset == before * (x.nbytes // x.shape[0]))  # nothing shares memory with an empty array
    return bool(offset == (rank * x.nbytes if traits.gathers else 0))


def make_receive_target(like: object, arrays: Arrays) -> object:
    """Return the object that a receive fills, for the argument `like` of `recv`.

    Args:
        like: An array or another object with writable memory, a pair (shape, dtype), a tree of these, or None.
        arrays: Makes new arrays.

    Returns:
        The array or object itself; a new array for a pair (shape, dtype); a `ReceiveBuffers` for a tree; `ANY_TREE`
        for None: the receive accepts anything.

    Raises:
        UsageError: If `like` is none of these.
    """
    if isinstance(like, tuple):
        try:
            like = new_array(like, arrays)
        except (TypeError, ValueError) as error:
            # A tuple that is no pair (shape, dtype) is a tree if it holds arrays, or its last item is a tree or a pair.
            if is_tree(like) or any(isinstance(item, (dict, list, tuple)) for item in like[-1:]):
                return make_receive_buffers(like, arrays)
            raise UsageError(f"like: expected an array or (shape, dtype), got {like!r}: {error}") from error
    elif type(like) is not np.ndarray:
        if like is None:
            return ANY_TREE
        if isinstance(like, (dict, list)):
            return make_receive_buffers(like, arrays)
        if isinstance(like, _INTEGERS):
            raise UsageError(f"like: expected an array or (shape, dtype), got {like}; a source is src={like}")
    check_dtype((like if isinstance(like, np.ndarray) else as_output_array(like, "like")).dtype, "like")
    return like


# -- ranks -----------------------------------------------------------------------------------------------------------


def check_rank(group: GroupLike, argument: str, rank: int | None) -> None:
    """Raise `UsageError`, which names `argument`, unless `rank` is a rank of the group."""
    if not isinstance(rank, _INTEGERS) or not 0 <= rank < group.size:
        raise UsageError(
            f"{argument}: expected 0 to {group.size - 1}, a rank of group '{group.name}', got {argument_text(rank)}"
        )


def check_peer(group: GroupLike, argument: str, peer: int | None, tag: int, tags: int = TAGS) -> None:
    """Raise `UsageError` if a peer is no rank of the group, or a tag is out of range.

    Args:
        group: The group.
        argument: Name of the argument that has the peer, for the error.
        peer: Group rank of the other end.
        tag: Tag of the message.
        tags: Number of allowed tags: 0 to `tags` - 1.
    """
    check_rank(group, argument, peer)
    if not isinstance(tag, int) or not 0 <= tag < tags:
        raise UsageError(f"tag: must be an integer from 0 to {tags - 1}, got {argument_text(tag)}")


def check_root(group: GroupLike, operation: CollectiveFuture[Any]) -> None:
    """Check root, input and `out` of a rooted collective on the rank `group.rank`.

    Raises:
        UsageError: If the root is no rank of the group, the input is None on a rank that needs one, or `out` is passed
            on a rank without a result.
    """
    kind, root, rank = operation.kind, operation.arguments.root, group.rank
    check_rank(group, "root", root)
    only_root = kind is REDUCE or kind is GATHER
    if operation.input is None and (root == rank or only_root):
        raise UsageError(f"x: {kind.value} needs an array on rank {rank}, got None")
    if only_root and operation.out is not None and root != rank:
        raise UsageError(
            f"out: only the root {root} of {kind.value} gets a result, this is rank {rank}; pass out=None here"
        )


def check_options(group: GroupLike, operation: CollectiveFuture[Any]) -> None:
    """Check the options `exact`, `shared` and `algorithm`. In a group of one rank, `algorithm` is set to None.

    Raises:
        UsageError: If one of them is invalid, or does not fit the call.
    """
    given = operation.arguments
    for option, value in (("exact", given.exact), ("shared", given.shared)):
        if type(value) is not bool:
            raise UsageError(f"{option}: expected True or False, got {argument_text(value)}")
    if given.shared and operation.out is not None:
        raise UsageError("out: a result that ranks share lies in memory of its own; pass out= or shared=True")
    if given.algorithm is not None:
        from ..cost.select import check_algorithm_for  # imported late: it imports all generators of schedules

        check_algorithm_for(operation.op, given.algorithm, group.size, exact=given.exact)
        if group.size == 1:  # a rank that is alone needs none
            operation.arguments = given._replace(algorithm=None)


def check_pairs(group: GroupLike, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Check the pairs (source, destination) of a permute, and return them with plain integers as group ranks.

    Raises:
        UsageError: If an item is no pair of ranks of the group, or a rank is a source or a destination twice.
    """
    try:
        checked = tuple((src, dst) for src, dst in pairs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"pairs: expected (source, destination) pairs of ranks, got {argument_text(pairs)}") from error
    for end, role in enumerate(("source", "destination")):
        ranks = [pair[end] for pair in checked]
        for rank in ranks:
            check_rank(group, "pairs", rank)
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise UsageError(f"pairs: rank {twice} is a {role} twice in {list(checked)}; each may be one once")
    return tuple((int(src), int(dst)) for src, dst in checked)


def check_value_per_rank(group: GroupLike, argument: str, values: object) -> None:
    """Raise `UsageError`, which names `argument`, unless `values` is a list or tuple with one item for each rank."""
    if not isinstance(values, (list, tuple)) or len(values) != group.size:
        got = f"{len(values)} of them" if isinstance(values, (list, tuple)) else type(values).__name__
        raise UsageError(f"{argument}: expected a list of {group.size} objects, one a rank, got {got}")
