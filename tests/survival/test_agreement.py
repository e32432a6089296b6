"""The agreement under kills, stops and false suspicion at every await of its protocol, by seed."""

from itertools import pairwise

import pytest

from overlap.survival.agreement import (
    EpochWorld,
    State,
    StepProgress,
    accepts,
    has_state,
    is_minority,
    lost_members,
    member_state,
    propose_world,
)
from tests.survival.model import FOREVER, STEPS, Job

CHUNK = 100


@pytest.mark.parametrize("first", range(0, 3000, CHUNK))
def test_invariants_by_seed(first: int) -> None:
    for seed in range(first, first + CHUNK):
        job = Job(seed)
        job.run()
        assert [record.epoch for record in job.records] == list(range(len(job.records))), "one world per epoch"
        survivors = [m for m in job.members.values() if m.finished and not m.dead and m.state is not State.WAITS]
        ends = [record.step for record in job.records[1:]] + [STEPS]
        history = [
            (step, record.members)
            for record, end in zip(job.records, ends, strict=True)
            for step in range(record.step + 1, end + 1)
        ]
        for member in survivors:
            assert member.weights == history, f"seed {seed}: a step is lost, doubled, or of another world"
        for member in job.members.values():
            stopped, ended = member.wakes >= FOREVER, member.state in (State.OUT, State.WAITS) or member.stateless
            assert member.dead or stopped or member.finished or ended, f"seed {seed}: waits for ever"
            assert member.state is not State.OUT or member.number not in job.record.members
        check_newcomers(job)


def check_newcomers(job: Job) -> None:
    """No world is larger than the first one; nobody returns; members with the state come first, then newcomers."""
    gone: set[int] = set()
    for before, after in pairwise(job.records):
        gone |= set(before.members) - set(after.members)
        assert set(after.lost) == gone
        assert not gone & set(after.members)
        assert len(after.members) <= job.size
        assert after.newcomers == after.members[len(after.members) - len(after.newcomers) :]
        assert set(after.members) - set(before.members) <= set(after.newcomers)
    if set(job.record.newcomers) == set(job.record.members):
        ends = [m for m in job.members.values() if m.finished and m.state is not State.WAITS]
        assert not ends, "a world without the state has an end"


def test_seeds_reach_every_outcome() -> None:
    jobs = [Job(seed) for seed in range(300)]
    for job in jobs:
        job.run()
    assert any(len(job.records) > 3 for job in jobs), "several losses in one job"
    assert any(m.state is State.OUT and not m.dead for job in jobs for m in job.members.values())
    decisions = [pair for job in jobs for pair in pairwise(job.records)]
    lost = {len(set(before.members) - set(after.members)) for before, after in decisions}
    assert lost >= {0, 1, 2}, "nobody, one or two lost in one decision"
    assert any(after.step == before.step for before, after in decisions), "a loss during joining"
    joined = [(before, after, set(after.members) - set(before.members)) for before, after in decisions]
    assert {len(new) for _, _, new in joined} >= {0, 1, 2}, "nobody, one or two joined in one decision"
    assert any(new and len(after.members) > len(before.members) for before, after, new in joined), "a late spare"
    assert any(set(before.newcomers) - set(after.members) for before, after in decisions), "a newcomer lost"
    kept = [set(before.newcomers) & set(after.newcomers) for before, after in decisions]
    assert any(kept), "a newcomer that has no state yet when the next epoch begins"
    assert any(member.stateless for job in jobs for member in job.members.values()), "nobody has the state"
    whole = [len(job.record.members) == job.size and job.record.step > 0 for job in jobs if len(job.records) > 2]
    assert any(whole), "two losses, and the size of the first world"


def test_the_witness_accepts_one_proposal_of_an_epoch() -> None:
    first = EpochWorld(epoch=0, members=(0, 1), step=3)
    left, right = (EpochWorld(epoch=1, members=(member,), step=3, lost=(1 - member,)) for member in (0, 1))
    assert accepts(first, left)
    assert not accepts(left, right)
    assert not accepts(first, EpochWorld(epoch=1, members=(), step=3, lost=(0, 1)))
    assert not accepts(first, EpochWorld(epoch=1, members=(0, 2), step=3, lost=(1,)))


def test_the_witness_accepts_newcomers_that_were_never_lost() -> None:
    record = EpochWorld(epoch=1, members=(0, 2), step=3, newcomers=(2,), lost=(1,))
    assert accepts(record, EpochWorld(epoch=2, members=(0, 3), step=3, newcomers=(3,), lost=(1, 2)))
    assert not accepts(record, EpochWorld(epoch=2, members=(0, 3), step=3, newcomers=(3,), lost=(1,)))
    assert not accepts(record, EpochWorld(epoch=2, members=(0, 1), step=3, newcomers=(1,), lost=(1, 2)))
    assert not accepts(record, EpochWorld(epoch=2, members=(0, 2, 2), step=3, newcomers=(2,), lost=(1,)))


def test_spares_fill_the_places_of_the_lost_by_number() -> None:
    world = EpochWorld(epoch=2, members=(0, 1, 4), step=5, newcomers=(4,), lost=(2, 3))
    reports = {0: 6, 1: 5, 4: 5}
    more = propose_world(world, reports, {0}, lacking={4}, spares={3, 4, 6, 5}, size=4)
    assert more == EpochWorld(epoch=3, members=(1, 4, 5, 6), step=5, newcomers=(4, 5, 6), lost=(2, 3, 0))
    alone = propose_world(world, {4: 5}, {0, 1}, lacking={4}, size=3)
    assert alone == EpochWorld(epoch=3, members=(4,), step=5, newcomers=(4,), lost=(2, 3, 0, 1))


def test_a_newcomer_has_the_state_once_it_has_prepared_a_step() -> None:
    world = EpochWorld(epoch=1, members=(0, 2), step=5, newcomers=(2,), lost=(1,))
    assert not has_state(2, world, prepared=5)
    assert has_state(2, world, prepared=6)
    assert has_state(0, world, prepared=5)


def test_a_spare_waits_until_a_world_takes_it() -> None:
    first = EpochWorld(epoch=0, members=(0, 1), step=0)
    assert member_state(2, None, first, reported=False) is State.WAITS
    taken = EpochWorld(epoch=1, members=(1, 2), step=4, newcomers=(2,), lost=(0,))
    assert member_state(2, None, taken, reported=False) is State.JOINS
    later = EpochWorld(epoch=2, members=(1, 3), step=4, newcomers=(3,), lost=(0, 2))
    assert member_state(2, None, later, reported=False) is State.OUT


def test_a_member_that_returns_after_a_long_stop_is_out() -> None:
    old = EpochWorld(epoch=0, members=(0, 1, 2), step=3)
    record = EpochWorld(epoch=2, members=(0, 2), step=9)
    assert member_state(1, old, record, reported=True) is State.OUT


def test_a_proposal_waits_for_the_reports_of_the_living() -> None:
    world = EpochWorld(epoch=4, members=(3, 1, 2), step=5)
    assert propose_world(world, {3: 5}, {2}) is None
    assert propose_world(world, {3: 5, 1: 6}, {2}) == EpochWorld(epoch=5, members=(3, 1), step=6, lost=(2,))


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
        progress.following(5)  # before the report
    assert progress.report() == 4
    with pytest.raises(AssertionError, match="after its report"):
        progress.agree(5)
    assert progress.following(4)[1] == ()
    following, means = progress.following(5)
    assert (following.agreed, following.prepared, means) == (5, 5, ["mean"])
    following.report()
    assert following.following(5)[1] == (), "a mean ends with its epoch"
    with pytest.raises(AssertionError, match="next world begins after step 6"):
        progress.following(6)


@pytest.mark.parametrize(
    ("lost", "ended", "waits"),
    [({1, 2}, set(), False), ({1, 2, 3}, {1, 2}, True), ({1, 2, 3}, {1, 2, 3}, False), ({3}, set(), False)],
)
def test_less_than_half_waits_for_others_that_may_live(lost, ended, waits):
    world = EpochWorld(epoch=0, members=(0, 1, 2, 3), step=0)
    assert is_minority(world, lost=lost, ended=ended) is waits
