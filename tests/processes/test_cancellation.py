"""Processes and awaits that are cancelled at any step, by seed: all end, and no message is lost or doubled."""

from __future__ import annotations

from collections import Counter
from itertools import count

import numpy as np
import pytest

import overlap
from tests.runtime.cancelled_awaits import play
from transports.handshake import HandshakeError

from .simulation import Simulation, seeds
from .test_worlds import EACH, live

# -- A process is cancelled at any step of its life, from joining to leaving: it ends, and the others know of whom -----

LIMIT_S = 90.0  # of virtual time: 60 s to notice that somebody does not come, and what else may be waited for


async def short(rank: overlap.Rank) -> float:
    """Meet twice, in different ways."""
    await rank.barrier()
    rank.send(np.ones(2), (rank.rank + 1) % rank.world_size)
    got = await rank.recv(((2,), float), (rank.rank - 1) % rank.world_size)
    return float((await rank.all_reduce(got))[0])


def cancelled(member: int, step: int, rails: int) -> Simulation | None:
    """Return a run of two processes of which one is cancelled before a step; None if it has fewer."""
    found = live(step, 2, short, rails=rails, most=0, cancel=(member, step))
    return found if any(what == "cancelled" for _, _, what in found.log) else None


def check(found: Simulation, member: int) -> None:
    context = f"{found.seed}: {found.ends}"
    assert max(at_s for at_s, _, _ in found.log) < LIMIT_S, context
    other = found.ends[1 - member]
    if isinstance(other, overlap.RankFailedError):
        assert other.rank // EACH == member, context
    elif isinstance(other, HandshakeError):  # it went in the middle of one, for which there is one connection
        assert str(other).startswith("the other side hung up "), context
    elif isinstance(other, Exception):
        assert f"process {member} " in str(other) or f"process {member}:" in str(other), context
    else:
        assert other == [2.0 * EACH] * EACH, context


@pytest.mark.everyday(1)
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rails", [0, 2])
@pytest.mark.parametrize("member", [0, 1])
def test_a_process_is_cancelled_at_any_step(member: int, rails: int, every: int) -> None:
    for step in count(1, every):
        found = cancelled(member, step, rails)
        if found is None:
            break
        check(found, member)
    assert step > 150  # of which there are fewer the fewer tasks a message takes


# -- awaits that are cancelled at random, by seed: no message is lost, doubled or reordered, and every run ends --------

WAYS = {
    "await cancelled", "receive cancelled", "compute cancelled", "task cancelled", "several", "called_back", "dropped",
    "by_daemon", "at_a_time", "computed", "shared", "polled",
}  # fmt: skip


def simulated(seed: int) -> list[tuple[dict[int, list[int]], Counter[str]]]:
    """Run the program of a seed on the virtual clock, slower or faster than its messages."""
    tick_s = 10.0 ** -(3 + seed % 3)
    return overlap.run(play, seed, tick_s, ranks=(2, 4)[seed % 2], clock="virtual", cluster="trn1.32xlarge")


@pytest.mark.parametrize("some", seeds(40, 640, at_once=100), ids=str)
def test_no_message_is_lost_doubled_or_reordered_by_awaits_that_are_cancelled(some: range) -> None:
    seen: Counter[str] = Counter()
    for seed in some:
        for _, counted in simulated(seed):
            seen += counted
    assert set(seen) == WAYS


def test_equal_seeds_give_equal_results() -> None:
    for seed in range(5):
        assert simulated(seed) == simulated(seed)


@pytest.mark.parametrize("rails", [0, 2])
@pytest.mark.parametrize("some", seeds(6, 206, at_once=50), ids=str)
def test_the_same_between_processes(some: range, rails: int) -> None:
    seen: Counter[str] = Counter()
    for seed in some:

        async def main(rank: overlap.Rank, seed: int = seed) -> Counter[str]:
            return (await play(rank, seed, 10.0 ** -(2 + seed % 3), threads=False))[1]

        found = live(seed, 2, main, rails=rails, most=0)
        for end in found.ends.values():
            assert isinstance(end, list), f"seed {seed}: {end!r}"
            assert len(end) == EACH
            for counted in end:
                seen += counted
    assert seen["await cancelled"]
    assert seen["receive cancelled"]
