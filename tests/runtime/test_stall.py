"""Nothing moves any more: the report of a time-out, and wires that break."""

import re
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import overlap
from overlap import PeerFailedError, StallError
from overlap.runtime.backend import RealBackend
from overlap.runtime.blame import stall as stall_watch
from tests.errors import error_from, error_of
from transports import Faulty, LinkLostError, NeuronLink

from .worlds import TIMEOUT_S, failure_of

R = overlap.Rank
HERE = "tests/runtime/test_stall.py"


def stall(main: Callable[[R], Awaitable[object]], ranks: int) -> StallError:
    """Run in virtual time, which jumps to the time-out as soon as nothing moves."""

    async def world() -> None:
        seen.append(await error_from(StallError, overlap.run_async(main, ranks=ranks, timeout_s=60)))

    seen: list[StallError] = []
    trio.run(world, clock=MockClock(autojump_threshold=0))
    return seen[0]


def test_a_stall_says_who_waits_for_whom() -> None:
    lines: dict[str, int] = {}

    async def main(rank: R) -> None:
        lines["main"] = main.__code__.co_firstlineno
        if rank.rank == 0:
            await rank.group([0, 2, 1], name="dp").all_reduce(np.ones(2), name="loss")
        elif rank.rank == 1:
            await rank.recv(((1,), float), 2, tag=3)
        elif rank.rank == 2:
            await trio.sleep_forever()

    error = stall(main, 4)
    first = lines["main"]
    assert error.timeout_s == 60
    report = (
        f"rank 0: loss #0 of group 'dp' ({HERE}:{first + 3}); waits for ranks 2, 1",
        f"rank 1: recv #0 from rank 2 with tag 3 ({HERE}:{first + 5}); waits for rank 2",
        f"rank 2: in its program, at {HERE}:{first + 7}",
        "rank 3: has finished",
    )
    assert error.report == report
    assert error.sentence.partition(";")[0] == f"rank 2 has not come: its program is at {HERE}:{first + 7}"
    first = f"the world did not finish within timeout_s=60: {error.sentence}"
    assert str(error) == "\n  ".join([f"{first}; raise timeout_s if the program is only slow", *report])


def test_a_rank_that_awaits_what_another_has_issued_is_told_with_its_line() -> None:
    shared: list[overlap.Future] = []

    async def main(rank: R) -> None:
        if rank.rank == 1:
            shared.append(rank.compute(np.ones, 3, seconds=100))
        if rank.rank == 0:
            await trio.sleep(1)
            await shared[0]
        await rank.barrier()

    error = error_of(StallError, overlap.run, main, ranks=3, clock="virtual", timeout_s=60)
    first = main.__code__.co_firstlineno
    place = f"{HERE}:{first + 5} (awaits compute 'ones' of rank 1)"
    assert error.report[0] == f"rank 0: in its program, at {place}"
    assert error.sentence == (
        f"rank 0 has not come: its program is at {place}; ranks 1-2 wait for it in barrier #0 of group 'world' "
        f"({HERE}:{first + 6})"
    )


def test_a_cycle_of_waits_shows_all_of_it() -> None:
    """Everybody receives before it sends."""

    async def main(rank: R) -> None:
        await rank.recv(((1,), float), (rank.rank + 1) % 3)
        await rank.send(np.ones(1), (rank.rank - 1) % 3)

    error, first = stall(main, 3), main.__code__.co_firstlineno + 1
    assert [plain(line).partition("; ")[2] for line in error.report] == [f"waits for rank {rank}" for rank in (1, 2, 0)]
    assert error.sentence == (
        "ranks 0-2 wait for each other and cannot go on: "
        + ", ".join(f"rank {rank} in recv #0 from rank {(rank + 1) % 3} ({HERE}:{first})" for rank in range(3))
        + "; each receives before it sends"
    )


@pytest.mark.parametrize("make", ["group", "stream"])
def test_groups_of_equal_ranks_and_streams_have_different_names_in_a_report(make: str) -> None:
    async def main(rank: R) -> None:
        if make == "group":
            halves = [rank.group([0, 1]), rank.group([0, 1])]
        else:
            halves = [rank.world.on(rank.stream("a")), rank.world.on(rank.stream("b"))]
        for half in halves[:: 1 - 2 * rank.rank]:
            await half.barrier()

    error, line = stall(main, 2), f"{HERE}:{main.__code__.co_firstlineno + 6}"
    names = ["0-1 (number 2, stream comm)", "0-1 (number 3, stream comm)"]
    if make == "stream":
        names = ["world (number 1, stream a)", "world (number 1, stream b)"]
    titles = [f"barrier #0 of group '{name}' ({line})" for name in names]
    assert error.sentence == (
        f"ranks 0-1 wait for each other and cannot go on: rank 0 in {titles[0]}, rank 1 in {titles[1]}; "
        "call the operations of all groups that ranks share in one order"
    )
    assert [line.partition(";")[0] for line in error.report] == [f"rank {rank}: {titles[rank]}" for rank in (0, 1)]


def test_arrays_come_back_after_a_stall() -> None:
    x = np.ones(2)

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.all_reduce(x)
        await trio.sleep_forever()

    stall(main, 2)
    assert x.flags.writeable


async def test_a_world_that_ends_in_time_is_none_the_wiser(autojump_clock) -> None:
    async def main(rank: R) -> float:
        await trio.sleep(59)
        return trio.current_time()

    started_s = trio.current_time()
    assert await overlap.run_async(main, ranks=2, timeout_s=60) == [started_s + 59] * 2


@pytest.mark.parametrize("waiting", [{0}, {0, 1}], ids=["one", "all"])
def test_a_program_that_waits_in_a_thread_ends_with_the_time_limit(waiting: set[int]) -> None:
    """No cancellation ends such a wait, and its error is no failure of its rank."""

    async def main(rank: R) -> None:
        if rank.rank in waiting:
            await trio.to_thread.run_sync(rank.recv(src=1 - rank.rank).result)
        await trio.sleep_forever()

    assert "rank 0: recv #0 from rank 1" in str(stall(main, 2))


@pytest.mark.parametrize("how", ["interrupt in one", "cancelled with one", "cancelled with all"])
def test_a_program_that_waits_in_a_thread_ends_with_its_interrupted_or_cancelled_world(how: str) -> None:
    """There is no time limit."""

    async def main(rank: R) -> None:
        receive = rank.recv(src=1 - rank.rank)
        if rank.rank == 0 and how == "interrupt in one":
            raise KeyboardInterrupt

        def wait() -> None:
            if rank.rank == 1 and how != "interrupt in one":
                trio.from_thread.run_sync(caller.cancel)
            receive.result()

        if rank.rank == 1 or how == "cancelled with all":
            await trio.to_thread.run_sync(wait)
        await trio.sleep_forever()

    async def world() -> None:
        with caller:
            await overlap.run_async(main, ranks=2)

    caller = trio.CancelScope()
    if how == "interrupt in one":
        with pytest.raises(KeyboardInterrupt):
            overlap.run(main, ranks=2)
    else:
        trio.run(world)
        assert caller.cancelled_caught


@pytest.mark.parametrize("cleanup_s", [-1.0, 5.0])
def test_after_an_interrupt_programs_clean_up_for_as_long_as_they_need(
    cleanup_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for it is that of a stop. A wait of a thread ends, and nothing else of its rank."""

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await wait_all_tasks_blocked()
            raise KeyboardInterrupt
        try:
            if rank.rank == 1:
                await trio.to_thread.run_sync(rank.recv(src=0).result)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                rank.send(np.ones(()), 3 - rank.rank)
                cleaned.append(float(await rank.recv(src=3 - rank.rank)))

    cleaned = list[float]()
    monkeypatch.setattr(RealBackend, "cleanup_s", cleanup_s)
    with pytest.raises(KeyboardInterrupt):
        overlap.run(main, ranks=3)
    assert cleaned == [1.0, 1.0]


@pytest.mark.parametrize("wraps", [False, True])
def test_what_a_thread_makes_of_a_stop_is_no_failure(wraps: bool) -> None:
    async def main(rank: R) -> None:
        try:
            await trio.to_thread.run_sync(rank.recv(src=1 - rank.rank).result)
        except PeerFailedError as ended:
            if wraps:
                raise RuntimeError("the program's own") from ended

    assert "did not finish within timeout_s=60" in str(stall(main, 2))


def test_a_rank_that_ends_because_of_a_stop_has_not_left_too_early() -> None:
    """The thread of rank 1 begins to wait once rank 0 has ended."""
    ended = threading.Event()

    async def main(rank: R) -> None:
        receive = rank.recv(src=1 - rank.rank)
        if rank.rank == 0:
            try:
                await trio.to_thread.run_sync(receive.exception)
            finally:
                ended.set()
        else:
            await trio.to_thread.run_sync(lambda: ended.wait(TIMEOUT_S) and receive.result())

    assert "did not finish within timeout_s=60" in str(stall(main, 2))


def test_a_program_that_is_stopped_may_use_the_world_while_it_cleans_up() -> None:
    sums: list[float] = []

    async def main(rank: R) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                sums.append(float(await rank.all_reduce(np.ones(()))))

    stall(main, 2)
    assert sums == [2.0, 2.0]


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_program_that_is_stopped_cannot_clean_up_for_ever(clock: str) -> None:
    async def main(rank: R) -> None:
        try:
            await rank.recv(src=1 - rank.rank)
        finally:
            with trio.CancelScope(shield=True):
                await rank.recv(src=1 - rank.rank, tag=1)

    if clock == "virtual":
        assert "cannot finish" in str(error_of(StallError, overlap.run, main, ranks=2, clock=clock))
    else:
        stall(main, 2)


def test_an_error_in_the_handler_of_a_stop_is_its_cause() -> None:
    async def main(rank: R) -> None:
        try:
            await trio.to_thread.run_sync(rank.recv(src=1 - rank.rank).result)
        except PeerFailedError:
            {}["the program's own"]

    assert isinstance(stall(main, 2).__cause__, KeyError)


def test_own_errors_in_a_group_with_that_of_a_stop_are_a_failure() -> None:
    async def main(rank: R) -> None:
        try:
            await trio.to_thread.run_sync(rank.recv(src=1 - rank.rank).result)
        except PeerFailedError as ended:
            raise ExceptionGroup("the program's own", [ended, KeyError("a"), ValueError("b")]) from None

    async def world() -> None:
        seen.append(await error_from(overlap.RankFailedError, overlap.run_async(main, ranks=2, timeout_s=60)))

    seen: list[overlap.RankFailedError] = []
    trio.run(world, clock=MockClock(autojump_threshold=0))
    assert isinstance(seen[0].cause, ExceptionGroup)


def test_an_error_that_nobody_awaits_ends_the_waits_of_its_rank_in_threads_at_the_time_limit() -> None:
    async def main(rank: R) -> None:
        rank.compute(lambda: {}["the program's own"], errors="await")
        await trio.to_thread.run_sync(rank.recv(src=0).result)

    failure = failure_of(overlap.run, main, ranks=1, timeout_s=0.2)
    assert isinstance(failure.cause, KeyError)


def test_an_error_that_is_raised_from_itself_after_a_stop() -> None:
    async def main(rank: R) -> None:
        try:
            await trio.sleep_forever()
        finally:
            error = ValueError("the program's own")
            raise error from error

    async def world() -> None:
        seen.append(await error_from(overlap.RankFailedError, overlap.run_async(main, ranks=1, timeout_s=60)))

    seen: list[overlap.RankFailedError] = []
    trio.run(world, clock=MockClock(autojump_threshold=0))
    assert isinstance(seen[0].cause, ValueError)


@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_a_world_that_is_over_is_a_failure_of_this_one(ranks: int, clock: str) -> None:
    over: list[R] = []

    async def keep(rank: R) -> None:
        over.append(rank)

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await over[0].all_reduce(np.ones(1))
        await rank.barrier()

    overlap.run(keep, ranks=1)
    failure = error_of(overlap.RankFailedError, overlap.run, main, ranks=ranks, clock=clock)
    assert failure.rank == 0
    assert isinstance(failure.cause, PeerFailedError)
    assert failure.cause.culprit == -1


def test_an_error_of_a_world_that_is_over_ends_this_one_at_its_time_limit_if_nobody_awaits_it() -> None:
    async def keep(rank: R) -> R:
        return rank

    async def main(rank: R) -> None:
        rank.compute(lambda: over.barrier(), errors="await")
        await trio.sleep_forever()

    over = overlap.run(keep, ranks=1)[0]
    assert error_of(overlap.RankFailedError, overlap.run, main, ranks=1, timeout_s=0.2).rank == 0


@pytest.mark.parametrize("elements", [3, 1 << 17])
def test_a_link_that_is_cut(elements: int) -> None:
    """Its ends get the transport's own error, the third rank one that names the culprit; nobody is left waiting."""
    told: dict[int, BaseException] = {}

    async def main(rank: R) -> None:
        x = np.ones(elements)
        await rank.all_reduce(x)
        if rank.rank == 0:
            transport.cut(0, 1)
        try:
            await rank.all_reduce(x)
        except (LinkLostError, PeerFailedError) as error:
            told[rank.rank] = error
            assert x.flags.writeable
            raise

    transport = Faulty(NeuronLink(3), seed=0)
    failure = failure_of(overlap.run, main, ranks=3, transport=transport, timeout_s=TIMEOUT_S)
    assert failure.rank in (0, 1)
    assert isinstance(failure.cause, LinkLostError)
    assert any(isinstance(error, LinkLostError) for error in told.values())
    for error in told.values():
        assert isinstance(error, (LinkLostError, PeerFailedError))
        assert not isinstance(error, PeerFailedError) or error.culprit == failure.rank


def test_a_cut_link_ends_the_operation_on_all_ranks_even_if_they_go_on() -> None:
    """Rank 2 has both its links, and yet it would wait for ever."""

    async def main(rank: R) -> str:
        await rank.barrier()
        if rank.rank == 0:
            transport.cut(0, 1)
        return type(await error_from((LinkLostError, PeerFailedError), rank.all_reduce(np.ones(3)))).__name__

    transport = Faulty(NeuronLink(3), seed=0)
    told = overlap.run(main, ranks=3, transport=transport, algorithm="ring", timeout_s=TIMEOUT_S)
    assert told[2] == "PeerFailedError"
    assert "LinkLostError" in told[:2]


def test_a_stall_in_operations_that_nobody_awaits_is_reported_too() -> None:
    async def main(rank: overlap.Rank) -> None:
        rank.recv(((1,), float), 1 - rank.rank)

    error = stall(main, 2)
    line = main.__code__.co_firstlineno + 1
    assert tuple(map(plain, error.report)) == tuple(
        f"rank {rank}: recv #0 from rank {1 - rank} ({HERE}:{line}); waits for rank {1 - rank}" for rank in range(2)
    )


# -- where the program of a rank is that nobody sees in an operation ---------------------------------------------------


async def _in_a_task() -> None:
    await trio.sleep_forever()


def test_of_a_program_with_tasks_their_places_are_told() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_in_a_task)
                nursery.start_soon(receive, rank)  # waits for us, and is told as what it waits for
        else:
            await trio.Event().wait()

    async def receive(rank: R) -> None:
        await rank.recv(((1,), float), 1)

    error = stall(main, 2)
    task, first = _in_a_task.__code__.co_firstlineno + 1, main.__code__.co_firstlineno
    received = receive.__code__.co_firstlineno + 1
    assert tuple(map(plain, error.report)) == (
        f"rank 0: recv #0 from rank 1 ({HERE}:{received}); waits for rank 1; its program is at {HERE}:{task}",
        f"rank 1: in its program, at {HERE}:{first + 6}",
    )
    assert error.sentence == ""


# -- told while it lasts ---------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return a report without how long the ranks have waited, which a busy machine decides."""
    return re.sub(r"has waited \d+ s for", "waits for", text)


def test_a_stall_is_told_without_any_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    told = trio.Event()

    def notify(text: str) -> None:
        said.append(text)
        told.set()

    async def main(rank: R) -> None:
        if rank.rank == 1:
            await told.wait()
        await rank.barrier()

    monkeypatch.setenv("OVERLAP_STALL_S", "0.2")
    monkeypatch.setattr(stall_watch, "notify", notify)
    overlap.run(main, ranks=3, timeout_s=TIMEOUT_S)
    first = main.__code__.co_firstlineno
    assert plain(said[0]) == (
        f"no progress for 0.2 s: rank 1 has not come: its program is at {HERE}:{first + 2}; ranks 0, 2 wait for it in "
        f"barrier #0 of group 'world' ({HERE}:{first + 3})\n"
        f"  rank 1: in its program, at {HERE}:{first + 2}\n"
        f"  ranks 0, 2: barrier #0 of group 'world' ({HERE}:{first + 3}); waits for rank 1\n"
        "  the run waits on; Ctrl-C ends it, as --stall-timeout SECONDS would"
    )


def test_a_compute_that_others_wait_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    told = threading.Event()

    def notify(text: str) -> None:
        said.append(text)
        told.set()

    def tokenise() -> object:
        assert told.wait(TIMEOUT_S)
        return np.ones(1)

    async def main(rank: R) -> None:
        await rank.all_reduce(rank.compute(tokenise) if rank.rank == 0 else np.ones(1))

    monkeypatch.setenv("OVERLAP_STALL_S", "0.2")
    monkeypatch.setattr(stall_watch, "notify", notify)
    overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)
    at = f"{HERE}:{main.__code__.co_firstlineno + 1}"
    assert plain(said[0]) == (
        f"no progress for 0.2 s: rank 0 has not come: it computes 'tokenise' ({at}); rank 1 waits for it in all_reduce "
        f"#0 of group 'world' ({at})\n"
        f"  rank 0: computes 'tokenise' ({at})\n"
        f"  rank 1: all_reduce #0 of group 'world' ({at}); waits for rank 0\n"
        "  the run waits on; Ctrl-C ends it, as --stall-timeout SECONDS would"
    )


def test_a_world_is_given_up_that_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            await trio.sleep_forever()
        await rank.barrier()

    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    monkeypatch.setenv("OVERLAP_GIVE_UP_S", "0.2")
    error = error_of(StallError, overlap.run, main, ranks=2)
    first = main.__code__.co_firstlineno
    sleeps, waits = f"{HERE}:{first + 2}", f"{HERE}:{first + 3}"
    assert error.timeout_s is None
    assert plain(str(error)) == (
        "the world made no progress for 0.2 s, and is given up: "
        f"rank 0 has not come: its program is at {sleeps}; rank 1 waits for it in barrier #0 of group 'world' "
        f"({waits})\n"
        f"  rank 0: in its program, at {sleeps}\n"
        f"  rank 1: barrier #0 of group 'world' ({waits}); waits for rank 0"
    )
