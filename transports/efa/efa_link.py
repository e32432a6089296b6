"""The link to another process over sockets: its rails, and its messages when rails die or it leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

from transports.buffers import BounceBuffers
from transports.efa.address import RAILS_LIMIT
from transports.efa.departures import LIMITS, Departures
from transports.efa.rail import Rail
from transports.efa.reading import message_of
from transports.efa.sharing import holds_back, holds_up
from transports.frame import CHUNK_BYTES, FrameError, FrameKind, pack
from transports.matched import MatchedLink
from transports.matching import Engine, Lane, Limits, Send

# Less than this on every rail within two seconds is signs of life, not progress.
_PROGRESS_BYTES = 4096

_EAGER = int(FrameKind.EAGER)  # asking an enumeration takes 0.2 us
_OF_RAILS = frozenset(map(int, (FrameKind.ALIVE, FrameKind.LOST, FrameKind.BYE)))


class EfaLink(MatchedLink):
    """Another process of the world.

    Its rails have numbers: the first ones from 0, and one that takes the place of another a number that is higher by
    `RAILS_LIMIT` or a multiple of it.

    Args:
        member: Its index.
        ranks: Its ranks.
        local: The ranks of this process.
        memory: For messages that are lent.
        report: Takes a line about rails that are lost, and about its loss.
        limits: The limits that both have agreed on.

    Attributes:
        rails: The living connections to it.
        departures: The frames that leave for it.
        silent_ticks: How often the keeper has looked since it was last heard.
        on_loss: Called with the place of a rail that has died, if it is to come back.
        note: Takes events of rails for the timeline.
        watched: Whether it may live without any connection; otherwise it is lost with the last one.
        last_loss: Why the last dead rail died.
    """

    engine: Engine

    progress = _PROGRESS_BYTES

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        local: Sequence[int],
        memory: BounceBuffers,
        report: Callable[[str], None],
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(member, ranks, local, limits, memory)
        self._new_engine: Callable[[Limits], Engine] = partial(Engine, self.name, ranks, local, memory=memory)
        self.rails: list[Rail] = []
        self.departures: Departures = Departures(self.engine.outgoing, limits, memory)
        self.engine.incoming.said = self.settle
        self.silent_ticks: int = 0
        self._report = report
        self.on_loss: Callable[[int], None] = _nothing
        self.note: Callable[[str], None] = _nothing
        self.watched: bool = False
        self.last_loss: str = ""
        self._dead: dict[int, tuple[Rail, str]] = {}  # until the other side has said how many frames it got
        self._tried: dict[int, int] = {}  # by place: the last number that a connection was to have
        self._arrived: dict[int, int] = {}  # frames that this side got on each rail that is dead
        self._last: dict[int, tuple[int, int]] = {}  # by place: the last dead rail that brought any, and how many

    def agree(self, limits: Limits) -> None:
        """Change the limits, before either side has said anything."""
        self.engine = self._new_engine(limits)
        self.engine.incoming.said = self.settle
        self.departures = Departures(self.engine.outgoing, limits, self.memory)

    # -- departures ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let idle rails take due frames."""
        rails = self.rails
        if len(rails) > 1:
            for rail in rails:
                rail.observe()
            rails = rails * 2  # a chunk that the last rail spares may be for the first
        for rail in rails:
            if rail.idle and (rail.acknowledge or rail.say_bye or self.departures.due):
                rail.start_writing()
        if self._changed is not None:  # without a call, for every message comes by here
            self._changed.set()

    def post(self, send: Send) -> None:
        """Send a message when its turn comes; whole and at once if the only rail is idle, and nothing is due."""
        if not (len(self.rails) == 1 and self.rails[0].push(send)):
            super().post(send)

    def spares(self, rail: Rail, *, small: bool = False) -> bool:
        """Whether other rails would bring the next chunk, or small frames, sooner than this one."""
        if len(self.rails) == 1:
            return False
        mine, others = rail.standing(), [other.standing() for other in self.rails if other is not rail]
        if small:
            return holds_up(mine, others)
        return holds_back(mine, others, due_bytes=self.departures.due_bytes, chunk_bytes=CHUNK_BYTES)

    def catch_up(self) -> bool:
        """Read frames if a call waits for some, and write frames that wait for room; return whether anything moved."""
        moved, wants = False, self.wants
        for rail in tuple(self.rails):
            if wants or not rail.idle:
                moved = rail.catch_up() or moved
        return moved

    @property
    def wants(self) -> bool:
        """Whether a call waits for a frame of the other process."""
        return self.engine.incoming.wanted or bool(self.engine.outgoing.sends)

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message from the calling task, if a rail is idle and nothing waits to be announced."""
        for rail in self.rails:
            if rail.idle and (len(self.rails) == 1 or not self.spares(rail, small=True)):
                number = self.engine.outgoing.eager(view)
                if number is None:
                    return False
                rail.put(self.departures.head(view, _EAGER, number, *lane), view)
                return True
        return False

    def check_acknowledged(self) -> None:
        """Lose the rails whose other end acknowledges nothing, as when a cable is pulled; report lost packets."""
        for rail in tuple(self.rails):
            if told := rail.check_health():
                self._report(f"{self.name_of(rail.index)} {told}")

    def tick(self, limit: float, silence_s: float) -> None:
        """Ask for a sign of life; give the process up after too many silent ticks, and rails that take nothing."""
        if self.engine.gone is not None:
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

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def eager(self, fields: list[int], payload: memoryview) -> None:
        """Take a small message, which must be copied."""
        if self.engine.gone is None:
            self.engine.incoming.eager(fields, payload)

    def take(self, rail: Rail, kind: int, fields: list[int]) -> None:
        """Act on a frame without payload."""
        if kind in _OF_RAILS:
            self._take_of_rails(rail, kind, fields)
        elif self.engine.gone is None:
            self.engine.hear(kind, fields)

    def _take_of_rails(self, rail: Rail, kind: int, fields: list[int]) -> None:
        if kind == FrameKind.ALIVE:
            rail.acknowledged(*fields)
        elif kind == FrameKind.BYE:
            self._bye(rail)
        elif self.engine.gone is None:
            self._lost_there(*fields)

    def push(self, fields: list[int], nbytes: int) -> memoryview:
        """Take the announcement of a message that comes with its first chunk, and return where that belongs."""
        if self.engine.gone is None:
            return self.engine.incoming.push_with(nbytes, *fields)
        return self.engine.incoming.place(fields[0], 0, nbytes)

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return where a chunk belongs."""
        return self.engine.incoming.place(number, offset, nbytes)

    def filled(self, number: int, offset: int, nbytes: int) -> None:
        """Note that a chunk is in its place."""
        self.engine.incoming.filled(number, offset, nbytes)

    def message(self, number: int) -> str:
        """Say which message comes in chunks under a number, for people."""
        receive = self.engine.incoming.filling.get(number)
        return f"message {number}" if receive is None else message_of(*receive.lane)

    # -- rails that die -----------------------------------------------------------------------------------------------

    def rail_died(self, rail: Rail, reason: str, *, evident: bool = False) -> None:
        """Continue without a rail that has died."""
        self.rails.remove(rail)
        self.note_change()
        if self.engine.gone is not None or rail.farewell:
            return
        if not self.rails and (evident or not self.watched):
            which = f", {rail.ends}," if rail.ends and not evident else ""  # an evident fault is not one of its way
            self.lose(f"the last connection to it{which} was lost: {reason}", evident=evident)
            return
        self._dead[rail.index] = rail, reason
        self._arrived[rail.index] = arrived = rail.reading.arrived
        if arrived:
            self._last[rail.index % RAILS_LIMIT] = rail.index, arrived
        self.last_loss = reason
        # The rail may have carried the news of another rail's death, and both sides may lose such news: then each would
        # wait for the other's. So every death repeats the news of all of them.
        for index, count in self._arrived.items():
            self.departures.add(pack(FrameKind.LOST, index, count))
        self.note(f"{self.name_of(rail.index)} was lost: {reason}")
        self.on_loss(rail.index % RAILS_LIMIT)
        self.settle()

    def _lost_there(self, index: int, count: int) -> None:
        """Repeat the frames of this side after the first `count`: the other side has lost the rail."""
        for rail in tuple(self.rails):
            if rail.index == index:
                rail.die("the other side has lost it")
        if index not in self._arrived:
            self._never_was(index)
        if index in self._dead:  # or it has been said before
            self._repeat(index, count)

    def _repeat(self, index: int, count: int) -> None:
        """Send again all frames of a dead rail after the first `count`."""
        dead, reason = self._dead.pop(index)
        nbytes = self.departures.repeat(dead.unarrived(count))
        others = f" over the other {len(self.rails)}" if self.rails else ""
        self._report(f"{self.name_of(index)} was lost: {reason}; {nbytes} bytes are sent again{others}")

    def _never_was(self, index: int) -> None:
        """Answer late news of a rail's death, or news of a rail that this side has never had."""
        tried = self._tried.get(index % RAILS_LIMIT)
        if tried is None or index > tried:
            raise FrameError(f"rail {index} is said to be lost, but is not known")
        if index > max(self._had(index), default=-1):
            self._arrived[index] = 0
            self.departures.add(pack(FrameKind.LOST, index, 0))

    def _had(self, index: int) -> list[int]:
        """Return the numbers of living and unsettled rails of this side at the place of one."""
        return [
            one
            for one in (*self._arrived, *(rail.index for rail in self.rails))
            if one % RAILS_LIMIT == index % RAILS_LIMIT
        ]

    def name_of(self, index: int) -> str:
        """Name a rail, for people."""
        return f"rail {index % RAILS_LIMIT} to {self.name}"

    # -- rails that come ----------------------------------------------------------------------------------------------

    def add(self, rail: Rail) -> None:
        """Use a connection, the first one at its place or a replacement of another."""
        place = rail.index % RAILS_LIMIT
        self._tried[place] = max(rail.index, self._tried.get(place, 0))
        for index in [index for index in self._arrived if index % RAILS_LIMIT == place]:
            del self._arrived[index]  # both sides have settled it, or they would not have come together again
        self.rails.append(rail)
        self.rails.sort(key=lambda one: one.index % RAILS_LIMIT)
        if rail.index >= RAILS_LIMIT:
            rail.acknowledge = True  # the other side learns from it that the rail is in use here
            self.settle()

    def lacks(self, place: int) -> bool:
        """Whether the rail at a place is dead."""
        return all(rail.index % RAILS_LIMIT != place for rail in self.rails)

    def got(self, place: int) -> tuple[int, int]:
        """Return the last dead rail at a place on which anything has come, and the number of its frames."""
        return self._last.get(place, (place, 0))

    def got_there(self, place: int, last: int, count: int) -> None:
        """Repeat the frames of dead rails at a place that the other side has not got; it says what `got` says here.

        There can be rails after its last one, which the other side has never had, or where nothing came. Rails before
        it are settled: both sides said their counts when they made that one.

        Raises:
            FrameError: The other side contradicts itself.
        """
        for index in sorted((one for one in self._dead if one % RAILS_LIMIT == place), reverse=True):
            if index < last:
                raise FrameError(f"rail {last} is said to have come after rail {index}, which is not settled")
            self._repeat(index, count if index == last else 0)

    def next_number(self, place: int) -> int:
        """Return the number of the next connection that is tried at a place."""
        self._tried[place] += RAILS_LIMIT
        return self._tried[place]

    def why_not(self, index: int) -> str:
        """Return why the other process may not connect under a number; empty if it may, once."""
        tried = self._tried.get(index % RAILS_LIMIT)
        if self.engine.gone is not None:
            return self.engine.gone
        if tried is None or index <= tried or not self.lacks(index % RAILS_LIMIT):
            return f"{self.name_of(index)} is not lost, or was a moment ago"
        self._tried[index % RAILS_LIMIT] = index
        return ""

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Give the process up: every operation with its ranks fails."""
        if self.engine.gone is None:
            self._report(f"{self.name} is lost: {reason}")
            self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """Give the process up without a report to the user, who has been told."""
        if self.engine.gone is not None:
            return
        self._end(f"{self.name} is lost: {reason}", evident=evident)
        for rail in tuple(self.rails):
            rail.die(reason)

    def _bye(self, rail: Rail) -> None:
        rail.farewell = True
        # A rail that has come back counts once it was heard: until then the other side may not know of it.
        sure = [rail for rail in self.rails if rail.index < RAILS_LIMIT or rail.reading.arrived]
        if self.engine.gone is None and all(rail.farewell for rail in sure):
            self._end(f"{self.name} has left", keep_arrived=True)

    def _end(self, reason: str, *, evident: bool = False, keep_arrived: bool = False) -> None:
        self.departures.clear()
        self.engine.end(reason, evident=evident, keep_arrived=keep_arrived)

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Finish messages that both sides have begun, say goodbye, and wait until the other side has read all."""
        await self.until(lambda: self.engine.gone is not None or self._quiet())
        self.engine.gone = self.engine.gone or "this side has closed"
        for rail in self.rails:
            rail.say_bye = True
        self.settle()
        await self.until(lambda: not self.rails)
        for rail in tuple(self.rails):
            rail.die(self.engine.gone)
        self._end(self.engine.gone)

    def _quiet(self) -> bool:
        settled = not self._dead and not self.departures.due
        return self.engine.quiet and settled and all(rail.idle for rail in self.rails)

    def traffic(self) -> dict[Hashable, int]:
        """Return the bytes that each rail has moved."""
        return {rail: rail.read_bytes + rail.written_bytes for rail in self.rails}


def _nothing(about: object) -> None:
    pass
