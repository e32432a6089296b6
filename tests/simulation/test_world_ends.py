"""How worlds in virtual time end badly: at once, at an exact instant, and saying who and why."""

import socket
from math import inf, nan

import numpy as np
import pytest
import trio
import trio.testing

import overlap
import topology
from overlap import UsageError
from overlap.timeline.spans import ENDED
from transports import NeuronLink

from .worlds import KB, assert_fails, mesh, now_ns, simulate


def fail():
    raise ValueError("mine")


async def nothing(rank):
    return None


def test_a_rank_that_raises_ends_the_world_in_that_instant():
    seen = []

    async def main(rank):
        try:
            if rank.rank == 1:
                await trio.sleep(0.5)
                fail()
            await rank.all_reduce(np.ones(3))
        except overlap.PeerFailedError as error:
            seen.append((now_ns(rank), rank.rank, error.culprit))
            raise

    with assert_fails(ValueError, "^rank 1 failed at .*: ValueError: mine") as caught:
        simulate(main, 3)
    assert sorted(seen) == [(500_000_000, 0, 1), (500_000_000, 2, 1)]
    assert (caught[0].rank, caught[0].others) == (1, {})


def test_a_compute_that_raises_fails_when_its_time_is_over():
    async def main(rank):
        if rank.rank == 2:
            rank.compute(lambda: None, seconds=1)
            rank.all_reduce(rank.compute(fail, seconds=0.25))
            return
        try:
            await rank.all_reduce(np.ones(3))
        finally:
            ends.append(now_ns(rank))

    ends = []
    with assert_fails(ValueError, "^rank 2 failed") as caught:
        simulate(main, 3)
    assert ends == [1_250_000_000] * 2
    assert caught[0].rank == 2


def test_of_ranks_that_fail_in_one_instant_the_first_one_is_blamed():
    async def main(rank):
        await trio.sleep(0.1)
        if rank.rank:
            raise ValueError(f"rank {rank.rank}")
        await trio.sleep(1)

    for _ in range(10):
        with assert_fails(ValueError, "^rank 1 failed .*: rank 1; also failed: ranks 2-3$") as caught:
            simulate(main, 4)
        assert sorted(caught[0].others) == [2, 3]


def test_a_system_exit_in_a_compute_is_that_ranks():
    async def main(rank):
        await rank.compute(exit if rank.rank else print, seconds=0.1)

    with assert_fails(SystemExit, "^rank 1 failed"):
        simulate(main, 2)


def test_who_disagrees_is_told():
    async def main(rank):
        await rank.all_reduce(np.ones(3 + rank.rank))

    with assert_fails(overlap.CollectiveMismatchError, "all_reduce"):
        simulate(main, 2)


def test_who_leaves_early_is_named():
    async def main(rank):
        if rank.rank:
            await rank.barrier()

    with assert_fails(overlap.RankLeftError, "rank 0 finished its program while rank 1 needs it"):
        simulate(main, 2)


def test_a_deadlock_ends_at_once_with_who_waits_for_whom():
    async def main(rank):
        await trio.sleep(2)
        await (rank.barrier() if rank.rank else rank.recv(((1,), np.uint8), 1))

    with pytest.raises(overlap.StallError, match=r"every rank is blocked, and nothing is due") as caught:
        simulate(main, 3)
    report = str(caught.value).splitlines()
    assert "rank 0: recv #0 from rank 1 (" in report[1]
    assert report[1].endswith("waits for rank 1")
    assert "rank 1: barrier #0 of group 'world'" in report[2]
    assert report[2].endswith("waits for rank 0")
    assert report[3].endswith("waits for rank 0")


def test_a_time_out_is_of_virtual_time():
    ends = []

    async def main(rank):
        try:
            await trio.sleep_until(1e6)
        finally:
            ends.append(now_ns(rank))

    with pytest.raises(overlap.StallError, match=r"3600"):
        simulate(main, 2, timeout_s=3600.0)
    assert ends == [3600 * 10**9] * 2


def test_a_deadlock_needs_no_time_out():
    async def main(rank):
        await trio.sleep(2)
        await rank.recv(((1,), np.uint8), 1 - rank.rank)

    with pytest.raises(overlap.StallError, match=r"every rank is blocked, and nothing is due") as caught:
        simulate(main, 2, timeout_s=3600.0)
    assert caught.value.timeout_s is None


def test_a_world_that_goes_on_after_its_tasks_were_blocked_was_not_stopped():
    async def main(rank):
        await trio.testing.wait_all_tasks_blocked()
        return rank.rank

    results, timeline = simulate(main, 2)
    assert results == [0, 1]
    assert ENDED not in timeline.meta


def test_what_ends_before_the_time_is_up_is_not_held_up():
    async def main(rank):
        await trio.sleep(2)
        return now_ns(rank)

    assert simulate(main, 2, timeout_s=3600.0)[0] == [2 * 10**9] * 2


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ({}, "^seconds: compute 'work' has no cost on the virtual clock; pass seconds="),
        ({"seconds": -1}, "^seconds: compute 'work' needs a finite number, 0 or more, got -1"),
        ({"flops": "3"}, "^flops: compute 'work' needs a finite number, 0 or more, got '3'"),
        ({"flops": nan}, "^flops: compute 'work' needs a finite number, 0 or more, got nan"),
        ({"bytes_moved": inf}, "^bytes_moved: compute 'work' needs a finite number, 0 or more, got inf"),
    ],
)
def test_a_compute_needs_a_cost(cost, said):
    async def main(rank):
        with pytest.raises(UsageError, match=said):
            rank.compute(fail, name="work", **cost)
        return now_ns(rank)

    assert simulate(main, 2)[0] == [0, 0]


def test_a_device_of_which_nothing_is_known_needs_seconds():
    async def main(rank):
        with pytest.raises(UsageError, match=r"CPU core has no known rate; state seconds="):
            rank.compute(fail, flops=1e9)

    simulate(main, 2, cluster="local")


def test_threads_are_refused():
    async def main(rank):
        await trio.to_thread.run_sync(fail)

    with pytest.raises(UsageError, match=r"clock: the program waits for a thread"):
        simulate(main, 2)


def test_real_input_is_refused():
    ours, theirs = socket.socketpair()

    async def main(rank):
        rank.compute(lambda: None, seconds=1)
        await trio.lowlevel.wait_readable(ours)

    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(UsageError, match=r"clock: the program waits for real input or output"):
            simulate(main, 1)


def test_a_running_event_loop_has_real_time():
    with pytest.raises(UsageError, match=r"use overlap\.run for virtual time"):
        trio.run(lambda: overlap.run_async(nothing, clock="virtual"))


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": NeuronLink(2)}, r"^transport: nothing travels in virtual time"),
        ({"cluster": "trn1.32xlarge", "ranks": 33}, r"^ranks: 33 do not fit on trn1.32xlarge, which has 32"),
        ({"clock": "fast"}, r"^clock: 'fast' is unknown; known are 'real', 'virtual' and"),
    ],
)
def test_worlds_that_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        overlap.run(nothing, **{"ranks": 2, "clock": "virtual"} | options)


def test_an_unknown_peak():
    with pytest.raises(UsageError, match=r"^dtype: no peak is known for 'int4' on abacus; known are float32, bfloat16"):
        simulate(nothing, 2, dtype="int4")


def test_an_illegal_group_is_refused_on_every_member():
    async def main(rank):
        if rank.rank < 3:
            with pytest.raises(topology.TopologyError, match=r"group 0-2 of 3 ranks is not legal on trn1.32xlarge"):
                rank.group([0, 1, 2])
        return True

    assert simulate(main, 8, cluster="trn1.32xlarge")[0] == [True] * 8


def test_ranks_that_no_wire_joins():
    async def main(rank):
        if rank.rank == 0:
            await rank.send(rank.compute(np.ones, 3, seconds=0.1), 1)
        else:
            await rank.recv(((3,), np.float64), 0)

    with assert_fails(topology.TopologyError, "^rank [01] failed"):
        simulate(main, 2, cluster=mesh(2, nodes=2))


def test_wrong_input_is_refused_as_on_the_real_clock():
    async def main(rank):
        x = np.ones(4)
        with pytest.raises(UsageError, match=r"out: overlaps x"):
            rank.all_to_all(x, out=x)
        with pytest.raises(UsageError, match=r"out: must be C-contiguous"):
            rank.all_reduce(x, out=np.broadcast_to(np.zeros(()), 4))
        issued = rank.all_reduce(x)
        with pytest.raises(ValueError, match=r"read-only"):
            x[0] = 2
        await issued
        x[0] = 2

    simulate(main, 2)


def test_cancelling_who_awaits_does_not_cancel_the_operation():
    async def main(rank):
        issued = rank.all_reduce(np.ones(KB))
        with trio.move_on_after(0.001):
            await issued
        assert not issued.done
        return (await issued)[0], now_ns(rank)

    assert simulate(main, 2, cluster=mesh(2), algorithm="ring")[0] == [(2.0, 8_000_000)] * 2
