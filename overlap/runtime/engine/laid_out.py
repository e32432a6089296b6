"""A program laid out on arrays: all that is the same in every call of one collective, worked out once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...collectives.program import Extent, Kind, Program, Step
from ...collectives.reduce import Array
from ...collectives.schedule import Op
from .cc_core import AHEAD
from .program_memory import Buffers, Layout

__all__ = ["LaidOut", "LaidStep", "lay_out"]

_Range: TypeAlias = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidStep:
    """One step, with all that follows from the layout of the arrays.

    Attributes:
        step: what it is.
        sends: whether it is a SEND.
        receives: whether it is a RECV; else it is a LOCAL step, or sends.
        peer: world rank of the other end.
        channel: FIFO lane.
        waits: as in `Step`.
        source: where what a LOCAL step moves or adds lies.
        target: where it goes, and what a receive brings.
        base: what that is added to, unless it is the target.
        lands: whether what a receive brings goes straight to its place.
        message_buffer: which of the buffers it sends from, or receives into if it lands.
        message_part: which of its bytes.
        message_bytes: length of its message.
        collides: positions before it in its queue, of steps that reduce or copy what it touches, if it is a receive.
    """

    step: Step
    sends: bool
    receives: bool
    peer: int
    channel: int
    waits: tuple[tuple[int, int], ...]
    source: _Range
    target: _Range
    base: _Range | None
    lands: bool
    message_buffer: int
    message_part: slice
    message_bytes: int
    collides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A program laid out.

    Attributes:
        queues: see `Program.queues`.
        layout: of its memory.
        rank: group rank.
        steps: how many there are in all queues.
    """

    queues: tuple[tuple[LaidStep, ...], ...]
    layout: Layout
    rank: int
    steps: int


def lay_out(program: Program, buffers: Buffers, members: Sequence[int]) -> LaidOut:
    """Lay out a program on arrays; whatever has other arrays of the same lengths and dtypes may use it, too.

    Args:
        program: One rank's.
        buffers: The arrays.
        members: World ranks by group rank.
    """
    queues = tuple(tuple(_laid(queue, at, buffers, members) for at in range(len(queue))) for queue in program.queues)
    return LaidOut(queues, buffers.layout, program.rank, sum(map(len, queues)))


def _laid(queue: Sequence[Step], at: int, buffers: Buffers, members: Sequence[int]) -> LaidStep:
    step = queue[at]
    sends, receives = step.kind is Kind.SEND, step.kind is Kind.RECV
    source = (0, 0, 0) if receives else _range(step.src, buffers)
    target = (0, 0, 0) if sends else _range(step.dst, buffers)
    buffer, start, stop = source if sends else target
    itemsize = buffers.arrays[step.src.buffer].dtype.itemsize
    return LaidStep(
        step=step,
        sends=sends,
        receives=receives,
        peer=members[step.peer],
        channel=step.channel,
        waits=step.waits,
        source=source,
        target=target,
        base=None if step.base is None else _range(step.base, buffers),
        lands=_lands(step, buffers),
        message_buffer=buffer,
        message_part=slice(start * itemsize, stop * itemsize),
        message_bytes=(stop - start) * itemsize,
        collides=_collisions(queue, at, buffers) if receives else (),
    )


def _lands(step: Step, buffers: Buffers) -> bool:
    same = buffers.arrays[step.src.buffer].dtype == buffers.arrays[step.dst.buffer].dtype
    return step.kind is Kind.RECV and step.op is Op.MOVE and same


def _range(extent: Extent, buffers: Buffers) -> _Range:
    start, stop = buffers.layout.bounds(extent)
    return int(extent.buffer), start, stop


def _collisions(queue: Sequence[Step], at: int, buffers: Buffers) -> tuple[int, ...]:
    """Return which of the last steps before one reduce or copy memory that it touches."""
    mine = _touched(queue[at], buffers)
    return tuple(
        other
        for other in range(max(0, at - AHEAD), at)
        if not _lands(queue[other], buffers)
        and any(np.may_share_memory(one, theirs) for theirs in _touched(queue[other], buffers) for one in mine)
    )


def _touched(step: Step, buffers: Buffers) -> list[Array]:
    """Return the memory of this rank that a step reads or writes."""
    theirs = step.src if step.kind is Kind.LOCAL else None
    return [buffers.view(extent) for extent in (step.dst, step.base, theirs) if extent is not None]
