"""Arithmetic of a step of a program: copies or reduces data, in one piece or in several for worker threads."""

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


def make_pieces(
    step: Step, layout: BufferLayout, rank: int, incoming: Array, operand: Array, target: Array
) -> list[Callable[[], None]]:
    """Return functions that together do `apply_step`: one for the calling thread, or several for worker threads.

    A single function is returned if the step is small, or its data is in the right place already. Arguments: see
    `apply_step`.
    """
    weight = 1 if layout.reducer is None else layout.reducer.weight
    if (incoming.nbytes + target.nbytes) * weight <= INLINE_BYTES or _moves_nothing(step, layout, incoming, target):
        return [partial(apply_step, step, layout, rank, incoming, operand, target)]
    length = max(1, PIECE_BYTES // target.itemsize)
    parts = (slice(start, start + length) for start in range(0, target.size, length))
    return [partial(apply_step, step, layout, rank, incoming[part], operand[part], target[part]) for part in parts]


def _moves_nothing(step: Step, layout: BufferLayout, incoming: Array, target: Array) -> bool:
    """Whether a step is a copy from some memory to the same memory, in the same dtype."""
    divides = layout.reducer is not None and layout.reducer.divides
    if step.op is Op.ADD or divides or incoming.dtype != target.dtype or incoming.size != target.size:
        return False
    return bool(incoming.__array_interface__["data"][0] == target.__array_interface__["data"][0])


def apply_step(step: Step, layout: BufferLayout, rank: int, incoming: Array, operand: Array, target: Array) -> None:
    """Copy data to the target of a step, or reduce data into the target. Pieces of the arrays may be passed.

    Args:
        step: The step.
        layout: Layout of the arrays, with the reducer.
        rank: Group rank that carries out the step.
        incoming: Received data, or the source of a local step.
        operand: The other operand of a reduction: the target itself, or the base of the step (see `Step.base`).
        target: Array for the result.
    """
    reducer = layout.reducer
    if step.op is Op.ADD:
        assert reducer is not None, "this is a bug in overlap: a row adds without a reducer"
        received, own = reducer.widen(incoming), reducer.widen(operand)
        low, high = (received, own) if step.peer < rank else (own, received)  # first operand: the lower rank's
        reducer.combine(low, high, out=target)
    elif reducer is not None and step.src.buffer == Buffer.SCRATCH and step.dst.buffer == Buffer.OUT:
        reducer.finalise(incoming, target, layout.contributions)  # all ranks have added to it
    else:
        np.copyto(target, incoming, casting="unsafe")
