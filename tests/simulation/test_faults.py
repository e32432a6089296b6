"""Worlds in which things go wrong by seed: every run is exact or names a culprit, and every seed repeats itself."""

import re

import numpy as np
import pytest
import trio

import overlap
from overlap import Faults, UsageError
from tests.errors import error_of

from .programs import PROGRAMS, Work
from .worlds import MS, assert_fails, mesh, now_ns, simulate, spans

NONE = {"delay": 0.0, "loss": 0.0, "death": 0.0, "slow": 0.0}
"""Nothing goes wrong but what a test adds."""


def faulty(main, ranks, *args, **faults):
    return simulate(main, ranks, *args, faults=Faults(**NONE | faults))


async def one_of_each(rank):
    """Compute, reduce, and pass a number around."""
    x = await rank.compute(np.full, 4, rank.rank + 1.0, seconds=1e-3)
    total = await rank.all_reduce(x)
    rank.send(total, (rank.rank + 1) % rank.world_size)
    got = await rank.recv(((4,), float), (rank.rank - 1) % rank.world_size)
    return float(got.sum())


async def first_come(rank):
    """Take messages from whoever sends."""
    if rank.rank:
        await trio.sleep(1e-3 * rank.rank)
        await rank.send(np.full(3, 10.0**rank.rank), 0, tag=rank.rank % 2)
        return 0.0
    total = 0.0
    for peer in range(1, rank.world_size):
        total += float((await rank.recv(((3,), float), src=None, tag=peer % 2)).sum())
    return total


async def catching(rank):
    """Do what careful programs do: catch errors, look after children, leave some futures alone."""
    sums = []

    async def child(number):
        sums.append(float((await rank.all_reduce(np.ones(2), stream=str(number)))[0]))

    for number in range(2):
        rank.stream(str(number))
    try:
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(child, number)
        with trio.move_on_after(1e-4):
            await rank.compute(lambda: None, seconds=1e-3)
        rank.barrier()
    finally:
        rank.compute(lambda: None, seconds=1e-3)
    return sums


WORK = Work(real=False)
ALL = [(one_of_each, ()), (catching, ()), *((program, (WORK,)) for program in PROGRAMS)]
SEEDS = [range(25), *(pytest.param(range(at, at + 100), marks=pytest.mark.slow) for at in range(25, 425, 100))]


def outcome(main, args, faults):
    """Return the results, or who is to blame."""
    try:
        return simulate(main, 4, *args, faults=faults)[0]
    except overlap.RankFailedError as error:
        return check_blame(error, faults)


def check_blame(error, faults):
    """Return the message of an error that says who is to blame, for what, and how to see it again."""
    assert isinstance(error.cause, overlap.PeerLostError)
    blamed = re.match(
        r"rank (\d) (died at|did not arrive at) .* \(\S+\.py:\d+\), planned by Faults\(", str(error.cause)
    )
    assert blamed, error
    assert int(blamed[1]) == error.rank == error.cause.culprit
    command = f"`overlap simulate --fault-seed {faults.seed}`"
    again = f"the same again: clock=overlap.Virtual(faults=overlap.{faults}) or {command}"
    assert error.__notes__ == [again]
    return str(error)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize(("main", "args"), ALL, ids=[main.__name__ for main, _ in ALL])
def test_every_seed_ends_with_the_results_or_with_a_culprit(main, args, seeds):
    exact = simulate(main, 4, *args)[0]
    found = [outcome(main, args, Faults(seed=seed)) for seed in seeds]
    assert {type(each) for each in found} == {list, str}
    assert all(each == exact for each in found if isinstance(each, list))


def test_receives_from_any_source_lose_nothing():
    exact = simulate(first_come, 4)[0]
    assert [faulty(first_come, 4, seed=seed, delay=0.5, delay_s=0.01)[0] for seed in range(10)] == [exact] * 10


def test_a_seed_repeats_the_run_to_the_byte(tmp_path):
    """Trio's own order of tasks differs from run to run."""
    seen = set()
    for seed in range(8):
        kept = []
        for name in "ab":
            path = tmp_path / f"{name}.json"
            try:
                clock = overlap.Virtual(faults=Faults(seed=seed))
                overlap.run(PROGRAMS[0], WORK, ranks=4, cluster=mesh(4), clock=clock, trace=path)
            except overlap.RankFailedError as error:
                kept.append(str(error))
            kept.append(path.read_bytes())
        assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]
        seen.add(kept[0])
    assert len(seen) == 8


def test_nothing_goes_wrong_where_nothing_may():
    results, timeline = faulty(one_of_each, 4)
    calm, expected = simulate(one_of_each, 4)
    assert results == calm == [40.0] * 4
    assert [spans(timeline, rank) for rank in range(4)] == [spans(expected, rank) for rank in range(4)]


def test_who_is_held_up_is_waited_for():
    async def main(rank):
        await rank.barrier()
        return now_ns(rank)

    times = {tuple(faulty(main, 3, seed=seed, delay=1.0, delay_s=0.25)[0]) for seed in range(5)}
    assert len(times) == 5
    assert all(len(set(each)) == 1 and 0 < each[0] <= 250 * MS for each in times)


def test_an_array_is_guarded_while_its_part_is_held_up():
    async def main(rank):
        x = np.ones(3)
        future = rank.all_reduce(x)
        with pytest.raises(ValueError, match=r"read-only"):
            x[0] = 2
        await future
        x[0] = 2

    faulty(main, 2, delay=1.0, delay_s=1.0)


def test_slow_ranks_take_longer():
    async def main(rank):
        await rank.compute(lambda: None, seconds=1e-3)
        return now_ns(rank)

    assert faulty(main, 2, slow=1.0, slow_factor=3.0)[0] == [3 * MS] * 2
    mixed = faulty(main, 8, slow=0.5, slow_factor=3.0)[0]
    assert set(mixed) == {MS, 3 * MS}


def test_a_death_is_told_after_a_while():
    ends = []

    async def main(rank):
        try:
            await rank.barrier()
        finally:
            ends.append((now_ns(rank), rank.rank))

    with assert_fails(
        overlap.PeerLostError, r"^rank 0 failed: PeerLostError: rank 0 died at barrier #0 on group 'world'"
    ):
        faulty(main, 2, seed=1, death=1.0, notice_s=0.5)
    assert sorted(ends) == [(0, 0), (0, 1)]


def test_what_the_dead_still_do_nobody_hears():
    ran = []

    async def main(rank):
        try:
            await rank.compute(lambda: None, seconds=1)
            await rank.barrier()
        finally:
            rank.compute(ran.append, rank.rank, seconds=0)
            rank.all_reduce(np.ones(1 + rank.rank))  # a mismatch, if anybody came to it
            with trio.CancelScope(shield=True):
                await trio.sleep(1e-3)
            raise ValueError("mine")

    with assert_fails(overlap.PeerLostError, r"^rank \d failed: PeerLostError: rank \d died at compute '<lambda>'"):
        faulty(main, 4, death=1.0)
    assert ran == []


def test_a_part_that_is_lost_is_noticed_by_the_silence():
    ends = []

    async def main(rank):
        try:
            await trio.sleep(1)
            await rank.all_reduce(np.ones(2))
        finally:
            ends.append(now_ns(rank))

    with assert_fails(
        overlap.PeerLostError, r"^rank 0 failed: .* rank 0 did not arrive at all_reduce #0 on .*; unfinished"
    ):
        faulty(main, 2, loss=1.0, silence_s=3.0)
    assert ends == [4000 * MS] * 2


def test_who_waits_for_what_never_comes_is_told_before_any_death():
    async def main(rank):
        await rank.recv(((1,), float), 1 - rank.rank)

    with pytest.raises(overlap.StallError, match=r"rank 0: recv #0 from rank 1 .* waits for rank 1") as caught:
        faulty(main, 2, seed=5)
    said = f"the same again: clock=overlap.Virtual(faults=overlap.{Faults(seed=5, **NONE)})"
    assert caught.value.__notes__ == [said]


async def racing(rank):
    """Let five tasks race for a place in a list."""
    order = []

    async def child(number):
        await trio.sleep(1e-3)
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(child, number)
    return order


def test_tasks_run_in_every_order_that_the_seed_can_think_of():
    orders = [faulty(racing, 1, seed=seed)[0][0] for seed in range(30)]
    assert orders == [faulty(racing, 1, seed=seed)[0][0] for seed in range(30)]
    assert len(set(map(tuple, orders))) > 20
    assert faulty(racing, 1, reorder=False)[0] == [[0, 1, 2, 3, 4]]


def test_trio_is_as_it_was_afterwards():
    before = trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING, trio._core._run._r
    faulty(racing, 1)
    with pytest.raises(overlap.RankFailedError):
        faulty(one_of_each, 2, death=1.0)
    assert (trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING, trio._core._run._r) == before


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"death": 1.5}, "faults: death is 1.5; expected 0 to 1"),
        ({"loss": -0.1}, "faults: loss is -0.1; expected 0 to 1"),
        ({"delay": float("nan")}, "faults: delay is nan; expected 0 to 1"),
        ({"slow_factor": 0.5}, "faults: slow_factor is 0.5; expected 1 to 1e+09"),
        ({"silence_s": -1}, "faults: silence_s is -1; expected 0 to 1e+09"),
    ],
)
def test_bad_faults(told, said):
    assert str(error_of(UsageError, Faults, **told)) == said


def test_faults_say_what_was_told():
    assert str(Faults(seed=3)) == "Faults(seed=3)"
    assert str(Faults(death=0.5, reorder=False)) == "Faults(seed=0, death=0.5, reorder=False)"


def test_who_stands_for_others_may_not_fail():
    with pytest.raises(UsageError, match=r"alike: ranks are not alike where things go wrong \(Faults\(seed=4\)\)"):
        simulate(one_of_each, 4, alike=1, shapes_only=True, faults=Faults(seed=4))
