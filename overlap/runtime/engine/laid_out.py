"""A program laid out on arrays: all that is the same in every call of one collective, worked out once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...collectives.program import Extent, Kind, Program, Step
from ...collectives.schedule import Op
from .program_memory import Buffers, Layout
from .step_order import Numbers, Order, order_of

_Range: TypeAlias = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidStep:
    """One step, with all that follows from the layout of the arrays."""

    step: Step  # what it is
    number: int  # which of all
    sends: bool  # whether it is a SEND
    receives: bool  # whether it is a RECV; else it is a LOCAL step, or sends
    works: bool  # whether it moves or adds what has come, or lies elsewhere; what else is received comes to its place
    peer: int  # world rank of the other end
    channel: int  # FIFO lane
    source: _Range  # where what a LOCAL step moves or adds lies
    target: _Range  # where it goes, and what a receive brings
    base: _Range | None  # what that is added to, unless it is the target
    message_buffer: int  # which of the buffers it sends from, or receives into
    message_part: slice  # which of its bytes
    message_bytes: int  # length of its message
    lets_begin: Numbers  # numbers of runs that may not begin before it has ended
    lets_work: Numbers  # numbers of steps that may not work before


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Steps of a queue that begin one after the other, for only the first one waits for anything else."""

    steps: tuple[LaidStep, ...]  # these
    # number of the run that follows, which may not begin before; none if it is the last of its queue.
    lets_begin: Numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """A program laid out."""

    steps: tuple[LaidStep, ...]  # by number
    runs: tuple[Run, ...]  # by number: those of the first queue, then those of the next
    first: tuple[Run, ...]  # those that wait for nothing
    layout: Layout  # of its memory
    rank: int  # group rank
    before_begin: Sequence[int]  # for each run, for how many runs and steps it waits
    before_work: Sequence[int]  # for each step, how many must have ended before it may work


def lay_out(program: Program, buffers: Buffers, members: Sequence[int], *, blank: bool = False) -> LaidOut:
    """Lay out a program on arrays; whatever has other arrays of the same lengths and dtypes may use it, too.

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
    runs = tuple(Run(tuple(laid[number] for number in numbers), lets_begin) for numbers, lets_begin in ends)
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
