"""Programs laid out on arrays and driven by the wires: right results in any order, and nothing left under way."""

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from threading import get_ident
from typing import TypeAlias

import numpy as np
import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

import overlap
from overlap.collectives import Buffer, Extent, Op, Program, Schedule, Step, StepKind, generate, project_all
from overlap.collectives.generators import GENERATORS, fits
from overlap.collectives.reduce import find_reducer
from overlap.collectives.slicing import slice_long_messages
from overlap.runtime.backend import Backend
from overlap.runtime.engine import arithmetic, execution, programs
from overlap.runtime.engine.arithmetic import apply_step
from overlap.runtime.engine.execution import Execution
from overlap.runtime.engine.laid_out import AHEAD, LaidOutProgram, LaidOutStep, lay_out_program
from overlap.runtime.engine.layout import BufferLayout, Buffers
from overlap.runtime.engine.workers import Workers
from transports import Wire

from .cases import KINDS, cases
from .companies import TIMEOUT_S, Company, by_sockets, run_far
from .test_collectives import check_world, issue_all

# -- programs driven by the wires: right results, and nothing under way once an execution has ended --------------------


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Execution]:
    """Return the executions that have begun."""
    executions: list[Execution] = []

    class Seen(Execution):
        def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
            executions.append(self)
            return super().begin(ended)

    monkeypatch.setattr(programs, "Execution", Seen)
    return executions


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective(kind: str, begun: list[Execution]) -> None:
    todo = list(cases(kind, 4))
    check_world(todo, run_far(issue_all, 4, 1, todo, wires=by_sockets))
    assert begun
    assert not any(run._running_steps for run in begun)


@pytest.mark.parametrize(
    ("gathers", "algorithm"), [(kind, name) for kind in ("all_gather", "gather") for name in GENERATORS[kind]]
)
def test_an_input_that_lies_in_the_result_is_gathered_from_there(
    gathers: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def seen(self: Backend, array: np.ndarray) -> np.ndarray:
        copied.append(array.size)
        return array.copy()

    monkeypatch.setattr(Backend, "copy", seen)

    async def main(rank: overlap.Rank) -> bool:
        everything = np.arange(4 * 1001, dtype=np.float32)
        out = np.full_like(everything, -1)
        mine = slice(rank.rank * 1001, (rank.rank + 1) * 1001)
        out[mine] = everything[mine]
        gets = gathers == "all_gather" or rank.rank == 0
        await getattr(rank, gathers)(out[mine], out=out if gets else None, algorithm=algorithm)
        return bool((out == everything).all()) or not gets

    assert run_far(main, 4, 1, wires=by_sockets) == [True] * 4
    assert copied == ([1001] if (gathers, algorithm) == ("gather", "hierarchical") else [])


def test_wires_are_not_looked_at_for_what_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root whose messages have left waits for its own block, which the others do not bring."""
    rested: dict[int, bool] = {}

    def seen(wires: Mapping[int, Wire], over: Callable[[], bool]) -> None:
        (peer,) = wires
        rested[1 - peer] = over()

    monkeypatch.setattr(arithmetic, "INLINE_BYTES", 0)
    monkeypatch.setattr(arithmetic, "PIECE_BYTES", 8)
    monkeypatch.setattr(execution, "poll_wires", seen)

    async def main(rank: overlap.Rank) -> float:
        return float((await rank.scatter(np.arange(4.0)))[0])

    assert run_far(main, 2, 1, wires=by_sockets) == [0.0, 2.0]
    assert rested[0]


def test_what_is_moved_to_where_it_lies_takes_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions are done where they come; what is left of an all-reduce in place is in its place."""
    monkeypatch.setattr(arithmetic, "INLINE_BYTES", 0)
    monkeypatch.setattr(Workers, "submit", None)

    async def main(rank: overlap.Rank) -> bool:
        x = np.full(300_000, rank.rank, np.float32)
        await rank.all_reduce(x, out=x, algorithm="ring")
        await rank.broadcast(x, out=x, root=1, algorithm="mesh")
        return bool((x == 1).all())

    assert run_far(main, 2, 1, wires=by_sockets) == [True] * 2


@pytest.mark.everyday(1)
@pytest.mark.parametrize("in_threads", [True, False])
def test_messages_of_every_length_at_once(in_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that leave at once, those whose chunks follow unasked, and those that are offered."""
    monkeypatch.setattr(arithmetic, "INLINE_BYTES", 0 if in_threads else 1 << 30)

    async def main(rank: overlap.Rank) -> bool:
        sizes = [100, 50_000, 300_000, 3_300_000]
        inputs = [np.arange(size, dtype=np.float32) % 1000 + rank.rank for size in sizes]
        sums = [rank.all_reduce(x, priority=-i) for i, x in enumerate(inputs)]
        copies = [rank.broadcast(x, root=i % 3) for i, x in enumerate(inputs)]
        right = [(await got == 3 * (x - rank.rank) + 3).all() for got, x in zip(sums, inputs, strict=True)]
        for i, (copy, x) in enumerate(zip(copies, inputs, strict=True)):
            right.append((await copy == x - rank.rank + i % 3).all())
        return all(right)

    assert run_far(main, 3, 1, wires=by_sockets) == [True] * 3


async def many(rank: overlap.Rank, step: int, mine: list[np.ndarray], end: Callable[[], Awaitable[None]]) -> None:
    """Have several operations of different lengths under way; one rank ends it all after so many turns."""
    mine += [np.full(size, rank.rank, np.float32) for size in (10, 60_000, 400_000)]
    pending = [rank.all_reduce(x) for x in mine] + [rank.all_gather(x) for x in mine]
    if rank.rank == 1:
        for _ in range(step):
            await trio.lowlevel.checkpoint()
        await end()
    for future in pending:
        await future
    await rank.barrier()  # those whose operations have ended by then hear of it here


@pytest.mark.parametrize("step", [0, 7, 19])
def test_when_a_rank_raises_nothing_stays_under_way(step: int, begun: list[Execution]) -> None:
    arrays: list[list[np.ndarray]] = [[], [], []]

    async def fail() -> None:
        raise ValueError("on purpose")

    async def main(rank: overlap.Rank) -> None:
        await many(rank, step, arrays[rank.rank], fail)

    outcomes = run_far(main, 3, 1, wires=by_sockets)
    assert [type(outcome) for outcome in outcomes] == [overlap.RankFailedError] * 3
    assert not any(run._running_steps for run in begun)
    assert all(array.flags.writeable for mine in arrays for array in mine)


@pytest.mark.parametrize("step", [0, 7, 19])
def test_when_a_process_is_lost_nothing_stays_under_way(step: int, begun: list[Execution]) -> None:
    arrays: list[list[np.ndarray]] = [[], [], []]
    reached = trio.Event()

    async def lose(companies: list[Company]) -> None:
        await reached.wait()
        for company, other in zip(companies, (1, 0, 1), strict=True):
            company.lose(other, "its connection broke")

    async def lost() -> None:
        reached.set()
        await trio.sleep_forever()

    async def main(rank: overlap.Rank) -> None:
        await many(rank, step, arrays[rank.rank], lost)

    outcomes = run_far(main, 3, 1, wires=by_sockets, nemesis=lose)
    assert all(isinstance(outcome, overlap.RankFailedError) for outcome in outcomes)
    assert not any(run._running_steps for run in begun)
    assert all(array.flags.writeable for mine in arrays for array in mine)


async def test_a_program_that_is_given_up_waits_for_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write to memory that belongs to others as soon as the end is told."""
    gate, told = threading.Event(), list[BaseException | None]()
    monkeypatch.setattr(arithmetic, "INLINE_BYTES", 0)
    monkeypatch.setattr(arithmetic, "PIECE_BYTES", 800)
    monkeypatch.setattr(arithmetic, "apply_step", lambda *_: gate.wait(TIMEOUT_S))
    run, workers = _copying(1000)
    async with trio.open_nursery() as nursery:
        assert not run(nursery).begin(told.append)
        run(nursery).cancel()
        await wait_all_tasks_blocked()
        assert not told
        gate.set()
    workers.close()
    assert [type(error) for error in told] == [trio.ClosedResourceError]


async def test_a_program_gets_the_error_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> None:
        raise ArithmeticError("on purpose")

    told = list[BaseException | None]()
    monkeypatch.setattr(arithmetic, "INLINE_BYTES", 0)
    monkeypatch.setattr(arithmetic, "PIECE_BYTES", 8)
    monkeypatch.setattr(arithmetic, "apply_step", boom)
    run, workers = _copying(3)
    async with trio.open_nursery() as nursery:
        assert not run(nursery).begin(told.append)
        while not told:
            await trio.lowlevel.checkpoint()
    workers.close()
    assert [str(error) for error in told] == ["on purpose"]


def _copying(size: int) -> tuple[Callable[[trio.Nursery], Execution], Workers]:
    """Return the execution of a program that copies an array in pieces, once there is a nursery, and its workers."""
    workers = Workers(1)
    step = Step(StepKind.LOCAL, Op.MOVE, 0, 0, Extent(Buffer.IN, 0, 1), Extent(Buffer.OUT, 0, 1), None, ())
    layout = BufferLayout(size, 1, None, 1)
    buffers = Buffers((np.ones(size), np.zeros(size), np.empty(0)), layout)
    laid = lay_out_program(Program(0, ((), (step,))), buffers, [0])

    @cache
    def run(nursery: trio.Nursery) -> Execution:
        token = trio.lowlevel.current_trio_token()
        resources = execution.ProgramResources(wires={}, workers=workers, token=token, thread=get_ident())
        return Execution(laid, buffers, resources, tag=0, priority=0, spawn=nursery.start_soon)

    return run, workers


# -- programs laid out on arrays: in whatever order steps are carried out that it leaves open, the same comes out ------

_Lane: TypeAlias = tuple[int, int, int]

BLOCK = 70  # so large that two slices are
REDUCER = find_reducer("sum", np.dtype(np.int64))
ALGORITHMS = [name for name in GENERATORS["all_reduce"] if fits(name, 4)]


class Message:
    """Bytes under way, and of whom their sender had heard when it began to send them."""

    def __init__(self, source: np.ndarray, heard: set[int]) -> None:
        self.bytes, self.heard, self.left = np.zeros_like(source), set(heard), False


class Rank:
    """One that takes two turns for each step beside that in which it begins: one for each half of the bytes."""

    def __init__(self, laid: LaidOutProgram, buffers: Buffers, wires: dict[_Lane, list[Message]]) -> None:
        self.laid, self.buffers, self.wires = laid, buffers, wires
        self.before_begin, self.before_work = list(laid.before_begin), list(laid.before_work)
        self.to_begin = list(laid.first)
        self.running: dict[LaidOutStep, int] = {}  # turns they have had
        self.place: dict[LaidOutStep, tuple[_Lane, int]] = {}  # of messages
        self.begun: Counter[_Lane] = Counter()
        self.heard, self.unended = {laid.rank}, len(laid.steps)

    def able(self) -> list[LaidOutStep]:
        return self.to_begin + [
            step
            for step in self.running
            if not self.before_work[step.number] and (not step.receives or self.message(step).left)
        ]

    def message(self, step: LaidOutStep) -> Message:
        lane, index = self.place[step]
        there = self.wires[lane]
        return there[index] if index < len(there) else Message(np.empty(0), set())

    def take_turn(self, step: LaidOutStep) -> None:
        if step not in self.running:
            self.begin(step)
            return
        turn = self.running[step]
        start, stop = self.laid.layout.element_range(step.step.dst)
        half = (stop - start) // 2
        self.move(step, slice(half, None) if turn else slice(half))
        self.running[step] += 1
        if turn == 1:
            self.end(step)

    def begin(self, step: LaidOutStep) -> None:
        self.to_begin.remove(step)
        if step.leads:
            self.let_begin([step.number + 1])
        self.running[step] = 0
        lane = (self.laid.rank, step.peer, step.channel) if step.sends else (step.peer, self.laid.rank, step.channel)
        self.place[step] = lane, self.begun[lane]
        if step.sends:
            self.wires[lane].append(Message(self.buffers.view(step.step.src), self.heard))
        self.begun[lane] += step.sends or step.receives

    def move(self, step: LaidOutStep, half: slice) -> None:
        source = self.message(step).bytes if step.receives else self.buffers.view(step.step.src)
        if step.sends:
            self.message(step).bytes[half] = source[half]
            return
        target = self.buffers.view(step.step.dst)
        base = target if step.step.base is None else self.buffers.view(step.step.base)
        apply_step(step.step, self.laid.layout, self.laid.rank, source[half], base[half], target[half])

    def end(self, step: LaidOutStep) -> None:
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
        ranks.append(Rank(lay_out_program(program, buffers, range(schedule.size), blank=blank), buffers, wires))
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
        ranks = ranks_of(slice_long_messages(schedule, 4 << 20) if sliced else schedule, shared=seed == 0)
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


def lay(receives: list[Step]) -> LaidOutProgram:
    arrays = (np.zeros(100), np.zeros(100), np.zeros(100))
    return lay_out_program(Program(0, ((), tuple(receives))), Buffers(arrays, BufferLayout(1, 1, REDUCER, 3)), range(3))
