"""The link to another process over sockets: its rails, and its messages when rails die or it leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from transports.address import RAILS_LIMIT
from transports.buffers import BounceBuffers
from transports.efa.departures import LIMITS, Departures
from transports.efa.rail import Rail
from transports.efa.sharing import delays_chunk, delays_small_frame
from transports.frame import CHUNK_BYTES, FrameError, pack
from transports.matched import MatchedLink
from transports.matching import Engine, Lane, Limits, MessageKind, Send
from transports.signature import Signature

# Fewer bytes on every rail within two seconds are signs of life, not progress.
_PROGRESS_BYTES = 4096

_EAGER = int(MessageKind.EAGER)  # asking an enumeration takes 0.2 us


class EfaLink(MatchedLink):
    """The link to another process of the world.

    Rails are numbered from 0; the number of a replacement is higher by `RAILS_LIMIT` or a multiple of it. The slot of a
    rail is its number modulo `RAILS_LIMIT`.

    Args:
        member: Index of the process.
        ranks: Ranks of the process.
        local: The ranks of this process.
        memory: Buffers of messages on loan.
        report: Prints a line about the loss of a rail or of the process.
        limits: The limits that both have agreed on.

    Attributes:
        rails: The living rails.
        departures: The frames that leave.
        silent_ticks: Ticks since the last bytes of the process.
        on_loss: Called with the slot of a dead rail that is to be replaced.
        note: Records events of rails for the timeline.
        watched: Whether the process may live without any rail; otherwise it is lost with the last one.
        last_loss: Why the last dead rail died.
    """

    engine: Engine

    least_progress = _PROGRESS_BYTES

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
        self.engine.incoming.flush_answers = self.flush
        self.silent_ticks: int = 0
        self._report = report
        self.on_loss: Callable[[int], None] = _ignore_event
        self.note: Callable[[str], None] = _ignore_event
        self.watched: bool = False
        self.last_loss: str = ""
        # until the other side has reported how many frames it received
        self._lost_rails: dict[int, tuple[Rail, str]] = {}
        self._tried_numbers: dict[int, int] = {}  # by slot: the highest number tried
        self._received_frames: dict[int, int] = {}  # frames received on each dead rail
        # by slot: the last dead rail that brought frames, and their number
        self._last_arrivals: dict[int, tuple[int, int]] = {}

    def set_limits(self, limits: Limits) -> None:
        """Set the limits that both processes have agreed on, in a new engine; before the first message only."""
        self.engine = self._new_engine(limits)
        self.engine.incoming.flush_answers = self.flush
        self.departures = Departures(self.engine.outgoing, limits, self.memory)

    # -- departures ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Let idle rails write due frames."""
        rails = self.rails
        if len(rails) > 1:
            for rail in rails:
                rail.observe()
            rails = rails * 2  # a chunk that the last rail leaves may be for the first
        for rail in rails:
            if rail.idle and (rail.acknowledge or rail.bye_due or self.departures.due):
                rail.start_writing()
        if self._changed is not None:  # inlined `record_change`, because every message passes here
            self._changed.set()

    def queue_send(self, send: Send) -> None:
        """Queue a message; send it whole at once if the only rail is idle and nothing is due."""
        if not (len(self.rails) == 1 and self.rails[0].push(send)):
            super().queue_send(send)

    def defers_to_others(self, rail: Rail, *, small: bool = False) -> bool:
        """Whether other rails would deliver the next chunk, or with `small` the next small frames, sooner."""
        if len(self.rails) == 1:
            return False
        standing, peers = rail.measure_state(), [peer.measure_state() for peer in self.rails if peer is not rail]
        if small:
            return delays_small_frame(standing, peers)
        return delays_chunk(standing, peers, due_bytes=self.departures.due_bytes, chunk_bytes=CHUNK_BYTES)

    def catch_up(self) -> bool:
        """Read frames if a call waits for a frame, and write frames that wait for room; return whether bytes moved."""
        moved, expects_frames = False, self.expects_frames
        for rail in tuple(self.rails):
            if expects_frames or not rail.idle:
                moved = rail.catch_up() or moved
        return moved

    @property
    def expects_frames(self) -> bool:
        """Whether a call waits for a frame of the other process."""
        return self.engine.incoming.awaited or bool(self.engine.outgoing.sends)

    def send_now(self, lane: Lane, view: memoryview, signature: Signature | None = None) -> bool:
        """Send a small message from the calling task, if a rail is idle and nothing waits to be announced."""
        for rail in self.rails:
            if rail.idle and (len(self.rails) == 1 or not self.defers_to_others(rail, small=True)):
                reserved = self.engine.outgoing.reserve_eager(view, signature)
                if reserved is None:
                    return False
                number, place = reserved
                rail.put(self.departures.pack_header(view, _EAGER, number, *lane, place), view)
                return True
        return False

    def check_acknowledged(self) -> None:
        """Close rails whose bytes are not acknowledged, as when a cable is pulled; report rails that lose packets."""
        for rail in tuple(self.rails):
            if losses := rail.check_health():
                self._report(f"{self.rail_name(rail.index)} {losses}")

    def tick(self, limit: float, silence_s: float) -> None:
        """Request a sign of life; give up the process, or rails that take no bytes, after `limit` silent ticks."""
        if self.engine.gone is not None:
            return
        self.silent_ticks += 1
        if self.silent_ticks > limit:
            self.lose(f"nothing was received from it for {silence_s:g} s")
            return
        for rail in tuple(self.rails):
            if rail.count_stalled_ticks() > limit:
                rail.die(f"it has taken nothing for {silence_s:g} s")
            elif not rail.dead:
                rail.acknowledge = True
        self.flush()

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def handle_frame(self, rail: Rail, kind: int, fields: list[Any]) -> None:
        """Handle a frame without payload, or with a text, about this rail or about messages."""
        if kind == MessageKind.ALIVE:
            rail.release_arrived(*fields)
        elif kind == MessageKind.BYE:
            self._handle_bye(rail)
        elif self.engine.gone is None and kind == MessageKind.LOST:
            self._handle_lost_rail(*fields)
        elif self.engine.gone is None:
            self.engine.handle(kind, fields)

    # -- rails that die -----------------------------------------------------------------------------------------------

    def rail_lost(self, rail: Rail, reason: str, *, evident: bool = False) -> None:
        """Continue without a rail that has died."""
        self.rails.remove(rail)
        self.record_change()
        if self.engine.gone is not None or rail.farewell:
            return
        if not self.rails and (evident or not self.watched):
            which = f", {rail.ends}," if rail.ends and not evident else ""  # an evident fault is not the network's
            self.lose(f"the last connection to it{which} was lost: {reason}", evident=evident)
            return
        self._lost_rails[rail.index] = rail, reason
        self._received_frames[rail.index] = arrived = rail.reading.arrived
        if arrived:
            self._last_arrivals[rail.index % RAILS_LIMIT] = rail.index, arrived
        self.last_loss = reason
        # The dead rail may have carried the LOST frame of another rail, and both sides may lose such frames: then each
        # would wait for the other's. So every death repeats the LOST frames of all dead rails.
        for index, count in self._received_frames.items():
            self.departures.add(pack(MessageKind.LOST, index, count))
        self.note(f"{self.rail_name(rail.index)} was lost: {reason}")
        self.on_loss(rail.index % RAILS_LIMIT)
        self.flush()

    def _handle_lost_rail(self, index: int, count: int) -> None:
        """Close a rail that the other side has lost, and repeat its frames after the first `count`."""
        for rail in tuple(self.rails):
            if rail.index == index:
                rail.die("the other side has lost it")
        if index not in self._received_frames:
            self._answer_unknown(index)
        if index in self._lost_rails:  # otherwise this LOST is a repetition
            self._repeat_frames(index, count)

    def _repeat_frames(self, index: int, count: int) -> None:
        """Send again all frames of a dead rail after the first `count`."""
        dead, reason = self._lost_rails.pop(index)
        nbytes = self.departures.repeat(dead.pop_unarrived(count))
        others = f" over the other {len(self.rails)}" if self.rails else ""
        self._report(f"{self.rail_name(index)} was lost: {reason}; {nbytes} bytes are sent again{others}")

    def _answer_unknown(self, index: int) -> None:
        """Answer a LOST frame of a rail that this side has settled or never had."""
        tried = self._tried_numbers.get(index % RAILS_LIMIT)
        if tried is None or index > tried:
            raise FrameError(
                f"peer reports the loss of rail {index}, which never existed; install the same overlap in every process"
            )
        numbers = (*self._received_frames, *(rail.index for rail in self.rails))  # living and unsettled rails
        if index > max((number for number in numbers if number % RAILS_LIMIT == index % RAILS_LIMIT), default=-1):
            self._received_frames[index] = 0
            self.departures.add(pack(MessageKind.LOST, index, 0))

    def rail_name(self, index: int) -> str:
        """Return the name of a rail, for people."""
        return f"rail {index % RAILS_LIMIT} to {self.name}"

    # -- new rails ----------------------------------------------------------------------------------------------------

    def add(self, rail: Rail) -> None:
        """Add a rail: the first one of its slot, or a replacement."""
        slot = rail.index % RAILS_LIMIT
        self._tried_numbers[slot] = max(rail.index, self._tried_numbers.get(slot, 0))
        for index in [index for index in self._received_frames if index % RAILS_LIMIT == slot]:
            del self._received_frames[index]  # the handshake of the replacement has settled it on both sides
        self.rails.append(rail)
        self.rails.sort(key=lambda rail: rail.index % RAILS_LIMIT)
        if rail.index >= RAILS_LIMIT:
            rail.acknowledge = True  # shows the other side that the rail is in use here
            self.flush()

    def is_rail_lost(self, slot: int) -> bool:
        """Whether no rail of a slot is alive."""
        return all(rail.index % RAILS_LIMIT != slot for rail in self.rails)

    def last_arrival(self, slot: int) -> tuple[int, int]:
        """Return the last dead rail of a slot that brought frames, and their number."""
        return self._last_arrivals.get(slot, (slot, 0))

    def repeat_missing(self, slot: int, last: int, count: int) -> None:
        """Repeat frames of a slot's dead rails that the other side has not received, once it has said how far it came.

        The other side never used rails after `last`, or received nothing there. Rails before `last` are settled: both
        sides exchanged their counts when they made `last`.

        Args:
            slot: Position of the rails in the link.
            last: Number of the last rail that the other side has received frames on.
            count: Number of frames that arrived on that rail.

        Raises:
            FrameError: The other side contradicts itself.
        """
        for index in sorted((number for number in self._lost_rails if number % RAILS_LIMIT == slot), reverse=True):
            if index < last:
                raise FrameError(
                    f"peer received frames on rail {last}, but had not settled rail {index} before; "
                    "install the same overlap in every process"
                )
            self._repeat_frames(index, count if index == last else 0)

    def next_number(self, slot: int) -> int:
        """Return the number for the next attempt to connect in a slot."""
        self._tried_numbers[slot] += RAILS_LIMIT
        return self._tried_numbers[slot]

    def refusal_reason(self, index: int) -> str:
        """Return why the other process may not connect a rail of this number; "" allows it, once for each number."""
        tried = self._tried_numbers.get(index % RAILS_LIMIT)
        if self.engine.gone is not None:
            return self.engine.gone
        if tried is None or index <= tried or not self.is_rail_lost(index % RAILS_LIMIT):
            return f"{self.rail_name(index)} is not lost; dial again later"
        self._tried_numbers[index % RAILS_LIMIT] = index
        return ""

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Report the loss of the process to the user, and end all calls with the process."""
        if self.engine.gone is None:
            self._report(f"{self.name} is lost: {reason}")
            self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """End all calls with the process without a report to the user, and close the rails."""
        if self.engine.gone is not None:
            return
        self._end(f"{self.name} is lost: {reason}", evident=evident)
        for rail in tuple(self.rails):
            rail.die(reason)

    def _handle_bye(self, rail: Rail) -> None:
        """Record the goodbye on a rail; with the last one the process has left, and arrived messages stay."""
        rail.farewell = True
        # A replacement counts once it has brought frames: until then the other side may not know of it.
        in_use = [rail for rail in self.rails if rail.index < RAILS_LIMIT or rail.reading.arrived]
        if self.engine.gone is None and all(rail.farewell for rail in in_use):
            self._end(f"{self.name} has left", keep_arrived=True)

    def _end(self, reason: str, *, evident: bool = False, keep_arrived: bool = False) -> None:
        """Drop all frames, and fail the calls that wait for the process."""
        self.departures.clear()
        self.engine.end(reason, evident=evident, keep_arrived=keep_arrived)

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Finish matched messages, send goodbyes, and wait until the other side has read all."""
        await self.until(lambda: self.engine.gone is not None or self._is_quiet())
        self.engine.gone = self.engine.gone or "this side has closed"
        for rail in self.rails:
            rail.bye_due = True
        self.flush()
        await self.until(lambda: not self.rails)
        for rail in tuple(self.rails):
            rail.die(self.engine.gone)
        self._end(self.engine.gone)

    def _is_quiet(self) -> bool:
        """Whether all messages and frames have left, and no dead rail waits to be settled."""
        settled = not self._lost_rails and not self.departures.due
        return self.engine.quiet and settled and all(rail.idle for rail in self.rails)

    def progress_counts(self) -> dict[Hashable, int]:
        """Return the bytes that each rail has read and written."""
        return {rail: rail.read_bytes + rail.written_bytes for rail in self.rails}


def _ignore_event(about: object) -> None:
    """Ignore an event of a rail."""
