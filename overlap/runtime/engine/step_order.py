"""What must have ended before a step of a program may begin, and before it may use what has come. Pure.

The steps of a queue begin in order, and end in any. Steps have numbers: first come those of the first queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from ...collectives.program import Kind, Program, Step
from ...collectives.reduce import Array
from .cc_core import AHEAD
from .program_memory import Buffers

__all__ = ["Numbers", "collisions", "followers", "waits"]

Numbers: TypeAlias = tuple[int, ...]
"""Of steps."""

_Touched: TypeAlias = tuple[Array, list[Array]]  # what a step writes, and what it reads


def waits(program: Program) -> list[Numbers]:
    """Return what each step waits for, and none before it in its queue has: it begins after that, and after those."""
    first = [0, *accumulate(map(len, program.queues))]
    return [numbers for index, queue in enumerate(program.queues) for numbers in _waits(queue, first[index], first)]


def _waits(queue: Sequence[Step], start: int, first: Sequence[int]) -> Iterator[Numbers]:
    waited = list(first)  # steps of each queue up to this one
    for at, step in enumerate(queue):
        numbers = [start + at - AHEAD] if step.kind is not Kind.SEND and at >= AHEAD else []
        for other, count in step.waits:
            numbers += range(waited[other], first[other] + count)
            waited[other] = first[other] + count
        yield tuple(numbers)


def collisions(program: Program, buffers: Buffers) -> list[Numbers]:
    """Return which steps before each one in its queue touch what it writes, or write what it touches.

    Only the last ones, with which it may be under way: see `AHEAD`.
    """
    first = [0, *accumulate(map(len, program.queues))]
    return [
        numbers for index, queue in enumerate(program.queues) for numbers in _collisions(queue, first[index], buffers)
    ]


def _collisions(queue: Sequence[Step], start: int, buffers: Buffers) -> Iterator[Numbers]:
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


def followers(before: Sequence[Numbers]) -> list[Numbers]:
    """Return which steps come after each one, from which ones come before each."""
    after: list[list[int]] = [[] for _ in before]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]
