"""Faults as data: what each does, that a seed draws them, and that a failing seed is made smaller."""

import re

import numpy as np
import pytest

import overlap
from overlap.parallel import SGD, DataParallel
from overlap.testing import Fault, Ranks, RanksFailed, run_marked
from overlap.testing.faults import KINDS, draw_faults, parse_faults
from tests.errors import error_of


async def steps(rank: overlap.Rank) -> float:
    total = 0.0
    for step in range(4):
        with rank.step(step):
            grad = await rank.compute(np.full, 4, 1.0 + step, seconds=1e-3)
            total += float((await rank.all_reduce(grad))[2])
    return total


def run(faults: str, **setting):
    return Ranks().run(steps, ranks=3, faults=faults, check=False, **setting)


def test_faults_are_read_as_they_are_written() -> None:
    text = "die(rank=1, at=3), late(rank=0, at=2, by=0.5), disk(rank=2, step=4), cut(rank=0, at=1, by=2, to=1)"
    assert ", ".join(map(str, parse_faults(text))) == text
    assert parse_faults(text)[0] == Fault(kind="die", rank=1, at=3)


@pytest.mark.parametrize(
    "text", ["die", "die()", "die(rank=x)", "die(rank=1) and more", "melt(rank=1)", "die(rank=0, to=1)"]
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(overlap.UsageError, match="faults: "):
        parse_faults(text)


@pytest.mark.parametrize(
    ("faults", "kind", "told"),
    [
        ("die(rank=1, at=3)", "rank lost", "rank 1 died at all_reduce #1 on group 'world'"),
        ("cut(rank=2, at=1)", "rank lost", "rank 2 did not arrive at all_reduce #0 on group 'world'"),
        ("stop(rank=0, at=5)", "dead", "ranks 1-2 wait for it in all_reduce #2 of group 'world'"),
        ("die(rank=1, step=2)", "rank lost", "rank 1 died at compute 'full'"),
    ],
)
def test_a_rank_that_is_gone_is_named(faults: str, kind: str, told: str) -> None:
    verdict = run(faults).verdict
    assert verdict is not None
    assert (verdict.kind, told in verdict.text) == (kind, True), verdict


async def in_turn(rank: overlap.Rank) -> None:
    for _ in range(4):
        await rank.compute(np.ones, 4, name="work", seconds=1e-3)
        await rank.all_reduce(np.ones(4))


@pytest.mark.parametrize(
    ("at", "what"), [(0, "compute 'work'"), (1, "all_reduce #0"), (2, "compute 'work'"), (5, "all_reduce #2")]
)
def test_a_rank_dies_at_computes_and_operations_as_they_are_counted(at: int, what: str) -> None:
    run = Ranks().run(in_turn, ranks=2, faults=f"die(rank=1, at={at})", check=False)
    assert [str(fault) for fault in run.faults] == [f"die(rank=1, at={at})"]
    assert f"rank 1 died at {what}" in str(run.verdict)


async def pairs(rank: overlap.Rank) -> float:
    """Ranks 0 and 1 meet three times, then 0 and 2."""
    total = 0.0
    for other in (1, 1, 1, 2):
        if rank.rank in (0, other):
            group = rank.world.group([0, other])
            total += float((await group.all_reduce(np.ones(1)))[0])
    return total


def test_a_cut_lasts_for_good_or_for_a_time() -> None:
    verdict = Ranks().run(pairs, ranks=3, faults="cut(rank=1, at=1)", check=False).verdict
    assert verdict is not None
    assert verdict.text.startswith("rank 1 did not arrive at all_reduce #0 on group '0-1'")
    run = Ranks().run(pairs, ranks=3, faults="cut(rank=0, at=1, by=2)")
    assert run.results == [8.0, 6.0, 2.0]
    came_s = [issue.ended_ns / 1e9 for issue in run.record.issues_of(0) if issue.ended_ns is not None]
    assert came_s[0] < 0.1  # before the cut; all that follows waits for its end
    assert all(2 < at_s < 2.1 for at_s in came_s[1:])
    assert "rank 1 did not arrive" in str(
        Ranks().run(pairs, ranks=3, faults="cut(rank=1, at=1, by=16)", check=False).verdict
    )  # given up before it is over


def test_a_cut_can_be_of_one_link() -> None:
    other = Ranks().run(pairs, ranks=3, faults="cut(rank=0, at=1, to=2)", check=False).verdict
    assert other is not None
    assert other.text.startswith("rank 0 did not arrive at all_reduce #0 on group ")
    assert Ranks().run(pairs, ranks=3, faults="cut(rank=1, at=0, to=2)").results == [8.0, 6.0, 2.0]  # unused


def test_slow_and_late_ranks_take_time_and_change_no_result() -> None:
    calm = run("late(rank=0, at=99)")
    for faults in ("slow(rank=1, at=0, by=3)", "late(rank=1, at=1, by=0.01)", "slow_link(rank=2, at=0, by=0.001)"):
        disturbed = run(faults)
        assert disturbed.results == calm.results
        assert disturbed.seconds > calm.seconds + 0.003


def test_a_flipped_bit_changes_the_results() -> None:
    flipped = run("flip(rank=1, at=1)")
    assert flipped.results
    assert flipped.results[0] == flipped.results[1] != run("late(rank=0, at=99)").results[0]


async def buckets(rank: overlap.Rank) -> float:
    """Sends two gradients in one bucket, whose buffer is locked when it is sent."""
    model = DataParallel(rank, {"w": np.zeros(4), "v": np.zeros(4)}, optimizer=SGD(0.5))
    for step in range(3):
        with rank.step(step):
            model.reduce("w", np.ones(4))
            model.reduce("v", np.ones(4))
            await model.step()
    weights = await model.finish()
    return float(weights["w"].sum() + weights["v"].sum())


async def hands_on(rank: overlap.Rank) -> float:
    """Sends a tree, whose arrays keep their values."""
    if rank.rank == 0:
        return float((await rank.recv(src=1))["w"][1])
    mine = {"w": np.ones(2)}
    await rank.send(mine, 0)
    return float(mine["w"].sum())


def test_gradients_of_a_bucket_and_messages_of_trees_are_flipped() -> None:
    calm, flipped = (Ranks().run(buckets, ranks=2, faults=f"{kind}(rank=1, step=1)") for kind in ("late", "flip"))
    assert [str(fault) for fault in flipped.faults] == ["flip(rank=1, step=1)"]
    assert calm.results == [-12.0] * 2
    assert flipped.results[0] == flipped.results[1] != -12.0
    assert Ranks().run(hands_on, ranks=2, faults="flip(rank=1, at=0)").results == [np.inf, 2.0]


async def objects(rank: overlap.Rank) -> tuple[int, float]:
    """Splits the world and gathers objects before it sends a number."""
    half = await rank.split(0)
    told = await half.all_gather_object({"rank": rank.rank})
    return len(told), float((await rank.all_reduce(np.ones(1)))[0])


def test_what_the_package_itself_sends_is_not_flipped() -> None:
    assert Ranks().run(objects, ranks=2, faults="flip(rank=1, at=0)").results == [(2, np.inf)] * 2
    assert Ranks().run(buckets, ranks=2, faults="flip(rank=0, at=0)").results[0] != -12.0
    assert Ranks().run(buckets, ranks=2, faults="flip", seeds=6).verdict is None


def test_a_seed_draws_the_same_faults_and_other_seeds_others() -> None:
    drawn = [draw_faults(seed, list(KINDS), [10, 10]) for seed in range(50)]
    assert drawn == [draw_faults(seed, list(KINDS), [10, 10]) for seed in range(50)]
    assert {fault.kind for faults in drawn for fault in faults} == set(KINDS)


def test_a_program_that_names_the_lost_rank_passes_all_seeds() -> None:
    run = Ranks().run(steps, ranks=3, faults="die, cut, late, slow", seeds=8)  # raises at the first that fails
    assert run.results == [10.0 * 3] * 3  # of the first, which has no faults
    assert re.fullmatch(r"\d+ faults happened, and \d+ runs ended with the rank that was hit", run.tried)
    assert "0 runs" not in run.tried


@pytest.mark.parametrize("check", [True, False])
def test_one_seed_draws_faults_too(check: bool) -> None:
    ended = [Ranks().run(steps, ranks=3, faults="die", seed=seed, check=check) for seed in range(4)]
    assert all(run.faults for run in ended)
    assert all(run.verdict is not None and run.verdict.ranks[0] == run.faults[0].rank for run in ended)


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ("die(rank=1, at=8)", "rank 1 begins 8 operations and computes, counted from 0; use a smaller at="),
        ("flip(rank=1, at=8)", "rank 1 begins 8 operations and computes, counted from 0; use a smaller at="),
        ("late(rank=1, step=4)", "the last step of rank 1 that issues anything is 3; use a smaller step="),
        ("die(rank=3)", "the ranks are 0 to 2"),
    ],
)
def test_a_fault_that_does_not_happen_fails_the_test(faults: str, why: str) -> None:
    error = error_of(RanksFailed, Ranks().run, steps, ranks=3, faults=faults)
    assert (error.verdict.kind, error.run.faults) == ("unused fault", ())
    assert f" did not happen: {why}" in error.verdict.text
    assert Ranks().run(steps, ranks=3, faults=faults, allow="unused fault").verdict is None


def test_a_step_of_a_program_that_marks_none_is_told_so() -> None:
    verdict = Ranks().run(in_turn, ranks=2, faults="die(rank=1, step=1)", check=False).verdict
    assert verdict is not None
    assert verdict.text.endswith("rank 1 issues nothing inside of rank.step(...); use at= in place of step=")


async def ahead(rank: overlap.Rank) -> None:
    """Issues everything, and then waits; its second step only computes."""
    for step in range(3):
        with rank.step(step):
            grad = rank.compute(np.ones, 4, name=f"work {step}", seconds=1e-3)
            if step != 1:
                rank.spawn(reduces, rank, grad)
    rank.compute(np.ones, 4, name="the rest", seconds=1.0)


async def reduces(rank: overlap.Rank, grad: overlap.Future) -> None:
    await rank.all_reduce(await grad)


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ("die(rank=1, step=0)", "rank 1 died at compute 'work 0'"),
        ("die(rank=1, step=1)", "rank 1 died at compute 'work 1'"),
        ("die(rank=1, step=2)", "rank 1 died at compute 'work 2'"),
        ("stop(rank=1, step=1)", "rank 0 waits for it in all_reduce #1"),  # at an operation: the next one is of step 2
        ("late(rank=1, step=2, by=20)", "None"),
    ],
)
def test_a_fault_of_a_step_happens_in_a_loop_that_issues_ahead(faults: str, told: str) -> None:
    run = Ranks().run(ahead, ranks=2, faults=faults)
    assert [str(fault) for fault in run.faults] == [faults]
    assert told in str(run.verdict)


async def computes(rank: overlap.Rank) -> None:
    for step in range(3):
        with rank.step(step):
            await rank.compute(np.ones, 4, seconds=1.0)


def test_what_has_no_data_is_not_flipped() -> None:
    verdict = Ranks().run(barriers, ranks=2, faults="flip(rank=1, at=1)", check=False).verdict
    assert verdict is not None
    assert "rank 1 begins 2 operations and computes, counted from 0, and no operation with data from 1 on" in str(
        verdict
    )


async def barriers(rank: overlap.Rank) -> None:
    for _ in range(2):
        await rank.barrier()


@pytest.mark.parametrize("when", ["at=1", "step=1"])
def test_computes_are_slow_from_the_one_on_that_is_named(when: str) -> None:
    run = Ranks().run(computes, ranks=2, faults=f"slow(rank=1, {when}, by=3)")
    assert [str(fault) for fault in run.faults] == [f"slow(rank=1, {when}, by=3)"]
    assert run.seconds == 1.0 + 3.0 + 3.0


@pytest.mark.parametrize("faults", ["signal(rank=1, at=1)", "disk(rank=1)", "die, signal"])
def test_what_does_nothing_to_a_function_is_refused(faults: str) -> None:
    with pytest.raises(overlap.UsageError, match=r"faults: (signal|disk) does nothing to an async function, whose"):
        Ranks().run(steps, ranks=2, faults=faults)
    with pytest.raises(overlap.UsageError, match="does nothing to an async function"):
        run_marked(steps, {}, {"ranks": 2, "faults": faults}, takes_rank=True)


async def messages(rank: overlap.Rank) -> None:
    """Rank 1 sends to rank 0, which answers; receives are issued ahead."""
    other = 1 - rank.rank
    received = [rank.recv(src=other, tag=number) for number in range(2)]
    for number in range(2):
        if rank.rank == 0:
            await received[number]
        await rank.send(np.ones(4), other, tag=number)
    await received[1]


async def from_any(rank: overlap.Rank) -> None:
    for _ in range(2):
        await (rank.recv() if rank.rank == 0 else rank.send(np.ones(4), 0))


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_between_messages_is_named_first(rank: int, at: int) -> None:
    verdict = Ranks().run(messages, ranks=2, faults=f"stop(rank={rank}, at={at})").verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks[0]) == ("dead", rank)
    assert "its process was stopped by a fault" in verdict.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_before_messages_from_any_rank_is_named_first(rank: int) -> None:
    verdict = Ranks().run(from_any, ranks=2, faults=f"stop(rank={rank}, at=1)").verdict
    assert verdict is not None
    assert verdict.ranks == (rank, 1 - rank)


def test_a_lost_rank_names_the_fault_that_was_written_down() -> None:
    assert "planned by die(rank=1, at=3)" in str(run("die(rank=1, at=3)").verdict)


async def fragile(rank: overlap.Rank) -> None:
    """Waits for a fixed time where it should wait for the result."""
    future = rank.all_reduce(np.ones(4))
    import trio

    await trio.sleep(0.2)
    assert future.done, "it is not here yet"
    await future


def test_a_failing_seed_is_made_smaller_and_printed_as_a_line_to_paste() -> None:
    error = error_of(RanksFailed, Ranks().run, fragile, ranks=8, faults="late, slow", seeds=30)
    last = str(error).splitlines()[-1]
    assert last.startswith("repeat: ranks.run(fragile, ranks=")
    assert last.count("late(") == 1
    assert "slow" not in last
    assert "made smaller in" in str(error)
    faults = last.partition('faults="')[2].partition('"')[0]
    assert Ranks().run(fragile, ranks=error.run.size, faults=faults, check=False).verdict.kind == "crash"


async def long_loop(rank: overlap.Rank, steps: int) -> None:
    """Cannot bear that a step comes late, as `fragile`, from its third step on."""
    import trio

    for step in range(steps):
        with rank.step(step):
            future = rank.all_reduce(np.ones(4))
            if step >= 2:
                await trio.sleep(0.2)
                assert future.done, "it is not here yet"
            await future


def test_steps_become_fewer_and_faults_earlier_as_long_as_the_line_fails() -> None:
    error = error_of(RanksFailed, Ranks().run, long_loop, ranks=4, steps=40, faults="late(rank=1, step=30)", seeds=2)
    last = str(error).splitlines()[-1]
    assert last == 'repeat: ranks.run(long_loop, ranks=2, faults="late(rank=1, step=2)", steps=3)'
    again = Ranks().run(long_loop, ranks=2, faults="late(rank=1, step=2)", steps=3, check=False)
    assert again.verdict == error.verdict
    failure = error_of(RanksFailed, Ranks().run, fortieth, ranks=2, faults="late(rank=1, at=30)", seeds=2)
    assert 'faults="late(rank=1, at=7)"' in str(failure)


async def fortieth(rank: overlap.Rank) -> None:
    await long_loop(rank, 40)


async def fails_otherwise(rank: overlap.Rank) -> None:
    await rank.barrier()
    if rank.world_size < 4:
        raise KeyError("too few")
    assert rank.rank != 3, "the fault that was found"


def test_another_failure_is_not_taken_for_a_smaller_one() -> None:
    with pytest.raises(RanksFailed, match="the fault that was found") as caught:
        Ranks().run(fails_otherwise, ranks=8, seeds=2)
    assert caught.value.run.size == 4
