"""Programs driven by the wires: right results, and nothing under way once an execution has ended."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from threading import get_ident

import numpy as np
import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

import overlap
from overlap.collectives import Buffer, Extent, Op, Program, Step, StepKind
from overlap.collectives.generators import GENERATORS
from overlap.runtime.backend import Backend
from overlap.runtime.engine import arithmetic, execution, programs
from overlap.runtime.engine.execution import Execution
from overlap.runtime.engine.laid_out import lay_out
from overlap.runtime.engine.layout import BufferLayout, Buffers
from overlap.runtime.engine.workers import Workers
from transports import Wire

from .cases import KINDS, cases
from .companies import TIMEOUT_S, Company, by_sockets, run_far
from .test_collectives import check_world, issue_all


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
    assert not any(run._running for run in begun)


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
    monkeypatch.setattr(execution, "linger", seen)

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
    assert not any(run._running for run in begun)
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
    assert not any(run._running for run in begun)
    assert all(array.flags.writeable for mine in arrays for array in mine)


async def test_a_program_that_is_given_up_waits_for_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write to memory that belongs to others as soon as the end is told."""
    gate, told = threading.Event(), list[BaseException | None]()
    monkeypatch.setattr(arithmetic, "INLINE_BYTES", 0)
    monkeypatch.setattr(arithmetic, "PIECE_BYTES", 800)
    monkeypatch.setattr(arithmetic, "apply", lambda *_: gate.wait(TIMEOUT_S))
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
    monkeypatch.setattr(arithmetic, "apply", boom)
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
    laid = lay_out(Program(0, ((), (step,))), buffers, [0])

    @cache
    def run(nursery: trio.Nursery) -> Execution:
        token = trio.lowlevel.current_trio_token()
        station = execution.Station(wires={}, workers=workers, token=token, thread=get_ident())
        return Execution(laid, buffers, station, tag=0, priority=0, spawn=nursery.start_soon)

    return run, workers
