"""Checks of the arguments of calls (arrays, roots, peers, pairs), and the memory that an operation uses."""

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
from ..errors import UsageError, shown
from .context import Arrays
from .memory.buffer_locks import BufferLocks
from .memory.foreign import as_input, as_output, changes
from .operation import CollectiveFuture, GroupLike
from .transfer import ANY_TREE, buffers_for, new_array
from .tree_operation import TreeOperation
from .trees import is_tree, message_of

if TYPE_CHECKING:
    from .message import Message

_ELEMENTWISE = (ALL_REDUCE, REDUCE, BROADCAST)
TAGS: int = 1 << 24
"""Number of tags of messages that programs may use."""
_INTEGERS = int, np.integer


def prepare(operation: CollectiveFuture[Any]) -> None:
    """Check the arguments and set `call` and `source`, the array to read.

    Raises:
        UsageError: For invalid arguments.
    """
    x, kind, out = operation.input, operation.kind, operation.out
    if x is None:
        operation.call = _receivers_call(operation)
        return
    if type(x) is not np.ndarray:
        if isinstance(x, (dict, list, tuple)) and is_tree(x):
            if kind is P2P:
                message = cast("Message[Any]", operation)
                message.tree_memory, operation.source, form = message_of(x, operation.context.arrays)
                dtype, shape = operation.source.dtype, operation.source.shape
                operation.call = call(kind.text, None, dtype, shape, 2, 0, (), (), False, False, None, form)
                return
            if isinstance(operation, TreeOperation):
                operation.pack(x, _call_with)
                return
        operation.input_changed = changes(x)
        x = as_input(x)
    operation.call = requested = call(kind.text, None, x.dtype, x.shape, 2) if kind is P2P else _call_with(operation, x)
    operation.source = x if x.flags.carray else _readable(operation, x)
    if out is not None and (out is not x or kind not in _ELEMENTWISE):
        if out.shape != requested.result_shape or out.dtype is not requested.dtype or requested.counts:
            check_result(out, requested, operation.member.rank)
        check_overlap(requested, operation.member.rank, out, x)


def prepare_late(operation: CollectiveFuture[Any]) -> None:
    """Prepare an operation with the value of the future that was its input.

    Raises:
        UsageError: As `prepare`, with the line of the call and the value of the future.
    """
    x, kind = operation.input, operation.kind
    try:
        if x is None and kind is P2P:
            raise UsageError("x: send needs an array or a tree of arrays, got None")
        if x is None and kind.traits.rooted:
            check_root(operation.member, operation)
        prepare(operation)
    except UsageError as error:
        which = f"{operation.name} at {operation.call_site}"
        raise UsageError(f"{error} (the future that {which} was given has become {describe_value(x)})") from error


def describe_value(x: object) -> str:
    """Return a value as messages have it: the outline of an array or a tree, else its type."""
    if isinstance(x, np.ndarray):
        return f"{x.dtype} {x.shape}"
    if x is None or not isinstance(x, (dict, list, tuple)):
        return "None" if x is None else f"an object of type {type(x).__name__}"
    return f"a {type(x).__name__} of {len(x)}"


def _call_with(operation: CollectiveFuture[Any], x: Array, form: str = "") -> Call:
    """Return the call of a rank that passes an array to a collective, or a tree of some form that is packed in it."""
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
        raise UsageError(f"op: {shown(given.op)} is unknown; known are {', '.join(OPS)}") from error


def _receivers_call(operation: CollectiveFuture[Any]) -> Call:
    """Return the call of a rank that passes no array."""
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


def call_by_out(operation: CollectiveFuture[Any]) -> Call | None:
    """Return the call of a broadcast or scatter that only receives, if `out` has dtype and shape."""
    out = operation.out
    if not isinstance(out, np.ndarray) or out.ndim == 0:
        return None
    shape, size, known = out.shape, operation.member.size, operation.call
    shape = (shape[0] * size, *shape[1:]) if operation.kind is SCATTER else shape
    return call(
        known.kind.text, None, out.dtype, shape, size, known.root, known.pairs, (), known.exact, known.shared,
        known.algorithm,
    )  # fmt: skip


def _readable(operation: CollectiveFuture[Any], x: Array) -> Array:
    """Return a C-contiguous array with the data of one that is read-only or not contiguous.

    Raises:
        UsageError: If an operation that has not ended still writes it.
    """
    if not x.flags.writeable and x is not operation.out:
        check_unwritten(operation.context.locks, (x,), "x")
    arrays = operation.context.arrays
    return x if x.flags.c_contiguous or arrays.shapes_only else arrays.copy(x)


def take_output(operation: CollectiveFuture[Any]) -> None:
    """Find the array behind `out`, which the result is written to.

    Raises:
        UsageError: If `out` has no memory of an array.
    """
    out = operation.out
    if isinstance(out, np.ndarray) and operation.context.arrays.shapes_only:
        return  # there is nothing to write
    target = as_output(out, "out" if operation.kind is not P2P else "like")
    if target is not out:
        operation.caller_out, operation.out = out, target
        if operation.input is out:
            operation.input, operation.input_changed = target, changes(out)


# -- arrays ----------------------------------------------------------------------------------------------------------


def check_result(out: Array | None, pattern: Call, rank: int) -> None:
    """Compare `out` with the result of a call on a group rank, if the call has a dtype.

    Raises:
        UsageError: With both, if they differ.
    """
    if out is None or pattern.dtype is None:
        return
    shape = pattern.result_at(rank)
    if out.shape != shape or out.dtype != pattern.dtype:
        raise UsageError(f"out: expected {pattern.dtype} {shape}, got {out.dtype} {out.shape}")


def check_unwritten(locks: BufferLocks, arrays: Iterable[Array], reader: str) -> None:
    """Refuse to read an array that another operation writes, as the data could be any mixture of old and new.

    Raises:
        UsageError: If one of the arrays is the `out` of an operation that has not ended.
    """
    for array in arrays:
        if not array.flags.writeable and locks.written(array):
            raise UsageError(f"{reader}: an operation that has not ended still writes this array; pass its future")


def check_overlap(call: Call, rank: int, out: Array, x: Array) -> None:
    """Refuse an `out` that is written to before all of `x` has been read.

    Raises:
        UsageError: If they share memory in such a way.
    """
    source, dest = x if x.base is None else x.base, out if out.base is None else out.base
    if source is not dest and type(source) is type(dest) is np.ndarray and source.flags.owndata and dest.flags.owndata:
        return  # as most; a comparison of their bounds takes three times as long
    if np.may_share_memory(out, x) and not _in_place(call, rank, out, x):
        kind = call.kind.text
        raise UsageError(f"out: overlaps x, which {kind} still reads; pass x itself or an array of its own")


def _in_place(call: Call, rank: int, out: Array, x: Array) -> bool:
    """Whether `x` lies in `out` at the place that the operation writes only after it has read."""
    traits = call.kind.traits
    if not x.flags.c_contiguous or traits.scatters or call.kind is PERMUTE:
        return x.nbytes == 0
    offset = x.__array_interface__["data"][0] - out.__array_interface__["data"][0]
    if call.counts:
        before = sum(call.counts[:rank])
        return bool(offset == before * (x.nbytes // x.shape[0]))  # nothing shares memory with an empty array
    return bool(offset == (rank * x.nbytes if traits.gathers else 0))


def receive_like(like: object, arrays: Arrays) -> object:
    """Return the target of a receive: an array, a new one of (shape, dtype), or the buffers of a tree or any message.

    Raises:
        UsageError: If it is none of these.
    """
    if isinstance(like, tuple):
        try:
            like = new_array(like, arrays)
        except (TypeError, ValueError) as error:
            if is_tree(like) or any(isinstance(item, (dict, list, tuple)) for item in like[-1:]):
                return buffers_for(like, arrays)
            raise UsageError(f"like: expected an array or (shape, dtype), got {like!r}: {error}") from error
    elif type(like) is not np.ndarray:
        if like is None:
            return ANY_TREE
        if isinstance(like, (dict, list)):
            return buffers_for(like, arrays)
        if isinstance(like, _INTEGERS):
            raise UsageError(f"like: expected an array or (shape, dtype), got {like}; a source is src={like}")
    check_dtype((like if isinstance(like, np.ndarray) else as_output(like, "like")).dtype, "like")
    return like


# -- ranks -----------------------------------------------------------------------------------------------------------


def check_rank(group: GroupLike, argument: str, rank: int | None) -> None:
    """Raise `UsageError` if a number is no rank of the group."""
    if not isinstance(rank, _INTEGERS) or not 0 <= rank < group.size:
        raise UsageError(
            f"{argument}: expected 0 to {group.size - 1}, a rank of group '{group.name}', got {shown(rank)}"
        )


def check_peer(group: GroupLike, argument: str, peer: int | None, tag: int, tags: int = TAGS) -> None:
    """Raise `UsageError` if a peer is no rank of the group, or a tag is out of range."""
    check_rank(group, argument, peer)
    if not isinstance(tag, int) or not 0 <= tag < tags:
        raise UsageError(f"tag: must be from 0 to {tags - 1}, got {shown(tag)}")


def check_root(group: GroupLike, operation: CollectiveFuture[Any]) -> None:
    """Raise `UsageError` if there is no such root, or an array is missing or given where none is used."""
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
    """Check `exact`, `shared` and `algorithm`, which few calls pass."""
    given = operation.arguments
    for option, value in (("exact", given.exact), ("shared", given.shared)):
        if type(value) is not bool:
            raise UsageError(f"{option}: expected True or False, got {shown(value)}")
    if given.shared and operation.out is not None:
        raise UsageError("out: a result that ranks share lies in memory of its own; pass out= or shared=True")
    if given.algorithm is not None:
        from ..cost.select import check_algorithm_for  # and with it the generators

        check_algorithm_for(operation.op, given.algorithm, group.size, exact=given.exact)
        if group.size == 1:  # a rank that is alone needs none
            operation.arguments = given._replace(algorithm=None)


def check_pairs(group: GroupLike, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return pairs of ranks as numbers; raise `UsageError` unless each rank sends once at most, and receives once."""
    try:
        checked = tuple((src, dst) for src, dst in pairs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"pairs: expected (source, destination) pairs of ranks, got {shown(pairs)}") from error
    for end, role in enumerate(("source", "destination")):
        ranks = [pair[end] for pair in checked]
        for rank in ranks:
            check_rank(group, "pairs", rank)
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise UsageError(f"pairs: rank {twice} is a {role} twice in {list(checked)}; each may be one once")
    return tuple((int(src), int(dst)) for src, dst in checked)


def check_one_a_rank(group: GroupLike, argument: str, values: object) -> None:
    """Raise `UsageError` if values are not a list or tuple of one for each rank."""
    if not isinstance(values, (list, tuple)) or len(values) != group.size:
        got = f"{len(values)} of them" if isinstance(values, (list, tuple)) else type(values).__name__
        raise UsageError(f"{argument}: expected a list of {group.size} objects, one a rank, got {got}")
