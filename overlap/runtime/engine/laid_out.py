"""Programs laid out on arrays: the places and the order of their steps, worked out once for each call. Pure.

The steps of a queue begin in order, and end in any. They are numbered: first come the steps of the first queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from ...collectives.program import Extent, Kind, Program, Step
from ...collectives.reduce import Array
from ...collectives.schedule import Op
from .layout import BufferLayout, Buffers

_Range: TypeAlias = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidStep:
    """One step, with all that follows from the layout of the arrays."""

    step: Step  # the step of the program
    number: int  # its number in the program
    sends: bool  # whether it is a SEND
    receives: bool  # whether it is a RECV
    works: bool  # whether it moves or adds what has come, or lies elsewhere; what else is received comes to its place
    peer: int  # world rank of the other end
    channel: int  # FIFO lane
    source: _Range  # the data that a LOCAL step moves or adds
    target: _Range  # the place of the result, and of received data
    base: _Range | None  # the second operand of an addition, unless it is the target
    message_buffer: int  # number of the buffer that the message leaves or enters
    message_part: slice  # the bytes of that buffer
    message_bytes: int  # length of its message
    lets_begin: Numbers  # numbers of runs that may not begin before it has ended
    lets_work: Numbers  # numbers of steps that may not work before


@dataclass(frozen=True, slots=True, eq=False)
class StepChain:
    """Steps of a queue that begin one after the other, for only the first one waits for anything else."""

    steps: tuple[LaidStep, ...]  # the steps, in order
    # number of the run that follows, which may not begin before; none if it is the last of its queue.
    lets_begin: Numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """A program laid out."""

    steps: tuple[LaidStep, ...]  # by number
    runs: tuple[StepChain, ...]  # by number: those of the first queue, then those of the next
    first: tuple[StepChain, ...]  # those that wait for nothing
    layout: BufferLayout  # layout of its memory
    rank: int  # group rank of this process's rank
    before_begin: Sequence[int]  # for each run, for how many runs and steps it waits
    before_work: Sequence[int]  # for each step, how many must have ended before it may work


def lay_out(program: Program, buffers: Buffers, members: Sequence[int], *, blank: bool = False) -> LaidOut:
    """Lay out a program on arrays; operations with other arrays of these lengths and dtypes may use it, too.

    Args:
        program: One rank's.
        buffers: The arrays.
        members: World ranks by group rank.
        blank: Whether all bytes are always the same: then messages matter, but not what is in them.
    """
    steps = [step for queue in program.queues for step in queue]
    works = [not blank and _works(step, buffers) for step in steps]
    order = order_of(program, None if blank else buffers, works)
    laid = tuple(_laid(step, number, order, buffers, members, works=works[number]) for number, step in enumerate(steps))
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


def _laid(step: Step, number: int, order: Order, buffers: Buffers, members: Sequence[int], *, works: bool) -> LaidStep:
    sends, receives = step.kind is Kind.SEND, step.kind is Kind.RECV
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
    """Whether a step has anything to do but to send, or to receive bytes where they belong."""
    same = buffers.arrays[step.src.buffer].dtype == buffers.arrays[step.dst.buffer].dtype
    lands = step.kind is Kind.RECV and step.op is Op.MOVE and same
    return step.kind is not Kind.SEND and not lands


def _range(extent: Extent, buffers: Buffers) -> _Range:
    start, stop = buffers.layout.bounds(extent)
    return int(extent.buffer), start, stop


#: Steps of a queue of receives that may be under way: all slices of a step, and what becomes of them.
AHEAD = 16

Numbers: TypeAlias = tuple[int, ...]
"""Of steps, or of runs."""

_Touched: TypeAlias = tuple[Array, list[Array]]  # the array that a step writes, and the arrays that it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order a program may be carried out.

    Queues are cut in runs, which have numbers like steps: only the first step of a run waits for any but those before
    it in its queue. A run may begin when as many of these, and of runs, are over as it waits for.
    """

    runs: Sequence[Numbers]  # the steps of each run
    run_lets_begin: Sequence[Numbers]  # for each run, the one that follows in its queue, if there is one
    lets_begin: Sequence[Numbers]  # for each step, the runs that wait for its end
    lets_work: Sequence[Numbers]  # for each step, the steps that may not use received data before its end
    before_begin: Numbers  # for each run, the number of ends that it waits for
    before_work: Numbers  # for each step, the number of ends that it waits for before it uses received data


def order_of(program: Program, buffers: Buffers | None, works: Sequence[bool]) -> Order:
    """Return in which order a program may be carried out.

    Args:
        program: One rank's.
        buffers: Its memory; None if it does not matter what is in it.
        works: For each step, whether it uses what has come, or lies elsewhere, once it is there; others change memory
            from when they begin.
    """
    first = [0, *accumulate(map(len, program.queues))]
    waits: list[Numbers] = []
    touch: list[Numbers] = []
    for start, queue in zip(first, program.queues, strict=False):
        waits += _waits(queue, start, first)
        touch += [()] * len(queue) if buffers is None else _collisions(queue, start, buffers)
    begin = [mine if w else mine + others for mine, others, w in zip(waits, touch, works, strict=True)]
    work = [others if w else () for others, w in zip(touch, works, strict=True)]
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
    """Cut steps in runs, given which others each one waits for, and which ones come first in their queues."""
    starts = [number for number, others in enumerate(begin) if others or number in first]
    return [tuple(range(*ends)) for ends in pairwise([*starts, len(begin)])]


def _waits(queue: Sequence[Step], start: int, first: Sequence[int]) -> Iterator[Numbers]:
    """Tell for which steps of other queues each one waits, and none before it does; and how many are under way."""
    waited = list(first)  # steps of each queue up to this one
    for at, step in enumerate(queue):
        numbers = [start + at - AHEAD] if step.kind is not Kind.SEND and at >= AHEAD else []
        for other, count in step.waits:
            numbers += range(waited[other], first[other] + count)
            waited[other] = first[other] + count
        yield tuple(numbers)


def _collisions(queue: Sequence[Step], start: int, buffers: Buffers) -> Iterator[Numbers]:
    """Tell which steps before each one touch what it writes, or write what it touches.

    Only the last ones, with which it may be under way: see `AHEAD`.
    """
    if queue and queue[0].kind is Kind.SEND:  # a queue of nothing else: they only read
        yield from [()] * len(queue)
        return
    touched = [_touched(step, buffers) for step in queue]
    for at, mine in enumerate(touched):
        others = range(max(0, at - AHEAD + 1), at)
        yield tuple(start + other for other in others if _collide(touched[other], mine))


def _touched(step: Step, buffers: Buffers) -> _Touched:
    """Return the memory of this rank that a receive or a local step writes, and what it reads."""
    theirs = step.src if step.kind is Kind.LOCAL else None
    return buffers.view(step.dst), [buffers.view(extent) for extent in (step.base, theirs) if extent is not None]


def _collide(one: _Touched, other: _Touched) -> bool:
    return any(
        np.may_share_memory(written, memory)
        for (written, _), (also_written, read) in ((one, other), (other, one))
        for memory in (also_written, *read)
    )


def _followers(before: Sequence[Numbers], steps: int) -> list[Numbers]:
    """Return for each step what comes after it, given which steps come before each of that."""
    after: list[list[int]] = [[] for _ in range(steps)]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]
