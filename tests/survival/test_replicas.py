"""Replicas of the shards of ZeRO: training goes on from the last complete ones, with the bits of its history."""

import re

import pytest

import overlap
import topology
from overlap import Faults, RankFailedError, Virtual
from overlap.parallel import replicated
from overlap.parallel.replicated import ShardReplicas
from tests.faults.job import Job
from tests.survival import replicating
from tests.survival.replicating import EVERY, STEPS, reference, sharded, train

CALM = {"delay": 0.0, "loss": 0.0, "death": 0.0, "slow": 0.0}


def survive(main, *args, ranks, kills, cluster="local", **faults):
    """Run in virtual time with deaths at instants in ms."""
    kills = tuple((time_ms / 1e3, rank) for time_ms, rank in kills)
    faults = Faults(survive=True, kills=kills, **CALM | faults)
    return overlap.run(main, *args, ranks=ranks, cluster=cluster, clock=Virtual(faults=faults))


def history_of(worlds):
    """Return the ranks and the first step of each epoch, from all that its ranks have noted."""
    return [worlds[epoch] for epoch in sorted(worlds)]


async def noting(rank, worlds, stage):
    model = sharded(rank, stage)
    worlds[rank.epoch.number] = rank.world_size, model.steps
    return await train(model, STEPS)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(3, [(20, 1)]), (4, [(20, 0), (355, 3)]), (5, [(34, 1), (34, 3)]), (2, [(40, 0)]), (4, [(20, 2), (325, 3)])],
    ids=["one", "two epochs", "two at once", "down to one", "again at the beginning"],
)
def test_weights_are_those_of_the_history(stage, ranks, kills):
    worlds = {}
    digests = survive(noting, worlds, stage, ranks=ranks, kills=kills)
    history = history_of(worlds)
    assert history[0] == (ranks, 0)
    assert history[-1][0] == ranks - len(kills) == len(digests)
    assert all(step and step % EVERY == 0 for _, step in history[1:])
    assert set(digests) == {reference(history, STEPS)}


def test_what_is_repeated_is_counted_and_printed(capsys):
    survive(noting, {}, 3, ranks=3, kills=[(20, 1)])
    assert "going on from replica of step 4, repeated steps: 2 (replicate=4)" in capsys.readouterr().err


def test_a_rank_and_its_neighbour_cannot_be_made_whole():
    with pytest.raises(RankFailedError, match=r"step 4 cannot be made whole: shards 1 of 4 have no valid copy"):
        survive(noting, {}, 3, ranks=4, kills=[(20, 1), (20, 2)])


def test_a_flipped_bit_is_refused(monkeypatch):
    advance = ShardReplicas.advance

    def flip(replicas, step):
        advance(replicas, step)
        if replicas._group.rank == 2:  # the neighbour of the dead one
            replicas.sources[0].shards[1][100] ^= 1

    monkeypatch.setattr(ShardReplicas, "advance", flip)
    with pytest.raises(RankFailedError, match=r"shards 1 of 3 have no valid copy"):
        survive(noting, {}, 3, ranks=3, kills=[(20, 1)])


def test_a_bit_that_is_flipped_on_the_way_leaves_the_replica_before(monkeypatch, capsys):
    check = ShardReplicas._issue_check

    def flip(replicas, replica):
        if replica.step == 8 and replicas._group.rank == 2:
            replica.shards[1][100] ^= 1
        return check(replicas, replica)

    monkeypatch.setattr(ShardReplicas, "_issue_check", flip)
    worlds = {}
    digests = survive(noting, worlds, 3, ranks=3, kills=[(34, 0)])
    assert worlds == {0: (3, 0), 1: (2, 4)}
    assert set(digests) == {reference(history_of(worlds), STEPS)}
    assert "replica of step 8 is dropped: a copy differs from its digest" in capsys.readouterr().err


def test_the_neighbour_is_on_another_host():
    assert replicated._neighbour_distance([0, 0, 1, 1]) == 2
    assert replicated._neighbour_distance([0, 0, 0]) == 1
    assert replicated._neighbour_distance([0, 0, 1]) == 1
    assert replicated._neighbour_distance([0]) == 0
    worlds = {}
    cluster = topology.cluster("local", nodes=4, ranks=8)
    digests = survive(noting, worlds, 3, ranks=8, cluster=cluster, kills=[(60, 2), (60, 3)])
    assert worlds[0] == (8, 0)
    assert worlds[1] in ((6, 4), (6, 8))
    assert set(digests) == {reference(history_of(worlds), STEPS)}


def test_replicas_change_no_bits_and_cost_nothing_without_survive():
    async def main(rank, every):
        model = sharded(rank, 3, every)
        digest = await train(model, STEPS)
        return digest, rank.epoch.survivor

    plain, replicate = (overlap.run(main, every, ranks=3, clock="virtual") for every in (None, EVERY))
    assert plain == replicate
    assert plain[0][1] is None
    assert {digest for digest, _ in plain} == {reference([(3, 0)], STEPS)}


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(*arguments, spares=0):
        options = ["--survive", "--processes", "4", "--spares", str(spares)]
        jobs.append(Job(tmp_path, *options, program=replicating.__file__, arguments=arguments))
        return jobs[-1]

    yield start
    for made in jobs:
        made.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "spares"),
    [pytest.param("1", 0, marks=pytest.mark.slow), ("3", 0), pytest.param("3", 1, marks=pytest.mark.slow)],
)
def test_processes_go_on(job, stage, spares):
    run, ranks = job(stage, "14:2", spares=spares), 3 + spares
    assert run.end() == 0, run.err
    step = int(re.search(rf"epoch 1 ranks {ranks} step (\d+)", run.out)[1])
    assert step in (8, 12)  # the newest copy may be on its way
    assert run.out.count(f"digest {reference([(4, 0), (ranks, step)], STEPS)}") == ranks
    assert f"going on from replica of step {step}" in run.err
    run.check_nothing_is_left()


@pytest.mark.slow
def test_a_checkpoint_stands_in_for_neighbours_that_are_lost(job):
    run = job("3", "14:1,14:2", "save")
    assert run.end() == 0, run.err
    assert re.search(r"no valid copy on the ranks that live; going on from the checkpoint of step 10", run.err)
    assert run.out.count("epoch 1 ranks 2 step 10") == 2
    assert run.out.count(f"digest {reference([(4, 0), (2, 10)], STEPS)}") == 2
    run.check_nothing_is_left()
