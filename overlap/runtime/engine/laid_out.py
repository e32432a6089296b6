"""A program laid out on arrays: all that is the same in every call of one collective, worked out once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ...collectives.program import Extent, Kind, Program, Step
from ...collectives.reduce import Array
from ...collectives.schedule import Op
from .cc_core import AHEAD, Buffers

__all__ = ["LaidOut", "LaidStep", "collisions", "lay_out"]

_Range: TypeAlias = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(slots=True, eq=False, kw_only=True)
class LaidStep:
    """One step, with all that follows from the layout of the arrays.

    Attributes:
        step: what it is.
        sends: whether it is a SEND.
        receives: whether it is a RECV; else it is a LOCAL step, or sends.
        peer: world rank of the other end.
        channel: FIFO lane.
        waits: as in `Step`.
        source: where what it sends, moves or adds lies; of a receive, at the other end.
        target: where it goes, at the receiving end.
        lands: whether what a receive brings goes straight to its place.
        message_bytes: length of its message.
        collides: positions before it in its queue, of steps that reduce or copy what it touches; None: not known yet.
    """

    step: Step
    sends: bool
    receives: bool
    peer: int
    channel: int
    waits: tuple[tuple[int, int], ...]
    source: _Range
    target: _Range
    lands: bool
    message_bytes: int
    collides: tuple[int, ...] | None = field(default=None)


LaidOut: TypeAlias = tuple[tuple[LaidStep, ...], ...]
"""The queues of a program, see `Program.queues`."""


def lay_out(program: Program, buffers: Buffers, members: Sequence[int]) -> LaidOut:
    """Lay out a program on arrays; whatever has other arrays of the same lengths and dtypes may use it, too.

    Args:
        program: One rank's.
        buffers: The arrays.
        members: World ranks by group rank.
    """
    return tuple(tuple(_laid(step, buffers, members) for step in queue) for queue in program.queues)


def _laid(step: Step, buffers: Buffers, members: Sequence[int]) -> LaidStep:
    sends, receives = step.kind is Kind.SEND, step.kind is Kind.RECV
    sent, kept = buffers.arrays[step.src.buffer].dtype, buffers.arrays[step.dst.buffer].dtype
    source = _range(step.src, buffers) if step.kind is not Kind.RECV else (0, 0, 0)
    target = _range(step.dst, buffers) if step.kind is not Kind.SEND else (0, 0, 0)
    length = source[2] - source[1] if sends else target[2] - target[1]
    return LaidStep(
        step=step,
        sends=sends,
        receives=receives,
        peer=members[step.peer],
        channel=step.channel,
        waits=step.waits,
        source=source,
        target=target,
        lands=receives and step.op is Op.MOVE and sent == kept,
        message_bytes=length * sent.itemsize,
    )


def _range(extent: Extent, buffers: Buffers) -> _Range:
    start, stop = buffers.bounds(extent)
    return int(extent.buffer), start, stop


def collisions(queue: Sequence[LaidStep], at: int, buffers: Buffers) -> tuple[int, ...]:
    """Return which of the last steps before one reduce or copy memory that it touches."""
    mine = _touched(queue[at], buffers)
    before = ((other, queue[other]) for other in range(max(0, at - AHEAD), at))
    return tuple(
        other
        for other, laid in before
        if not laid.lands
        and any(np.may_share_memory(one, theirs) for theirs in _touched(laid, buffers) for one in mine)
    )


def _touched(laid: LaidStep, buffers: Buffers) -> list[Array]:
    """Return the memory of this rank that a step reads or writes."""
    step = laid.step
    theirs = step.src if step.kind is Kind.LOCAL else None
    return [buffers.view(extent) for extent in (step.dst, step.base, theirs) if extent is not None]
