"""Reconnection of dead rails: the side that dialled dials again, and the side that listened listens until then."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import trio

from transports.efa.address import RAILS_LIMIT
from transports.efa.efa_link import EfaLink
from transports.efa.joining import HANDSHAKE_S, Connection, Joining, discard
from transports.efa.rail import Rail
from transports.failures import TransportError
from transports.frame import FrameError
from transports.handshake import HandshakeError
from transports.identity import Hello

# The first pause before a rail is dialled again is short, for a connection that broke while its link is up; each later
# one is twice as long, up to one that costs nothing while a link is down for hours.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# A rail that dies sooner after its return continues with longer pauses: it may die over and over.
_STEADY_S = 60.0
# Where no rail is left, ranks wait for it.
_LONGEST_WAITED_S = 1.0
# For a whole attempt: where packets vanish, the system would go on for two minutes.
_ATTEMPT_S = HANDSHAKE_S + 1.0
# Interval between looks at the processes that are expected or waited for.
_LOOK_S = 1.0
# A connection that was reset is back by then; otherwise the user is told.
_TOLD_S = 2.0
# A process whose host answers may be in a call that lets nothing else run; as long as a deadlock may last.
_ANSWERING_S = 300.0
_NUMBERS = 2**32  # bound of numbers of connections, as frames can name them


class Detail(NamedTuple):
    """The detail of the hellos of a connection that replaces a dead one."""

    number: int  # Number of the connection, higher than all before at its place
    last: int  # The last rail at this place on which the speaker has received anything
    frames: int  # How many frames have come on that rail

    def __str__(self) -> str:
        """Write it as a hello carries it."""
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Detail | None:
        """Read it; None if it is none."""
        words = text.split(" ")
        if len(words) != len(cls._fields) or not all(word.isascii() and word.isdecimal() for word in words):
            return None
        told = cls(*map(int, words)) if len(text) <= _DETAIL_LIMIT else None
        return told if told is not None and told.number < _NUMBERS else None


_DETAIL_LIMIT = 2 * 10 + 20 + 2  # two numbers of 32 bits, one of 64


class Reconnection:
    """Brings back the dead rails of a process.

    A connection that replaces another has a number of its own, so no frame about one can be taken for the other. In its
    handshake both sides say how many frames they have got on the one before, and send the missing ones again, where
    other rails have not settled that already.

    Where no rail is left, the process is waited for as long as it is known to live, within two bounds, as for a
    process that says nothing: one that cannot be reached is lost after `unreachable_s`, one whose host answers,
    if only to refuse, after 300 s. The side that dials judges that, for it knows more than the side that listens.

    Args:
        joining: Makes connections.
        links: To the other processes.
        make: Makes a rail of a link, a number and a connection.
        report: Takes a line about rails that are back, or stay away.
        unreachable_s: How long a process may be out of reach.
    """

    def __init__(
        self,
        joining: Joining,
        links: Mapping[int, EfaLink],
        make: Callable[[EfaLink, int, Connection], Rail],
        report: Callable[[str], None],
        *,
        unreachable_s: float,
    ) -> None:
        self._joining, self._links, self._make, self._report = joining, links, make, report
        self._unreachable_s = unreachable_s
        self._unanswered_s: dict[int, float] = {}  # by member without a rail: how long it has been dialled in vain
        self._lost_s: dict[tuple[int, int], float] = {}  # by member and place of the rail
        self._returned_s: dict[tuple[int, int], float] = {}
        self._pauses_s: dict[tuple[int, int], float] = {}
        self._expected: set[tuple[int, int]] = set()  # places that the other processes dial
        self._asked = trio.Event()
        self._door = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[EfaLink, int]] = []  # the process was lost before this task ran
        for link in links.values():
            link.on_loss = partial(self._lost, link)

    async def run(self) -> None:
        """Bring rails back until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._keep_door)
                for link, place in self._early:
                    self._lost(link, place)
        finally:
            for link in self._links.values():
                link.on_loss = _nothing

    def _lost(self, link: EfaLink, place: int) -> None:
        if self._nursery is None:
            self._early.append((link, place))
            return
        key, now_s = (link.member, place), trio.current_time()
        steady = now_s - self._returned_s.get(key, -math.inf) > _STEADY_S
        self._pauses_s[key] = _FIRST_PAUSE_S if steady else self._longer(self._pauses_s[key])
        self._lost_s[key] = now_s
        if not link.rails and link.member not in self._unanswered_s:
            self._nursery.start_soon(self._wait_for, link)
        if link.member > self._joining.member:
            self._nursery.start_soon(self._dial, link, place)
        else:
            self._expected.add(key)
            self._asked.set()

    def _longer(self, pause_s: float) -> float:
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _wait_for(self, link: EfaLink) -> None:
        """Wait until a process without rails has one again; report a long wait, and give the process up in time.

        Looks are counted, not seconds: an event loop that stood still has not dialled, so it proves nothing.
        """
        waited_s, dials = 0.0, link.member > self._joining.member
        self._unanswered_s[link.member] = 0.0
        while not link.rails and link.engine.gone is None:
            await trio.sleep(_LOOK_S)
            waited_s += _LOOK_S
            self._unanswered_s[link.member] += _LOOK_S
            if waited_s == _TOLD_S and not link.rails:
                doing = "is dialled again" if dials else "is expected to dial again"
                self._report(f"no connection to {link.name} is left ({link.last_loss}); it {doing}")
            if dials and not link.rails:
                self._judge_absence(link, waited_s)
        del self._unanswered_s[link.member]

    def _judge_absence(self, link: EfaLink, waited_s: float) -> None:
        if self._unanswered_s[link.member] >= self._unreachable_s:
            link.lose(f"{link.last_loss}, and since then it could not be reached for {self._unreachable_s:g} s")
        elif waited_s >= _ANSWERING_S:
            link.lose(f"{link.last_loss}, and no connection came about in {waited_s:g} s, though its host answers")

    def _use(self, link: EfaLink, number: int, connection: Connection) -> None:
        key = link.member, number % RAILS_LIMIT
        rail = self._make(link, number, connection)
        link.add(rail)
        assert self._nursery is not None, "connections are made while this runs"
        self._nursery.start_soon(rail.run)
        self._returned_s[key] = trio.current_time()
        line = f"{link.name_of(number)} is back after {self._returned_s[key] - self._lost_s[key]:.1f} s"
        link.note(line)
        self._report(line)

    # -- the side that dials ------------------------------------------------------------------------------------------

    async def _dial(self, link: EfaLink, place: int) -> None:
        key = link.member, place
        while True:
            await trio.sleep(self._pauses_s[key] if link.rails else min(self._pauses_s[key], _LONGEST_WAITED_S))
            if link.engine.gone is not None:
                return
            mine = Detail(link.next_number(place), *link.got(place))
            connection = await self._attempt(link, place, mine)
            if connection is not None:
                if link.engine.gone is None and self._hears(link, Detail.parse(connection.detail)):
                    self._use(link, mine.number, connection)
                else:
                    await discard(connection)
                return
            self._pauses_s[key] = self._longer(self._pauses_s[key])

    async def _attempt(self, link: EfaLink, place: int, mine: Detail) -> Connection | None:
        answered = False
        with trio.move_on_after(_ATTEMPT_S):
            try:
                return await self._joining.dial(link.member, place, str(mine), deadline_s=HANDSHAKE_S)
            except HandshakeError:
                answered = True  # the other side is not ready for the connection
            except TransportError as error:
                answered = isinstance(error.__cause__, ConnectionRefusedError)  # so says its host: it has not heard yet
        if answered and link.member in self._unanswered_s:
            self._unanswered_s[link.member] = 0.0
        return None

    def _hears(self, link: EfaLink, theirs: Detail | None) -> bool:
        """Send again the frames of earlier rails that the other side has not got; False if its count makes no sense."""
        try:
            if theirs is None:
                raise FrameError("the answer to a connection that replaces another says nothing of that one")
            link.got_there(theirs.number % RAILS_LIMIT, theirs.last, theirs.frames)
        except FrameError as error:
            link.lose(str(error), evident=True)
        return link.engine.gone is None

    # -- the side that listens ----------------------------------------------------------------------------------------

    async def _keep_door(self) -> None:
        """Listen whenever a process is expected."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            try:
                listeners = self._joining.meeting.door.open()
            except TransportError:  # another program has taken a port meanwhile
                await trio.sleep(_LOOK_S)
                self._asked.set()
                continue
            try:
                with trio.CancelScope() as self._door:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._joining.meeting.door.serve, listeners, self._welcome)
                        await self._expect()
                        nursery.cancel_scope.cancel()
            finally:
                for listener in listeners:
                    listener.close()

    async def _expect(self) -> None:
        """Wait until no process is expected any more."""
        while self._expected:
            await trio.sleep(_LOOK_S)
            self._expected = {key for key in self._expected if self._links[key[0]].engine.gone is None}

    async def _welcome(self, connection: socket.socket) -> None:
        wanted: list[tuple[EfaLink, int]] = []
        welcomed = await self._joining.welcome(connection, partial(self._judge, wanted))
        if welcomed is None:
            return
        link, number = wanted[0]
        if link.engine.gone is not None or not link.lacks(number % RAILS_LIMIT):
            await discard(welcomed)
            return
        self._use(link, number, welcomed)
        self._expected.discard((link.member, number % RAILS_LIMIT))
        if not self._expected:
            self._door.cancel()

    def _judge(self, wanted: list[tuple[EfaLink, int]], hello: Hello) -> Hello | str:
        link, theirs = self._links.get(hello.member), Detail.parse(hello.detail)
        reason = self._joining.meeting.stranger(hello)
        if reason:
            return reason
        if link is None or theirs is None or hello.member > self._joining.member:
            return self._joining.meeting.unexpected(hello)
        reason = link.why_not(theirs.number)
        if not reason and not self._hears(link, theirs):
            reason = link.engine.gone or ""
        if reason:
            return reason
        wanted.append((link, theirs.number))
        return self._joining.meeting.hello(str(Detail(theirs.number, *link.got(theirs.number % RAILS_LIMIT))))


def _nothing(place: int) -> None:
    """Ignore the loss of a rail."""
