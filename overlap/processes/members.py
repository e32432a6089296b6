"""Members of a world: the decisions of member 0, the decisions of other members, and the view of each member's program.

Three state machines without clock, sockets or waiting. `Members` decides for all members, in the process of member 0.
`Client` decides for another member, in the loop of its connection. `View` has the exchanges and news that the program
of a member waits for. Each method handles one event, and returns the actions that follow, in their order; `host` and
`join` perform them.

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
from . import wire
from .clock import ClockSample, CoordinatorClock
from .identity import RendezvousConfig
from .sockets import format_endpoint

#: Most exchanges that may be unfinished: some members have sent their parts, others have not.
_UNFINISHED_LIMIT = 4096
#: Up to this number of missing members, waiting members are notified of each change, so that they can name them.
_FEW_MISSING = 16
#: Bytes that one part of an exchange takes in a frame beyond its content.
_PART_OVERHEAD_BYTES = 16
#: Number of different refusals that are reported; others are only counted.
_REPORTED_LIMIT = 8
#: Number of refusals that the error repeats: a refused process may be the missing one.
_REPEATED_LIMIT = 3
#: Pings in a row at the start: so many that one of them has not waited in a queue.
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
    """Send a message to a member. A message to this process's own member is passed to its program."""

    member: int
    message: wire.Message


@dataclass(frozen=True, slots=True)
class CutConnection:
    """End the connection of a member, and send it the reason."""

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
    """Stop joining: the world does not start, or not with this member."""

    reason: str
    missing: tuple[int, ...]  # Members that had not joined, as far as known


Action: TypeAlias = SendControl | CutConnection | PrintLine | Complete | GiveUp


# -- silence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Silence of a connected member for at least `SilenceLimits.suspect_s`, and the state of its process.

    A healthy process is silent while a call of C code keeps the GIL; a stopped process is silent, too, but counts as
    lost. On this host, the kernel reports which of the two it is. The kernel of another host cannot be asked; a silent
    process there has more time as long as its host answers.
    """

    silent_s: float  # Seconds since the last message
    state: ProcessState  # State of the process by this host's kernel
    host: str = ""  # Address of the process's host, if that is another one and answers; otherwise empty

    def judge(self, member: int, config: RendezvousConfig, *, suspected: bool) -> Iterator[Action]:
        """Yield the report of this silence, once, and the cut of the connection when the member counts as lost.

        Args:
            member: The silent member.
            config: Configuration of this member, with the limits.
            suspected: Whether this silence has been reported before.
        """
        limits = config.patience
        limit_s = limits.answering_s if self.host else limits.silence_s
        if not suspected:
            if self.host:
                why = f"its host {self.host} answers: it is stopped, or a call in it keeps the GIL"
                reason = f"{why}; it is waited for, and counts as lost after {limit_s:g} s"
            elif self.state is ProcessState.RUNS:
                reason = "it runs, but a call in it keeps the GIL; it is waited for"
            else:
                reason = f"{_SUSPICIONS[self.state]}; it counts as lost after {limit_s:g} s"
            yield PrintLine(f"{config.format_member(member)} has been silent for {limits.suspect_s:g} s: {reason}")
        # a process that runs is waited for, however long it is silent
        if self.silent_s >= limit_s and self.state is not ProcessState.RUNS:
            detail = f"; its host {self.host} answers" if self.host else _DETAILS.get(self.state, "")
            yield CutConnection(member, f"no sign of life for {limit_s:g} s{detail}")


_SUSPICIONS = {
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
    address: str | None = None  # Address at the other end of its connection; None: it has no connection
    suspected: bool = False  # Whether its present silence has been reported

    @property
    def receives(self) -> bool:
        """Whether messages to this member can be sent."""
        return self.address is not None and self.state not in (MemberState.LEFT, MemberState.LOST)


class Members:
    """All members of a world, and the parts of unfinished exchanges, in the process of member 0.

    Args:
        config: Configuration of member 0.

    Attributes:
        phase: Phase of the world.
        members: The members, by number.
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self.phase: MembershipPhase = MembershipPhase.GATHERING
        self.members: list[Member] = [Member() for _ in range(config.members)]
        self._config = config
        self._exchanges: dict[tuple[str, int], dict[int, bytes]] = {}
        self._refusals: dict[str, str] = {}  # by reason: the line

    def _members_in_state(self, *states: MemberState) -> list[int]:
        return [number for number, member in enumerate(self.members) if member.state in states]

    @property
    def _missing_message(self) -> wire.Waiting:
        """A new `Waiting` message, which names the members that have not joined."""
        departed = self._members_in_state(MemberState.DEPARTED)
        return wire.Waiting(missing=self._members_in_state(MemberState.ABSENT, MemberState.DEPARTED), departed=departed)

    def add_connection(self, number: int, address: str) -> list[Action]:
        """Record a new connection of a member; refuse and cut it if the member has one already, or is gone.

        Args:
            number: The member.
            address: Address of the other end, for messages; empty for member 0 itself.
        """
        member = self.members[number]
        if member.address is not None or member.state in (MemberState.LEFT, MemberState.LOST):
            reason = f"process {number} has already joined; give each process a number of its own"
            return [*self._report_refusal(address, reason), CutConnection(number, reason)]
        member.address, member.suspected = address, False
        return []

    def report_failed_handshake(self, address: str, why: str, reason: str) -> list[Action]:
        """Report a failed handshake, once for each kind of failure.

        A handshake that the other side has ended is not reported, because a member would try again.

        Args:
            address: Address of the other end.
            why: Kind of the failure, as in `HandshakeError`.
            reason: The failure, as text.
        """
        if why == "refused":
            return self._report_refusal(address, reason)
        if why == "left":
            return []
        line = f"turned away {address}: {reason} (others like it are only counted)"
        actions = self._report_once(why, line)
        # not printed: a member on a busy host is late, too, and tries again. The line is stored for `give_up_joining`.
        return [] if why == "silent" else actions

    def _report_refusal(self, address: str, reason: str) -> list[Action]:
        """Report a refused connection, once for each reason."""
        return self._report_once(reason, f"refused {address}: {reason}")

    def _report_once(self, key: str, line: str) -> list[Action]:
        """Store and report a line, unless a line with this key is stored, or too many are."""
        if key in self._refusals or len(self._refusals) >= _REPORTED_LIMIT:
            return []
        self._refusals[key] = line
        return [PrintLine(line)]

    def receive(self, number: int, message: wire.Message, now_ns: int) -> list[Action]:
        """Act on a message of a member; a message that it must not send now ends its connection.

        Args:
            number: The member.
            message: The message.
            now_ns: Time on this process's clock.
        """
        member, is_complete = self.members[number], self.phase is not MembershipPhase.GATHERING
        if not member.receives or self.phase is MembershipPhase.OVER:
            return []
        match message:
            case wire.Ping(sent_ns=sent_ns):
                return [SendControl(number, wire.Pong(sent_ns=sent_ns, server_ns=now_ns))]
            case wire.Join(detail=detail) if member.state is not MemberState.JOINED:
                return self._admit_member(number, detail)
            case wire.Notice(body=body) if is_complete:
                return self._send_to_others(number, wire.MemberNotice(member=number, body=body))
            case wire.Contribution() if is_complete:
                return self._collect_exchange_part(number, message)
            case wire.Bye() if is_complete:
                member.state = MemberState.LEFT
                farewell: list[Action] = [SendControl(number, wire.Goodbye())] if number else []
                return [
                    *self._send_to_others(number, wire.MemberLeft(member=number)),
                    *farewell,
                    *self._release_member_0(),
                ]
        # none of the above, or not in this phase
        return [
            CutConnection(number, wire.broken_protocol_reason(f"a {type(message).__name__}, which is not its turn"))
        ]

    def _admit_member(self, number: int, detail: str) -> list[Action]:
        """Let a member join, and start the world if it is the last one; refuse it if its settings (`detail`) differ."""
        member, ours = self.members[number], self._config.detail
        if detail != ours:
            reason = f"process {number} has '{detail}', process 0 has '{ours}'; they must be the same"
            return [*self._report_refusal(member.address or "", reason), CutConnection(number, reason)]
        member.state = MemberState.JOINED
        if self._members_in_state(MemberState.ABSENT, MemberState.DEPARTED):
            return [SendControl(number, self._missing_message), *self._announce_missing_if_few()]
        self.phase = MembershipPhase.COMPLETE
        return [*self._send_to_others(None, wire.Ready(process=self._config.process)), Complete()]

    def _collect_exchange_part(self, number: int, part: wire.Contribution) -> list[Action]:
        """Store a member's part of an exchange; after the last part, send all parts to all members.

        The connection of a member ends if its part is too long, its second one, or of one exchange too many.
        """
        key = part.name, part.turn
        if key not in self._exchanges and len(self._exchanges) >= _UNFINISHED_LIMIT:
            text = f"the beginning of '{part.name}', while {len(self._exchanges)} others are unfinished"
            return [CutConnection(number, wire.broken_protocol_reason(text))]
        parts = self._exchanges.setdefault(key, {})
        if number in parts or len(part.blob) > wire.BLOB_LIMIT_BYTES:
            text = f"a part of exchange '{part.name}' which is too long, or its second one"
            return [CutConnection(number, wire.broken_protocol_reason(text))]
        parts[number] = part.blob
        if len(parts) < len(self.members):
            return []
        del self._exchanges[key]
        actions: list[Action] = []
        for batch in _split_parts_into_frames(parts):
            actions += self._send_to_others(None, wire.Contributions(name=part.name, turn=part.turn, parts=batch))
        return actions

    def end_link(self, number: int, reason: str) -> list[Action]:
        """Record that the connection of a member has ended.

        Before all have joined, the member may connect again. After that, it is lost unless it has said goodbye.

        Args:
            number: The member.
            reason: Why the connection has ended.
        """
        member = self.members[number]
        member.address = None
        has_joined = member.state is MemberState.JOINED
        if self.phase is MembershipPhase.GATHERING and has_joined:
            member.state = MemberState.DEPARTED
            gone = f"process {number} went away before all had joined: {reason}"
            return [PrintLine(gone), *self._announce_missing_if_few()]
        if self.phase is not MembershipPhase.COMPLETE:
            return []
        if not has_joined:
            return self._release_member_0()
        member.state = MemberState.LOST
        return [*self._send_to_others(number, wire.MemberLost(member=number, reason=reason)), *self._release_member_0()]

    def judge_silences(self, silences: Mapping[int, Silence]) -> list[Action]:
        """Report each silence once, and cut the connections of members that have been silent for too long.

        Args:
            silences: The silence of each silent member, by member.
        """
        actions: list[Action] = []
        for number, member in enumerate(self.members):
            silence = silences.get(number)
            if silence is not None:
                actions += silence.judge(number, self._config, suspected=member.suspected)
            member.suspected = silence is not None
        return actions

    def report_progress(self) -> list[Action]:
        """Report the missing members to the user, and to the members that wait for them."""
        waiting, joined = self._missing_message, len(self._members_in_state(MemberState.JOINED))
        line = f"{joined} of {len(self.members)} joined; missing {', '.join(map(str, waiting.missing))}"
        return [PrintLine(line), *self._send_to_others(0, waiting)]

    def give_up_joining(self) -> list[Action]:
        """End the world before its start, because the time is over, and send all other members the reason."""
        missing = self._missing_message.missing
        refusals = [f"process 0 {line}" for line in [*self._refusals.values()][-_REPEATED_LIMIT:]]
        reason = "; ".join(
            [self._config.format_absent_members(missing, self._members_in_state(MemberState.DEPARTED)), *refusals]
        )
        self.phase = MembershipPhase.OVER
        return [*self._send_to_others(0, wire.Refused(reason=reason)), GiveUp(reason, tuple(missing))]

    def _release_member_0(self) -> list[Action]:
        """Let member 0 leave if it wants to and all others have hung up; until then it carries their messages."""
        others_connected = any(member.address is not None for member in self.members[1:])
        if others_connected or self.phase is MembershipPhase.OVER or self._members_in_state(MemberState.JOINED):
            return []
        self.phase = MembershipPhase.OVER
        return [SendControl(0, wire.Goodbye())]

    def _announce_missing_if_few(self) -> list[Action]:
        """If many are missing, the waiting members get the list from `report_progress`, at intervals."""
        waiting = self._missing_message
        return self._send_to_others(0, waiting) if len(waiting.missing) <= _FEW_MISSING else []

    def _send_to_others(self, number: int | None, message: wire.Message) -> list[Action]:
        """Return the actions that send a message to all connected members except `number`; None: to all of them."""
        receivers = [receiver for receiver, member in enumerate(self.members) if member.receives]
        return [SendControl(receiver, message) for receiver in receivers if receiver != number]


def _split_parts_into_frames(parts: Mapping[int, bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield lists of (member, part), in member order, each short enough for one frame."""
    batch: list[tuple[int, bytes]] = []
    used_bytes = 0
    for part in sorted(parts.items()):
        part_bytes = len(part[1]) + _PART_OVERHEAD_BYTES
        if batch and used_bytes + part_bytes > wire.BLOB_LIMIT_BYTES + _PART_OVERHEAD_BYTES:
            yield batch
            batch, used_bytes = [], 0
        batch.append(part)
        used_bytes += part_bytes
    yield batch


# -- other members ---------------------------------------------------------------------------------------------------


class Client:
    """Decides for a member other than 0, in the loop of its connection.

    Args:
        config: Configuration of this member.

    Attributes:
        phase: Phase of the world, as far as this member knows.
        clock: Samples of member 0's clock.
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self.phase: MembershipPhase = MembershipPhase.GATHERING
        self.clock: CoordinatorClock = CoordinatorClock()
        self._config = config
        self._host = f"at {format_endpoint(config.endpoint)}"
        self._waiting: wire.Waiting | None = None
        self._suspected = False  # whether the present silence of member 0 has been reported

    def ping_and_judge_silence(self, silences: Mapping[int, Silence], now_ns: int) -> list[Action]:
        """Send a ping, as a sign of life, and judge the silence of member 0. To be called at each beat.

        `receive` sends the request to join with the first answer.

        Args:
            silences: The silence of member 0, by member; empty if it is not silent.
            now_ns: Time on this process's clock.
        """
        actions: list[Action] = [SendControl(0, wire.Ping(sent_ns=now_ns))]
        if 0 in silences:
            actions += silences[0].judge(0, self._config, suspected=self._suspected)
        self._suspected = 0 in silences
        return actions

    def receive(self, message: wire.Message, now_ns: int) -> list[Action]:
        """Act on a message of member 0; a message that it must not send now ends the connection.

        Args:
            message: The message.
            now_ns: Time on this process's clock.
        """
        member, is_gathering = self._config.member, self.phase is MembershipPhase.GATHERING
        match message:
            case wire.Pong(sent_ns=sent_ns, server_ns=server_ns):
                self.clock.add(ClockSample(sent_ns=sent_ns, server_ns=server_ns, back_ns=now_ns))
                actions: list[Action] = []
                if len(self.clock) == 1:
                    actions.append(SendControl(0, wire.Join(detail=self._config.detail, process=self._config.process)))
                if len(self.clock) < _CLOCK_SAMPLES:
                    actions.append(SendControl(0, wire.Ping(sent_ns=now_ns)))
                return actions
            case wire.Refused(reason=reason):
                return [CutConnection(0, reason if is_gathering else f"has excluded this process: {reason}")]
            case wire.Waiting():
                self._waiting = message
                return []
            case wire.Ready():
                self.phase = MembershipPhase.COMPLETE
                return [Complete()]
            case wire.Goodbye():  # hang up: member 0 waits for that, so that its last messages arrive
                self.phase = MembershipPhase.OVER
                return [SendControl(member, message), CutConnection(0, "has let this process go")]
            case wire.MemberNotice() | wire.Contributions() | wire.MemberLost() | wire.MemberLeft():
                return [SendControl(member, message)]
        return [CutConnection(0, wire.broken_protocol_reason(f"a {type(message).__name__}, which is not its turn"))]

    def end_link(self, reason: str) -> list[Action]:
        """Act on the end of the connection: member 0 is lost, or, before all have joined, this member gives up."""
        phase, self.phase = self.phase, MembershipPhase.OVER
        if phase is MembershipPhase.GATHERING:
            return [GiveUp(f"process 0 {self._host}: {reason}", tuple(self._waiting.missing if self._waiting else ()))]
        if phase is MembershipPhase.OVER:
            return []
        return [SendControl(self._config.member, wire.MemberLost(member=0, reason=reason))]

    def give_up_joining(self, obstacle: str) -> list[Action]:
        """Give up joining, because the time is over.

        Args:
            obstacle: Why member 0 could not be reached; "": it was reached.
        """
        self.phase = MembershipPhase.OVER
        within = f"within {self._config.timeout_s:g} s"
        if obstacle:
            reason = f"process 0 could not be reached {self._host} {within}: {obstacle}"
            return [GiveUp(f"{reason}; check that it runs, and that its port is open", (0,))]
        if self._waiting is None:
            return [GiveUp(f"process 0 {self._host} did not let this process in {within}; look at its output", (0,))]
        missing = self._waiting.missing
        return [GiveUp(self._config.format_absent_members(missing, self._waiting.departed), tuple(missing))]


# -- the program of each member --------------------------------------------------------------------------------------

#: A notice of another member, or the loss of one.
News: TypeAlias = wire.MemberNotice | wire.MemberLost


class MemberLostError(OverlapError):
    """An exchange or barrier cannot end, because a member is lost or has left.

    Args:
        member: The member that is gone.
        how: End of a sentence about the member: "is lost: ...", or "has left".
        doing: The exchange or barrier, for the message.

    Attributes:
        member: The member that is gone.
        how: End of a sentence about the member, as passed.
    """

    def __init__(self, *, member: int, how: str, doing: str) -> None:
        self.member = member
        self.how = how
        super().__init__(f"{doing}: process {member} {how}")


class View:
    """The world as the program of one member sees it: exchanges, unread news, and the members that are gone.

    It follows from the messages of member 0, which `apply_message` gets.

    Args:
        members: Number of members.

    Attributes:
        news: Notices and losses that the program has not read.
        gone: Members that left or were lost, each with the reason as text for errors, such as "has left".
        over: Whether this member has left, or member 0 is lost: no further message arrives.
    """

    def __init__(self, members: int) -> None:
        self.news: deque[News] = deque()
        self.gone: dict[int, str] = {}
        self.over: bool = False
        self._members = members
        self._turns: Counter[str] = Counter()  # exchanges so far, by name
        # by name and turn of each exchange that waits: the parts so far, by member
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}

    def begin_exchange(self, name: str) -> int:
        """Begin an exchange, and return its turn: the number of earlier exchanges of this name."""
        turn = self._turns[name]
        self._turns[name] += 1
        self._parts[name, turn] = {}
        return turn

    def end_exchange(self, name: str, turn: int) -> None:
        """Drop the parts of an exchange that has its result, has failed, or was cancelled."""
        del self._parts[name, turn]

    def check_all_present(self, doing: str) -> None:
        """Raise an error if an exchange cannot end.

        Args:
            doing: Begins the error message.

        Raises:
            MemberLostError: A member is gone.
            UsageError: This member has left.
        """
        # the first one is named
        for member, how in self.gone.items():
            raise MemberLostError(member=member, how=how, doing=doing)
        if self.over:
            raise UsageError(f"{doing}: this process has left the world; call it before")

    def exchange_parts(self, name: str, turn: int, doing: str) -> list[bytes] | None:
        """Return the parts of an exchange in member order; None while it waits.

        Args:
            name: Name of the exchange.
            turn: Result of `begin_exchange`.
            doing: Begins the error message.

        Raises:
            MemberLostError: A member is gone, and has not sent its part.
            UsageError: This member has left.
        """
        parts = self._parts[name, turn]
        if len(parts) == self._members:
            return [parts[member] for member in sorted(parts)]
        self.check_all_present(doing)
        return None

    def apply_message(self, message: wire.Message) -> wire.MemberLost | None:
        """Act on a message of member 0; return the message if it reports a loss, else None."""
        match message:
            case _ if self.over:
                pass
            case wire.MemberNotice():
                self.news.append(message)
            case wire.Contributions(name=name, turn=turn, parts=parts):
                # parts of an exchange that was cancelled here are dropped
                self._parts.get((name, turn), {}).update(parts)
            case wire.MemberLeft(member=member):
                self.gone[member] = "has left"
            case wire.MemberLost(member=member, reason=reason):
                self.news.append(message)  # behind the notices of that member, which may have the cause
                self.gone[member] = f"is lost: {reason}"
                self.over = member == 0
                return message
            case wire.Goodbye():
                self.over = True
        return None
