"""Checks of sent data for NaN and infinity, before any reduction, for ``run(check="nan")``.

A rank with a NaN or an infinity in its input fails at once, and is named: after a reduction all ranks would have it,
and its origin would be unknown. Runs without the check have nothing of this.

An input that is written to while it is in flight fails as well: its digest is taken with the check, and compared at the
end of the operation. Locks catch most of such writes at once, but none through a view that was made before.
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

# Elements in one look: its arrays stay in the caches of a core, and 64 MiB of float32 take 12 ms, not 40.
_BLOCK = 1 << 15


def check_inputs(interceptor: Interceptor) -> Interceptor:
    """Let an interceptor check the inputs of operations once they exist, before it decides when they arrive."""
    interceptor.arrive = partial(_check_arrival, interceptor.arrive)  # type: ignore[method-assign]
    return interceptor


def _check_arrival(arrive: Callable[[Place, Any], None], place: Place, operation: Any) -> None:
    """Let the end of a rank arrive, or fail all ends if its data is not finite."""
    error = _finding(operation) if sends(operation) else None
    if error is None:
        _watch(operation)
        arrive(place, operation)
    elif isinstance(place, Port):
        place.communicator.withdraw(operation, Failure(error))
    else:
        place.withdraw(operation, Failure(error))


def sends(operation: Operation) -> bool:
    """Whether the input of a rank has data, and is sent."""
    position, kind = operation.port.position, operation.kind
    if operation.source is None or operation.context.arrays.shapes_only:
        return False
    if kind in (Collective.BROADCAST, Collective.SCATTER):
        return position == operation.call.root
    return kind is not Collective.PERMUTE or position in {src for src, _ in operation.call.pairs}


def _watch(operation: Operation) -> None:
    """Let an operation fail if its input is written to from now on, except by its own result."""
    source, out = operation.source, operation.out
    if source is None or operation.input_changed is not None or operation.context.arrays.shapes_only:
        return
    if isinstance(out, np.ndarray) and np.may_share_memory(source, out):
        return
    before = _digest(source)
    operation.input_changed = lambda: _digest(source) != before


def _digest(array: Array) -> int:
    """Return a checksum of a C-contiguous array: 1 to 3 GB/s."""
    return crc32(array.reshape(-1).view(np.uint8).data)


def _finding(operation: Operation) -> NonFiniteError | None:
    """Return the error for a NaN or an infinity in the input of an operation, None without one."""
    source = operation.source
    assert source is not None, "this is a bug in overlap: a sender has no array"
    at = first_not_finite(source)
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


def first_not_finite(array: Array) -> int | None:
    """Return the flat index of the first NaN or infinity of a C-contiguous array of any type; None if all is finite."""
    flat = array.reshape(-1)
    dtype = flat.dtype
    if dtype.kind in "biu":
        return None
    marks = _marks(dtype)
    if marks is not None:
        flat = flat.view(np.uint8 if dtype.itemsize == 1 else np.uint16)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        bad = ~np.isfinite(block) if marks is None else np.bitwise_and(block, marks[0]) == marks[1]
        if bad.any():
            return start + int(bad.argmax())
    return None


@cache
def _marks(dtype: np.dtype[np.generic]) -> tuple[np.generic, np.generic] | None:
    """Return the bits of a narrow type that mark NaN and infinity, and their values; None: check each element.

    That would take forty times as long for a bfloat16.
    """
    if dtype.itemsize > 2:
        return None
    patterns = np.arange(1 << (8 * dtype.itemsize), dtype=np.uint8 if dtype.itemsize == 1 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling values of bfloat16
        bad = patterns[~np.isfinite(patterns.view(dtype))]
    if not bad.size:
        return None
    common = ~np.bitwise_or.reduce(bad ^ bad[0])
    exact = np.array_equal(patterns[(patterns & common) == (bad[0] & common)], bad)
    return (common, bad[0] & common) if exact else None
