"""Members of a world: the decisions of member 0, of the other members, and what the program of each one knows.

Three state machines without clock, sockets or waiting. `Members` decides for all members, in the process of member 0.
`Client` decides for another member, in the loop of its connection. `View` has what the program of a member waits for.
A method is a stimulus, and returns the actions that follow from it in their order; `host` and `join` perform them.

Every member has one connection, to member 0. Its messages to one member arrive in the order in which they were sent:
the results that were complete before a loss arrive before the report of the loss.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ..errors import OverlapError, UsageError
from ..kernel_facts import ProcessState
from .clock import ClockSample, CoordinatorClock
from .identity import RendezvousConfig
from .sockets import format_endpoint
from .wire import (
    BLOB_LIMIT_BYTES,
    Bye,
    Contribution,
    Contributions,
    Goodbye,
    Join,
    MemberLeft,
    MemberLost,
    MemberNotice,
    Message,
    Notice,
    Ping,
    Pong,
    Ready,
    Refused,
    Waiting,
    broken_protocol,
)

#: Exchanges with parts of some members only.
_UNFINISHED_LIMIT = 4096
#: Up to this number of missing members, those that wait get each change: a member that gives up names them correctly.
_FEW_MISSING = 16
#: Size of one part of an exchange in a frame, without its bytes.
_PART_OVERHEAD_BYTES = 16
#: Number of different refusals that are reported; others are only counted.
_REPORTED_LIMIT = 8
#: Number of refusals that the error repeats: a refused process may be the missing one.
_REPEATED_LIMIT = 3
#: Pings in a row at the start: enough that one of them did not wait in a queue.
_CLOCK_SAMPLES = 16


class MembershipPhase(Enum):
    """Phase of a world, as one member sees it."""

    GATHERING = "some members have not joined"
    COMPLETE = "all have joined"
    OVER = "it did not start, or this member has left"


class MemberState(Enum):
    """State of a member."""

    ABSENT = "has not joined"
    DEPARTED = "had joined, and went away before all had; may join again"
    JOINED = "has joined"
    LEFT = "has left with a goodbye"
    LOST = "has ended without a goodbye"


# -- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a message to a member; the program of this process gets that to its own member."""

    member: int
    message: Message


@dataclass(frozen=True, slots=True)
class CutConnection:
    """End the connection of a member, which gets the reason."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrintLine:
    """Print a line for the user."""

    line: str


@dataclass(frozen=True, slots=True)
class Complete:
    """All members have joined."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The world does not start, or not with this member."""

    reason: str
    missing: tuple[int, ...]


Action: TypeAlias = SendControl | CutConnection | PrintLine | Complete | GiveUp


# -- silence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Silence of a connected member for at least `SilenceLimits.suspect_s`, and what the kernel reports of it.

    A call of C code that keeps the GIL silences every thread of a healthy process; a stopped process is silent in the
    same way, and is lost. The kernel of their host reports the difference; that of another host cannot be asked, and a
    silent process there has more time while its host answers.
    """

    silent_s: float
    state: ProcessState
    host: str = ""  # Address of its host, if that is another one and answers

    def judge(self, member: int, config: RendezvousConfig, *, suspected: bool) -> Iterator[Action]:
        """Report the silence unless it is `suspected` already; cut the connection once the member counts as lost."""
        limits = config.patience
        limit_s = limits.answering_s if self.host else limits.silence_s
        if not suspected:
            reason = f"{_SUSPICIONS[self.state]}; it counts as lost after {limit_s:g} s"
            if self.host:
                why = f"its host {self.host} answers: it is stopped, or a call in it keeps the GIL"
                reason = f"{why}; it is waited for, and counts as lost after {limit_s:g} s"
            elif self.state is ProcessState.RUNS:
                reason = "it runs, but a call in it keeps the GIL; it is waited for"
            yield PrintLine(f"{config.name(member)} has been silent for {limits.suspect_s:g} s: {reason}")
        if self.silent_s >= limit_s and self.state is not ProcessState.RUNS:
            detail = f"; its host {self.host} answers" if self.host else _DETAILS.get(self.state, "")
            yield CutConnection(member, f"no sign of life for {limit_s:g} s{detail}")


_SUSPICIONS = {
    ProcessState.RUNS: "",
    ProcessState.STOPPED: "it is stopped",
    ProcessState.GONE: "it has ended, and something else keeps its connection",
    ProcessState.ELSEWHERE: "it may be stopped, or in a call that keeps the GIL, or its host is gone",
    ProcessState.UNKNOWN: "it may be stopped, or in a call that keeps the GIL",
}
_DETAILS = {ProcessState.STOPPED: "; it is stopped", ProcessState.GONE: "; it has ended"}


# -- member 0 --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Member:
    """A member, as member 0 sees it."""

    state: MemberState = MemberState.ABSENT
    address: str | None = None  # Of its connection; None: it has none
    suspected: bool = False  # Whether its present silence has been reported

    @property
    def receives(self) -> bool:
        """Whether messages reach it."""
        return self.address is not None and self.state not in (MemberState.LEFT, MemberState.LOST)


class Members:
    """All members of a world, and the parts of unfinished exchanges, in the process of member 0.

    Attributes:
        phase: Phase of the world.
        members: Its members.
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self.phase: MembershipPhase = MembershipPhase.GATHERING
        self.members: list[Member] = [Member() for _ in range(config.members)]
        self._config = config
        self._exchanges: dict[tuple[str, int], dict[int, bytes]] = {}
        self._refusals: dict[str, str] = {}  # by reason: the line

    def _in_state(self, *states: MemberState) -> list[int]:
        return [number for number, member in enumerate(self.members) if member.state in states]

    @property
    def _waiting(self) -> Waiting:
        departed = self._in_state(MemberState.DEPARTED)
        return Waiting(missing=self._in_state(MemberState.ABSENT, MemberState.DEPARTED), departed=departed)

    def connect(self, number: int, address: str) -> list[Action]:
        """Add the connection of a member that has none; else cut this new connection."""
        member = self.members[number]
        if member.address is not None or member.state in (MemberState.LEFT, MemberState.LOST):
            reason = f"process {number} has already joined; give each process a number of its own"
            return [*self._refuse(address, reason), CutConnection(number, reason)]
        member.address, member.suspected = address, False
        return []

    def reject(self, address: str, why: str, reason: str) -> list[Action]:
        """Report a failed handshake, once for each kind; one that a member gave up is unreported: it tries again.

        Args:
            address: The other end.
            why: Kind of the failure, as in `HandshakeError`.
            reason: The failure.
        """
        if why == "refused":
            return self._refuse(address, reason)
        if why == "left":
            return []
        line = f"turned away {address}: {reason} (others like it are only counted)"
        # A member on a busy host is late as well, and tries again; the error of a missing member repeats this.
        return self._report_once(why, line)[: why != "silent"]

    def _refuse(self, address: str, reason: str) -> list[Action]:
        return self._report_once(reason, f"refused {address}: {reason}")

    def _report_once(self, key: str, line: str) -> list[Action]:
        """Store and report a line, unless there is one with this key."""
        if key in self._refusals or len(self._refusals) >= _REPORTED_LIMIT:
            return []
        self._refusals[key] = line
        return [PrintLine(line)]

    def receive(self, number: int, message: Message, now_ns: int) -> list[Action]:
        """Act on a message of a member; `now_ns` is the time on this process's clock."""
        member, is_complete = self.members[number], self.phase is not MembershipPhase.GATHERING
        if not member.receives or self.phase is MembershipPhase.OVER:
            return []
        match message:
            case Ping(sent_ns=sent_ns):
                return [SendControl(number, Pong(sent_ns=sent_ns, server_ns=now_ns))]
            case Join(detail=detail) if member.state is not MemberState.JOINED:
                return self._admit(number, detail)
            case Notice(body=body) if is_complete:
                return self._send_others(number, MemberNotice(member=number, body=body))
            case Contribution() if is_complete:
                return self._collect_part(number, message)
            case Bye() if is_complete:
                member.state = MemberState.LEFT
                farewell: list[Action] = [SendControl(number, Goodbye())] if number else []
                return [*self._send_others(number, MemberLeft(member=number)), *farewell, *self._release_last()]
        return [CutConnection(number, broken_protocol(f"a {type(message).__name__}, which is not its turn"))]

    def _admit(self, number: int, detail: str) -> list[Action]:
        """Let a member join; start the world if it is the last one."""
        member, ours = self.members[number], self._config.detail
        if detail != ours:
            reason = f"process {number} has '{detail}', process 0 has '{ours}'; they must be the same"
            return [*self._refuse(member.address or "", reason), CutConnection(number, reason)]
        member.state = MemberState.JOINED
        if self._in_state(MemberState.ABSENT, MemberState.DEPARTED):
            return [SendControl(number, self._waiting), *self._send_few_missing()]
        self.phase = MembershipPhase.COMPLETE
        return [*self._send_others(None, Ready(process=self._config.process)), Complete()]

    def _collect_part(self, number: int, part: Contribution) -> list[Action]:
        """Store a member's part of an exchange; after the last part, send all parts to all members."""
        key = part.name, part.turn
        if key not in self._exchanges and len(self._exchanges) >= _UNFINISHED_LIMIT:
            text = f"the beginning of '{part.name}', while {len(self._exchanges)} others are unfinished"
            return [CutConnection(number, broken_protocol(text))]
        parts = self._exchanges.setdefault(key, {})
        if number in parts or len(part.blob) > BLOB_LIMIT_BYTES:
            text = f"a part of exchange '{part.name}' which is too long, or its second one"
            return [CutConnection(number, broken_protocol(text))]
        parts[number] = part.blob
        if len(parts) < len(self.members):
            return []
        del self._exchanges[key]
        results = [Contributions(name=part.name, turn=part.turn, parts=batch) for batch in _split_into_frames(parts)]
        return [action for result in results for action in self._send_others(None, result)]

    def end_link(self, number: int, reason: str) -> list[Action]:
        """Remove the connection of a member. Before the world is complete, another may take its place."""
        member = self.members[number]
        member.address = None
        if self.phase is MembershipPhase.OVER or (
            self.phase is MembershipPhase.GATHERING and member.state is not MemberState.JOINED
        ):
            return []
        if self.phase is MembershipPhase.GATHERING:
            member.state = MemberState.DEPARTED
            gone = f"process {number} went away before all had joined: {reason}"
            return [PrintLine(gone), *self._send_few_missing()]
        if member.state is not MemberState.JOINED:
            return self._release_last()
        member.state = MemberState.LOST
        return [*self._send_others(number, MemberLost(member=number, reason=reason)), *self._release_last()]

    def judge_silences(self, silences: Mapping[int, Silence]) -> list[Action]:
        """Report members that are silent, once each, and lose members that have been silent for too long."""
        actions: list[Action] = []
        for number, member in enumerate(self.members):
            silence = silences.get(number)
            if silence is not None:
                actions += silence.judge(number, self._config, suspected=member.suspected)
            member.suspected = silence is not None
        return actions

    def report_progress(self) -> list[Action]:
        """Report the members that are missing, to the user and to the members that wait."""
        waiting, joined = self._waiting, len(self._in_state(MemberState.JOINED))
        missing = ", ".join(map(str, waiting.missing))
        return [
            PrintLine(f"{joined} of {len(self.members)} joined; missing {missing}"), *self._send_others(0, waiting)
        ]  # fmt: skip

    def give_up(self) -> list[Action]:
        """Send all other members the reason why the world does not start: the time is over."""
        missing = self._waiting.missing
        refusals = [f"process 0 {line}" for line in [*self._refusals.values()][-_REPEATED_LIMIT:]]
        reason = "; ".join([self._config.name_absent(missing, self._in_state(MemberState.DEPARTED)), *refusals])
        self.phase = MembershipPhase.OVER
        return [*self._send_others(0, Refused(reason=reason)), GiveUp(reason, tuple(missing))]

    def _release_last(self) -> list[Action]:
        """Release member 0 when all others have left and hung up: until then it carries their messages."""
        others_connected = any(member.address is not None for member in self.members[1:])
        if others_connected or self.phase is MembershipPhase.OVER or self._in_state(MemberState.JOINED):
            return []
        self.phase = MembershipPhase.OVER
        return [SendControl(0, Goodbye())]

    def _send_few_missing(self) -> list[Action]:
        """Send the missing members to the members that wait, if few are missing; else `report_progress` does."""
        waiting = self._waiting
        return self._send_others(0, waiting) if len(waiting.missing) <= _FEW_MISSING else []

    def _send_others(self, number: int | None, message: Message) -> list[Action]:
        """Send a message to all members that it reaches, except one; None: to all."""
        receivers = enumerate(self.members)
        return [
            SendControl(receiver, message) for receiver, member in receivers if receiver != number and member.receives
        ]


def _split_into_frames(parts: Mapping[int, bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Divide the parts of an exchange, by member, into lists that each fit into a frame."""
    batch: list[tuple[int, bytes]] = []
    used_bytes = 0
    for part in sorted(parts.items()):
        part_bytes = len(part[1]) + _PART_OVERHEAD_BYTES
        if batch and used_bytes + part_bytes > BLOB_LIMIT_BYTES + _PART_OVERHEAD_BYTES:
            yield batch
            batch, used_bytes = [], 0
        batch.append(part)
        used_bytes += part_bytes
    yield batch


# -- other members ---------------------------------------------------------------------------------------------------


class Client:
    """A member other than 0, in the loop of its connection.

    Attributes:
        phase: Phase of the world, as far as this member knows.
        clock: Samples of member 0's clock.
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self.phase: MembershipPhase = MembershipPhase.GATHERING
        self.clock: CoordinatorClock = CoordinatorClock()
        self._config = config
        self._host = f"at {format_endpoint(config.endpoint)}"
        self._waiting: Waiting | None = None
        self._suspected = False  # whether the present silence of member 0 has been reported

    def beat(self, silences: Mapping[int, Silence], now_ns: int) -> list[Action]:
        """Send a ping, as a sign of life, and judge the silence of member 0.

        The first answer lets this member join, and starts a series of pings.
        """
        judged = [each for one in silences.values() for each in one.judge(0, self._config, suspected=self._suspected)]
        self._suspected = bool(silences)
        return [SendControl(0, Ping(sent_ns=now_ns)), *judged]

    def receive(self, message: Message, now_ns: int) -> list[Action]:
        """Act on a message of member 0; `now_ns` is the time on this process's clock."""
        member, is_gathering = self._config.member, self.phase is MembershipPhase.GATHERING
        match message:
            case Pong(sent_ns=sent_ns, server_ns=server_ns):
                self.clock.add(ClockSample(sent_ns=sent_ns, server_ns=server_ns, back_ns=now_ns))
                actions: list[Action] = []
                if len(self.clock) == 1:
                    actions.append(SendControl(0, Join(detail=self._config.detail, process=self._config.process)))
                if len(self.clock) < _CLOCK_SAMPLES:
                    actions.append(SendControl(0, Ping(sent_ns=now_ns)))
                return actions
            case Refused(reason=reason):
                return [CutConnection(0, reason if is_gathering else f"has excluded this process: {reason}")]
            case Waiting():
                self._waiting = message
                return []
            case Ready():
                self.phase = MembershipPhase.COMPLETE
                return [Complete()]
            case Goodbye():  # hang up: member 0 waits for that, so that its last messages arrive
                self.phase = MembershipPhase.OVER
                return [SendControl(member, message), CutConnection(0, "has let this process go")]
            case MemberNotice() | Contributions() | MemberLost() | MemberLeft():
                return [SendControl(member, message)]
        return [CutConnection(0, broken_protocol(f"a {type(message).__name__}, which is not its turn"))]

    def end_link(self, reason: str) -> list[Action]:
        """Report member 0 as lost because its connection ended; before the world is complete, give up joining."""
        phase, self.phase = self.phase, MembershipPhase.OVER
        if phase is MembershipPhase.GATHERING:
            return [GiveUp(f"process 0 {self._host}: {reason}", tuple(self._waiting.missing if self._waiting else ()))]
        return (
            [SendControl(self._config.member, MemberLost(member=0, reason=reason))]
            if phase is MembershipPhase.COMPLETE
            else []
        )

    def give_up(self, obstacle: str) -> list[Action]:
        """Give up because the time is over; `obstacle` is why member 0 was not reached, or empty."""
        self.phase = MembershipPhase.OVER
        within = f"within {self._config.timeout_s:g} s"
        if obstacle:
            reason = f"process 0 could not be reached {self._host} {within}: {obstacle}"
            return [GiveUp(f"{reason}; check that it runs, and that its port is open", (0,))]
        if self._waiting is None:
            return [GiveUp(f"process 0 {self._host} did not let this process in {within}; look at its output", (0,))]
        missing = self._waiting.missing
        return [GiveUp(self._config.name_absent(missing, self._waiting.departed), tuple(missing))]


# -- the program of each member --------------------------------------------------------------------------------------

#: A notice of another member, or the loss of one.
News: TypeAlias = MemberNotice | MemberLost


class MemberLostError(OverlapError):
    """An exchange or barrier cannot end, because a member is lost or has left.

    Args:
        doing: What cannot end.

    Attributes:
        member: The lost member.
        how: The end of a sentence about it: that it is lost, and why, or has left.
    """

    member: int
    how: str

    def __init__(self, *, member: int, how: str, doing: str) -> None:
        self.member, self.how = member, how
        super().__init__(f"{doing}: process {member} {how}")


class View:
    """State of the program of a member: its exchanges, unread news, and the members that are gone.

    Attributes:
        news: Notices and losses that the program has not read.
        gone: By member that left or was lost: how, for errors.
        over: Whether this member has left, or member 0 is lost: no further message arrives.
    """

    def __init__(self, members: int) -> None:
        self.news: deque[News] = deque()
        self.gone: dict[int, str] = {}
        self.over: bool = False
        self._members = members
        self._turns: Counter[str] = Counter()  # exchanges so far, by name
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}  # of exchanges that wait

    def begin(self, name: str) -> int:
        """Return the turn of the next exchange of a name; its parts are collected until `end`."""
        turn = self._turns[name]
        self._turns[name] += 1
        self._parts[name, turn] = {}
        return turn

    def end(self, name: str, turn: int) -> None:
        """End an exchange that has its result, has failed, or was cancelled."""
        del self._parts[name, turn]

    def check(self, doing: str) -> None:
        """Refuse an exchange that cannot end; `doing` begins the error.

        Raises:
            MemberLostError: A member is gone.
            UsageError: This member has left.
        """
        for member, how in self.gone.items():
            raise MemberLostError(member=member, how=how, doing=doing)
        if self.over:
            raise UsageError(f"{doing}: this process has left the world; call it before")

    def parts(self, name: str, turn: int, doing: str) -> list[bytes] | None:
        """Return the parts of an exchange in member order; None: it waits. Raises the errors of `check`."""
        parts = self._parts[name, turn]
        if len(parts) == self._members:
            return [parts[member] for member in sorted(parts)]
        self.check(doing)
        return None

    def handle(self, message: Message) -> MemberLost | None:
        """Act on a message of member 0; return the message if it reports a loss, else None."""
        match message:
            case _ if self.over:
                pass
            case MemberNotice():
                self.news.append(message)
            case Contributions(name=name, turn=turn, parts=parts):
                self._parts.get((name, turn), {}).update(parts)
            case MemberLeft(member=member):
                self.gone[member] = "has left"
            case MemberLost(member=member, reason=reason):
                self.news.append(message)  # behind the notices of that member, which may have the cause
                self.gone[member] = f"is lost: {reason}"
                self.over = member == 0
                return message
            case Goodbye():
                self.over = True
        return None
