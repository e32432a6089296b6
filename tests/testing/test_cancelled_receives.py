"""Receives that are cancelled while the order of ranks is decided by seeds."""

from __future__ import annotations

import numpy as np
import trio

import overlap
from overlap.testing import Ranks

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
