"""Model of a job between hosts whose network fails: members over the pure agreement, in ticks of half a second.

All hosts reach the witness; packets between some of them vanish, for a time or for ever. Limits are those of processes.
"""

import random
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from overlap.processes.sockets import OUTAGE_S
from overlap.survival.agreement import (
    AgreementState,
    EpochWorld,
    accepts_proposal,
    cut_off_members,
    is_minority,
    lost_members,
    member_state,
    propose_world,
)
from overlap.survival.epochs import JOIN_S, MINORITY_S, REPORT_S, SUSPECT_S

TICK_S = 0.5
FAILS_AT = 10  # tick
FOREVER = 10**9


@dataclass
class Member:
    number: int
    world: EpochWorld
    state: AgreementState = AgreementState.TRAINS
    since: int = 0  # tick of the present state
    heard: dict[int, int] = field(default_factory=dict)  # last tick of an answer, by member
    dialled: set[int] = field(default_factory=set)  # no answer yet
    cut_off: set[int] = field(default_factory=set)
    unreached: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    late: bool = False
    end: str = ""


class Job:
    """A job of some members, and a network that fails."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        first = EpochWorld(epoch=0, members=tuple(range(self.draw.randint(2, 6))), step=0)
        self.records, self.trained, self.tick = [first], {0}, 0
        self.members = {number: Member(number, first) for number in first.members}
        self.reports: dict[int, dict[int, set[int]]] = {}  # unreached members, by epoch and member
        self.kind = self.draw.choice(("parts", "parts", "pairs", "flapping"))
        self.pairs = self._draw_pairs(first.members)
        self.times = self._draw_times()
        self.healed_at = self.times[-1][1]

    def _draw_pairs(self, members: tuple[int, ...]) -> set[frozenset[int]]:
        """Return the pairs that do not reach each other while the network fails."""
        pairs = [frozenset(pair) for pair in combinations(members, 2)]
        if self.kind == "pairs":
            return {pair for pair in pairs if self.draw.random() < 0.4} or {pairs[0]}
        parts = [self.draw.randrange(3) for _ in members]
        parts[0], parts[-1] = 0, 1
        return {pair for pair in pairs if len({parts[member] for member in pair}) > 1}

    def _draw_times(self) -> list[tuple[int, int]]:
        """Return when the network fails, and when it is whole again."""
        if self.kind == "flapping":
            down, up = self.draw.choice(((8, 3), (7, 1), (12, 6), (30, 2)))
            begins = range(FAILS_AT, FAILS_AT + 6 * (down + up), down + up)
            return [(begin, begin + down) for begin in begins]
        return [(FAILS_AT, FAILS_AT + self.draw.choice((4, 9, 14, 18, 25, 40, FOREVER, FOREVER)))]

    def reach(self, one: int, other: int) -> bool:
        """Whether packets pass between two members, in both directions."""
        fails = any(begin <= self.tick < end for begin, end in self.times)
        return not fails or frozenset((one, other)) not in self.pairs

    def run(self, ticks: int) -> None:
        """Let the members act, in any order in each tick."""
        for self.tick in range(ticks):
            for member in self.draw.sample(list(self.members.values()), len(self.members)):
                if not member.end:
                    self.act(member)

    def act(self, me: Member) -> None:
        """Let a member notice what has happened, and act on it."""
        self.watch(me)
        epoch, others = me.world.epoch, set(me.world.members) - {me.number}
        left = others & (self.reports.get(epoch, {}).keys() | {m for m in others if self.members[m].end})
        waited_s = (self.tick - me.since) * TICK_S
        if me.state is AgreementState.TRAINS:
            lost = me.cut_off | {member for member in left if self.reach(me.number, member)}
            if lost and self.draw.random() < 0.8:  # else a compute keeps it from noticing
                self.report(me, suspects={min(lost)}, late=False)
        elif me.state is AgreementState.JOINS:
            gone = bool(me.cut_off or left)
            if (gone and not me.dialled) or waited_s >= JOIN_S:
                self.report(me, suspects=set() if gone else others, late=not gone)
            elif not gone:
                self.start_if_all_have_met(me.world)
        else:
            self.follow(me, waited_s)

    def watch(self, me: Member) -> None:
        """Dial members, or note that a connection has broken, as a socket does after `OUTAGE_S`."""
        for other in set(me.world.members) - {me.number}:
            if self.reach(me.number, other):
                me.heard[other] = self.tick
                if other in me.dialled:
                    me.dialled.discard(other)
                    me.unreached.discard(other)
            elif (self.tick - me.heard[other]) * TICK_S >= OUTAGE_S and other not in me.cut_off:
                me.dialled.discard(other)
                me.cut_off.add(other)
                if me.state is not AgreementState.TRAINS:
                    me.unreached.add(other)

    def begin(self, me: Member, state: AgreementState) -> None:
        """Enter a state; all members are dialled anew."""
        me.state, me.since, me.cut_off = state, self.tick, set()
        me.dialled = set(me.world.members) - {me.number} if state is not AgreementState.TRAINS else set()
        me.heard = dict.fromkeys(me.world.members, self.tick)

    def report(self, me: Member, *, suspects: set[int], late: bool) -> None:
        self.reports.setdefault(me.world.epoch, {})[me.number] = set(me.unreached)
        me.suspects, me.late = suspects, late
        self.begin(me, AgreementState.REPORTS)

    def start_if_all_have_met(self, world: EpochWorld) -> None:
        members = [self.members[number] for number in world.members]
        here = all(m.state is AgreementState.JOINS and m.world == world for m in members)
        if here and all(self.reach(one, other) for one, other in combinations(world.members, 2)):
            self.trained.add(world.epoch)
            for member in members:
                self.begin(member, AgreementState.TRAINS)

    def follow(self, me: Member, waited_s: float) -> None:
        """Propose the next world, or enter it: as `SurvivingRun` does."""
        record, before = self.records[-1], me.world
        state = member_state(me.number, before, record)
        if state is AgreementState.OUT:
            me.end = "out"
        elif state is AgreementState.JOINS and me.late and record.lost == before.lost:
            me.end = "cannot meet"
        elif state is AgreementState.JOINS:
            me.world = record
            self.begin(me, AgreementState.JOINS)
        else:
            self.propose(me, waited_s)

    def propose(self, me: Member, waited_s: float) -> None:
        world, reports = me.world, self.reports[me.world.epoch]
        ended = {member for member in world.members if self.members[member].end and self.reach(me.number, member)}
        lost = lost_members(
            world, dead=ended | me.cut_off, suspects=me.suspects, reports=reports.keys(), waited_s=waited_s,
            suspect_s=SUSPECT_S, report_s=REPORT_S,
        )  # fmt: skip
        lost |= cut_off_members(world, reports, lost=lost)
        if waited_s < MINORITY_S and is_minority(world, lost=lost, ended=lost & ended):
            return
        proposal = propose_world(world, dict.fromkeys(reports, 0), lost)
        if proposal is not None and accepts_proposal(self.records[-1], proposal):
            self.records.append(proposal)

    def vain(self) -> list[EpochWorld]:
        """Return worlds that did not meet, and were proposed again with the same members."""
        return [a for a, b in pairwise(self.records) if a.members == b.members and a.epoch not in self.trained]
