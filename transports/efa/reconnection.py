"""Reconnection of dead rails: the side that dialled dials again, and the side that listened listens until then."""

from __future__ import annotations

import math
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import trio

from transports.address import RAILS_LIMIT
from transports.efa.efa_link import EfaLink
from transports.efa.joining import HANDSHAKE_S, ProvedSocket, SocketJoining, close_proved_socket
from transports.efa.rail import Rail
from transports.failures import TransportError
from transports.frame import FrameError
from transports.handshake import HandshakeError
from transports.identity import Hello
from transports.matching.protocol import BROKEN_PROTOCOL

# The first pause before a rail is dialled again is short, for a connection that broke while its link is up; each later
# one is twice as long, up to one that costs nothing while a link is down for hours.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# A replacement that dies sooner continues with longer pauses, because it may die again and again.
_STEADY_S = 60.0
# Longest pause while no rail is left and ranks wait.
_LONGEST_WAITED_S = 1.0
# Limit of a whole attempt: where packets vanish, the system would try for two minutes.
_ATTEMPT_S = HANDSHAKE_S + 1.0
# Interval between checks of the processes that are expected or waited for.
_LOOK_S = 1.0
# After this long without a rail the user is notified; a reset connection is back before.
_REPORT_S = 2.0
# A process whose host answers may be busy in a call; the same bound as for a deadlock.
_ANSWERING_S = 300.0
_NUMBERS = 2**32  # bound of the numbers of connections in frames


class ReplacementDetail(NamedTuple):
    """`Hello.detail` of a replacement connection, in both directions: "129 65 7" for the three fields."""

    number: int  # Number of the new rail, higher than all before in its slot
    last: int  # Number of the last rail of the slot on which the sender of the hello has received frames
    frames: int  # Number of frames that it received on that rail

    def __str__(self) -> str:
        """Format the detail for a hello."""
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> ReplacementDetail | None:
        """Parse the detail of a hello; None if it is malformed."""
        match = _DETAIL.fullmatch(text)
        if match is None or len(text) > _DETAIL_LIMIT:
            return None
        detail = cls(*map(int, match.groups()))
        return detail if detail.number < _NUMBERS else None


_DETAIL = re.compile("([0-9]+) ([0-9]+) ([0-9]+)")
_DETAIL_LIMIT = 2 * 10 + 20 + 2  # two numbers of 32 bits, one of 64


@dataclass(slots=True)
class _SlotTimes:
    """Times of one slot of a link, on Trio's clock."""

    lost_s: float = 0.0  # Time at which the last rail was lost
    returned_s: float = -math.inf  # Time at which the last replacement was made
    pause_s: float = 0.0  # Duration of the pause before the next dial


class Reconnection:
    """Replaces dead rails between this process and others.

    A replacement has a rail number of its own, so that frames about the two rails cannot be confused. In its handshake
    each side reports how many frames it has received on the dead rail, and the other side sends the missing ones again,
    unless it has done so over other rails.

    A process without any rail is given up after `unreachable_s` if it cannot be reached, and after 300 s if its host
    answers, even with a refusal. Only the side that dials decides that, because it sees the answers.

    Args:
        joining: Makes connections.
        links: The link to each other process, by its index.
        make: Returns a rail, from its link, its number and its connection.
        report: Prints a line about replaced rails, and about long waits.
        unreachable_s: Seconds after which an unreachable process is given up.
    """

    def __init__(
        self,
        joining: SocketJoining,
        links: Mapping[int, EfaLink],
        make: Callable[[EfaLink, int, ProvedSocket], Rail],
        report: Callable[[str], None],
        *,
        unreachable_s: float,
    ) -> None:
        self._joining, self._links, self._make, self._report = joining, links, make, report
        self._unreachable_s = unreachable_s
        self._unanswered_s: dict[int, float] = {}  # for each process without a rail: seconds since its last answer
        self._times: defaultdict[tuple[int, int], _SlotTimes] = defaultdict(_SlotTimes)  # by member and slot
        self._expected: set[tuple[int, int]] = set()  # (member, slot) of rails that the other processes dial
        self._is_expecting = trio.Event()
        self._listening_scope = trio.CancelScope()
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Replace dead rails until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._listen_while_expected)
                for link in self._links.values():
                    link.on_loss = partial(self._replace_rail, link)
                    for slot in range(self._joining.rail_count):
                        if link.is_rail_lost(slot) and link.engine.gone is None:  # since before this task ran
                            self._replace_rail(link, slot)
        finally:
            for link in self._links.values():
                link.on_loss = lambda slot: None  # no replacement is made any more

    def _replace_rail(self, link: EfaLink, slot: int) -> None:
        """Begin to replace a dead rail: dial the other process if its index is higher, otherwise listen for it."""
        key = link.member, slot
        times = self._times[key]
        times.lost_s = trio.current_time()
        # A replacement that lasted begins with short pauses again; one that died soon continues with longer ones.
        was_steady = times.lost_s - times.returned_s > _STEADY_S
        times.pause_s = _FIRST_PAUSE_S if was_steady else min(2 * times.pause_s, _LONGEST_PAUSE_S)
        if not link.rails and link.member not in self._unanswered_s:
            self._nursery.start_soon(self._wait_for_rail, link)
        if link.member > self._joining.member:
            self._nursery.start_soon(self._dial_until_back, link, slot)
        else:
            self._expected.add(key)
            self._is_expecting.set()

    async def _wait_for_rail(self, link: EfaLink) -> None:
        """Wait until a process without rails has one again; report a long wait, and give up the process at its limit.

        The number of sleeps measures the time: while the event loop was blocked, nothing was dialled, so that time does
        not count.
        """
        waited_s, dials = 0.0, link.member > self._joining.member
        self._unanswered_s[link.member] = 0.0
        while not link.rails and link.engine.gone is None:
            await trio.sleep(_LOOK_S)
            waited_s += _LOOK_S
            self._unanswered_s[link.member] += _LOOK_S
            if waited_s == _REPORT_S and not link.rails:
                doing = "is dialled again" if dials else "is expected to dial again"
                self._report(f"no connection to {link.name} is left ({link.last_loss}); it {doing}")
            if dials and not link.rails:
                self._give_up_if_absent(link, waited_s)
        del self._unanswered_s[link.member]

    def _give_up_if_absent(self, link: EfaLink, waited_s: float) -> None:
        """Give up a process that has been unreachable for `unreachable_s`, or without a rail for 300 s."""
        if self._unanswered_s[link.member] >= self._unreachable_s:
            link.lose(f"{link.last_loss}, and since then it could not be reached for {self._unreachable_s:g} s")
        elif waited_s >= _ANSWERING_S:
            link.lose(f"{link.last_loss}, and no connection came about in {waited_s:g} s, though its host answers")

    def _add_replacement(self, link: EfaLink, number: int, connection: ProvedSocket) -> None:
        """Add a connection to its link, run it, and report that the rail is back."""
        rail = self._make(link, number, connection)
        times = self._times[link.member, rail.slot]
        link.add_rail(rail)
        self._nursery.start_soon(rail.run)
        times.returned_s = trio.current_time()
        line = f"{link.rail_name(number)} is back after {times.returned_s - times.lost_s:.1f} s"
        link.note(line)
        self._report(line)

    # -- the side that dials ------------------------------------------------------------------------------------------

    async def _dial_until_back(self, link: EfaLink, slot: int) -> None:
        """Dial with growing pauses, until a slot has a rail again or the process is lost."""
        times = self._times[link.member, slot]
        while True:
            await trio.sleep(times.pause_s if link.rails else min(times.pause_s, _LONGEST_WAITED_S))
            if link.engine.gone is not None:
                return
            detail = ReplacementDetail(link.next_rail_number(slot), *link.last_arrival(slot))
            connection = await self._dial_once(link, slot, detail)
            if connection is not None:
                # In the handshake each side got the other's count of frames. `_repeat_missing_frames` queues the
                # missing frames, and returns False if the count was wrong, which ends the link.
                if link.engine.gone is None and self._repeat_missing_frames(
                    link, ReplacementDetail.parse(connection.detail)
                ):
                    self._add_replacement(link, detail.number, connection)
                else:
                    close_proved_socket(connection)
                return
            times.pause_s = min(2 * times.pause_s, _LONGEST_PAUSE_S)

    async def _dial_once(self, link: EfaLink, slot: int, detail: ReplacementDetail) -> ProvedSocket | None:
        """Return None after a failure. Any answer of the other host resets the time without an answer."""
        answered = False
        with trio.move_on_after(_ATTEMPT_S):
            try:
                return await self._joining.dial(link.member, slot, str(detail), deadline_s=HANDSHAKE_S)
            except HandshakeError:
                answered = True  # the other side is not ready for the connection
            except TransportError as error:
                answered = isinstance(error.__cause__, ConnectionRefusedError)  # its host answers
        if answered and link.member in self._unanswered_s:
            self._unanswered_s[link.member] = 0.0
        return None

    def _repeat_missing_frames(self, link: EfaLink, their_detail: ReplacementDetail | None) -> bool:
        """Queue the frames again that did not arrive over dead rails; return False if the link has ended.

        `their_detail` is None if the other side's hello was malformed, which ends the link.
        """
        try:
            if their_detail is None:
                raise FrameError("the answer to a replacement connection does not name the rail before")
            link.repeat_missing_frames(their_detail.number % RAILS_LIMIT, their_detail.last, their_detail.frames)
        except FrameError as error:
            link.lose(f"{error}; {BROKEN_PROTOCOL}", evident=True)
        return link.engine.gone is None

    # -- the side that listens ----------------------------------------------------------------------------------------

    async def _listen_while_expected(self) -> None:
        """Listen whenever processes are expected to dial lost rails, and add their connections, until cancelled."""
        while True:
            await self._is_expecting.wait()
            self._is_expecting = trio.Event()
            try:
                listeners = self._joining.meeting.sockets.listen()
            except TransportError:  # another program has taken the port
                await trio.sleep(_LOOK_S)
                self._is_expecting.set()
                continue
            try:
                with trio.CancelScope() as self._listening_scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._joining.meeting.sockets.serve, listeners, self._accept_replacement)
                        while self._expected:  # until all have dialled or are lost
                            await trio.sleep(_LOOK_S)
                            self._expected = {key for key in self._expected if self._links[key[0]].engine.gone is None}
                        nursery.cancel_scope.cancel()
            finally:
                for listener in listeners:
                    listener.close()

    async def _accept_replacement(self, connection: socket.socket) -> None:
        """Shake hands, and add the connection to its link; a connection that is not expected is closed."""
        admitted: list[tuple[EfaLink, int]] = []
        welcomed = await self._joining.meeting.welcome(connection, partial(self._admit_replacement, admitted))
        if welcomed is None:
            return
        # `_admit_replacement` adds the only entry before the handshake ends
        link, number = admitted[0]
        if link.engine.gone is not None or not link.is_rail_lost(number % RAILS_LIMIT):
            close_proved_socket(welcomed)
            return
        self._add_replacement(link, number, welcomed)
        self._expected.discard((link.member, number % RAILS_LIMIT))
        if not self._expected:
            self._listening_scope.cancel()

    def _admit_replacement(self, admitted: list[tuple[EfaLink, int]], hello: Hello) -> Hello | str:
        """Return the answer to a hello, with this side's count of frames, or why it is refused, as text.

        Before the answer, the frames that the other side has not received are queued again, and `admitted` gets the
        link and the number of the new rail.
        """
        meeting, link, theirs = (
            self._joining.meeting,
            self._links.get(hello.member),
            ReplacementDetail.parse(hello.detail),
        )
        if reason := meeting.stranger_refusal(hello):
            return reason
        if link is None or theirs is None or hello.member > self._joining.member:
            return meeting.unexpected_refusal(hello)
        if reason := link.rail_refusal_reason(theirs.number):
            return reason
        if not self._repeat_missing_frames(link, theirs):
            return str(link.engine.gone)
        admitted.append((link, theirs.number))
        return meeting.make_hello(
            str(ReplacementDetail(theirs.number, *link.last_arrival(theirs.number % RAILS_LIMIT)))
        )
