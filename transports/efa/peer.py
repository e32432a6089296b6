"""A peer: another process, the rails to it, and what becomes of its messages when rails die or it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from transports.base import LinkLostError, describe_ranks
from transports.efa.inbound import Inbound
from transports.efa.outbound import Outbound
from transports.frame import FrameError, Kind

if TYPE_CHECKING:
    from transports.efa.messages import Lane, Receive, Send
    from transports.efa.rail import Rail
    from transports.rooms import Rooms

__all__ = ["Peer"]

# Saying goodbye waits so long for the next sign of progress: longer than a busy machine keeps a process from running,
# shorter than anybody waits for a program to end.
_PATIENCE_S = 2.0
# Less than this on every rail in that time is signs of life, not progress.
_PROGRESS_BYTES = 4096


class Peer:
    """Another process of the world.

    Attributes:
        member: Its index.
        rails: The living connections to it.
        inbound: What comes from it.
        outbound: What leaves for it.
        silent_ticks: How often the keeper has looked since it was last heard.
        gone: Why nothing more can be sent to it or expected from it; None while it is there.
    """

    def __init__(
        self, member: int, ranks: tuple[int, ...], local: tuple[int, ...], rooms: Rooms, report: Callable[[str], None]
    ) -> None:
        self.member = member
        self.rails: list[Rail] = []
        self.inbound = Inbound(ranks, local, rooms, self._answer)
        self.outbound = Outbound()
        self.silent_ticks = 0
        self.gone: str | None = None
        self.name = f"process {member} ({describe_ranks(ranks)})"
        self._report = report
        self._dead: dict[int, tuple[Rail, str]] = {}  # until the other side has said what it got, and why
        self._arrived: dict[int, int] = {}  # frames that this side got on each rail that is dead
        self._changed: trio.Event | None = None
        self._take: dict[int, Callable[..., None]] = {
            Kind.OFFER: self.inbound.offer,
            Kind.ACCEPT: self.outbound.accepted,
            Kind.REFUSE: self.outbound.refused,
            Kind.TAKEN: self.outbound.taken,
            Kind.WITHDRAW: self.inbound.withdraw,
            Kind.WITHDRAWN: self.outbound.withdrawn,
            Kind.CREDIT: self.outbound.credited,
            Kind.LOST: self._lost_there,
        }

    # -- what leaves --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let idle rails take what is due."""
        for rail in tuple(self.rails):
            if rail.idle and (rail.owes or self.outbound.due):
                rail.start_writing()
        if self._changed is not None:
            self._changed.set()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message from the calling task, if a rail is idle and nothing waits to be announced."""
        for rail in self.rails:
            if rail.idle:
                frame = self.outbound.eager(lane, view)
                if frame is not None:
                    rail.put(frame)
                    return True
                return False
        return False

    def announce(self, send: Send) -> None:
        """Queue a message."""
        self.outbound.announce(send)
        self.settle()

    def withdraw(self, send: Send) -> None:
        """Take back a message that was cancelled before it was accepted."""
        if send.cancelled:
            self._answer(Kind.WITHDRAW, send.number)
            self.settle()

    def _answer(self, kind: Kind, *fields: int) -> None:
        self.outbound.answer(kind, *fields)

    def tick(self, limit: int, silence_s: float) -> None:
        """Ask for a sign of life; give the process up after too many silent ticks, and rails that take nothing."""
        if self.gone is not None:
            return
        self.silent_ticks += 1
        if self.silent_ticks > limit:
            self.lose(f"nothing was heard from it for {silence_s:g} s")
            return
        for rail in tuple(self.rails):
            if rail.stalled_ticks() > limit:
                rail.die(f"it has taken nothing for {silence_s:g} s")
            elif not rail.dead:
                rail.acknowledge = True
        self.settle()

    # -- what arrives -------------------------------------------------------------------------------------------------

    def take(self, rail: Rail, kind: int, fields: list[int], payload: memoryview) -> None:
        """Act on a frame that is no chunk."""
        if kind == Kind.EAGER:
            if self.gone is None:
                self.inbound.eager(fields, payload)
        elif kind == Kind.ALIVE:
            rail.acknowledged(*fields)
        elif kind == Kind.BYE:
            self._bye(rail)
        elif self.gone is None:
            self._take[kind](*fields)

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return where a chunk belongs."""
        return self.inbound.place(number, offset, nbytes)

    def filled(self, number: int, offset: int, nbytes: int) -> None:
        """Note that a chunk is in its place."""
        self.inbound.filled(number, offset, nbytes)

    async def receive(self, receive: Receive) -> memoryview | None:
        """Receive a message; return its memory if it is lent."""
        if receive.lane in self.inbound.arrived:
            self.inbound.match(receive, self.inbound.pop_arrived(receive.lane))
            self.settle()
        else:
            self.check(receive.lane)
            self.inbound.post(receive)
        return await receive.wait()

    # -- rails that die -----------------------------------------------------------------------------------------------

    def rail_died(self, rail: Rail, reason: str) -> None:
        """Go on without a rail."""
        self.rails.remove(rail)
        if self._changed is not None:
            self._changed.set()
        if self.gone is not None or rail.farewell:
            return
        if not self.rails:
            self.lose(f"the last connection to it was lost: {reason}")
            return
        self._dead[rail.index] = rail, reason
        self._arrived[rail.index] = rail.arrived
        # The rail may have carried the news of another's death, and this news may be lost in the same way on both
        # sides: then each would wait for the other's. So every death brings all of them up again.
        for index, count in self._arrived.items():
            self._answer(Kind.LOST, index, count)
        self.settle()

    def _lost_there(self, index: int, count: int) -> None:
        """The other side has lost a rail after `count` of our frames: repeat those after them."""
        for rail in self.rails:
            if rail.index == index:
                rail.die("the other side has lost it")
        if index not in self._arrived:
            raise FrameError(f"rail {index} is said to be lost, but is not known")
        if index not in self._dead:
            return  # it has been said before
        dead, reason = self._dead.pop(index)
        nbytes = self.outbound.repeat(dead.unarrived(count))
        again = f"{nbytes} bytes are sent again over the other {len(self.rails)}"
        self._report(f"rail {index} to {self.name} was lost: {reason}; {again}")

    def lose(self, reason: str) -> None:
        """Give the process up: every operation with its ranks fails."""
        if self.gone is not None:
            return
        self.gone = f"{self.name} is lost: {reason}"
        self._report(self.gone)
        self._end(keep_arrived=False)
        for rail in tuple(self.rails):
            rail.die(reason)

    def _bye(self, rail: Rail) -> None:
        rail.farewell = True
        if self.gone is None and all(rail.farewell for rail in self.rails):
            self.gone = f"{self.name} has left"
            self._end(keep_arrived=True)

    def _end(self, *, keep_arrived: bool) -> None:
        assert self.gone is not None, "nothing ends while the process is there"
        for end in (*self.outbound.clear(), *self.inbound.clear(keep_arrived=keep_arrived)):
            end.lost(self.gone)

    def check(self, lane: Lane) -> None:
        """Raise `LinkLostError` if the process is not there any more."""
        if self.gone is not None:
            src, dst, tag = lane
            raise LinkLostError(self.gone, src=src, dst=dst, tag=tag)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def give_up_waiting(self) -> None:
        """Fail every operation that has not met its other end; this side closes."""
        for end in (*self.outbound.give_up_waiting(), *self.inbound.give_up_waiting()):
            end.closed()

    async def leave(self) -> None:
        """Finish what both sides have begun, say goodbye, and wait until the other side has read everything."""
        await self._until(lambda: self.gone is not None or self._quiet())
        self.gone = self.gone or "this side has closed"
        for rail in self.rails:
            rail.say_bye = True
        self.settle()
        await self._until(lambda: not self.rails)
        for rail in tuple(self.rails):
            rail.die(self.gone)
        self._end(keep_arrived=False)

    def _quiet(self) -> bool:
        busy = self.outbound.due or self.outbound.sends or self.inbound.filling
        return not busy and all(rail.idle for rail in self.rails)

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait for `done`, as long as something moves."""
        seen_bytes: dict[Rail, int] = {}
        while not done() and self._progresses(seen_bytes):
            with trio.move_on_after(_PATIENCE_S):
                while not done():
                    self._changed = trio.Event()
                    await self._changed.wait()
        self._changed = None

    def _progresses(self, seen_bytes: dict[Rail, int]) -> bool:
        """Whether a rail has moved data since it was seen, or never was."""
        moved_bytes = {rail: rail.read_bytes + rail.written_bytes for rail in self.rails}
        progress = [count - seen_bytes.get(rail, -_PROGRESS_BYTES) for rail, count in moved_bytes.items()]
        seen_bytes.update(moved_bytes)
        return max(progress, default=0) >= _PROGRESS_BYTES
