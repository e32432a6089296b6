"""Receives from any source in the record."""

import numpy as np

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
    assert [(each.op, each.peer) for each in run.record.of(0)] == [("recv", 1), ("recv", 2)]


def test_one_too_many_is_named() -> None:
    run = Ranks().run(receives_one_more, ranks=3, check=False)
    assert run.verdict is not None
    assert run.verdict.kind == "receive without a send"
    assert run.verdict.ranks[0] == 0


def test_the_line_that_repeats_a_run_has_its_clock() -> None:
    assert Setting(ranks=3, clock=overlap.Virtual(profile="run.json")).told == (
        "ranks=3, clock=overlap.Virtual(profile='run.json')"
    )
    assert Setting(ranks=3).told == "ranks=3"
