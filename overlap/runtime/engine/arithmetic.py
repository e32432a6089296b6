"""Arithmetic of a step of a program: moves or reductions of incoming data, at once or in pieces for worker threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...collectives.program import Step
from ...collectives.reduce import Array
from ...collectives.schedule import Buffer, Op
from ...defaults import INLINE_BYTES
from .layout import BufferLayout
from .workers import PIECE_BYTES


def pieces_of(
    step: Step, layout: BufferLayout, rank: int, incoming: Array, operand: Array, target: Array
) -> list[Callable[[], None]]:
    """Return functions that `apply` a step: one for this thread, or several for worker threads."""
    weight = 1 if layout.reducer is None else layout.reducer.weight
    if (incoming.nbytes + target.nbytes) * weight <= INLINE_BYTES or _is_there(step, layout, incoming, target):
        return [partial(apply, step, layout, rank, incoming, operand, target)]
    length = max(1, PIECE_BYTES // target.itemsize)
    parts = (slice(start, start + length) for start in range(0, target.size, length))
    return [partial(apply, step, layout, rank, incoming[part], operand[part], target[part]) for part in parts]


def _is_there(step: Step, layout: BufferLayout, incoming: Array, target: Array) -> bool:
    """Whether a move has nothing to do, because input and result share memory."""
    divides = layout.reducer is not None and layout.reducer.divides
    if step.op is Op.ADD or divides or incoming.dtype != target.dtype or incoming.size != target.size:
        return False
    return bool(incoming.__array_interface__["data"][0] == target.__array_interface__["data"][0])


def apply(step: Step, layout: BufferLayout, rank: int, incoming: Array, operand: Array, target: Array) -> None:
    """Move or add incoming data, or a part of it, to the target of a step.

    Args:
        incoming: Received data, or the source of a local step.
        operand: The other operand of an addition: the target itself, or the base of the step.
    """
    reducer = layout.reducer
    if step.op is Op.ADD:
        assert reducer is not None, "this is a bug in overlap: a row adds without a reducer"
        received, own = reducer.widen(incoming), reducer.widen(operand)
        low, high = (received, own) if step.peer < rank else (own, received)
        reducer.combine(low, high, out=target)
    elif reducer is None or step.src.buffer != Buffer.SCRATCH or step.dst.buffer != Buffer.OUT:
        np.copyto(target, incoming, casting="unsafe")
    else:
        reducer.finalise(incoming, target, layout.contributions)
