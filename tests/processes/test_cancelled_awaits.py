"""Awaits that are cancelled at random, by seed: no message is lost, doubled or reordered, and every run ends."""

from __future__ import annotations

from collections import Counter

import pytest

import overlap
from tests.runtime.cancelled_awaits import play

from .simulation import seeds
from .test_worlds import EACH, live

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
