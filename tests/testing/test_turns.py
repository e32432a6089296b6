"""Turns by priorities that change at random steps; receives from any source, or cancelled, in their record."""

from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
import trio
import trio.testing

import overlap
from overlap.testing import Ranks, RanksFailed
from overlap.testing.running import Setting
from overlap.testing.turns import Turns

# -- turns by priorities that change at random steps: their order, their bound, and programs that need them ------------


def taken(turns: Turns, steps: dict[str, int]) -> str:
    """Return the order in which ranks take so many steps each, of which the next waits for the one before."""
    order: list[str] = []
    numbers = {name: number for number, name in enumerate(steps)}

    def go(name: str) -> None:
        order.append(name)
        if order.count(name) < steps[name]:
            turns.queue(numbers[name], partial(go, name))

    for name, number in numbers.items():
        turns.queue(number, partial(go, name))
    while turns.run_next_step():
        pass
    return "".join(order)


def test_without_changes_the_highest_priority_goes_on_until_it_is_blocked() -> None:
    orders = set()
    for seed in range(50):
        turns = Turns(seed)
        turns._lowered.clear()
        orders.add(taken(turns, {"a": 3, "b": 3, "c": 3}))
    assert orders == {"aaabbbccc", "aaacccbbb", "bbbaaaccc", "bbbcccaaa", "cccaaabbb", "cccbbbaaa"}


async def test_a_task_goes_on_when_it_is_its_turn_and_not_before() -> None:
    turns, went = Turns(0), []

    async def go(rank: int) -> None:
        await turns.wait_for_turn(rank)
        went.append(rank)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert went == []
        assert turns.run_next_step()
    assert went == [0]


def chosen(first: str, changes: dict[int, float]) -> str:
    """Return the order of two ranks with four steps each, with these priorities."""
    turns = Turns(2)
    turns._lowered, turns._priorities = changes, {0: 0.9 if first == "a" else 0.1, 1: 0.5}
    return taken(turns, {"a": 4, "b": 4})


def test_a_change_is_at_its_step_and_to_below_all_others() -> None:
    assert chosen("a", {3: -0.5, 5: -0.2}) == "aabbbbaa"
    assert chosen("a", {3: -0.2, 5: -0.5}) == "aabbaabb"


@pytest.mark.parametrize(("depth", "wanted"), [(1, "b"), (2, "aab"), (3, "aabba")])
def test_an_order_is_as_likely_as_the_bound_says(depth: int, wanted: str) -> None:
    """Counts all draws for n = 2 ranks and k = 8 steps; `wanted` needs as many ordered steps."""
    draws = [
        chosen(first, dict(zip(steps, (-0.1, -0.2), strict=False)))
        for first in "ab"
        for steps in permutations(range(1, 9), depth - 1)
    ]
    found = sum(order.startswith(wanted) for order in draws)
    assert found / len(draws) >= 1 / (2 * 8 ** (depth - 1))


def test_seeds_draw_all_depths_and_lengths() -> None:
    drawn = [Turns(seed) for seed in range(2, 1000, 2)]
    assert {(turns.depth, turns.length) for turns in drawn} == set(product((2, 3, 4), (2**n for n in range(2, 13))))
    assert {len(turns._lowered) - turns.depth for turns in drawn} == {-1}


BOX: set[str] = set()


async def half_done(rank: overlap.Rank) -> None:
    """Rank 1 must take two steps while rank 0 is between two of its own: speeds and delays seldom do that."""
    if rank.rank == 2:
        for _ in range(4):
            await rank.recv(np.ones(1), None)
        return
    if rank.rank == 0:
        BOX.clear()
    await rank.send(np.ones(1), 2)
    if rank.rank == 0:
        BOX.add("begun")
    seen = set(BOX)
    await rank.send(np.ones(1), 2)
    if rank.rank == 0:
        BOX.add("done")
    assert rank.rank == 0 or "begun" not in seen or "done" in BOX, "it saw half of it"


def test_a_fault_that_needs_an_order_of_steps_is_found_and_repeats() -> None:
    with pytest.raises(RanksFailed, match="it saw half of it") as caught:
        Ranks().run(half_done, ranks=3, seeds=200)
    run = caught.value.run
    assert run.seed
    again = Ranks().run(half_done, ranks=3, seed=run.seed, check=False)
    assert again.trace == run.trace
    assert again.verdict == run.verdict


async def patient(rank: overlap.Rank) -> float:
    """Has deadlines and sleeps that no turn may outlast."""
    total = np.zeros(1)
    for step in range(4):
        await rank.compute(np.ones, 3, seconds=1e-3 * (1 + rank.rank))
        with trio.fail_after(1):
            total = await rank.all_reduce(np.full(1, rank.rank + step))
        await trio.sleep(0.1)
    return float(total[0])


def test_turns_outlast_no_deadline_of_a_right_program() -> None:
    runs = [Ranks().run(patient, ranks=4, seed=seed) for seed in (0, 2, 4, 6, 8)]
    assert {tuple(run.results) for run in runs} == {(18.0,) * 4}


# -- receives from any source in the record ----------------------------------------------------------------------------


async def receives(rank: overlap.Rank) -> None:
    if rank.rank:
        await rank.send(np.ones(1), 0)
    else:
        for _ in range(rank.world_size - 1):
            await rank.recv(np.ones(1), None)


async def receives_one_more(rank: overlap.Rank) -> None:
    await receives(rank)
    if rank.rank == 0:
        await rank.recv(np.ones(1), None)


def test_they_are_recorded_once_with_the_source_that_they_found() -> None:
    run = Ranks().run(receives, ranks=3)
    assert [(each.call.op, each.call.peer) for each in run.record.issues_of(0)] == [("recv", 1), ("recv", 2)]


def test_one_too_many_is_named() -> None:
    run = Ranks().run(receives_one_more, ranks=3, check=False)
    assert run.verdict is not None
    assert run.verdict.kind == "unmatched"
    assert run.verdict.ranks == (1, 2, 0)


def test_the_line_that_repeats_a_run_has_its_clock() -> None:
    assert Setting(ranks=3, clock=overlap.Virtual(profile="run.json")).arguments == (
        "ranks=3, clock=overlap.Virtual(profile='run.json')"
    )
    assert Setting(ranks=3).arguments == "ranks=3"


async def believes_the_first(rank: overlap.Rank, *, strictly: bool = False) -> bool:
    """Rank 0 believes that what comes first is from rank 1."""
    if rank.rank:
        await rank.send(np.array([rank.rank]), 0)
        return True
    first = await rank.recv(like=((1,), np.int64))
    await rank.recv(like=((1,), np.int64))
    if strictly:
        assert first[0] == 1
    return bool(first[0] == 1)


def test_what_is_asked_of_several_seeds_is_asked_of_each() -> None:
    run = Ranks().run(believes_the_first, ranks=3, seeds=20)
    assert [each.seed for each in run.runs] == [*range(20)]
    assert run.runs[0].results == [True] * 3
    wrong = next(each for each in run.runs if not each.results[0])
    with pytest.raises(overlap.UsageError) as caught:
        _ = run.results
    assert str(caught.value) == (
        f"results: seed {wrong.seed} returned [False, True, True], seed 0 [True, True, True]; where seeds may differ, "
        f"look at the results of each of run.runs\nrepeat: ranks.run(believes_the_first, ranks=3, seed={wrong.seed})"
    )
    assert run.same("results").problem == f"seed {wrong.seed}: rank 1 returned True, rank 0 False\nrepeat: {wrong.line}"
    assert Ranks().run(receives, ranks=2, seeds=4).results == [None, None]


def test_unchecked_seeds_return_the_first_that_fails() -> None:
    run = Ranks().run(partial(believes_the_first, strictly=True), ranks=3, seeds=20, check=False)
    assert run.verdict is not None
    assert run.seed > 0


# -- receives that are cancelled while the order of ranks is decided by seeds ------------------------------------------

NUMBER = ((1,), "float64")


def test_a_receive_is_withdrawn_before_its_turn_and_takes_no_message(ranks: Ranks) -> None:
    async def main(rank: overlap.Rank) -> float:
        if rank.rank == 0:
            await rank.recv(((1,), "float64"), src=1, tag=2)
            rank.send(np.ones(1), dst=1, tag=1)
            return 1.0
        assert rank.recv(NUMBER, src=0, tag=1).cancel()
        with trio.CancelScope() as scope:
            left = rank.recv(NUMBER, src=0, tag=1)
            scope.cancel()
            await left
        rank.send(np.ones(1), dst=0, tag=2)
        return float((await rank.recv(NUMBER, src=0, tag=1))[0])

    run = ranks.run(main, ranks=2, seeds=20)
    assert all(each.results == [1.0, 1.0] for each in run.runs)


def test_a_receive_that_is_late_takes_no_message_once_it_is_withdrawn(ranks: Ranks) -> None:
    async def main(rank: overlap.Rank) -> float:
        if rank.rank == 0:
            await trio.sleep(2)
            rank.send(np.ones(1), dst=1)
            return 1.0
        with trio.move_on_after(0.5):
            await rank.recv(NUMBER, src=0)
        await trio.sleep(1)
        return float((await rank.recv(NUMBER, src=0))[0])

    assert ranks.run(main, ranks=2, faults="late(rank=1, at=0, by=1)").results == [1.0, 1.0]
