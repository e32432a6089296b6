"""The agreement where packets vanish and all hosts reach the folder, by seed: one part goes on, and soon."""

from itertools import combinations

import pytest

from overlap.survival.agreement import AgreementState, EpochWorld, cut_off_members
from tests.survival.networks import FAILS_AT, FOREVER, TICK_S, Job

CHUNK = 100
LIMIT_S = 30.0


def stop_s(job):
    """Return when the last change of the network is."""
    return (FAILS_AT if job.healed_at >= FOREVER else job.healed_at) * TICK_S


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_one_part_goes_on(first):
    for seed in range(first, first + CHUNK):
        job = Job(seed)
        job.run(ticks=round((stop_s(job) + LIMIT_S) / TICK_S))
        trains = {m.number for m in job.members.values() if m.state is AgreementState.TRAINS and not m.end}
        going = [m for m in job.members.values() if not m.end]
        assert {m.state for m in going} == {AgreementState.TRAINS}, f"seed {seed}: not decided after {LIMIT_S} s"
        assert trains == set(job.records[-1].members), f"seed {seed}: nobody goes on, or a part beside the others"
        assert all(job.reach(*pair) for pair in combinations(trains, 2))
        assert job.vain() == [], f"seed {seed}: a world that could not meet is proposed again"


def test_seeds_reach_every_network():
    jobs = [Job(seed) for seed in range(100)]
    for job in jobs:
        job.run(ticks=round((stop_s(job) + LIMIT_S) / TICK_S))
    assert {job.kind for job in jobs} == {"parts", "pairs", "flapping"}
    assert {len(job.records) for job in jobs} >= {1, 2, 3, 7}
    assert any(set(job.records[-1].members) < set(job.members) for job in jobs if job.healed_at < FOREVER)
    assert any(len(job.records[-1].members) * 2 < len(job.members) for job in jobs), (
        "the largest part has less than half"
    )


@pytest.mark.parametrize(
    ("unreached", "out"),
    [
        ({0: {2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {0, 1}}, {2, 3}),
        ({0: {2, 3}, 1: {2, 3}}, {2, 3}),  # one way, or the others have not reported yet
        ({3: {0, 1, 2}}, {3}),
        ({0: {1, 2, 3}}, {0}),
        ({0: {1}, 1: {2}}, {1}),  # 0 reaches 2
        ({0: {9}}, set()),  # lost before
        ({}, set()),
    ],
)
def test_members_are_left_out_until_all_reach_each_other(unreached, out):
    world = EpochWorld(epoch=1, members=(0, 1, 2, 3), step=0)
    assert cut_off_members(world, unreached, lost_members=set()) == out


def test_a_lost_member_needs_no_connection():
    world = EpochWorld(epoch=1, members=(0, 1, 2, 3), step=0)
    assert cut_off_members(world, {0: {2, 3}, 1: {2, 3}}, lost_members={0, 1}) == set()
