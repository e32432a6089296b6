"""The code between two epochs in virtual time, with the files of the witness: kills and stops at any await, by seed.

A world is a loop of steps here; reports, the agreement, places and the order of the calls are those of processes.
"""

import random
from collections import Counter
from itertools import repeat
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from overlap.errors import PeerLostError
from overlap.processes.place import ProcessPlace
from overlap.survival import epochs
from overlap.survival.agreement import AgreementState, StepProgress
from overlap.survival.epochs import EpochClosedError, NotMetError, SurvivingRun
from overlap.survival.witness import Witness

STEPS = 8
LIMIT_S = 1000.0


class Model:
    """Survivor whose weights are a list of (step, members of the mean)."""

    def __init__(self):
        self.progress, self.weights, self.ready = StepProgress(), [], None

    def prepare(self, step, members):
        self.apply()
        self.progress.prepare(step)
        self.ready = step, members

    def apply(self):
        if self.ready is not None and self.ready[0] <= self.progress.agreed:
            self.weights.append(self.ready)
            self.ready = None

    @property
    def prepared(self):
        return self.progress.prepared

    def report(self):
        return self.progress.report()

    def advance(self, step):
        self.progress, _ = self.progress.begin_next_epoch(step)
        self.apply()
        self.ready = None


class Job:
    """A job of some members in one process, each with the code of a surviving run."""

    def __init__(self, folder, seed):
        self.draw, self.folder = random.Random(seed), folder
        self.members = range(self.draw.randint(2, 5))
        self.dead, self.worlds, self.left, self.arrived, self.prepared = set(), {}, set(), {}, {}
        self.scopes, self.models, self.ends = {}, {member: Model() for member in self.members}, {}

    async def live(self):
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(self.member, member)
            nursery.start_soon(self.hurt)

    async def hurt(self):
        for _ in range(self.draw.choice((0, 1, 1, 2, 3))):
            await trio.sleep(self.draw.uniform(0, 0.1))
            member = self.draw.choice(self.members)
            self.dead.add(member)
            if member in self.scopes:
                self.scopes[member].cancel()

    async def member(self, member):
        with trio.CancelScope() as self.scopes[member]:
            if member not in self.dead:
                self.ends[member] = await self.run(self.surviving(member), member)

    def surviving(self, member):
        place = ProcessPlace(source="test", process=member, processes=len(self.members), ranks_per_process=1,
                             node=0, nodes=1, endpoint=("127.0.0.1", 1), job="test")  # fmt: skip
        wanted = SimpleNamespace(state_dir=None, lost_after_s=15.0)
        wanted.with_changes = lambda *_, **__: wanted
        epochs._member[:], epochs._last[:] = [member], []
        run = SurvivingRun(place, wanted)
        run.epochs[0].survivor = self.models[member]
        return run

    async def run(self, run, member):
        while True:
            try:
                await self.world(run, member)
            except PeerLostError as error:
                loss = error
            else:
                run.witness.record_finished_epoch(run.world.epoch)
                return "finished"
            self.left.add((run.world.epoch, member))
            assert run.is_loss(loss)
            try:
                if await run.enter_next_world(loss) is not None:
                    return "finished"
            except EpochClosedError:
                return "out"

    async def world(self, run, member):
        world, model = run.world, self.models[member]
        assert self.worlds.setdefault(world.epoch, world) == world, "one world per epoch"
        run.state, run._finished = AgreementState.JOINS, {}
        arrived = self.arrived.setdefault(world.epoch, set())
        arrived.add(member)
        while arrived != set(world.members):
            await trio.sleep(run.witness.look_s)
            if run._dead_members() or run.witness.read_reports(world.epoch, world.members):
                raise PeerLostError("lost before all had met", culprit=-1)
        run.state = AgreementState.TRAINS
        while model.progress.agreed < STEPS:
            step = model.progress.agreed + 1
            model.prepare(step, world.members)
            await self.together(world, member, step)
            model.progress.agree(step)
            await trio.sleep(self.draw.uniform(0, 0.002))
            if self.draw.random() < 0.7:
                model.apply()
        model.apply()
        run._finished[run.place.process] = True
        await self.together(world, member, STEPS + 1)

    async def together(self, world, member, step):
        ready = self.prepared.setdefault((world.epoch, step), set())
        ready.add(member)
        slow = self.draw.random() < 0.02
        await trio.sleep(self.draw.choice((0.5, 5.0)) if slow else self.draw.uniform(0, 0.002))
        waits_until_s, look_s = trio.current_time() + 2.0, 0.001
        while True:
            others = [m for m in world.members if m != member]
            lost = [m for m in others if m in self.dead or (world.epoch, m) in self.left]
            silent = [m for m in others if m not in ready and trio.current_time() > waits_until_s]
            if (lost or silent) and (ready != set(world.members) or self.draw.random() < 0.5):
                raise PeerLostError("lost", culprit=world.members.index((lost or silent)[0]))
            if ready == set(world.members):
                return
            await trio.sleep(look_s)
            look_s = min(2 * look_s, 0.1)  # seconds of waiting are not looked through by the millisecond


@pytest.fixture
def one_process(monkeypatch):
    """Let several members be in one process."""
    jobs = []
    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1), fileno=lambda: 0, close=lambda: None)
    monkeypatch.setattr(epochs, "listen", lambda endpoint: listener)
    monkeypatch.setattr(epochs, "witness_folder", lambda: jobs[-1].folder)
    monkeypatch.setattr(epochs, "_runs", repeat(0))
    for name in ("set_place_variables", "report_to_launcher", "notify"):
        monkeypatch.setattr(epochs, name, lambda *_: None)
    monkeypatch.setattr(Witness, "look_s", 0.02)  # as of the witness between hosts: of those waits most of the time is
    monkeypatch.setattr(Witness, "has_ended", lambda self, member: member in jobs[-1].dead)
    member, last = list(epochs._member), list(epochs._last)
    yield jobs
    epochs._member[:], epochs._last[:] = member, last


def test_invariants_by_seed(one_process, tmp_path):
    """The order in which tasks run is Trio's own draw: of one seed, a member is out in one run and not in the next."""
    numbers, ends = set(), Counter()
    for seed in range(80):
        job = Job(tmp_path / str(seed), seed)
        one_process.append(job)

        async def main(job=job):
            with trio.fail_after(LIMIT_S):  # else somebody waits for ever
                await job.live()

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        worlds = [job.worlds[epoch] for epoch in sorted(job.worlds)]
        numbers.add(len(worlds))
        steps = [world.step for world in worlds[1:]] + [STEPS]
        history = [(step, world.members) for world, end in zip(worlds, steps, strict=True)
                   for step in range(world.step + 1, end + 1)]  # fmt: skip
        ends.update(job.ends.values())
        for member, end in job.ends.items():
            if end == "finished" and member not in job.dead:
                assert job.models[member].weights == history, (
                    f"seed {seed}: a step is lost, doubled, or of another world"
                )
        assert job.dead | job.ends.keys() == set(job.members), f"seed {seed}: a member has no end"
    assert len(numbers) >= 3
    assert ends["finished"] > 100
    assert ends["out"]  # 14 in the mean


def follow_losses(jobs, folder, losses, reports_s):
    """Let members of a world of four follow their losses; return the members of their next world, and when it began.

    Args:
        jobs: Jobs of the fixture.
        folder: Folder of the witness.
        losses: Error of each member that follows, by member.
        reports_s: Time of its report.
    """
    job, entered = Job(folder, 0), {}
    jobs.append(job)
    job.members = range(4)
    job.models = {member: Model() for member in job.members}
    job.dead = set(job.members) - losses.keys()

    async def member(number):
        run = job.surviving(number)
        run.state = AgreementState.TRAINS
        await trio.sleep(reports_s[number])
        try:
            await run.enter_next_world(losses[number])
        except EpochClosedError:
            entered[number] = "out", 0
        else:
            entered[number] = run.world.members, round(trio.current_time() - start_s)

    async def main():
        nonlocal start_s
        start_s = trio.current_time()
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                for number in losses:
                    nursery.start_soon(member, number)

    start_s = 0.0
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return entered


def test_a_living_member_that_nobody_has_lost_may_report_late(one_process, tmp_path):
    """Only process 0 is lost: process 3, whose compute cannot be interrupted, keeps its place."""
    losses = {member: PeerLostError("lost", culprit=0) for member in (1, 2, 3)}
    entered = follow_losses(one_process, tmp_path, losses, {1: 0, 2: 0, 3: 5})
    assert entered == dict.fromkeys((1, 2, 3), ((1, 2, 3), 5))


def test_a_member_that_others_have_lost_has_a_second_to_report(one_process, tmp_path):
    losses = {member: PeerLostError("lost", culprit=3) for member in (0, 1, 2, 3)}
    entered = follow_losses(one_process, tmp_path, losses, {0: 0, 1: 0, 2: 0, 3: 5})
    assert entered == dict.fromkeys((0, 1, 2), ((0, 1, 2), 1)) | {3: ("out", 0)}


def test_members_that_have_not_met_in_time_wait_a_second_for_each_other(one_process, tmp_path):
    losses = {member: NotMetError(late=True) for member in (0, 1, 2, 3)}
    entered = follow_losses(one_process, tmp_path, losses, {0: 0, 1: 0, 2: 0, 3: 5})
    assert entered == dict.fromkeys((0, 1, 2), ((0, 1, 2), 1)) | {3: ("out", 0)}
