"""The pure machines of a membership under random stimuli: nobody waits for ever, and each loss is reported once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from random import Random

import pytest

from overlap.errors import UsageError
from overlap.kernel_facts import ProcessState
from overlap.processes.identity import RendezvousConfig
from overlap.processes.members import (
    Action,
    Client,
    Complete,
    CutConnection,
    GiveUp,
    MemberLostError,
    Members,
    MembershipPhase,
    MemberState,
    PrintLine,
    SendControl,
    Silence,
    View,
)
from overlap.processes.wire import Bye, Contribution, Join, MemberNotice, Message, Notice, Pong, Refused

from .simulation import seeds

EOF = None  # the end of a connection
EXCHANGES = 3


class Process:
    """One process: its program exchanges, sends notices and leaves; it may die at any step, or never begin."""

    def __init__(self, world: World, member: int) -> None:
        self.world, self.member = world, member
        self.client = Client(world.config(member))
        self.view = View(world.size)
        self.to_host: deque[Message | None] = deque()
        self.from_host: deque[Message | None] = deque()
        self.connected = self.dead = self.joined = self.has_left = False
        self.failure: GiveUp | None = None
        self.losses: Counter[int] = Counter()
        self.heard: dict[int, list[int]] = {}
        self.done = 0  # exchanges
        self.turn: int | None = None  # of the one that waits

    @property
    def ended(self) -> bool:
        return self.dead or self.failure is not None or self.view.over

    def act(self, actions: Iterable[Action]) -> None:
        """Perform the actions of the client machine."""
        for action in actions:
            match action:
                case SendControl(0, message) if self.member:
                    self.send(message)
                case SendControl(_, message):
                    self.receive(message)
                case CutConnection(_, reason):
                    self.hang_up()
                    self.act(self.client.end_link(reason))
                case GiveUp():
                    assert self.failure is None
                    self.failure = action
                    self.hang_up()
                case Complete():
                    self.joined = True

    def send(self, message: Message) -> None:
        if self.connected:
            self.to_host.append(message)

    def hang_up(self) -> None:
        if self.connected:
            self.connected = False
            self.to_host.append(EOF)
            self.from_host.clear()

    def receive(self, message: Message) -> None:
        """Let the program see a message."""
        if (loss := self.view.apply_message(message)) is not None:
            self.losses[loss.member] += 1

    def step(self) -> None:
        """Let the program go on, unless it waits."""
        while self.view.news:
            if isinstance(news := self.view.news.popleft(), MemberNotice):
                self.heard.setdefault(news.member, []).append(int(news.body))
        if self.has_left or not self.joined or self.world.chance.random() < 0.5:
            return
        try:
            if self.turn is None and self.done < EXCHANGES:
                self.view.check_all_present("exchange")
                self.turn = self.view.begin_exchange("x")
                self.send(Notice(body=b"%d" % self.turn))
                self.send(Contribution(name="x", turn=self.turn, blob=self.part(self.member, self.turn)))
            elif self.turn is not None:
                parts = self.view.exchange_parts("x", self.turn, "exchange")
                if parts is None:
                    return
                assert parts == [self.part(member, self.turn) for member in range(self.world.size)]
                self.view.end_exchange("x", self.turn)
                self.done, self.turn = self.done + 1, None
        except (MemberLostError, UsageError):
            self.done = EXCHANGES
        if self.done == EXCHANGES or self.world.chance.random() < self.world.leaves_early:
            if self.turn is not None:  # as when its task is cancelled
                self.view.end_exchange("x", self.turn)
                self.turn = None
            self.has_left = True
            self.send(Bye())

    @staticmethod
    def part(member: int, turn: int) -> bytes:
        return b"%d of %d" % (turn, member)


class World:
    """Processes, and the connections between them, in which each message arrives in order or never."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.size = self.chance.randint(1, 6)
        self.members = Members(self.config(0))
        self.processes = [Process(self, member) for member in range(self.size)]
        self.ends: dict[int, str] = {}  # by member whose connection ends: why
        self.expected: dict[int, set[int]] = {member: set() for member in range(self.size)}  # losses by receiver
        self.lines: list[str] = []
        self.kills = self.chance.choice((0, 0, 1, 1, 2, 3))
        self.leaves_early = self.chance.choice((0, 0, 0.02))
        self.timed_out = False

    def config(self, member: int) -> RendezvousConfig:
        return RendezvousConfig(
            job="", member=member, members=self.size, endpoint=("10.0.0.1", 1), secret=b"-", process=f"p{member}"
        )

    @property
    def host(self) -> Process:
        return self.processes[0]

    def act(self, actions: Iterable[Action]) -> None:
        """Perform the actions of the machine of member 0."""
        for action in actions:
            match action:
                case SendControl(member, message):
                    self.processes[member].from_host.append(message)
                case CutConnection(member, reason):
                    self.ends.setdefault(member, reason)
                case PrintLine(line):
                    self.lines.append(line)
                case GiveUp() | Complete():
                    self.host.act([action])

    def events(self) -> list[tuple[object, ...]]:
        """Return what may happen next."""
        found: list[tuple[object, ...]] = []
        for member, process in enumerate(self.processes):
            if process.dead:
                continue
            if not process.joined and not process.connected and not process.ended and not self.host.ended:
                found.append((self.connect, member))
            if process.from_host:
                found += [(self.to_member, member)] * 3
            if not process.ended and (not process.has_left or process.view.news):
                found.append((self.step, member))
        if not self.host.dead:
            found += [(self.to_host, member) for member, each in enumerate(self.processes) if each.to_host] * 3
            found += [(self.end_link, member) for member in self.ends]
        if self.kills:
            found += [(self.kill, self.chance.randrange(self.size)), (self.silence, self.chance.randrange(self.size))]
        if self.members.phase is MembershipPhase.GATHERING and not self.host.dead:
            found.append((self.progress,))
        return found

    def run(self) -> None:
        """Let things happen in random order until nothing more does; then the time to join is over."""
        self.connect(0)
        self.to_host(0)
        for _ in range(20_000):
            if self.chance.random() < 0.002 and self.members.phase is MembershipPhase.GATHERING:
                self.time_up()
            quiet = all(process.ended or (process.has_left and not process.from_host) for process in self.processes)
            moves = [event for event in self.events() if event[0] not in (self.progress,) or not quiet]
            if not moves or (quiet and not self.ends and not any(p.to_host or p.from_host for p in self.processes)):
                break
            move, *arguments = self.chance.choice(moves)
            move(*arguments)  # type: ignore[operator]
        self.time_up()
        for _ in range(200):
            for member in range(self.size):
                while self.processes[member].to_host and not self.host.dead:
                    self.to_host(member)
                while self.processes[member].from_host and not self.processes[member].dead:
                    self.to_member(member)
                self.step(member)
            for member in [*self.ends]:
                self.end_link(member)

    # -- events --------------------------------------------------------------------------------------------------------

    def connect(self, member: int) -> None:
        process = self.processes[member]
        process.connected = True
        before = self.members.members[member].address
        actions = self.members.add_connection(member, "somewhere")
        assert (before is not None) == any(isinstance(action, CutConnection) for action in actions)
        if before is not None:  # the old connection has not ended yet: this one is refused, and tries again
            process.connected = False
            return
        self.act(actions)
        process.send(Join(detail="", process=f"p{member}"))

    def to_host(self, member: int) -> None:
        message = self.processes[member].to_host.popleft()
        if message is EOF:
            self.ends.setdefault(member, "its connection ended without a goodbye")
        elif member not in self.ends:
            self.act(self.members.receive(member, message, 0))

    def end_link(self, member: int) -> None:
        reason, process = self.ends.pop(member), self.processes[member]
        joined = {each for each, its in enumerate(self.members.members) if its.state is MemberState.JOINED}
        self.act(self.members.end_link(member, reason))
        if self.members.members[member].state is MemberState.LOST and member in joined:
            for receiver in joined - {member}:
                self.expected[receiver].add(member)
        process.to_host.clear()
        if process.connected:
            process.from_host += [Refused(reason=reason), EOF]

    def to_member(self, member: int) -> None:
        process = self.processes[member]
        message = process.from_host.popleft()
        if member == 0:
            if message is not EOF and not isinstance(message, Pong):
                self.host.receive(message)
        elif message is EOF:
            process.hang_up()
            process.act(process.client.end_link("its connection ended without a goodbye"))
        else:
            process.act(process.client.receive(message, 0))

    def step(self, member: int) -> None:
        self.processes[member].step()

    def kill(self, member: int) -> None:
        """End a process; what it has sent, and what it was sent, may be lost on the way."""
        process = self.processes[member]
        if process.ended:
            return
        self.kills -= 1
        process.dead = True
        if member:
            self._cut_short(process.to_host)
            process.hang_up()
            return
        for each in self.processes[1:]:
            if each.connected:
                self._cut_short(each.from_host)
                each.from_host.append(EOF)
            each.to_host.clear()

    def _cut_short(self, queue: deque[Message | None]) -> None:
        for _ in range(self.chance.randint(0, len(queue))):
            queue.pop()

    def silence(self, member: int) -> None:
        """Let a connected member be silent for so long that it is lost."""
        its = self.members.members[member]
        if member and its.address is not None and member not in self.ends and not self.host.dead:
            self.kills -= 1
            silences = {member: Silence(silent_s=20.0, state=ProcessState.STOPPED)}
            self.act(self.members.judge_silences(silences))
            assert member in self.ends
            self.members.judge_silences({})

    def progress(self) -> None:
        self.act(self.members.report_progress())

    def time_up(self) -> None:
        """Let the time to join be over, for member 0 and then for the others."""
        if self.members.phase is MembershipPhase.GATHERING and not self.host.dead:
            self.timed_out = True
            self.act(self.members.give_up_joining())
        for process in self.processes[1:]:
            if not process.connected and process.client.phase is MembershipPhase.GATHERING and not process.dead:
                process.act(process.client.give_up_joining("Connection refused"))


def check(world: World, seed: int) -> str:
    """Assert what holds at the end of any history; return how it has ended."""
    context = f"seed {seed}"
    dead = {process.member for process in world.processes if process.dead}
    lost = {number for number, member in enumerate(world.members.members) if member.state is MemberState.LOST}
    for process in world.processes:
        assert process.ended, f"{context}: process {process.member} waits for ever"
        assert set(process.losses.values()) <= {1}, f"{context}: a loss is reported twice to {process.member}"
        for numbers in process.heard.values():
            assert numbers == sorted(set(numbers)), context
        if 0 not in dead and process.member not in dead | lost and process.failure is None:
            assert world.expected[process.member] == set(process.losses), context
    if 0 in dead:
        return "member 0 lost"
    assert world.members.phase is MembershipPhase.OVER, context
    states = [member.state for member in world.members.members]
    if world.timed_out:
        return "gave up"
    assert set(states) <= {MemberState.LEFT, MemberState.LOST}, f"{context}: {states}"
    assert all(each.member in lost for each in world.processes if each.dead and each.joined and not each.has_left), (
        context
    )
    return "lost" if lost else "left"


@pytest.mark.parametrize("some", seeds(100, 1000, at_once=100), ids=str)
def test_whatever_happens_each_member_ends_and_each_loss_is_reported_once(some: range) -> None:
    ends: Counter[str] = Counter()
    for seed in some:
        world = World(seed)
        world.run()
        ends[check(world, seed)] += 1
    assert set(ends) == {"left", "lost", "gave up", "member 0 lost"}, ends
