"""Receives from any source in the record."""

from functools import partial

import numpy as np
import pytest

import overlap
from overlap.testing import Ranks
from overlap.testing.running import Setting


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
    assert [(each.call.op, each.call.peer) for each in run.record.of(0)] == [("recv", 1), ("recv", 2)]


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
