"""Real models in virtual time that lose ranks by seed: any end is that of a run with this history of members."""

from itertools import pairwise

import pytest
import trio

import overlap
from overlap import Faults, OverlapError, Virtual
from overlap.parallel import AdamW, DataParallel
from tests.survival.histories import params, reference, train

STEPS = 12


def whole(rank):
    return DataParallel(rank, params(), optimizer=AdamW(lr=0.01), exact=True, bucket_bytes=2000)


async def noting(rank, worlds):
    model = whole(rank)
    worlds.setdefault(rank.epoch.number, set()).add((rank.epoch.members, model.steps))
    return rank.epoch.number, await train(model, STEPS)


def simulate(seed):
    """Return the worlds of a run and its end; death strikes a rank before, in and after any operation."""
    worlds = {}
    faults = Faults(seed=seed, survive=True, delay=0.02, loss=0.0005, death=0.003, slow=0.0, delay_s=0.002)
    try:
        ends = overlap.run(noting, worlds, ranks=4, clock=Virtual(faults=faults))
    except OverlapError as error:
        return worlds, error
    return worlds, ends


@pytest.mark.everyday(2)
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_invariants_by_seed(seeds):
    epochs, ends = set(), []
    for seed in seeds:
        worlds, end = simulate(seed)
        assert all(len(world) == 1 for world in worlds.values()), f"seed {seed}: two worlds of one epoch"
        history = [next(iter(worlds[epoch])) for epoch in sorted(worlds)]
        for (before, begin), (after, step) in pairwise(history):
            assert set(after) < set(before), f"seed {seed}: a lost rank has come back"
            assert begin <= step <= STEPS, f"seed {seed}: a step is lost"
        epochs.add(len(history))
        ends.append(end)
        if isinstance(end, OverlapError):
            assert len(history[-1][0]) == 1, f"seed {seed}: {end}"
            continue
        ranks = [(len(members), step) for members, step in history]
        expected = reference(ranks, STEPS, members=[members for members, _ in history])
        assert {digest for _, digest in end} == {expected}, f"seed {seed}: other bits than those of its history"
    assert len(epochs) >= 3, "seeds reach several losses in one run"
    assert sum(not isinstance(end, OverlapError) for end in ends) >= len(seeds) // 2


def test_a_seed_repeats_itself():
    assert [simulate(3)[0] for _ in range(2)] == [simulate(3)[0]] * 2


def test_memory_outlives_the_epoch_and_time_goes_on():
    async def main(rank):
        seen = rank.epoch.memory.setdefault("seen", [])
        seen.append((rank.epoch.number, rank.now_ns()))
        await trio.sleep(1.0)
        await rank.barrier()
        return seen, rank.epoch.members

    faults = Faults(survive=True, kills=((0.5, 0),), delay=0.0, loss=0.0, death=0.0, slow=0.0)
    ends = overlap.run(main, ranks=3, clock=Virtual(faults=faults))
    assert ends == [([(0, 0), (1, 800_000_000)], (1, 2))] * 2


def test_an_error_of_the_program_is_no_loss():
    async def main(rank):
        await rank.barrier()
        raise ValueError("own code")

    with pytest.raises(overlap.RankFailedError, match="own code"):
        overlap.run(main, ranks=3, clock=Virtual(faults=Faults(survive=True, death=0.0, loss=0.0)))


def test_the_loss_of_all_ends_the_run():
    async def main(rank):
        await trio.sleep(1.0)
        await rank.barrier()

    faults = Faults(survive=True, kills=((0.2, 0), (0.2, 1)), delay=0.0, loss=0.0, death=0.0, slow=0.0)
    with pytest.raises(overlap.RankFailedError, match=r"died at 0\.2 s"):
        overlap.run(main, ranks=2, clock=Virtual(faults=faults))
