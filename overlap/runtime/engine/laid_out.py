"""A program laid out on arrays: all that is the same in every call of one collective, worked out once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...collectives.program import Extent, Kind, Program, Step
from ...collectives.schedule import Op
from .program_memory import Buffers, Layout
from .step_order import Numbers, collisions, followers, waits

__all__ = ["LaidOut", "LaidStep", "lay_out"]

_Range: TypeAlias = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidStep:
    """One step, with all that follows from the layout of the arrays.

    Attributes:
        step: what it is.
        number: which of all.
        queue: which one it is in.
        sends: whether it is a SEND.
        receives: whether it is a RECV; else it is a LOCAL step, or sends.
        works: whether it moves or adds what has come, or lies elsewhere; what else is received comes to its place.
        peer: world rank of the other end.
        channel: FIFO lane.
        source: where what a LOCAL step moves or adds lies.
        target: where it goes, and what a receive brings.
        base: what that is added to, unless it is the target.
        message_buffer: which of the buffers it sends from, or receives into.
        message_part: which of its bytes.
        message_bytes: length of its message.
        lets_begin: steps that may not begin before it has ended.
        lets_work: steps that may not work before.
    """

    step: Step
    number: int
    queue: int
    sends: bool
    receives: bool
    works: bool
    peer: int
    channel: int
    source: _Range
    target: _Range
    base: _Range | None
    message_buffer: int
    message_part: slice
    message_bytes: int
    lets_begin: Numbers
    lets_work: Numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """A program laid out.

    Attributes:
        steps: by number.
        queues: see `Program.queues`; the steps of each begin in order, and end in any.
        layout: of its memory.
        rank: group rank.
        before_begin: for each step, how many must have ended before it may begin.
        before_work: for each step, how many must have ended before it may work.
    """

    steps: tuple[LaidStep, ...]
    queues: tuple[tuple[LaidStep, ...], ...]
    layout: Layout
    rank: int
    before_begin: Sequence[int]
    before_work: Sequence[int]


def lay_out(program: Program, buffers: Buffers, members: Sequence[int], *, blank: bool = False) -> LaidOut:
    """Lay out a program on arrays; whatever has other arrays of the same lengths and dtypes may use it, too.

    Args:
        program: One rank's.
        buffers: The arrays.
        members: World ranks by group rank.
        blank: Whether all bytes are always the same: then messages matter, but not what is in them.
    """
    steps = [(step, queue) for queue, its in enumerate(program.queues) for step in its]
    works = [not blank and _works(step, buffers) for step, _ in steps]
    touch: list[Numbers] = [()] * len(steps) if blank else collisions(program, buffers)
    before_work = [others if w else () for others, w in zip(touch, works, strict=True)]
    before_begin = [
        waited if w else waited + others for waited, others, w in zip(waits(program), touch, works, strict=True)
    ]
    lets_begin, lets_work = followers(before_begin), followers(before_work)
    laid = tuple(
        _laid(step, buffers, members, number, queue, works[number], lets_begin[number], lets_work[number])
        for number, (step, queue) in enumerate(steps)
    )
    return LaidOut(
        queues=tuple(tuple(step for step in laid if step.queue == queue) for queue in range(len(program.queues))),
        steps=laid,
        layout=buffers.layout,
        rank=program.rank,
        before_begin=tuple(map(len, before_begin)),
        before_work=tuple(map(len, before_work)),
    )


def _laid(
    step: Step,
    buffers: Buffers,
    members: Sequence[int],
    number: int,
    queue: int,
    works: bool,
    lets_begin: Numbers,
    lets_work: Numbers,
) -> LaidStep:
    sends, receives = step.kind is Kind.SEND, step.kind is Kind.RECV
    source = (0, 0, 0) if receives else _range(step.src, buffers)
    target = (0, 0, 0) if sends else _range(step.dst, buffers)
    buffer, start, stop = source if sends else target
    itemsize = buffers.arrays[step.src.buffer].dtype.itemsize
    return LaidStep(
        step=step,
        number=number,
        queue=queue,
        sends=sends,
        receives=receives,
        works=works,
        peer=members[step.peer],
        channel=step.channel,
        source=source,
        target=target,
        base=None if step.base is None else _range(step.base, buffers),
        message_buffer=buffer,
        message_part=slice(start * itemsize, stop * itemsize),
        message_bytes=(stop - start) * itemsize,
        lets_begin=lets_begin,
        lets_work=lets_work,
    )


def _works(step: Step, buffers: Buffers) -> bool:
    """Whether a step has anything to do but to send, or to receive bytes where they belong."""
    same = buffers.arrays[step.src.buffer].dtype == buffers.arrays[step.dst.buffer].dtype
    lands = step.kind is Kind.RECV and step.op is Op.MOVE and same
    return step.kind is not Kind.SEND and not lands


def _range(extent: Extent, buffers: Buffers) -> _Range:
    start, stop = buffers.layout.bounds(extent)
    return int(extent.buffer), start, stop
