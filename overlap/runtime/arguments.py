"""The arrays that a caller passes: whether they fit what is asked for, and each other."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

import numpy as np

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..collectives.reduce import Array, check_dtype
from ..errors import UsageError
from .context import Arrays
from .memory.buffer_locks import BufferLocks
from .memory.foreign import as_output


def check_result(out: Array | None, pattern: Call, rank: int) -> None:
    """Compare `out` with the result that `pattern` makes on a group rank, if it says what that is.

    Raises:
        UsageError: Naming both.
    """
    if out is None or pattern.dtype is None:
        return
    shape = pattern.result_at(rank)
    if out.shape != shape or out.dtype != pattern.dtype:
        raise UsageError(f"out: expected {pattern.dtype} {shape}, got {out.dtype} {out.shape}")


def check_unwritten(locks: BufferLocks, arrays: Iterable[Array], reader: str) -> None:
    """Refuse to read what another operation is writing: whoever reads could get any mixture of old and new.

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
    theirs, mine = x if x.base is None else x.base, out if out.base is None else out.base
    if theirs is not mine and type(theirs) is type(mine) is np.ndarray and theirs.flags.owndata and mine.flags.owndata:
        return  # as most: to ask for their bounds takes three times as long
    if np.may_share_memory(out, x) and not _in_place(call, rank, out, x):
        kind = call.kind.text
        raise UsageError(f"out: overlaps x, which {kind} still reads; pass x itself or an array of its own")


def _in_place(call: Call, rank: int, out: Array, x: Array) -> bool:
    """Whether `x` lies in `out` just where the operation writes only after it has read."""
    traits = call.kind.traits
    if not x.flags.c_contiguous or traits.scatters or call.kind is Collective.PERMUTE:
        return x.nbytes == 0
    offset = x.__array_interface__["data"][0] - out.__array_interface__["data"][0]
    if call.counts:
        before = sum(call.counts[:rank])
        return bool(offset == before * (x.nbytes // x.shape[0]))  # nothing shares memory with an empty array
    return bool(offset == (rank * x.nbytes if traits.gathers else 0))


def receive_like(like: object, arrays: Arrays) -> object:
    """Return what a receive fills: the one given, or a new array of (shape, dtype)."""
    if isinstance(like, tuple):
        try:
            shape, dtype = like
            like = arrays.empty(tuple(map(index, (shape,) if isinstance(shape, int) else shape)), np.dtype(dtype))
        except (TypeError, ValueError) as error:
            raise UsageError(f"like: expected an array or (shape, dtype), got {like!r}: {error}") from error
    check_dtype((like if isinstance(like, np.ndarray) else as_output(like, "like")).dtype, "like")
    return like
