"""How rails come back: who dialled a rail that has died dials again, and who listened listens again until then."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from functools import partial

import trio

from transports.efa.address import RAILS_LIMIT
from transports.efa.joining import HANDSHAKE_S, Connection, Joining, discard
from transports.efa.link import EfaLink
from transports.efa.rail import Rail
from transports.failures import TransportError
from transports.handshake import Hello

__all__ = ["Returning"]

# The first pause before a rail is dialled again is short, for a connection that broke while its link is up; each one
# after it is twice as long, up to one that costs nothing while a link is down for hours.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# A rail that dies sooner after its return goes on with the pauses where it was: it may do so over and over.
_STEADY_S = 60.0
# For a whole attempt: where packets vanish, the system would go on for two minutes.
_ATTEMPT_S = HANDSHAKE_S + 1.0
# How often a process that listens asks itself whether it still has anybody to expect.
_LOOK_S = 1.0
_NUMBERS = 2**32  # of connections, as frames can name them


class Returning:
    """Brings back the rails of a process that die while others to the same process live.

    A connection that takes a place has a number of its own. It is dialled, and let in, by a side that knows what of the
    one before has arrived on both sides; so nothing that either of them says can be taken for the other's.

    Args:
        joining: How connections are made.
        links: To the other processes.
        make: Makes a rail of a link, a number and a connection.
        report: Takes a line about rails that are back.
    """

    def __init__(
        self,
        joining: Joining,
        links: Mapping[int, EfaLink],
        make: Callable[[EfaLink, int, Connection], Rail],
        report: Callable[[str], None],
    ) -> None:
        self._joining, self._links, self._make, self._report = joining, links, make, report
        self._lost_s: dict[tuple[int, int], float] = {}  # when, by member and place
        self._returned_s: dict[tuple[int, int], float] = {}
        self._pauses_s: dict[tuple[int, int], float] = {}
        self._expected: set[tuple[int, int]] = set()  # those that others are to dial
        self._asked = trio.Event()
        self._door = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[EfaLink, int]] = []  # lost before this runs
        for link in links.values():
            link.on_loss = partial(self._lost, link)

    async def run(self) -> None:
        """Bring rails back until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._keep_door)
            for link, place in self._early:
                self._lost(link, place)

    def _lost(self, link: EfaLink, place: int) -> None:
        if self._nursery is None:
            self._early.append((link, place))
            return
        key, now_s = (link.member, place), trio.current_time()
        steady = now_s - self._returned_s.get(key, -math.inf) > _STEADY_S
        self._pauses_s[key] = _FIRST_PAUSE_S if steady else self._longer(self._pauses_s[key])
        self._lost_s[key] = now_s
        if link.member > self._joining.member:
            self._nursery.start_soon(self._dial, link, place)
        else:
            self._expected.add(key)
            self._asked.set()

    def _longer(self, pause_s: float) -> float:
        return min(2 * pause_s, _LONGEST_PAUSE_S)

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
            await trio.sleep(self._pauses_s[key])
            if link.engine.gone is not None:
                return
            if not link.lacks(place):
                continue  # the other side has not said yet what it got
            number = link.next_number(place)
            connection = await self._attempt(link, place, number)
            if connection is not None:
                if link.engine.gone is None:
                    self._use(link, number, connection)
                else:
                    await discard(connection)
                return
            self._pauses_s[key] = self._longer(self._pauses_s[key])

    async def _attempt(self, link: EfaLink, place: int, number: int) -> Connection | None:
        with trio.move_on_after(_ATTEMPT_S):
            try:
                return await self._joining.dial(link.member, place, str(number), deadline_s=HANDSHAKE_S)
            except TransportError:
                pass  # it is still away, or not ready for it
        return None

    # -- the side that listens ----------------------------------------------------------------------------------------

    async def _keep_door(self) -> None:
        """Listen whenever somebody is expected."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            try:
                listeners = self._joining.door.open()
            except TransportError:  # somebody else has taken a port meanwhile
                await trio.sleep(_LOOK_S)
                self._asked.set()
                continue
            try:
                with trio.CancelScope() as self._door:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._joining.door.serve, listeners, self._welcome)
                        await self._expect()
                        nursery.cancel_scope.cancel()
            finally:
                for listener in listeners:
                    listener.close()

    async def _expect(self) -> None:
        """Wait until nobody is expected any more."""
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
        link = self._links.get(hello.member)
        number = int(hello.detail) if hello.detail.isdecimal() and len(hello.detail) < 11 else _NUMBERS
        reason = self._joining.stranger(hello)
        if not reason and (link is None or hello.member > self._joining.member or number >= _NUMBERS):
            reason = (
                f"process {hello.member}, rail {hello.detail!r} is not expected to call process {self._joining.member}"
            )
        if reason or link is None:
            return reason
        reason = link.why_not(number)
        if reason:
            return reason
        wanted.append((link, number))
        return self._joining.hello(hello.detail)
