"""The marker `ranks`: async functions on many ranks, and what it refuses."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.parallel import SGD, DataParallel, Sharded
from overlap.simulation.compute_cost import _report_unknown_costs
from overlap.testing import Ranks, RanksFailed, run_marked
from tests.errors import error_of


@pytest.mark.ranks(64, cluster="trn2.48xlarge x4")
async def test_a_marked_function_runs_on_every_rank_of_a_cluster(rank: overlap.Rank) -> None:
    total = await rank.all_reduce(np.full(4, rank.rank, np.float32))
    assert (rank.world_size, rank.clock, total[0]) == (64, "virtual", sum(range(64)))


@pytest.mark.ranks(3, seeds=4)
async def test_fixtures_come_beside_the_rank(tmp_path: Path, rank: overlap.Rank) -> None:
    assert isinstance(tmp_path, Path)
    await rank.barrier()


async def takes_rank(rank: overlap.Rank) -> None:
    await rank.barrier()


async def takes_nothing() -> None:
    pass


def marked(function=takes_rank, takes=True, fixtures=None, **settings):
    run_marked(function, fixtures or {}, settings, takes_rank=takes)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"colour": "red"}, "ranks: 'colour' is unknown; known are ranks, cluster, seed"),
        ({"ranks": 0}, "ranks: expected a positive integer, got 0"),
        ({"ranks": 10**9}, "need at least 1000000000 MiB of memory, and this machine has"),
        ({"ranks": 2, "seed": -1}, "seed: expected an integer from 0, got -1"),
        ({"ranks": 2, "seeds": 0}, "seeds: expected a positive integer, got 0"),
        ({"ranks": 2, "faults": "flood"}, "faults: 'flood' is unknown; known are die, stop, slow"),
        ({"ranks": 2, "faults": "die(at=3)"}, r"faults: die needs a rank, as in die\(rank=0\)"),
        ({"ranks": 2, "faults": "die(rank=1, when=3)"}, "faults: die has no 'when'; it takes rank, at, step and by"),
        ({"ranks": 2, "clock": "slow"}, "clock: expected an overlap.Virtual, got 'slow'"),
        ({"ranks": 2, "clock": 2}, "clock: expected an overlap.Virtual, got 2"),
        ({"function": takes_nothing, "takes": False}, "takes_nothing should take `rank`"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(settings, told) -> None:
    with pytest.raises(overlap.UsageError, match=told):
        marked(**settings)


async def inverted(rank: overlap.Rank) -> None:
    a, b = (rank.world.group(range(rank.world_size), name=name) for name in "ab")
    for group in (a, b) if rank.rank else (b, a):
        await group.all_reduce(np.ones(4))


def test_an_inversion_is_named_with_both_operations_and_made_smaller() -> None:
    error = error_of(RanksFailed, Ranks().run, inverted, ranks=8, seed=3, seeds=2)
    verdict = error.verdict
    assert (verdict.kind, verdict.ranks) == ("cycle", (0, 1))
    assert "rank 0 in all_reduce #0 of group 'b' (test_marker.py:" in verdict.text
    assert "rank 1 in all_reduce #0 of group 'a' (test_marker.py:" in verdict.text
    assert str(error).endswith("repeat: ranks.run(inverted, ranks=2)")


async def asserting(rank: overlap.Rank) -> None:
    await rank.barrier()
    assert rank.rank != 1, "one is wrong"


def test_an_assertion_of_a_rank_is_raised_as_it_is_with_the_verdict_beside_it() -> None:
    with pytest.raises(AssertionError, match="one is wrong") as caught:
        marked(asserting, ranks=2)
    assert "crash: rank 1 failed at test_marker.py:" in caught.value.__notes__[0]


def test_ranks_that_a_cluster_has_no_place_for_are_told_as_it_tells_them() -> None:
    with pytest.raises(
        RanksFailed, match=r"^crash: the world failed: TopologyError: group 0-62 of 63 ranks is not legal"
    ):
        marked(asserting, ranks=63, cluster="trn2.48xlarge x16")


async def without_a_cost(rank: overlap.Rank, times: int) -> int:
    for _ in range(times):
        await rank.compute(np.sqrt, 4.0)
    return times


def test_computes_without_a_cost_take_a_fixed_one_that_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    _report_unknown_costs.cache_clear()
    for _ in range(2):
        run = Ranks().run(without_a_cost, 3, ranks=2)
        assert run.results == [3, 3]
        assert run.timeline is not None
        assert {span.duration_ns for span in run.timeline.spans if span.kind == "compute"} == {100_000}
    told = capsys.readouterr().err
    assert told.count("computes without a cost take 100 us on the virtual clock") == 1
    marked(without_a_cost, fixtures={"times": 1}, ranks=2)
    with pytest.raises(overlap.UsageError, match=r"^clock: expected an overlap.Virtual, got 'real'"):
        Ranks().run(without_a_cost, 1, ranks=2, clock="real")
    with pytest.raises(overlap.UsageError, match=r"^clock: .*; for real time call overlap.run\(main, ranks=4\)"):
        marked(without_a_cost, fixtures={"times": 1}, ranks=2, clock="real")


def test_prices_of_functions_are_unknown() -> None:
    with pytest.raises(overlap.UsageError, match=r"^ranks: 'cost' is unknown; known are ranks, cluster"):
        Ranks(cost="fixed")


def test_a_failure_shows_frames_of_the_program_and_none_of_ours() -> None:
    async def own(rank: overlap.Rank) -> None:
        raise ValueError(rank.rank)

    async def wrong(rank: overlap.Rank) -> None:
        await rank.compute(np.sqrt, 4.0, seconds=-1.0)

    error = error_of(RanksFailed, Ranks().run, wrong, ranks=2)
    assert (error.__cause__, error.__suppress_context__) == (None, True)
    assert isinstance(error_of(RanksFailed, Ranks().run, own, ranks=2).__cause__, ValueError)


async def returning(rank: overlap.Rank, *args: object, steps: int = 0) -> tuple[object, ...]:
    await rank.barrier()
    return rank.rank, *args, steps


def test_a_run_hands_arguments_over_and_its_line_repeats_them() -> None:
    run = Ranks().run(returning, 3, "x", ranks=2, steps=5)
    assert run.results == [(0, 3, "x", 5), (1, 3, "x", 5)]
    assert run.line == "ranks.run(returning, 3, 'x', ranks=2, steps=5)"


async def endless(rank: overlap.Rank) -> None:
    while True:
        await rank.barrier()


async def computing(rank: overlap.Rank) -> None:
    while rank.rank == 1:
        pass


@pytest.mark.slow
def test_a_program_that_never_ends_is_ended_in_virtual_time_and_in_real_time() -> None:
    assert (
        "did not finish within timeout_s=0.001"
        in Ranks().run(endless, ranks=2, timeout_s=1e-3, check=False).verdict.text
    )
    run = Ranks().run(computing, ranks=2, real_timeout_s=0.01, check=False)
    assert run.verdict.kind == "never ends"
    assert Ranks().run(takes_rank, ranks=2).verdicts == []


async def gathers(rank: overlap.Rank) -> float:
    futures = [rank.all_reduce(np.full(3, rank.rank + i, np.float32)) for i in range(4)]
    rank.compute(sum, [1, 2], seconds=1e-4)
    return float(sum([(await future)[0] for future in futures]))


def test_the_same_seed_gives_the_same_trace_and_other_seeds_other_orders(tmp_path: Path) -> None:
    runs = [Ranks().run(gathers, ranks=4, seed=seed) for seed in (7, 7, 0, 0)]
    assert runs[0].trace == runs[1].trace
    assert runs[2].trace == runs[3].trace != runs[0].trace
    assert runs[2].same("results")
    assert Ranks().repeats(partial(Ranks().run, gathers, ranks=4), seeds=5)
    assert runs[0].matches(tmp_path / "golden.txt")
    assert runs[1].matches(tmp_path / "golden.txt")
    differing = runs[2].matches(tmp_path / "golden.txt")
    assert not differing
    assert "+0 rank 0 all_reduce #0 of group 'world' (test_marker.py:" in differing.problem


def test_what_repeats_nothing_is_refused() -> None:
    told = "^repeats: expected a function that returns the run of a seed, as ranks.run does, but it returned "
    with pytest.raises(overlap.UsageError, match=told):
        Ranks().repeats(lambda seed: Ranks().run(gathers, ranks=2, seed=seed).trace)


def test_one_try_is_told_as_one() -> None:
    with pytest.raises(RanksFailed, match="\nmade smaller in 1 try\n"):
        Ranks().run(inverted, ranks=2, seed=3, seeds=2)
    with pytest.raises(RanksFailed, match="\nmade smaller in 2 tries\n"):
        Ranks().run(inverted, ranks=3, seed=3, seeds=2)


def test_a_run_says_what_was_exposed_and_sent() -> None:
    run = Ranks().run(gathers, ranks=4)
    assert (run.exposed, run.seconds) == (0.0, 1e-4)  # the compute takes longer than all operations
    assert Ranks().run(takes_rank, ranks=4).exposed == 1.0
    assert run.sent_bytes == 4 * 3 * 4
    assert repr(run) == "<Run of 4 ranks, seed 0: well>"


PROJECT = """
import numpy as np
import pytest

@pytest.mark.ranks(2, colour="red")
async def test_unknown(rank): ...

@pytest.mark.ranks(2)
async def test_wrong(rank):
    if rank.rank == 0:
        await rank.all_reduce(np.ones(1))

@pytest.mark.ranks(2)
async def test_right(rank):
    await rank.all_reduce(np.ones(1))
"""


def result_of(folder: Path, tests: str) -> str:
    """Return what pytest prints of tests in a folder of their own."""
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p pytest_overlap -p no:randomly --strict-markers\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False).stdout


@pytest.mark.slow
def test_in_a_project_of_a_stranger(tmp_path: Path) -> None:
    stdout = result_of(tmp_path, PROJECT)
    assert "2 failed, 1 passed" in stdout
    assert "\nranks: 'colour' is unknown; known are ranks, cluster" in stdout
    assert (
        "\nleft: rank 1 has finished its program; rank 0 waits for it in all_reduce #0 of group 'world' (test_it.py:11)"
        in stdout
    )
    assert "Traceback" not in stdout


PLAIN = """
import pytest

@pytest.mark.ranks(4)
def test_plain(rank):
    pass

@pytest.mark.ranks(4, steps=2)
def test_steps(steps):
    pass

async def test_unmarked(rank):
    pass

@pytest.mark.ranks(4)
def test_right(ranks):
    async def main(rank):
        return rank.world_size
    assert ranks.run(main).results == [4] * 4

@pytest.mark.ranks(4)
@pytest.mark.parametrize("rank", [0, 1])
def test_own(rank):
    assert rank in (0, 1)
"""


@pytest.mark.slow
def test_a_plain_function_that_asks_for_a_rank_is_refused(tmp_path: Path) -> None:
    stdout = result_of(tmp_path, PLAIN)
    told = "expected an async function with the mark `@pytest.mark.ranks(n)`, but"
    assert f"\nrank: {told} test_plain is a plain function; write `async def test_plain(rank)`" in stdout
    assert f"\nsteps: {told} test_steps is a plain function" in stdout
    assert f"\nrank: {told} test_unmarked has no mark" in stdout
    assert "3 passed, 3 errors" in stdout


def test_a_plain_function_in_place_of_an_async_one_is_told_with_its_line() -> None:
    def plain(rank: overlap.Rank, steps: int = 0) -> None:
        pass

    told = rf"main: expected an async function, but plain\(rank\) returned NoneType \(test_marker.py:{line_of(plain)}\)"
    for setting in ({}, {"steps": 3}):
        with pytest.raises(RanksFailed, match=told):
            Ranks().run(plain, ranks=2, **setting)
    with pytest.raises(overlap.UsageError, match="main: expected an async function, got int"):
        Ranks().run(3, ranks=2)


UNASKED = """
async def main(rank):
    await rank.barrier()
    return rank.rank

def test_forgets_assert(ranks):
    ranks.run(main, ranks=2).same("results")

def test_forgets_assert_of_seeds(ranks):
    numbers = iter(range(9))
    async def counts(rank):
        return next(numbers)
    ranks.repeats(lambda seed: ranks.run(counts, ranks=1, seed=seed), seeds=2)

def test_asks(ranks):
    assert not ranks.run(main, ranks=2).same("results")

def test_fails_by_itself(ranks):
    ranks.run(main, ranks=2).same("results")
    raise ValueError("first")
"""


@pytest.mark.slow
def test_an_answer_that_is_no_and_is_not_asserted_fails_its_test(tmp_path: Path) -> None:
    stdout = result_of(tmp_path, UNASKED)
    told = "an answer is no, and the test does not assert it:"
    assert f"{told} rank 1 returned 1, rank 0 0\nwrite `assert` before the question" in stdout
    assert f"{told} seed 1: rank 0 returned 1, in the first run 0\n" in stdout
    assert "1 failed, 3 passed, 2 errors" in stdout, stdout


def line_of(function: Callable[..., object]) -> int:
    return function.__code__.co_firstlineno


def test_the_plugin_loads_nothing_but_pytest() -> None:
    code = "import sys, pytest; before = set(sys.modules); import pytest_overlap; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["pytest_overlap"]


async def forgets(rank: overlap.Rank) -> None:
    rank.all_reduce(np.ones(4))
    await rank.compute(np.ones, 3, seconds=1e-9)


def test_an_operation_that_nobody_waits_for_is_a_leak_with_its_line() -> None:
    verdict = Ranks().run(forgets, ranks=2, check=False).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("leak", (0,))
    [line] = verdict.lines
    assert line.startswith("test_marker.py:")
    assert f"rank 0 has ended without waiting for all_reduce #0 of group 'world' ({line})" in verdict.text


@pytest.mark.parametrize("strategy", [DataParallel, partial(Sharded, stage=2), partial(Sharded, stage=3)])
def test_what_a_strategy_has_issued_ahead_is_no_leak(strategy: Callable[..., Any]) -> None:
    async def trains(rank: overlap.Rank) -> None:
        model = strategy(rank, {name: np.zeros((8, 8)) for name in "abc"}, optimizer=SGD(lr=0.1), bucket_bytes=512)
        for step in range(2):
            for name in "abc":
                rank.compute(np.sum, model[name], seconds=1e-3)
            for name in "cba":
                model.reduce(name, rank.compute(np.full, (8, 8), float(step), seconds=1e-3))
            await model.step()

    assert Ranks().run(trains, ranks=2, check=False).verdict is None


async def leaves_a_send(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        rank.send(np.ones(4), 1)
    else:
        await rank.compute(np.ones, 3, seconds=1.0)
        await rank.recv(src=0)


def test_a_send_may_be_left_to_the_end_of_its_rank() -> None:
    assert Ranks().run(leaves_a_send, ranks=2).verdict is None


@pytest.mark.ranks(2, steps=3)
async def test_a_mark_gives_the_number_of_steps(rank: overlap.Rank, steps: int) -> None:
    await rank.barrier()
    assert steps == 3


def test_steps_that_nothing_takes_are_refused() -> None:
    with pytest.raises(overlap.UsageError, match="steps: takes_rank takes no argument `steps`"):
        marked(ranks=2, steps=3)
    with pytest.raises(overlap.UsageError, match="steps: expected a positive integer, got 0"):
        marked(ranks=2, steps=0)


async def sends_twice(rank: overlap.Rank) -> None:
    """The second pair of messages begins long after the first was done; then both send before they receive."""
    x = np.ones(100_000)
    if rank.rank == 0:
        await rank.send(x, 1)
        await rank.compute(np.ones, 1, seconds=1)
    else:
        await rank.recv(x, 0)
        await rank.compute(np.ones, 1, seconds=1)
        await rank.send(x, 0)
    if rank.rank == 0:
        await rank.send(x, 1)


def test_messages_are_told_from_earlier_ones_between_the_same_ranks() -> None:
    verdict = Ranks().run(sends_twice, ranks=2, check=False).verdict
    assert verdict is not None
    assert verdict.kind == "cycle", verdict
    assert set(verdict.ranks) == {0, 1}
