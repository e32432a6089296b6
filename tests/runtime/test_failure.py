"""Nothing is lost: whoever fails first is named, everybody else learns of it, and all of them end."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
import trio

import overlap
import topology
from overlap import PeerFailedError, RankFailedError
from tests.errors import Mute, error_from
from transports import LinkLostError

from .worlds import TIMEOUT_S, Turns, failure_of, run

R = overlap.Rank
HERE = "tests/runtime/test_failure.py"


class Boom(Exception):
    """Raised on purpose."""


def boom() -> None:
    raise Boom("on purpose")


def line_of(error: BaseException) -> int:
    """The last line of this file in the traceback of `error`."""
    return [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == __file__][-1]


def test_who_raised_what_where_and_doing_what(path: str) -> None:
    async def main(rank: R) -> None:
        if rank.rank == 1:
            rank.all_reduce(np.ones(3), name="w2")
            rank.recv(((1,), float), 2, tag=4)
            await trio.lowlevel.checkpoint()
            boom()
        await rank.barrier(stream=rank.stream("other"))

    error = failure_of(run, main, 3, path=path)
    assert error.rank == 1
    assert type(error.cause) is Boom
    assert error.__cause__ is error.cause
    line = line_of(error.cause)
    first = main.__code__.co_firstlineno
    assert error.doing == (
        f"w2 #0 on group 'world' ({HERE}:{first + 2})",
        f"recv #0 from rank 2 with tag 4 on group 'world' ({HERE}:{first + 3})",
    )
    assert str(error) == (
        f"rank 1 failed at test_failure.py:{line}: Boom: on purpose; unfinished there: {', '.join(error.doing)}; "
        "the other 2 ranks were stopped"
    )


class Halt(BaseException):
    """What some libraries raise past every `except Exception`, such as `asyncio.CancelledError`."""


@pytest.mark.parametrize("how", ["in the program", "in a task of it", "in a compute"])
def test_what_is_no_exception_names_its_rank_all_the_same(how: str) -> None:
    async def halt() -> None:
        raise Halt("on purpose")

    def compute() -> None:
        raise Halt("on purpose")

    async def main(rank: R) -> None:
        if rank.rank == 1 and how == "in a compute":
            await rank.compute(compute)
        elif rank.rank == 1 and how == "in a task of it":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(halt)
        elif rank.rank == 1:
            await halt()
        await rank.barrier()

    failure = failure_of(run, main, 3)
    line = (compute if how == "in a compute" else halt).__code__.co_firstlineno + 1
    told = f"rank 1 failed at test_failure.py:{line}: Halt: on purpose"
    assert (failure.rank, type(failure.cause)) == (1, Halt)
    assert str(failure) == f"{told}; the other 2 ranks were stopped"
    assert not failure.others


def test_many_unfinished_operations_are_counted() -> None:
    async def main(rank: R) -> None:
        for tag in range(9):
            rank.recv(((1,), float), 0, tag)
        raise Boom("on purpose")

    failure = failure_of(run, main, 1)
    assert failure.doing[4:] == ("and 5 more",)
    assert len(failure.doing) == 5


def test_peers_that_wait_get_an_error_that_names_the_culprit(path: str) -> None:
    """Whatever they wait in: started, queued, point to point; those that sleep are cancelled."""
    told: dict[int, BaseException] = {}

    async def main(rank: R) -> None:
        if rank.rank == 3:
            for peer in range(3):
                await rank.recv(((1,), float), peer)
            raise Boom("on purpose")
        rank.stream("s", window=1)
        futures = [rank.barrier(stream="s"), rank.barrier(stream="s"), rank.recv(((1,), float), 3)]
        rank.send(np.zeros(1), 3)
        told[rank.rank] = await error_from(PeerFailedError, futures[rank.rank])
        with pytest.raises(PeerFailedError):
            rank.all_reduce(np.ones(1))
        with pytest.raises(PeerFailedError):
            rank.compute(int)
        await trio.sleep_forever()

    failure = failure_of(run, main, 4, path=path)
    assert sorted(told) == [0, 1, 2]
    assert len({id(error) for error in told.values()}) == 3
    for error in told.values():
        assert isinstance(error, PeerFailedError)
        assert str(error) == "rank 3 failed: Boom: on purpose"
        assert error.culprit == 3
        assert error.__cause__ is failure.cause
    assert failure.rank == 3
    assert not failure.others


def test_ranks_that_wait_for_nothing_of_ours_are_cancelled() -> None:
    ended: list[int] = []

    async def main(rank: R) -> None:
        if rank.rank == 0:
            raise Boom("on purpose")
        try:
            await trio.sleep_forever()
        finally:
            ended.append(rank.rank)

    failure_of(run, main, 4)
    assert sorted(ended) == [1, 2, 3]


def test_queued_computes_do_not_start_any_more() -> None:
    """The one that runs ends first: a thread cannot be interrupted."""
    ran: list[str] = []
    inside, go_on = trio.Event(), trio.Event()

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await inside.wait()
            raise Boom("on purpose")

        def first(token: trio.lowlevel.TrioToken) -> None:
            token.run_sync_soon(inside.set)
            trio.from_thread.run(go_on.wait, trio_token=token)
            ran.append("first")

        rank.compute(first, trio.lowlevel.current_trio_token())
        rank.compute(ran.append, "second")
        try:
            await trio.sleep_forever()
        finally:
            go_on.set()

    failure_of(run, main, 2)
    assert ran == ["first"]


async def in_a_nursery(rank: R) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        nursery.start_soon(raise_boom)


async def in_nested_nurseries(rank: R) -> None:
    async with trio.open_nursery() as outer:
        outer.start_soon(in_a_nursery, rank)


async def raise_boom() -> None:
    await trio.lowlevel.checkpoint()
    raise Boom("on purpose")


async def in_a_compute(rank: R) -> None:
    await rank.compute(boom)


async def in_a_nursery_that_waits(rank: R) -> None:
    """The other tasks of this rank that wait for the collective are cancelled and do not count."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for, rank)
        nursery.start_soon(raise_boom)


async def wait_for(rank: R) -> None:
    await rank.barrier()


@pytest.mark.parametrize(
    "program", [in_a_nursery, in_nested_nurseries, in_a_compute, in_a_nursery_that_waits], ids=lambda f: f.__name__
)
def test_the_cause_is_the_error_itself_however_deep(program: Callable[[R], Awaitable[None]], path: str) -> None:
    async def main(rank: R) -> None:
        if rank.rank == 1:
            await program(rank)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(wait_for, rank)

    failure = failure_of(run, main, 3, path=path)
    assert failure.rank == 1
    assert type(failure.cause) is Boom
    assert not failure.others


async def raise_at_once() -> None:
    raise Boom("on purpose")


def test_two_errors_in_one_nursery_come_as_a_group() -> None:
    async def main(rank: R) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raise_at_once)
            nursery.start_soon(raise_at_once)

    failure = failure_of(run, main, 1)
    assert isinstance(failure.cause, ExceptionGroup)
    assert [type(error) for error in failure.cause.exceptions] == [Boom, Boom]


def test_several_ranks_fail_and_the_first_is_the_culprit() -> None:
    """Rank 2 is first; 1 fails of its own while it ends; 0 only passes on what it was told."""
    turns = Turns((1, 0, 2))

    async def main(rank: R) -> None:
        async with turns.of(rank.rank):
            future = rank.barrier() if rank.rank < 2 else rank.recv(((1,), float), 0)
        if rank.rank == 2:
            raise Boom("first")
        try:
            await future
        except PeerFailedError:
            if rank.rank == 1:
                raise ValueError("second") from None
            raise

    failure = failure_of(run, main, 3)
    assert failure.rank == 2
    assert str(failure.cause) == "first"
    assert {rank: str(error) for rank, error in failure.others.items()} == {1: "second"}
    assert "; also failed: rank 1" in str(failure)


def test_wires_that_break_after_a_failure_are_no_failures() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 2:
            raise Boom("first")
        try:
            await rank.barrier()
        except PeerFailedError:
            raise LinkLostError("process 2 is lost: the connection ended", src=rank.rank, dst=2) from None

    failure = failure_of(run, main, 3)
    assert (failure.rank, failure.others) == (2, {})
    assert "also failed" not in str(failure)


def test_all_ranks_fail_at_once() -> None:
    async def main(rank: R) -> None:
        raise Boom(f"rank {rank.rank}")

    failure = failure_of(run, main, 5)
    assert str(failure.cause) == f"rank {failure.rank}"
    everybody = {failure.rank: failure.cause, **failure.others}
    assert {rank: str(error) for rank, error in everybody.items()} == {rank: f"rank {rank}" for rank in range(5)}


def test_a_peer_that_swallows_the_error_does_not_save_the_world() -> None:
    async def main(rank: R) -> str:
        if rank.rank == 0:
            raise Boom("on purpose")
        try:
            await rank.barrier()
        except PeerFailedError:
            return "all is well"
        return "never"

    failure = failure_of(run, main, 2)
    assert failure.rank == 0


def test_one_world_fails_and_another_one_in_the_same_program_goes_on() -> None:
    async def good(rank: R) -> int:
        for _ in range(50):
            await rank.all_reduce(np.ones(2))
        return rank.rank

    async def bad(rank: R) -> None:
        await rank.all_reduce(np.ones(2))
        raise Boom("on purpose")

    async def both() -> list[object]:
        got: list[object] = []

        async def first() -> None:
            got.append(await overlap.run_async(good, ranks=3, timeout_s=TIMEOUT_S))

        async def second() -> None:
            error = await error_from(RankFailedError, overlap.run_async(bad, ranks=2, timeout_s=TIMEOUT_S))
            got.append(type(error.cause))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            nursery.start_soon(second)
        return got

    got = trio.run(both)
    assert len(got) == 2
    assert [0, 1, 2] in got
    assert Boom in got


@pytest.mark.parametrize("path", ["direct", "mesh"])
def test_the_timeline_of_a_failed_run_is_written(path: str, tmp_path: Path) -> None:
    async def main(rank: R) -> None:
        await rank.barrier(name="reached")
        raise Boom("on purpose")

    trace = tmp_path / "trace.json"
    with pytest.raises(RankFailedError):
        overlap.run(main, ranks=2, trace=trace, algorithm=path, timeout_s=TIMEOUT_S)
    assert trace.read_text().count('"reached"') >= 2


def test_the_place_is_the_line_of_the_program() -> None:
    """Whatever refuses the call, and however deep in libraries."""

    async def illegal(rank: R) -> None:
        rank.mesh(pp=32 // 3, dp=3)

    async def library(rank: R) -> None:
        json.loads("{")

    for main in (illegal, library):
        error = failure_of(overlap.run, main, ranks=1)
        line = main.__code__.co_firstlineno + 1
        assert str(error).startswith(f"rank 0 failed at test_failure.py:{line}: ")


@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize(("function", "args"), [(lambda x: x, ()), (json.loads, ("{",))], ids=["call", "library"])
def test_a_compute_that_fails_outside_the_program_has_the_line_of_its_call(
    function: Callable[..., object], args: tuple[object, ...], clock: Any
) -> None:
    async def main(rank: R) -> None:
        future = rank.compute(function, *args, seconds=1e-6)
        await rank.barrier()
        await future

    error = failure_of(overlap.run, main, ranks=1, clock=clock)
    assert str(error).startswith(f"rank 0 failed at test_failure.py:{main.__code__.co_firstlineno + 1}: ")


def test_advice_names_the_line_of_the_program() -> None:
    async def main(rank: R) -> None:
        rank.mesh(dp=8, tp=8)

    with pytest.warns(topology.TopologyWarning) as caught:
        overlap.run(main, cluster="trn2.48xlarge", clock="virtual")
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, main.__code__.co_firstlineno + 1)}


def test_a_program_whose_path_begins_like_ours_is_a_program() -> None:
    beside = Path(overlap.__file__).parent.with_name("overlap_of_mine.py")
    code = compile("def fail():\n    raise ValueError('mine')\n", str(beside), "exec")
    mine: dict[str, Callable[[], None]] = {}
    exec(code, mine)

    async def main(rank: R) -> None:
        mine["fail"]()

    with pytest.raises(RankFailedError, match=r"^rank 0 failed at overlap_of_mine.py:2: ValueError: mine"):
        overlap.run(main, ranks=1)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (GeneratorExit(), "RuntimeError: the program raised GeneratorExit"),
        (Mute(), "RuntimeError: Mute: (its text cannot be had: RuntimeError)"),
        (ExceptionGroup("two", [ValueError("one"), Mute()]), "ValueError: one, and 1 more"),
        (BaseExceptionGroup("two", [ValueError("one"), GeneratorExit()]), "ValueError: one, and 1 more"),
        (StopIteration(), "RuntimeError: coroutine raised StopIteration"),
    ],
    ids=["GeneratorExit", "unshowable", "group", "group with GeneratorExit", "StopIteration"],
)
def test_errors_that_nurseries_cannot_hold_are_told_like_others(error: BaseException, told: str, path: str) -> None:
    async def main(rank: R) -> None:
        await rank.barrier()
        if rank.rank == 1:
            raise error
        await rank.barrier()

    failure = failure_of(run, main, 2, path=path)
    line = main.__code__.co_firstlineno + 3
    assert (failure.rank, str(failure)) == (1, f"rank 1 failed at test_failure.py:{line}: {told}")


def test_a_long_line_of_an_error_is_told_by_its_ends() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 1:
            raise ValueError("a" + "x" * 10_000_000 + "z")
        await rank.barrier()

    failure = failure_of(run, main, 2)
    text = str(failure)
    assert len(text) < 3000
    assert text.startswith("rank 1 failed at test_failure.py:")
    assert text.endswith("xxxz")
    assert "x ... 9998002 characters left out ... x" in text
