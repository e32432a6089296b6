"""What must have ended before a step of a program may begin, and before it may use what has come. Pure.

The steps of a queue begin in order, and end in any. They have numbers: first come those of the first queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from ...collectives.program import Kind, Program, Step
from ...collectives.reduce import Array
from .program_memory import Buffers

#: Steps of a queue of receives that may be under way: all slices of a step, and what becomes of them.
AHEAD = 16

Numbers: TypeAlias = tuple[int, ...]
"""Of steps, or of runs."""

_Touched: TypeAlias = tuple[Array, list[Array]]  # what a step writes, and what it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order a program may be carried out.

    Queues are cut in runs, which have numbers like steps: only the first step of a run waits for any but those before
    it in its queue. A run may begin when as many of these, and of runs, are over as it waits for.
    """

    runs: Sequence[Numbers]  # the steps of each run
    run_lets_begin: Sequence[Numbers]  # for each run, the one that follows in its queue, if there is one
    lets_begin: Sequence[Numbers]  # for each step, the runs that wait for its end
    lets_work: Sequence[Numbers]  # for each step, those that may not use what they have got before its end
    before_begin: Numbers  # for how many others each run waits
    before_work: Numbers  # for how many steps each one waits until it uses what it has got


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
