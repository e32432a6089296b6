"""The agreement under kills, stops, suspicion and lost packets, by seed."""

from itertools import combinations, pairwise

import pytest

from overlap.survival.agreement import (
    AgreementState,
    EpochWorld,
    StepProgress,
    accepts_proposal,
    cut_off_members,
    is_minority,
    lost_members,
    member_state,
    propose_world,
)
from tests.survival import networks
from tests.survival.model import FOREVER, STEPS, Job
from tests.survival.networks import FAILS_AT, TICK_S

# -- the agreement under kills, stops and false suspicion at every await of its protocol, by seed ----------------------

CHUNK = 100


@pytest.mark.parametrize("first", range(0, 3000, CHUNK))
def test_invariants_by_seed(first: int) -> None:
    for seed in range(first, first + CHUNK):
        job = Job(seed)
        job.run()
        assert [record.epoch for record in job.records] == list(range(len(job.records))), "one world per epoch"
        survivors = [member for member in job.members.values() if member.finished and not member.dead]
        ends = [record.step for record in job.records[1:]] + [STEPS]
        history = [
            (step, record.members)
            for record, end in zip(job.records, ends, strict=True)
            for step in range(record.step + 1, end + 1)
        ]
        for member in survivors:
            assert member.weights == history, f"seed {seed}: a step is lost, doubled, or of another world"
        for member in job.members.values():
            stopped, ended = member.wakes >= FOREVER, member.state is AgreementState.OUT
            assert member.dead or stopped or member.finished or ended, f"seed {seed}: waits for ever"
            assert member.state is not AgreementState.OUT or member.number not in job.record.members
        for before, after in pairwise(job.records):
            assert set(after.members) <= set(before.members), "nobody returns"


def test_seeds_reach_every_outcome() -> None:
    jobs = [Job(seed) for seed in range(300)]
    for job in jobs:
        job.run()
    assert any(len(job.records) > 3 for job in jobs), "several losses in one job"
    assert any(m.state is AgreementState.OUT and not m.dead for job in jobs for m in job.members.values())
    decisions = [pair for job in jobs for pair in pairwise(job.records)]
    lost = {len(set(before.members) - set(after.members)) for before, after in decisions}
    assert lost >= {0, 1, 2}, "nobody, one or two lost in one decision"
    assert any(after.step == before.step for before, after in decisions), "a loss during joining"


def test_the_witness_accepts_one_proposal_of_an_epoch() -> None:
    first = EpochWorld(epoch=0, members=(0, 1), step=3)
    left, right = (EpochWorld(epoch=1, members=(member,), step=3) for member in (0, 1))
    assert accepts_proposal(first, left)
    assert not accepts_proposal(left, right)
    assert not accepts_proposal(first, EpochWorld(epoch=1, members=(), step=3))
    assert not accepts_proposal(first, EpochWorld(epoch=1, members=(0, 2), step=3))
    assert not accepts_proposal(first, EpochWorld(epoch=1, members=(0, 0), step=3))


def test_a_member_that_returns_after_a_long_stop_is_out() -> None:
    old = EpochWorld(epoch=0, members=(0, 1, 2), step=3)
    record = EpochWorld(epoch=2, members=(0, 2), step=9)
    assert member_state(1, old, record) is AgreementState.OUT


def test_a_proposal_waits_for_the_reports_of_the_living() -> None:
    world = EpochWorld(epoch=4, members=(3, 1, 2), step=5)
    assert propose_world(world, {3: 5}, {2}) is None
    assert propose_world(world, {3: 5, 1: 6}, {2}) == EpochWorld(epoch=5, members=(3, 1), step=6)


def test_a_suspect_that_reports_is_not_lost() -> None:
    world = EpochWorld(epoch=0, members=(0, 1, 2, 3), step=0)
    limits = {"suspect_s": 1.0, "report_s": 60.0}
    lost = lost_members(world, dead={3}, suspects={1, 2}, reports={0, 1}, waited_s=1.0, **limits)
    assert lost == {2, 3}
    assert lost_members(world, dead=set(), suspects={1}, reports={0}, waited_s=0.5, **limits) == set()
    assert lost_members(world, dead=set(), suspects=set(), reports={0}, waited_s=60.0, **limits) == {1, 2, 3}


def test_progress_enforces_the_order_of_a_step() -> None:
    progress = StepProgress(4)
    with pytest.raises(AssertionError, match="step 5 agreed, prepared is 4"):
        progress.agree(5)
    progress.prepare(5, ["mean"])
    with pytest.raises(AssertionError, match="step 7 prepared after 4"):
        progress.prepare(7)
    with pytest.raises(AssertionError, match="next world begins after step 5"):
        progress.begin_next_epoch(5)  # before the report
    assert progress.report() == 4
    with pytest.raises(AssertionError, match="after its report"):
        progress.agree(5)
    assert progress.begin_next_epoch(4)[1] == ()
    following, means = progress.begin_next_epoch(5)
    assert (following.agreed, following.prepared, means) == (5, 5, ["mean"])
    following.report()
    assert following.begin_next_epoch(5)[1] == (), "a mean ends with its epoch"
    with pytest.raises(AssertionError, match="next world begins after step 6"):
        progress.begin_next_epoch(6)


@pytest.mark.parametrize(
    ("lost", "ended", "waits"),
    [({1, 2}, set(), False), ({1, 2, 3}, {1, 2}, True), ({1, 2, 3}, {1, 2, 3}, False), ({3}, set(), False)],
)
def test_less_than_half_waits_for_others_that_may_live(lost, ended, waits):
    world = EpochWorld(epoch=0, members=(0, 1, 2, 3), step=0)
    assert is_minority(world, lost=lost, ended=ended) is waits


# -- the agreement where packets vanish and all hosts reach the folder, by seed: one part goes on, and soon ------------

LIMIT_S = 30.0


def stop_s(job):
    """Return when the last change of the network is."""
    return (FAILS_AT if job.healed_at >= networks.FOREVER else job.healed_at) * TICK_S


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_one_part_goes_on(first):
    for seed in range(first, first + CHUNK):
        job = networks.Job(seed)
        job.run(ticks=round((stop_s(job) + LIMIT_S) / TICK_S))
        trains = {m.number for m in job.members.values() if m.state is AgreementState.TRAINS and not m.end}
        going = [m for m in job.members.values() if not m.end]
        assert {m.state for m in going} == {AgreementState.TRAINS}, f"seed {seed}: not decided after {LIMIT_S} s"
        assert trains == set(job.records[-1].members), f"seed {seed}: nobody goes on, or a part beside the others"
        assert all(job.reach(*pair) for pair in combinations(trains, 2))
        assert job.vain() == [], f"seed {seed}: a world that could not meet is proposed again"


def test_seeds_reach_every_network():
    jobs = [networks.Job(seed) for seed in range(100)]
    for job in jobs:
        job.run(ticks=round((stop_s(job) + LIMIT_S) / TICK_S))
    assert {job.kind for job in jobs} == {"parts", "pairs", "flapping"}
    assert {len(job.records) for job in jobs} >= {1, 2, 3, 7}
    assert any(set(job.records[-1].members) < set(job.members) for job in jobs if job.healed_at < networks.FOREVER)
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
    assert cut_off_members(world, unreached, lost=set()) == out


def test_a_lost_member_needs_no_connection():
    world = EpochWorld(epoch=1, members=(0, 1, 2, 3), step=0)
    assert cut_off_members(world, {0: {2, 3}, 1: {2, 3}}, lost={0, 1}) == set()
