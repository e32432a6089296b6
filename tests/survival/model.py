"""Model of a job that survives: members as generators over the pure agreement, a witness, and faults by seed.

A member yields at each await of the protocol, where it may be killed, or stopped for a time. Time is the number of
turns. What a member applies is a list of (step, members whose gradients are in its mean): its weights.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from overlap.survival.agreement import (
    AgreementState,
    EpochWorld,
    StepProgress,
    accepts_proposal,
    lost_members,
    member_state,
    propose_world,
)

STEPS = 12
SUSPECT_S, REPORT_S = 30.0, 300.0
LONGEST = 60_000  # turns: a job that takes longer waits for ever
FOREVER = 10**9


@dataclass
class Member:
    number: int
    world: EpochWorld
    progress: StepProgress = field(default_factory=StepProgress)
    weights: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    ready: tuple[int, tuple[int, ...]] | None = None  # the step that is prepared, not applied
    joined: bool = False  # in its present epoch
    left: set[int] = field(default_factory=set)  # epochs whose connections it has closed
    suspects: set[int] = field(default_factory=set)
    state: AgreementState = AgreementState.TRAINS
    finished: bool = False
    dead: bool = False
    wakes: int = 0  # turn until which it is stopped


class Job:
    """A job of some members, with faults."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.record = EpochWorld(epoch=0, members=tuple(range(self.draw.randint(2, 5))), step=0)
        self.records = [self.record]
        self.members = {number: Member(number, self.record) for number in self.record.members}
        self.prepared: dict[tuple[int, int], set[int]] = {}  # members, by epoch and step
        self.reports: dict[tuple[int, int], int] = {}
        self.ended: dict[int, set[int]] = {}  # members that have finished their programs, by epoch
        self.done: set[int] = set()  # epochs that have ended well
        self.turn = 0
        self.faults = {"kill": self.draw.choice((0, 1, 1, 2, 3, 5)), "stop": self.draw.choice((0, 1, 2)),
                       "suspect": self.draw.choice((0, 0, 1, 2))}  # fmt: skip

    def run(self) -> None:
        """Give members turns until all have ended."""
        lives = {number: self.live(member) for number, member in self.members.items()}
        while running := [m for m in self.members.values() if m.number in lives and not m.dead and m.wakes < FOREVER]:
            self.turn += 1
            assert self.turn < LONGEST, f"waits for ever: {running}"
            awake = [member for member in running if member.wakes <= self.turn]
            self.hurt(running)
            for member in self.draw.sample(awake, min(len(awake), 1)):
                if not member.dead and next(lives[member.number], None) is None:
                    del lives[member.number]

    def hurt(self, running: list[Member]) -> None:
        if self.draw.random() > 0.02:
            return
        kind, member = self.draw.choice(list(self.faults)), self.draw.choice(running)
        if not self.faults[kind]:
            return
        self.faults[kind] -= 1
        if kind == "kill":
            member.dead = True
        elif kind == "stop":
            member.wakes = self.turn + self.draw.choice((20, 200, 5000, FOREVER))
        else:
            member.suspects.add(self.draw.choice(member.world.members))

    # -- one member ----------------------------------------------------------------------------------------------------

    def live(self, me: Member) -> Iterator[int]:
        """Train, report, agree, join, and so on; each yield is an await."""
        while True:
            for turn in self.join(me):
                yield turn
            for turn in self.train(me):
                yield turn
            if me.finished:
                yield 1
                self.done.add(me.world.epoch)
                return
            me.left.add(me.world.epoch)
            yield 1
            self.reports[me.world.epoch, me.number] = me.progress.report()
            me.state = AgreementState.REPORTS
            yield 1
            for turn in self.agree(me):
                yield turn
            if me.finished or me.state is AgreementState.OUT:
                return

    def sees_loss(self, me: Member) -> bool:
        """Whether a connection to a member is closed, or has been silent for too long in this member's eyes."""
        for other in me.world.members:
            them = self.members[other]
            silent = them.wakes > self.turn + SUSPECT_S
            if them.dead or silent or me.world.epoch in them.left:
                me.suspects |= {other} - {me.number}
        return bool(me.suspects & set(me.world.members) - {me.number})

    def join(self, me: Member) -> Iterator[int]:
        me.joined = True
        everybody = [self.members[number] for number in me.world.members]
        while not all(m.world.epoch >= me.world.epoch and m.joined for m in everybody) and not self.sees_loss(me):
            yield 1

    def train(self, me: Member) -> Iterator[int]:
        epoch, world = me.world.epoch, set(me.world.members)
        while me.progress.agreed < STEPS:
            yield 1
            if self.sees_loss(me):
                return
            self.apply(me)  # the gradients of the next step need these weights
            step = me.progress.agreed + 1
            me.progress.prepare(step)
            me.ready = step, me.world.members
            ready = self.prepared.setdefault((epoch, step), set())
            ready.add(me.number)
            yield 1
            while ready != world:
                if self.sees_loss(me):
                    return
                yield 1
            yield 1
            if self.sees_loss(me) and self.draw.random() < 0.5:  # the loss overtakes the result
                return
            me.progress.agree(step)
            yield 1
            if self.draw.random() < 0.8:  # else the update is still in the queue when a loss comes
                self.apply(me)
        self.apply(me)
        ended = self.ended.setdefault(epoch, set())
        ended.add(me.number)
        while ended != world:
            if self.sees_loss(me):
                return
            yield 1
        yield 1
        me.finished = not self.sees_loss(me) or self.draw.random() < 0.5

    def apply(self, me: Member) -> None:
        if me.ready is not None and me.ready[0] <= me.progress.agreed:
            me.weights.append(me.ready)
            me.ready = None

    def agree(self, me: Member) -> Iterator[int]:
        began = self.turn
        while (state := member_state(me.number, me.world, self.record)) is AgreementState.REPORTS:
            if me.world.epoch in self.done and me.number in self.ended.get(me.world.epoch, ()):
                me.finished = True
                return
            reports = {m: s for (e, m), s in self.reports.items() if e == me.world.epoch}
            lost = lost_members(
                me.world, dead={m.number for m in self.members.values() if m.dead}, suspects=me.suspects,
                reports=reports.keys(), waited_s=self.turn - began, suspect_s=SUSPECT_S, report_s=REPORT_S,
            )  # fmt: skip
            proposal = propose_world(me.world, reports, lost)
            yield 1  # between the look and the decision anything may happen
            if proposal and accepts_proposal(self.record, proposal):
                self.record = proposal
                self.records.append(proposal)
            yield 1
        me.state = state
        if state is AgreementState.OUT:
            return
        me.progress, _ = me.progress.begin_next_epoch(self.record.step)
        self.apply(me)
        if me.ready is not None and me.ready[0] > self.record.step:
            me.ready = None
        me.world, me.suspects, me.joined = self.record, set(), False
