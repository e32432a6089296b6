"""Programs laid out on arrays: in whatever order steps are carried out that it leaves open, the same comes out."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest

from overlap.collectives import Buffer, Extent, Op, Program, Schedule, Step, StepKind, generate, project_all
from overlap.collectives.generators import GENERATORS, fits
from overlap.collectives.reduce import reducer
from overlap.collectives.slicing import in_slices
from overlap.runtime.engine.arithmetic import apply
from overlap.runtime.engine.laid_out import AHEAD, LaidOut, LaidStep, lay_out
from overlap.runtime.engine.layout import BufferLayout, Buffers

_Lane: TypeAlias = tuple[int, int, int]

BLOCK = 70  # so large that two slices are
REDUCER = reducer("sum", np.dtype(np.int64))
ALGORITHMS = [name for name in GENERATORS["all_reduce"] if fits(name, 4)]


class Message:
    """Bytes under way, and of whom their sender had heard when it began to send them."""

    def __init__(self, source: np.ndarray, heard: set[int]) -> None:
        self.bytes, self.heard, self.left = np.zeros_like(source), set(heard), False


class Rank:
    """One that takes two turns for each step beside that in which it begins: one for each half of the bytes."""

    def __init__(self, laid: LaidOut, buffers: Buffers, wires: dict[_Lane, list[Message]]) -> None:
        self.laid, self.buffers, self.wires = laid, buffers, wires
        self.before_begin, self.before_work = list(laid.before_begin), list(laid.before_work)
        self.to_begin = list(laid.first)
        self.running: dict[LaidStep, int] = {}  # turns they have had
        self.place: dict[LaidStep, tuple[_Lane, int]] = {}  # of messages
        self.begun: Counter[_Lane] = Counter()
        self.heard, self.unended = {laid.rank}, len(laid.steps)

    def able(self) -> list[LaidStep]:
        return self.to_begin + [
            step
            for step in self.running
            if not self.before_work[step.number] and (not step.receives or self.message(step).left)
        ]

    def message(self, step: LaidStep) -> Message:
        lane, index = self.place[step]
        there = self.wires[lane]
        return there[index] if index < len(there) else Message(np.empty(0), set())

    def take_turn(self, step: LaidStep) -> None:
        if step not in self.running:
            self.begin(step)
            return
        turn = self.running[step]
        start, stop = self.laid.layout.bounds(step.step.dst)
        half = (stop - start) // 2
        self.move(step, slice(half, None) if turn else slice(half))
        self.running[step] += 1
        if turn == 1:
            self.end(step)

    def begin(self, step: LaidStep) -> None:
        self.to_begin.remove(step)
        if step.leads:
            self.let_begin([step.number + 1])
        self.running[step] = 0
        lane = (self.laid.rank, step.peer, step.channel) if step.sends else (step.peer, self.laid.rank, step.channel)
        self.place[step] = lane, self.begun[lane]
        if step.sends:
            self.wires[lane].append(Message(self.buffers.view(step.step.src), self.heard))
        self.begun[lane] += step.sends or step.receives

    def move(self, step: LaidStep, half: slice) -> None:
        source = self.message(step).bytes if step.receives else self.buffers.view(step.step.src)
        if step.sends:
            self.message(step).bytes[half] = source[half]
            return
        target = self.buffers.view(step.step.dst)
        base = target if step.step.base is None else self.buffers.view(step.step.base)
        apply(step.step, self.laid.layout, self.laid.rank, source[half], base[half], target[half])

    def end(self, step: LaidStep) -> None:
        del self.running[step]
        self.unended -= 1
        if step.sends:
            self.message(step).left = True
        elif step.receives:
            self.heard |= self.message(step).heard
        self.let_begin(step.lets_begin)
        for number in step.lets_work:
            self.before_work[number] -= 1

    def let_begin(self, steps: Sequence[int]) -> None:
        for number in steps:
            self.before_begin[number] -= 1
            if not self.before_begin[number]:
                self.to_begin.append(self.laid.steps[number])


def ranks_of(schedule: Schedule, *, shared: bool, blank: bool = False) -> list[Rank]:
    """Return all ranks, each with a bit of its own as input; what may share memory does so if asked."""
    wires: dict[_Lane, list[Message]] = defaultdict(list)
    layout = BufferLayout(BLOCK, schedule.slots_per_block, REDUCER, schedule.size)
    ranks = []
    for program in project_all(schedule):
        given, out, scratch = (np.full(blocks * BLOCK, -999) for blocks in schedule.blocks)
        if shared:
            given = out = scratch[:BLOCK]
        given[:] = 1 << program.rank
        buffers = Buffers((given, out, scratch), layout)
        ranks.append(Rank(lay_out(program, buffers, range(schedule.size), blank=blank), buffers, wires))
    return ranks


def run(ranks: list[Rank], seed: int) -> None:
    rng = random.Random(seed)
    while any(rank.unended for rank in ranks):
        for rank in rng.sample(ranks, len(ranks)):
            able = rank.able()
            if able:
                rank.take_turn(rng.choice(able))
                break
        else:
            raise AssertionError("they wait for each other")


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_order_gives_the_same_sum(algorithm: str, sliced: bool) -> None:
    schedule = generate("all_reduce", algorithm, 4)
    for seed in range(1 if sliced else 3):
        ranks = ranks_of(in_slices(schedule, 4 << 20) if sliced else schedule, shared=seed == 0)
        run(ranks, seed)
        assert all((rank.buffers.arrays[Buffer.OUT][:BLOCK] == 0b1111).all() for rank in ranks)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whoever_ends_a_blank_program_has_heard_of_everybody(algorithm: str) -> None:
    for seed in range(3):
        ranks = ranks_of(generate("all_reduce", algorithm, 4), shared=True, blank=True)
        assert not any(step.works for rank in ranks for step in rank.laid.steps)
        run(ranks, seed)
        assert [rank.heard for rank in ranks] == [{0, 1, 2, 3}] * 4


def test_what_is_added_to_what_comes_waits_for_it() -> None:
    """The pieces of a message may be added as they come, but not before what they are added to has."""
    place = Extent(Buffer.OUT, 0, 1)
    steps = [Step(StepKind.RECV, op, peer, 0, place, place, None, ()) for peer, op in ((1, Op.MOVE), (2, Op.ADD))]
    laid = lay(steps)
    assert (laid.steps[0].lets_work, laid.before_work) == ((1,), (0, 1))
    assert (laid.first, laid.before_begin) == (laid.steps[:1], (0, 1))


def test_receives_are_posted_so_far_ahead() -> None:
    steps = [
        Step(StepKind.RECV, Op.MOVE, 1, 0, Extent(Buffer.IN, at, 1), Extent(Buffer.OUT, at, 1), None, ())
        for at in range(AHEAD + 2)
    ]
    laid = lay(steps)
    assert [step.leads for step in laid.steps] == [True] * (AHEAD + 1) + [False]
    assert [step.lets_begin for step in laid.steps[:3]] == [(AHEAD,), (AHEAD + 1,), ()]
    assert (laid.before_begin, laid.first) == ((0, *[1] * (AHEAD - 1), 2, 2), laid.steps[:1])


def lay(receives: list[Step]) -> LaidOut:
    arrays = (np.zeros(100), np.zeros(100), np.zeros(100))
    return lay_out(Program(0, ((), tuple(receives))), Buffers(arrays, BufferLayout(1, 1, REDUCER, 3)), range(3))
