"""Programs laid out on arrays: places and order of their steps, computed once for each call. Pure.

The steps of a queue begin in order, and end in any. They are numbered: first come the steps of the first queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from ...collectives.program import Extent, Program, Step, StepKind
from ...collectives.reduce import Array
from ...collectives.schedule import Op
from .layout import BufferLayout, Buffers

_Range: TypeAlias = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidStep:
    """One step, with all consequences of the layout of the arrays."""

    step: Step  # the step of the program
    number: int  # its number in the program
    sends: bool  # whether it is a SEND
    receives: bool  # whether it is a RECV
    works: bool  # whether it moves or adds data from a message or another place; other messages arrive in place
    peer: int  # world rank of the other end
    channel: int  # FIFO lane
    source: _Range  # the data that a LOCAL step moves or adds
    target: _Range  # the place of the result, and of received data
    base: _Range | None  # the second operand of an addition, unless it is the target
    message_buffer: int  # number of the buffer that the message leaves or enters
    message_part: slice  # the bytes of that buffer
    message_bytes: int  # length of its message
    leads: bool  # whether the next number is the next step of its queue, which may not begin before
    lets_begin: Numbers  # numbers of steps that may not begin before its end
    lets_work: Numbers  # numbers of steps that may not work before its end


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """A program laid out."""

    steps: tuple[LaidStep, ...]  # by number
    first: tuple[LaidStep, ...]  # steps that wait for nothing
    layout: BufferLayout  # layout of its memory
    rank: int  # group rank of this process's rank
    # For each step, the number of steps that must end before it may begin, and of the one that must begin before
    before_begin: Sequence[int]
    before_work: Sequence[int]  # for each step, the number of steps that must end before it may work


def lay_out(program: Program, buffers: Buffers, members: Sequence[int], *, blank: bool = False) -> LaidOut:
    """Lay out a program on arrays. Operations with other arrays of these lengths and dtypes may use the layout, too.

    Args:
        blank: Whether all bytes are always the same: then messages matter, but not their contents.
    """
    queues, begin, work = program.queues, list[Numbers](), list[Numbers]()
    first = [0, *accumulate(map(len, queues))]
    steps = [step for queue in queues for step in queue]
    works = [not blank and _works(step, buffers) for step in steps]
    for start, queue in zip(first, queues, strict=False):
        begin += _waits(queue, start, first)
        work += [()] * len(queue) if blank else _collisions(queue, start, buffers)
    for number, clashes in enumerate(work):
        if not works[number]:  # it changes memory from its start on
            begin[number], work[number] = begin[number] + clashes, ()
    lets_begin, lets_work = _followers(begin), _followers(work)
    laid: list[LaidStep] = []
    for number, step in enumerate(steps):
        sends, receives = step.kind is StepKind.SEND, step.kind is StepKind.RECV
        source = (0, 0, 0) if receives else _range(step.src, buffers)
        target = (0, 0, 0) if sends else _range(step.dst, buffers)
        buffer, start, stop = source if sends else target
        itemsize = buffers.arrays[step.src.buffer].dtype.itemsize
        laid.append(
            LaidStep(
                step=step,
                number=number,
                sends=sends,
                receives=receives,
                works=works[number],
                peer=members[step.peer],
                channel=step.channel,
                source=source,
                target=target,
                base=None if step.base is None else _range(step.base, buffers),
                message_buffer=buffer,
                message_part=slice(start * itemsize, stop * itemsize),
                message_bytes=(stop - start) * itemsize,
                leads=number + 1 not in first,
                lets_begin=lets_begin[number],
                lets_work=lets_work[number],
            )
        )
    before_begin = [len(others) + (number not in first) for number, others in enumerate(begin)]
    return LaidOut(
        steps=tuple(laid),
        first=tuple(step for step in laid if not before_begin[step.number]),
        layout=buffers.layout,
        rank=program.rank,
        before_begin=tuple(before_begin),
        before_work=tuple(map(len, work)),
    )


def _works(step: Step, buffers: Buffers) -> bool:
    """Whether a step has work besides sending, or receiving bytes in place."""
    same = buffers.arrays[step.src.buffer].dtype == buffers.arrays[step.dst.buffer].dtype
    in_place = step.kind is StepKind.RECV and step.op is Op.MOVE and same
    return step.kind is not StepKind.SEND and not in_place


def _range(extent: Extent, buffers: Buffers) -> _Range:
    """Return the buffer of an extent, and the first and last element in its array."""
    start, stop = buffers.layout.bounds(extent)
    return int(extent.buffer), start, stop


#: Steps of a queue of receives in flight: all slices of a step, and the work on them.
AHEAD = 16

Numbers: TypeAlias = tuple[int, ...]
"""Numbers of steps."""

_Touched: TypeAlias = tuple[Array, list[Array]]  # the array that a step writes, and the arrays that it reads


def _waits(queue: Sequence[Step], start: int, first: Sequence[int]) -> Iterator[Numbers]:
    """Yield the steps of other queues that each step waits for, and no earlier one does; and of the `AHEAD` limit."""
    waited = list(first)  # end of the steps of each queue waited for
    for at, step in enumerate(queue):
        numbers = [start + at - AHEAD] if step.kind is not StepKind.SEND and at >= AHEAD else []
        for other, count in step.waits:
            numbers += range(waited[other], first[other] + count)
            waited[other] = first[other] + count
        yield tuple(numbers)


def _collisions(queue: Sequence[Step], start: int, buffers: Buffers) -> Iterator[Numbers]:
    """Yield the earlier steps that touch memory that each step writes, or write memory that it touches.

    Only the last ones, which may run at the same time: see `AHEAD`.
    """
    if queue and queue[0].kind is StepKind.SEND:  # a queue of sends, which only read
        yield from [()] * len(queue)
        return
    touched = [_touched_memory(step, buffers) for step in queue]
    for at, own in enumerate(touched):
        others = range(max(0, at - AHEAD + 1), at)
        yield tuple(start + other for other in others if _collide(touched[other], own))


def _touched_memory(step: Step, buffers: Buffers) -> _Touched:
    """Return the memory of this rank that a receive or a local step writes, and the memory that it reads."""
    source = step.src if step.kind is StepKind.LOCAL else None
    return buffers.view(step.dst), [buffers.view(extent) for extent in (step.base, source) if extent is not None]


def _collide(first: _Touched, second: _Touched) -> bool:
    """Whether two steps may not run in any order: one writes memory that the other reads or writes."""
    return any(
        np.may_share_memory(written, memory)
        for (written, _), (also_written, read) in ((first, second), (second, first))
        for memory in (also_written, *read)
    )


def _followers(before: Sequence[Numbers]) -> list[Numbers]:
    """Return the steps after each step, given the steps before each."""
    after: list[list[int]] = [[] for _ in before]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]
