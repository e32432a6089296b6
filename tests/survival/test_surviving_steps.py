"""Steps of real models through random losses, on the real and the virtual clock: weights are those of the history."""

import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import trio

import overlap
from overlap import Faults, OverlapError, Virtual
from overlap.parallel import AdamW, DataParallel
from overlap.parallel.surviving import SurvivingSteps
from overlap.runtime.epoch import Epoch
from overlap.survival.agreement import EpochWorld, Prepared, StepProgress, propose_world
from tests.survival.histories import params, reference, train

# ----------------------------------------------------------------------------------------------------------------------
# Steps of real models through random losses: each weight is that of the history of members, and no mean comes
# late

# A pure model. Members prepare, agree and apply parts of steps in any order that a network allows, and lose members, or
# only their connections, while they train and while they join. The steps are the product's `SurvivingSteps`, on buckets
# whose weights are lists of means, and a mean is (step, members of its epoch, epoch).

STEPS = 5
PARTS = [slice(0, 4), slice(4, 6)]


class Bucket:
    """Bucket of one epoch; its weights outlive it."""

    parts = PARTS

    def __init__(self, weights):
        self.weights, self.applied_steps, self.mean_futures = weights, {}, []

    def update_part(self, step, part, mean):
        self.weights[part.start].append(mean)
        self.applied_steps[part.start] = step
        return True


class Member:
    """A member with weights of two buckets; the calls of its compute stream are made by hand."""

    def __init__(self):
        self.weights = [{part.start: [] for part in PARTS} for _ in range(2)]
        self.epoch = Epoch(survives=True)
        self.updated = 0  # step whose updates are all done: the gradients of the next one need these weights

    def compute(self, fn, *args, **_):
        self.calls.append(partial(fn, *args))

    def begin(self, world):
        """Make the model again, in an epoch that all members have joined."""
        rank = SimpleNamespace(epoch=self.epoch, world_size=len(world.members), stream=lambda name: name)
        group = SimpleNamespace(size=rank.world_size, all_reduce=lambda *_, **__: None)
        self.buckets, self.updated = [Bucket(weights) for weights in self.weights], world.step
        self.steps = SurvivingSteps(rank, self, group, None, hook=None, exact=False)

    def train(self, world, prepared):
        """Make the steps of an epoch; each yield is a moment at which a loss may come."""
        for step in range(world.step + 1, STEPS + 1):
            for bucket in self.buckets:
                bucket.mean_futures = [(step, world.members, world.epoch)] * len(PARTS)
            self.calls = []
            self.steps.issue_agreement(self.buckets, (), step)
            prepare, agree = self.calls
            while any(member.updated < step - 1 for member in prepared):
                yield
            prepare()
            prepared[self] = step
            yield
            while any(last < step for last in prepared.values()):
                yield
            agree()
            yield
            for bucket in self.buckets:
                for part, mean in zip(PARTS, bucket.mean_futures, strict=True):
                    bucket.update_part(step, part, mean)
                    yield
            self.updated = step


def live(seed):
    """Return the members that end a history of losses, and the means of their history."""
    draw = random.Random(seed)
    world = EpochWorld(epoch=0, members=tuple(range(draw.randint(2, 5))), step=0)
    members, history = {number: Member() for number in world.members}, []
    while True:
        here = {number: members[number] for number in world.members}
        trains = {}
        if world.epoch == 0 or draw.random() < 0.6:  # else a loss comes before all have joined
            for member in here.values():
                member.begin(world)
            prepared = dict.fromkeys(here.values(), world.step)
            trains = {number: member.train(world, prepared) for number, member in here.items()}
        while trains and draw.random() > 0.01:
            number = draw.choice(list(trains))
            if next(trains[number], "ended") == "ended":
                del trains[number]
        if all(member.updated == STEPS for member in here.values()):
            return here, history + [(step, world.members, world.epoch) for step in range(world.step + 1, STEPS + 1)]
        lost = set(draw.sample(world.members, min(draw.choice((0, 1, 1, 2)), len(here) - 1)))
        reports = {}
        for number in draw.sample(world.members, len(here)):  # they see the loss one after the other
            for _ in range(draw.choice((0, 0, 3, 20))):
                next(trains.get(number, iter(())), None)
            trains.pop(number, None)
            if number not in lost:
                reports[number] = here[number].epoch.survivor.report()
        before, world = world, propose_world(world, reports, lost)
        history += [(step, before.members, before.epoch) for step in range(before.step + 1, world.step + 1)]
        for number in world.members:
            members[number].epoch.number, members[number].epoch.step = world.epoch, world.step
            members[number].epoch.survivor.advance(world.step)


def check(seeds):
    """Check the weights of histories by seed; return the numbers of their epochs."""
    epochs = set()
    for seed in seeds:
        members, history = live(seed)
        for member in members.values():
            parts = [means for weights in member.weights for means in weights.values()]
            assert parts == [history] * len(parts), f"seed {seed}: a step is lost, doubled, or of another epoch"
        epochs.add(member.epoch.number)
    return epochs


@pytest.mark.parametrize(
    "seeds", [range(500), pytest.param(range(500, 10_000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_weights_are_those_of_the_history(seeds):
    assert check(seeds) >= {0, 1, 2, 3, 4, 5}


def test_the_model_sees_a_mean_that_outlives_its_epoch(monkeypatch):
    following = StepProgress.begin_next_epoch

    def keep(self, step):
        fresh, means = following(self, step)
        fresh._latest = Prepared(step, self._latest.means)
        return fresh, means

    monkeypatch.setattr(StepProgress, "begin_next_epoch", keep)
    with pytest.raises(AssertionError, match="a step is lost, doubled, or of another epoch"):
        check(range(500))


# -- real models in virtual time that lose ranks by seed: any end is that of a run with this history of members --------

VIRTUAL_STEPS = 12


def whole(rank):
    return DataParallel(rank, params(), optimizer=AdamW(lr=0.01), exact=True, bucket_bytes=2000)


async def noting(rank, worlds):
    model = whole(rank)
    worlds.setdefault(rank.epoch.number, set()).add((rank.epoch.members, model.steps))
    return rank.epoch.number, await train(model, VIRTUAL_STEPS)


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
            assert begin <= step <= VIRTUAL_STEPS, f"seed {seed}: a step is lost"
        epochs.add(len(history))
        ends.append(end)
        if isinstance(end, OverlapError):
            assert len(history[-1][0]) == 1, f"seed {seed}: {end}"
            continue
        ranks = [(len(members), step) for members, step in history]
        expected = reference(ranks, VIRTUAL_STEPS, members=[members for members, _ in history])
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
