"""Nothing moves any more: the report of a time-out, and wires that break."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import overlap
from overlap import PeerFailedError, StallError
from transports import Faulty, LinkLostError, NeuronLink

from .worlds import TIMEOUT_S, failing

R = overlap.Rank
HERE = "tests/core/test_stall.py"


def stall(main: Callable[[R], Awaitable[object]], ranks: int) -> StallError:
    """Run in virtual time, which jumps to the time-out as soon as nothing moves."""

    async def world() -> None:
        with pytest.raises(StallError) as caught:
            await overlap.run_async(main, ranks=ranks, timeout_s=60)
        seen.append(caught.value)

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
        f"rank 0: loss #0 on group 'dp' ({HERE}:{first + 3}); waits for rank 2, 1",
        f"rank 1: recv #0 from rank 2 with tag 3 on group 'world' ({HERE}:{first + 5}); waits for rank 2",
        "rank 2: has nothing issued; its program is elsewhere",
        "rank 3: has finished",
    )
    assert error.report == report
    assert str(error) == "\n  ".join(["the world did not finish within timeout_s=60", *report])


def test_a_cycle_of_waits_shows_all_of_it() -> None:
    """Everybody receives before it sends."""

    async def main(rank: R) -> None:
        await rank.recv(((1,), float), (rank.rank + 1) % 3)
        await rank.send(np.ones(1), (rank.rank - 1) % 3)

    report = stall(main, 3).report
    assert [line.partition("; ")[2] for line in report] == [f"waits for rank {rank}" for rank in (1, 2, 0)]


def test_arrays_come_back_after_a_stall() -> None:
    x = np.ones(2)

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.all_reduce(x)
        await trio.sleep_forever()

    stall(main, 2)
    assert x.flags.writeable


def test_a_world_that_ends_in_time_is_none_the_wiser() -> None:
    async def main(rank: R) -> float:
        await trio.sleep(59)
        return trio.current_time()

    async def world() -> None:
        started_s = trio.current_time()
        assert await overlap.run_async(main, ranks=2, timeout_s=60) == [started_s + 59] * 2

    trio.run(world, clock=MockClock(autojump_threshold=0))


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
    with failing() as errors:
        overlap.run(main, ranks=3, transport=transport, timeout_s=TIMEOUT_S)
    assert errors[0].rank in (0, 1)
    assert isinstance(errors[0].cause, LinkLostError)
    assert any(isinstance(error, LinkLostError) for error in told.values())
    for error in told.values():
        assert isinstance(error, (LinkLostError, PeerFailedError))
        assert not isinstance(error, PeerFailedError) or error.culprit == errors[0].rank


def test_a_cut_link_ends_the_operation_on_all_ranks_even_if_they_go_on() -> None:
    """Rank 2 has both its links, and yet it would wait for ever."""

    async def main(rank: R) -> str:
        await rank.barrier()
        if rank.rank == 0:
            transport.cut(0, 1)
        with pytest.raises((LinkLostError, PeerFailedError)) as caught:
            await rank.all_reduce(np.ones(3))
        return type(caught.value).__name__

    transport = Faulty(NeuronLink(3), seed=0)
    told = overlap.run(main, ranks=3, transport=transport, algorithm="ring", timeout_s=TIMEOUT_S)
    assert told[2] == "PeerFailedError"
    assert "LinkLostError" in told[:2]


def test_a_stall_in_operations_that_nobody_awaits_is_reported_too() -> None:
    async def main(rank: overlap.Rank) -> None:
        rank.recv(((1,), float), 1 - rank.rank)

    error = stall(main, 2)
    line = main.__code__.co_firstlineno + 1
    assert error.report == tuple(
        f"rank {rank}: recv #0 from rank {1 - rank} on group 'world' ({HERE}:{line}); waits for rank {1 - rank}"
        for rank in range(2)
    )
