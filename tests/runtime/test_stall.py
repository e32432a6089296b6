"""Nothing moves any more: the report of a time-out, and wires that break."""

import re
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import overlap
from overlap import PeerFailedError, StallError
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
    assert str(error) == "\n  ".join([f"the world did not finish within timeout_s=60: {error.sentence}", *report])


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
