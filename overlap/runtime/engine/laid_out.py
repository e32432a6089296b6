"""Programs laid out on arrays: places and order of their steps, computed once for each call. Pure.

The steps of a queue begin in order, and end in any. They are numbered: first come the steps of the first queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
    lets_begin: Numbers  # numbers of chains that may not begin before its end
    lets_work: Numbers  # numbers of steps that may not work before its end


@dataclass(frozen=True, slots=True, eq=False)
class StepChain:
    """Steps of a queue that begin one after the other; only the first one waits for steps outside."""

    steps: tuple[LaidStep, ...]  # steps in order
    # number of the next chain, which may not begin before; none for the last chain of a queue.
    lets_begin: Numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """A program laid out."""

    steps: tuple[LaidStep, ...]  # by number
    runs: tuple[StepChain, ...]  # by number: chains of the first queue, then of the next
    first: tuple[StepChain, ...]  # chains that wait for nothing
    layout: BufferLayout  # layout of its memory
    rank: int  # group rank of this process's rank
    before_begin: Sequence[int]  # for each chain, the number of chains and steps that it waits for
    before_work: Sequence[int]  # for each step, the number of steps that must end before it may work


def lay_out(program: Program, buffers: Buffers, members: Sequence[int], *, blank: bool = False) -> LaidOut:
    """Lay out a program on arrays. Operations with other arrays of these lengths and dtypes may use the layout, too.

    Args:
        blank: Whether all bytes are always the same: then messages matter, but not their contents.
    """
    steps = [step for queue in program.queues for step in queue]
    works = [not blank and _works(step, buffers) for step in steps]
    order = order_of(program, None if blank else buffers, works)
    laid = tuple(
        _lay_out(step, number, order, buffers, members, works=works[number]) for number, step in enumerate(steps)
    )
    ends = zip(order.runs, order.run_lets_begin, strict=True)
    runs = tuple(StepChain(tuple(laid[number] for number in numbers), lets_begin) for numbers, lets_begin in ends)
    return LaidOut(
        steps=laid,
        runs=runs,
        first=tuple(run for run, count in zip(runs, order.before_begin, strict=True) if not count),
        layout=buffers.layout,
        rank=program.rank,
        before_begin=order.before_begin,
        before_work=order.before_work,
    )


def _lay_out(
    step: Step, number: int, order: Order, buffers: Buffers, members: Sequence[int], *, works: bool
) -> LaidStep:
    """Return a step with the places of its data in the buffers, and the steps that wait for it."""
    sends, receives = step.kind is StepKind.SEND, step.kind is StepKind.RECV
    source = (0, 0, 0) if receives else _range(step.src, buffers)
    target = (0, 0, 0) if sends else _range(step.dst, buffers)
    buffer, start, stop = source if sends else target
    itemsize = buffers.arrays[step.src.buffer].dtype.itemsize
    return LaidStep(
        step=step,
        number=number,
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
        lets_begin=order.lets_begin[number],
        lets_work=order.lets_work[number],
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
"""Numbers of steps, or of chains."""

_Touched: TypeAlias = tuple[Array, list[Array]]  # the array that a step writes, and the arrays that it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order in which a program may run.

    Queues are cut in chains, which have numbers like steps: only the first step of a chain waits for steps of other
    queues. A chain may begin when all chains and steps that it waits for are over.
    """

    runs: Sequence[Numbers]  # steps of each chain
    run_lets_begin: Sequence[Numbers]  # for each chain, the next one of its queue, if there is one
    lets_begin: Sequence[Numbers]  # for each step, the chains that wait for its end
    lets_work: Sequence[Numbers]  # for each step, the steps that may not use received data before its end
    before_begin: Numbers  # for each chain, the number of ends that it waits for
    before_work: Numbers  # for each step, the number of ends that it waits for before it uses received data


def order_of(program: Program, buffers: Buffers | None, works: Sequence[bool]) -> Order:
    """Return the order in which a program may run.

    Args:
        buffers: Memory of the program; None if its contents do not matter.
        works: For each step, whether it works on data once they exist; other steps change memory from their start
            on.
    """
    first = [0, *accumulate(map(len, program.queues))]
    waits: list[Numbers] = []
    touch: list[Numbers] = []
    for start, queue in zip(first, program.queues, strict=False):
        waits += _waits(queue, start, first)
        touch += [()] * len(queue) if buffers is None else _collisions(queue, start, buffers)
    begin = [own if w else own + clashes for own, clashes, w in zip(waits, touch, works, strict=True)]
    work = [clashes if w else () for clashes, w in zip(touch, works, strict=True)]
    runs = _cut(begin, first)
    follows = [*(run[0] not in first for run in runs), False]
    return Order(
        runs=runs,
        run_lets_begin=[(after,) if follows[after] else () for after in range(1, len(follows))],
        lets_begin=_followers([begin[run[0]] for run in runs], len(works)),
        lets_work=_followers(work, len(works)),
        before_begin=tuple(len(begin[run[0]]) + after for run, after in zip(runs, follows, strict=False)),
        before_work=tuple(map(len, work)),
    )


def _cut(begin: Sequence[Numbers], first: Sequence[int]) -> list[Numbers]:
    """Cut steps in chains, given the other steps that each one waits for, and the first steps of the queues."""
    starts = [number for number, others in enumerate(begin) if others or number in first]
    return [tuple(range(*ends)) for ends in pairwise([*starts, len(begin)])]


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


def _followers(before: Sequence[Numbers], steps: int) -> list[Numbers]:
    """Return the steps after each step, given the steps before each."""
    after: list[list[int]] = [[] for _ in range(steps)]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]
