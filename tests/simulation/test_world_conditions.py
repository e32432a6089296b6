"""What simulations assume: jitter and stragglers by seed, interference, adapters, profiles, the start of programs."""

import numpy as np
import pytest

import overlap
from overlap import Conditions, Interference, UsageError
from overlap.simulation import Profile

from .worlds import KB, MS, now_ns, simulate


async def three_steps(rank):
    """Compute a millisecond and reduce what takes two, three times."""
    for step in range(3):
        with rank.step(step):
            await rank.all_reduce(rank.compute(np.zeros, KB, np.uint8, seconds=0.001, name="work"))
    return now_ns(rank)


def test_calm():
    assert simulate(three_steps, 2, algorithm="ring")[0] == [6 * MS, 6 * MS]


def test_jitter_is_the_same_again_with_the_same_seed():
    ends = [simulate(three_steps, 4, conditions=Conditions(seed=seed, jitter=0.1))[0][0] for seed in (1, 2, 1)]
    assert ends[0] == ends[2] != ends[1]


def test_jitter_is_each_ranks_own():
    _, timeline = simulate(three_steps, 4, conditions=Conditions(jitter=0.1))
    first = {timeline.for_rank(rank)[0].duration_ns for rank in range(4)}
    _, smaller = simulate(three_steps, 2, conditions=Conditions(jitter=0.1))
    assert len(first) == 4
    assert {smaller.for_rank(rank)[0].duration_ns for rank in range(2)} <= first, "however many others there are"


def test_a_straggler_holds_all_up():
    conditions = Conditions(stragglers=(2,), straggler_factor=3.0)
    results, timeline = simulate(three_steps, 4, algorithm="ring", conditions=conditions)
    assert results == [3 * (3 * MS + 6 * 250_000)] * 4
    assert [span.info.last_rank_wait_ns for span in timeline.for_rank(0) if span.info] == [2 * MS] * 3


def test_slow_wires():
    conditions = Conditions(slow_wire_share=1.0, slow_wire_factor=0.25)
    assert simulate(three_steps, 2, algorithm="ring", conditions=conditions)[0] == [3 * (1 + 4) * MS] * 2


def test_interference():
    async def main(rank):
        first = rank.all_reduce(np.zeros(8 * KB, np.uint8))
        await rank.compute(lambda: None, seconds=0.004)
        return now_ns(rank), await first is not None, now_ns(rank)

    # Both last 4 ms twice as slow, which is 8; the 6 of the collective's 8 ms that are left take 6.
    stated = Interference(compute={"*": 2.0}, communication={"all_reduce": 4.0})
    results, timeline = simulate(main, 2, algorithm="ring", interference=stated)
    assert results == [(8 * MS, True, 14 * MS)] * 2
    assert "all_reduce x4" in timeline.meta["interference"]
    assert simulate(main, 2, algorithm="ring")[0] == [(4 * MS, True, 8 * MS)] * 2


def test_peer_direct():
    async def main(rank):
        await rank.all_reduce(rank.empty((8_000_000,)))
        return now_ns(rank)

    ends = {
        on: simulate(main, 32, cluster="dl1.24xlarge x4", shapes_only=True, peer_direct=on)[0][0]
        for on in (True, False)
    }  # fmt: skip
    assert ends[False] > 1.5 * ends[True]


def test_a_profile_of_a_real_run(tmp_path):
    async def main(rank):
        for _ in range(3):
            await rank.compute(sum, range(1000), name="sum")
        return rank.world_size

    trace = tmp_path / "real.json"
    overlap.run(main, ranks=2, trace=trace)
    median_ns = Profile.read(trace).median_ns["sum"]

    async def ends(rank):
        await main(rank)
        return now_ns(rank)

    assert simulate(ends, 2, profile=trace)[0] == [3 * median_ns] * 2
    assert simulate(ends, 2, profile=Profile(median_ns={"sum": 7}))[0] == [21] * 2


def test_what_a_profile_does_not_know():
    async def main(rank):
        with pytest.raises(UsageError, match=r"compute 'work' has no cost .*; the profile a timeline knows sum"):
            rank.compute(len, name="work")

    simulate(main, 1, profile=Profile(median_ns={"sum": 7}))
