"""The agreement under kills at every step of its protocol, by seed."""

import random

import pytest

from overlap.survival.agreement import Membership, State, accepts, proposal_of, state_of


def survive(seed: int) -> tuple[list[Membership], dict[int, tuple[int, int]]]:
    """The records of the witness, and the epoch and step of each survivor, after kills at random moments."""
    draw = random.Random(seed)
    record = Membership(epoch=0, members=tuple(range(draw.randint(2, 6))), step=7)
    records, alive = [record], set(record.members)
    worlds = dict.fromkeys(alive, record)
    applied = {member: draw.choice((7, 8)) for member in alive}  # all have prepared step 8
    reports: dict[tuple[int, int], int] = {}
    kills = draw.randint(1, len(alive) - 1)
    for _ in range(1000):
        if kills and draw.random() < 0.2:
            alive.discard(draw.choice(sorted(alive)))
            kills -= 1
        member = draw.choice(sorted(alive))
        world = worlds[member]
        lost = set(world.members) - alive
        state = state_of(member, world, record, reported=(world.epoch, member) in reports)
        assert state is not State.OUT, "a living member is never excluded"
        if state is State.JOINS:
            assert record.step - applied[member] in (0, 1), "no step is lost, none is applied twice"
            worlds[member], applied[member] = record, record.step
        elif state is State.TRAINS and lost:
            reports[world.epoch, member] = applied[member]
        elif state is State.REPORTS:
            of_epoch = {m: step for (epoch, m), step in reports.items() if epoch == world.epoch}
            proposal = proposal_of(world, of_epoch, lost)
            if proposal and accepts(record, proposal):
                record = proposal
                records.append(record)
    assert not kills
    return records, {member: (worlds[member].epoch, applied[member]) for member in alive}


@pytest.mark.parametrize("seed", range(300))
def test_survivors_share_one_world_and_step(seed: int) -> None:
    records, survivors = survive(seed)
    assert [record.epoch for record in records] == list(range(len(records)))
    assert set(records[-1].members) == set(survivors), "nobody waits for ever"
    assert set(survivors.values()) == {(records[-1].epoch, records[-1].step)}


def test_the_witness_accepts_one_proposal_of_an_epoch() -> None:
    first = Membership(epoch=0, members=(0, 1), step=3)
    left, right = (Membership(epoch=1, members=(member,), step=3) for member in (0, 1))
    assert accepts(first, left)
    assert not accepts(left, right)


def test_a_member_that_returns_after_a_long_stop_is_out() -> None:
    old = Membership(epoch=0, members=(0, 1, 2), step=3)
    record = Membership(epoch=2, members=(0, 2), step=9)
    assert state_of(1, old, record, reported=True) is State.OUT


def test_a_proposal_waits_for_the_reports_of_the_living() -> None:
    world = Membership(epoch=4, members=(3, 1, 2), step=5)
    assert proposal_of(world, {3: 5}, {2}) is None
    assert proposal_of(world, {3: 5, 1: 6}, {2}) == Membership(epoch=5, members=(3, 1), step=6)
