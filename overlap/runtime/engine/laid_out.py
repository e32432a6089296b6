"""Programs laid out on arrays: memory and order of their steps, computed once for each call. Pure.

The steps of a queue begin in order, and end in any order. All steps are numbered, those of the first queue first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from ...collectives.program import Extent, Program, Step, StepKind
from ...collectives.reduce import Array
from ...collectives.schedule import Op
from .layout import BufferLayout, Buffers


class BufferRange(NamedTuple):
    """Elements [start, stop) of a buffer."""

    buffer: int  # index of the buffer, a `Buffer`
    start: int
    stop: int


_NOTHING = BufferRange(0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOutStep:
    """A step of a program, with its memory in the arrays, and the steps that wait for it."""

    step: Step  # the step of the program
    number: int  # number of the step in the program
    sends: bool  # whether the step is a SEND
    receives: bool  # whether the step is a RECV
    works: bool  # whether the step moves or adds data here; a SEND does not, nor a RECV of bytes in place
    peer: int  # world rank of the other end
    channel: int  # FIFO lane
    source: BufferRange  # the data that a LOCAL step moves or adds
    target: BufferRange  # the place of the result, and of received data
    base: BufferRange | None  # the second operand of an addition, unless it is the target
    message_buffer: int  # index of the buffer that the message is sent from or received into
    message_part: slice  # the message's bytes in that buffer
    message_bytes: int  # length of the message
    leads: bool  # whether the next number is a step of the same queue, which may not begin before this step
    lets_begin: Numbers  # numbers of steps that may not begin before the end of this step
    lets_work: Numbers  # numbers of steps that may not work before the end of this step


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOutProgram:
    """A program laid out."""

    steps: tuple[LaidOutStep, ...]  # by number
    first: tuple[LaidOutStep, ...]  # steps that wait for nothing
    layout: BufferLayout  # layout of its memory
    rank: int  # group rank of this process's rank
    # for each step, how many steps it waits for before it begins: steps that must end, and the step before it in its
    # queue, which must begin.
    before_begin: Sequence[int]
    before_work: Sequence[int]  # for each step, how many steps must end before it may work


def lay_out_program(
    program: Program, buffers: Buffers, members: Sequence[int], *, blank: bool = False
) -> LaidOutProgram:
    """Lay out a program on arrays. The result also serves operations with other arrays of these lengths and dtypes.

    A step begins, works and ends. Work is to move or reduce data here. If a step needs memory that an earlier step
    still uses, it waits before it works; a step without work waits before it begins.

    Args:
        program: The program of one rank.
        buffers: The arrays of the rank, with their layout.
        members: World ranks of the group, in group order.
        blank: Whether all data is always zero, as in a barrier. Then messages are sent, but no step works.
    """
    queue_starts = [0, *accumulate(map(len, program.queues))]
    steps = [step for queue in program.queues for step in queue]
    works = [not blank and _has_work_here(step, buffers) for step in steps]
    # for each step, the steps that must end before it may begin, and before it may work
    before_begin, before_work = list[Numbers](), list[Numbers]()
    for start, queue in zip(queue_starts, program.queues, strict=False):
        before_begin += _new_waits_of_each_step(queue, start, queue_starts)
        before_work += [()] * len(queue) if blank else _earlier_collisions(queue, start, buffers)
    for number, collisions in enumerate(before_work):
        if not works[number]:  # a receive in place changes memory as soon as it begins
            before_begin[number], before_work[number] = before_begin[number] + collisions, ()
    lets_begin, lets_work = _invert_waits(before_begin), _invert_waits(before_work)
    laid: list[LaidOutStep] = []
    for number, step in enumerate(steps):
        sends, receives = step.kind is StepKind.SEND, step.kind is StepKind.RECV
        source = _NOTHING if receives else _find_range(step.src, buffers)
        target = _NOTHING if sends else _find_range(step.dst, buffers)
        message = source if sends else target
        itemsize = buffers.arrays[step.src.buffer].dtype.itemsize
        laid.append(
            LaidOutStep(
                step=step,
                number=number,
                sends=sends,
                receives=receives,
                works=works[number],
                peer=members[step.peer],
                channel=step.channel,
                source=source,
                target=target,
                base=None if step.base is None else _find_range(step.base, buffers),
                message_buffer=message.buffer,
                message_part=slice(message.start * itemsize, message.stop * itemsize),
                message_bytes=(message.stop - message.start) * itemsize,
                leads=number + 1 not in queue_starts,
                lets_begin=lets_begin[number],
                lets_work=lets_work[number],
            )
        )
    # All steps except the first of a queue also wait until the step before has begun.
    begin_counts = [len(others) + (number not in queue_starts) for number, others in enumerate(before_begin)]
    return LaidOutProgram(
        steps=tuple(laid),
        first=tuple(step for step in laid if not begin_counts[step.number]),
        layout=buffers.layout,
        rank=program.rank,
        before_begin=tuple(begin_counts),
        before_work=tuple(map(len, before_work)),
    )


def _has_work_here(step: Step, buffers: Buffers) -> bool:
    """Whether data is moved or added here: not by a send, nor by a receive whose bytes arrive in their place."""
    same = buffers.arrays[step.src.buffer].dtype == buffers.arrays[step.dst.buffer].dtype
    in_place = step.kind is StepKind.RECV and step.op is Op.MOVE and same
    return step.kind is not StepKind.SEND and not in_place


def _find_range(extent: Extent, buffers: Buffers) -> BufferRange:
    return BufferRange(int(extent.buffer), *buffers.layout.element_range(extent))


#: Number of steps of a queue of receives that may be in flight: enough for all slices of a step, and the work on them.
AHEAD = 16

Numbers: TypeAlias = tuple[int, ...]
"""Numbers of steps."""

_Touched: TypeAlias = tuple[Array, list[Array]]  # the array that a step writes, and the arrays that it reads


def _new_waits_of_each_step(queue: Sequence[Step], start: int, first: Sequence[int]) -> Iterator[Numbers]:
    """Yield for each step of a queue the numbers of the steps whose end it waits for, without repetitions.

    These are the steps in `Step.waits`, except those that an earlier step of this queue waits for already. In a queue
    of receives, a step also waits for the step `AHEAD` places before it. `start` is the number of the queue's first
    step; `first` has this number of every queue.
    """
    waited_stop = list(first)  # for each queue, the number after the last step that is waited for
    for at, step in enumerate(queue):
        numbers = [start + at - AHEAD] if step.kind is not StepKind.SEND and at >= AHEAD else []
        for other, count in step.waits:
            numbers += range(waited_stop[other], first[other] + count)
            waited_stop[other] = first[other] + count
        yield tuple(numbers)


def _earlier_collisions(queue: Sequence[Step], start: int, buffers: Buffers) -> Iterator[Numbers]:
    """Yield for each step of a queue the numbers of earlier steps that it collides with, see `_collide`.

    Only the last `AHEAD - 1` steps before it are compared: earlier ones cannot run at the same time. The first step of
    the queue has the number `start`.
    """
    if queue and queue[0].kind is StepKind.SEND:  # sends only read, so they collide with nothing
        yield from [()] * len(queue)
        return
    touched = [_touched_memory(step, buffers) for step in queue]
    for at, own in enumerate(touched):
        others = range(max(0, at - AHEAD + 1), at)
        yield tuple(start + other for other in others if _collide(touched[other], own))


def _touched_memory(step: Step, buffers: Buffers) -> _Touched:
    """Return the array that a receive or a local step writes on this rank, and the arrays that it reads."""
    source = step.src if step.kind is StepKind.LOCAL else None
    return buffers.view(step.dst), [buffers.view(extent) for extent in (step.base, source) if extent is not None]


def _collide(first: _Touched, second: _Touched) -> bool:
    """Whether one of two steps writes memory that the other reads or writes, so that their order matters."""
    (written, read), (also_written, also_read) = first, second
    return any(np.may_share_memory(written, memory) for memory in (also_written, *also_read)) or any(
        np.may_share_memory(also_written, memory) for memory in read
    )


def _invert_waits(before: Sequence[Numbers]) -> list[Numbers]:
    """Return for each step the steps that wait for it, given for each the steps that it waits for."""
    after: list[list[int]] = [[] for _ in before]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]
