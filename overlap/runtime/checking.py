"""Checks of sent data for NaN and infinity, before any reduction, for ``run(check="nan")``.

A rank with a NaN or an infinity in its input fails at once, and the error names it: after a reduction all ranks would
have the value, and its origin would be unknown. Runs without the check pay nothing.

An operation also fails if its input is written to while it is in flight: a checksum of the input is compared at the
end. Locks catch most of such writes at once, but no write through a view that was made before the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np

from ..collectives.kinds import Collective
from ..collectives.reduce import Array
from ..errors import NonFiniteError
from .failure import Failure
from .interceptor import Interceptor, Place
from .operation import Operation
from .port import Port

# Elements that are checked at a time: temporary arrays stay in the caches, and 64 MiB of float32 take 12 ms, not 40.
_BLOCK = 1 << 15


def install_input_checks(interceptor: Interceptor) -> Interceptor:
    """Change `arrive` of an interceptor so that it checks the input of an operation first; return the interceptor."""
    interceptor.arrive = partial(_arrive_if_finite, interceptor.arrive)  # type: ignore[method-assign]
    return interceptor


def _arrive_if_finite(arrive: Callable[[Place, Any], None], place: Place, operation: Any) -> None:
    """Let an operation arrive by the replaced method `arrive`, or fail it on all ranks if its data is not finite."""
    error = _not_finite_input_error(operation) if sends_data(operation) else None
    if error is None:
        _watch_for_writes(operation)
        arrive(place, operation)
    elif isinstance(place, Port):
        place.communicator.fail_and_report(operation, Failure(error))
    else:
        place.fail_and_report(operation, Failure(error))


def sends_data(operation: Operation) -> bool:
    """Whether this rank sends the data of its input; in a broadcast only the root does."""
    position, kind = operation.port.position, operation.kind
    if operation.source is None or operation.context.arrays.shapes_only:
        return False
    if kind in (Collective.BROADCAST, Collective.SCATTER):
        return position == operation.call.root
    return kind is not Collective.PERMUTE or position in {src for src, _ in operation.call.pairs}


def _watch_for_writes(operation: Operation) -> None:
    """Let an operation fail if its input is written to from now on. An input that is also the result is not watched."""
    source, out = operation.source, operation.out
    if source is None or operation.input_changed is not None or operation.context.arrays.shapes_only:
        return  # no data, or an object that counts changes of its data itself
    if isinstance(out, np.ndarray) and np.may_share_memory(source, out):
        return
    before = _digest(source)
    operation.input_changed = lambda: _digest(source) != before


def _digest(array: Array) -> int:
    """Return a checksum of a C-contiguous array, at 1 to 3 GB/s."""
    return crc32(array.reshape(-1).view(np.uint8).data)


def _not_finite_input_error(operation: Operation) -> NonFiniteError | None:
    """Return the error for a NaN or an infinity in the input of an operation, or None."""
    source = operation.source
    assert source is not None, "this is a bug in overlap: a sender has no array"
    at = first_not_finite_index(source)
    if at is None:
        return None
    index = tuple(map(int, np.unravel_index(at, source.shape)))
    return NonFiniteError(
        rank=operation.context.rank,
        operation=operation.label,
        seq=operation.seq,
        step=operation.step,
        call_site=operation.call_site,
        array=f"{source.dtype.name} {source.shape}",
        index=index,
        value=str(source[index]),
        count=int(source.size - np.count_nonzero(np.isfinite(source))),
    )


def first_not_finite_index(array: Array) -> int | None:
    """Return the flat index of the first NaN or infinity of a C-contiguous array, or None if all is finite."""
    flat = array.reshape(-1)
    dtype = flat.dtype
    if dtype.kind in "biu":
        return None
    marks = _not_finite_bits(dtype)
    if marks is not None:
        flat = flat.view(np.uint8 if dtype.itemsize == 1 else np.uint16)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        # `marks` is (mask, value): an element is bad if its bits under the mask have this value
        bad = ~np.isfinite(block) if marks is None else np.bitwise_and(block, marks[0]) == marks[1]
        if bad.any():
            return start + int(bad.argmax())
    return None


@cache
def _not_finite_bits(dtype: np.dtype[np.generic]) -> tuple[np.generic, np.generic] | None:
    """Return (mask, value): an element of this dtype is NaN or infinite if its bits & mask == value.

    None for a dtype of more than two bytes, or without such bits. `np.isfinite` on a bfloat16 takes forty times as
    long.
    """
    if dtype.itemsize > 2:
        return None
    patterns = np.arange(1 << (8 * dtype.itemsize), dtype=np.uint8 if dtype.itemsize == 1 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling values of bfloat16
        bad = patterns[~np.isfinite(patterns.view(dtype))]  # all bit patterns that are NaN or infinite
    if not bad.size:
        return None
    # the bits that are the same in all bad patterns; they serve as the mask if no good pattern has them
    common = ~np.bitwise_or.reduce(bad ^ bad[0])
    exact = np.array_equal(patterns[(patterns & common) == (bad[0] & common)], bad)
    return (common, bad[0] & common) if exact else None
