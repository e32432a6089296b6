"""The link to another process over sockets: its rails, and its messages when rails die or it leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from transports.address import RAILS_LIMIT
from transports.buffers import BounceBuffers
from transports.efa.departures import Departures
from transports.efa.rail import Rail
from transports.efa.sharing import delays_chunk, delays_small_frame
from transports.frame import CHUNK_BYTES, LIMITS, SAME_OVERLAP, FrameError, pack
from transports.matched import MatchedLink
from transports.matching import Engine, Lane, Limits, MessageKind, Send
from transports.signature import Signature

# Fewer bytes on every rail within two seconds are signs of life, not progress.
_PROGRESS_BYTES = 4096

_EAGER = int(MessageKind.EAGER)  # asking an enumeration takes 0.2 us


class EfaLink(MatchedLink):
    """The link to another process of the world.

    Rails are numbered from 0. A rail that replaces a dead one has the number of the dead one plus a multiple of
    `RAILS_LIMIT` (64): rail 1 is replaced by 65, then by 129. The number modulo 64 is the slot of the rail, here 1.

    Args:
        member: Index of the process.
        ranks: Ranks of the process.
        local: The ranks of this process.
        memory: Pool of buffers for messages that are received on loan.
        report: Prints a line about the loss of a rail or of the process.

    Attributes:
        rails: The living rails, in the order of their slots.
        departures: The frames that leave.
        silent_ticks: Number of calls of `check_liveness` since the last bytes arrived from the process.
        on_loss: Called with the slot of a dead rail that is to be replaced.
        note: Records an event of a rail for the timeline.
        watched: Whether the control plane detects the loss of the process. Then the process may be without any rail for
            a time. Otherwise it counts as lost when its last rail dies.
        last_loss: Why the rail that died last has died, as text.
    """

    least_progress = _PROGRESS_BYTES

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        local: Sequence[int],
        memory: BounceBuffers,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(member, ranks, local, LIMITS, memory)
        self._new_engine: Callable[[Limits], Engine] = partial(Engine, self.name, ranks, local, memory=memory)
        self.rails: list[Rail] = []
        self.departures: Departures
        self.set_limits(LIMITS)
        self.silent_ticks: int = 0
        self._report = report
        self.on_loss: Callable[[int], None] = _ignore_event
        self.note: Callable[[str], None] = _ignore_event
        self.watched: bool = False
        self.last_loss: str = ""
        # dead rails and why they died, by rail number, until the other side has reported how many frames it received
        self._lost_rails: dict[int, tuple[Rail, str]] = {}
        self._tried_numbers: dict[int, int] = {}  # by slot: the highest rail number that either side has tried
        self._received_frames: dict[int, int] = {}  # by number of a dead rail: frames that have arrived on it
        # by slot: number of the last dead rail on which frames have arrived, and how many did
        self._last_arrivals: dict[int, tuple[int, int]] = {}

    def set_limits(self, limits: Limits) -> None:
        """Set the limits that both processes have agreed on, by making a new engine; before the first message only."""
        self.engine: Engine = self._new_engine(limits)
        self.engine.incoming.flush_answers = self.flush
        self.departures = Departures(self.engine.outgoing, limits, self.memory)

    # -- departures ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Let idle rails write due frames."""
        rails = self.rails
        if len(rails) > 1:
            for rail in rails:
                if rail.rate.is_measuring:
                    rail.measure_state()
            rails = rails * 2  # a chunk that the last rail leaves may be for the first
        for rail in rails:
            if rail.idle and (rail.acknowledge or rail.bye_due or self.departures.due):
                rail.start_writing()
        if self._changed is not None:  # inlined `record_change`, because every message passes here
            self._changed.set()

    def queue_send(self, send: Send) -> None:
        """Queue a message; send it whole at once if the only rail is idle and nothing is due."""
        if not (len(self.rails) == 1 and self.rails[0].write_pushed(send)):
            super().queue_send(send)

    def defers_to_others(self, rail: Rail, *, small: bool = False) -> bool:
        """Whether another rail would deliver the next chunk sooner than this one; if `small`, the next small frames."""
        if len(self.rails) == 1:
            return False
        standing, peers = rail.measure_state(), [peer.measure_state() for peer in self.rails if peer is not rail]
        if small:
            return delays_small_frame(standing, peers)
        return delays_chunk(standing, peers, due_bytes=self.departures.due_bytes, chunk_bytes=CHUNK_BYTES)

    def catch_up(self) -> bool:
        """Read frames if a call waits for one, and write frames that are due; return whether any bytes moved."""
        moved, expects_frames = False, self.expects_frames
        for rail in tuple(self.rails):
            if expects_frames or not rail.idle:
                moved = rail.catch_up() or moved
        return moved

    @property
    def expects_frames(self) -> bool:
        """Whether a call waits for a frame of the other process: a message, or the answer to one."""
        return self.engine.incoming.awaited or bool(self.engine.outgoing.sends)

    def send_now(self, lane: Lane, view: memoryview, signature: Signature | None = None) -> bool:
        """Send a small message at once, in the calling task.

        False if that is impossible: no rail is idle, other messages wait to be announced, or credit is missing.

        Args:
            lane: Source, destination and tag.
            view: Bytes of the message, which may change after the call.
            signature: What the message is; None: anything.
        """
        for rail in self.rails:
            if rail.idle and (len(self.rails) == 1 or not self.defers_to_others(rail, small=True)):
                reserved = self.engine.outgoing.reserve_eager(view, signature)
                if reserved is None:
                    return False
                number, place = reserved
                rail.write_eager(self.departures.pack_header(view, _EAGER, number, *lane, place), view)
                return True
        return False

    def close_silent_rails(self) -> None:
        """Close rails whose bytes are not acknowledged, as when a cable is pulled; report rails that lose packets."""
        for rail in tuple(self.rails):
            # `check_health` closes the rail if its bytes stay unacknowledged, and returns a text about lost packets
            if losses := rail.check_health():
                self._report(f"{self.rail_name(rail.index)} {losses}")

    def check_liveness(self, limit_ticks: float, silence_s: float) -> None:
        """Request a sign of life on every rail; the owner calls this at regular intervals.

        The process is given up if no byte has arrived from it for more than `limit_ticks` calls. So is a single rail
        that the system has taken no bytes for, while bytes waited.

        Args:
            limit_ticks: Number of calls; infinite: silence proves nothing.
            silence_s: The same limit in seconds, for error messages.
        """
        if self.engine.gone is not None:
            return
        self.silent_ticks += 1
        if self.silent_ticks > limit_ticks:
            self.lose(f"nothing was received from it for {silence_s:g} s")
            return
        for rail in tuple(self.rails):
            if rail.count_stalled_ticks() > limit_ticks:
                rail.die(f"it has taken nothing for {silence_s:g} s")
            elif not rail.dead:
                rail.acknowledge = True
        self.flush()

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def handle_frame(self, rail: Rail, kind: int, fields: list[Any]) -> None:
        """Handle a frame that carries no data of ranks: about this rail, another rail, or a message.

        Frames about messages and about other rails are ignored once the process is lost or has left.

        Args:
            rail: The rail on which the frame has arrived.
            kind: Kind of the frame, a `MessageKind`.
            fields: Its fields. A payload, which is a text, is the last one.

        Raises:
            ProtocolError: The frame is invalid in this state.
        """
        if kind == MessageKind.ALIVE:
            rail.release_arrived_frames(*fields)
        elif kind == MessageKind.BYE:
            self._handle_bye(rail)
        elif self.engine.gone is None and kind == MessageKind.LOST:
            self._handle_lost_rail(*fields)
        elif self.engine.gone is None:
            self.engine.handle(kind, fields)

    # -- rails that die -----------------------------------------------------------------------------------------------

    def remove_lost_rail(self, rail: Rail, reason: str, *, evident: bool) -> None:
        """Continue without a rail that has died, and let it be replaced.

        If no rail is left, the process counts as lost, unless `watched` allows it to be without one for a time.

        Args:
            rail: The dead rail.
            reason: Why it died, for messages.
            evident: Whether this side has seen the fault itself. Then the process counts as lost even if `watched`.
        """
        self.rails.remove(rail)
        self.record_change()
        # The link has ended, or the rail has said goodbye: nothing is repeated.
        if self.engine.gone is not None or rail.farewell:
            return
        if not self.rails and (evident or not self.watched):
            which = f", {rail.ends}," if rail.ends and not evident else ""  # an evident fault is not the network's
            self.lose(f"the last connection to it{which} was lost: {reason}", evident=evident)
            return
        self._lost_rails[rail.index] = rail, reason
        self._received_frames[rail.index] = arrived = rail.reading.arrived_frames
        if arrived:
            self._last_arrivals[rail.slot] = rail.index, arrived
        self.last_loss = reason
        # The dead rail may have carried the LOST frame of another rail, and both sides may lose such frames: then each
        # would wait for the other's. So every death repeats the LOST frames of all dead rails.
        for index, count in self._received_frames.items():
            self.departures.queue_frame(pack(MessageKind.LOST, index, count))
        self.note(f"{self.rail_name(rail.index)} was lost: {reason}")
        self.on_loss(rail.slot)
        self.flush()

    def _handle_lost_rail(self, index: int, count: int) -> None:
        """Handle a `LOST` frame: close the rail, and send the frames after its first `count` again."""
        for rail in tuple(self.rails):
            if rail.index == index:
                rail.die("the other side has lost it")
        if index not in self._received_frames:
            self._answer_unknown_rail(index)
        if index in self._lost_rails:  # otherwise this LOST is a repetition
            self._repeat_frames(index, count)

    def _repeat_frames(self, index: int, count: int) -> None:
        """Queue all frames of a dead rail after the first `count` again, and report that to the user."""
        dead, reason = self._lost_rails.pop(index)
        nbytes = self.departures.requeue_lost_frames(dead.pop_missing_frames(count))
        others = f" over the other {len(self.rails)}" if self.rails else ""
        self._report(f"{self.rail_name(index)} was lost: {reason}; {nbytes} bytes are sent again{others}")

    def _answer_unknown_rail(self, index: int) -> None:
        """Answer a `LOST` frame about a rail that this side never had; do nothing if both sides have settled it.

        Raise `FrameError` if neither side has tried to make a rail of this number.
        """
        tried = self._tried_numbers.get(index % RAILS_LIMIT)
        if tried is None or index > tried:
            raise FrameError(f"peer reports the loss of rail {index}, which never existed; {SAME_OVERLAP}")
        # rails whose missing frames are not settled, and living ones
        numbers = (*self._received_frames, *(rail.index for rail in self.rails))
        # A rail that is younger than all known ones of its slot was tried by the other side, and never made here: no
        # frame of it has arrived. An older one has been settled by the handshake of its replacement, and needs no
        # answer.
        if index > max((number for number in numbers if number % RAILS_LIMIT == index % RAILS_LIMIT), default=-1):
            self._received_frames[index] = 0
            self.departures.queue_frame(pack(MessageKind.LOST, index, 0))

    def rail_name(self, index: int) -> str:
        """Return the name of a rail, for people."""
        return f"rail {index % RAILS_LIMIT} to {self.name}"

    # -- new rails ----------------------------------------------------------------------------------------------------

    def add_rail(self, rail: Rail) -> None:
        """Add a rail: the first one of its slot, or a replacement."""
        self._tried_numbers[rail.slot] = max(rail.index, self._tried_numbers.get(rail.slot, 0))
        for index in [index for index in self._received_frames if index % RAILS_LIMIT == rail.slot]:
            del self._received_frames[index]  # the handshake of the replacement has settled it on both sides
        self.rails.append(rail)
        self.rails.sort(key=lambda rail: rail.slot)
        if rail.index >= RAILS_LIMIT:
            rail.acknowledge = True  # shows the other side that the rail is in use here
            self.flush()

    def is_rail_lost(self, slot: int) -> bool:
        """Whether no rail of a slot is alive."""
        return all(rail.slot != slot for rail in self.rails)

    def last_arrival(self, slot: int) -> tuple[int, int]:
        """Return the number of the last dead rail of a slot on which frames have arrived, and how many frames did.

        If no frames have arrived on any dead rail of the slot, that is the number of its first rail, and 0.
        """
        return self._last_arrivals.get(slot, (slot, 0))

    def repeat_missing_frames(self, slot: int, last: int, count: int) -> None:
        """Send frames of a slot's dead rails again that the other side has not received, as it reports in a handshake.

        Of rail `last`, the frames after the first `count` are missing; of later rails, all frames are. Earlier rails
        are settled, because both sides exchanged their counts when they made `last`.

        Args:
            slot: Slot of the rails.
            last: Number of the last rail on which the other side has received frames.
            count: Number of frames that it received on that rail.

        Raises:
            FrameError: A rail before `last` is not settled here, so the report is wrong.
        """
        for index in sorted((number for number in self._lost_rails if number % RAILS_LIMIT == slot), reverse=True):
            if index < last:
                reason = f"peer received frames on rail {last}, but had not settled rail {index} before"
                raise FrameError(f"{reason}; {SAME_OVERLAP}")
            self._repeat_frames(index, count if index == last else 0)

    def next_rail_number(self, slot: int) -> int:
        """Return the rail number for the next attempt to connect in a slot, and record it as tried."""
        self._tried_numbers[slot] += RAILS_LIMIT
        return self._tried_numbers[slot]

    def rail_refusal_reason(self, index: int) -> str:
        """Return why the other process may not connect a rail of this number; "" if it may.

        In the second case the number is recorded as tried, so a second attempt with the same number is refused.
        """
        tried = self._tried_numbers.get(index % RAILS_LIMIT)
        if self.engine.gone is not None:
            return self.engine.gone
        if tried is None or index <= tried or not self.is_rail_lost(index % RAILS_LIMIT):
            return f"{self.rail_name(index)} is not lost; dial again later"
        self._tried_numbers[index % RAILS_LIMIT] = index
        return ""

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Report the loss of the process to the user, and fail all calls with it. A second call does nothing.

        Args:
            reason: The cause, for messages.
            evident: Whether this side has seen the fault itself, see `LinkLostError`.
        """
        if self.engine.gone is None:
            self._report(f"{self.name} is lost: {reason}")
            self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """Fail all calls with the process, and close the rails, without a report; arguments are those of `lose`."""
        if self.engine.gone is not None:
            return
        self._end_engine(f"{self.name} is lost: {reason}", evident=evident)
        for rail in tuple(self.rails):
            rail.die(reason)

    def _handle_bye(self, rail: Rail) -> None:
        """Record a goodbye on a rail. When all rails have one, the process has left; arrived messages stay."""
        rail.farewell = True
        # A replacement counts once frames have arrived on it: until then the other side may not know of it.
        in_use = [each for each in self.rails if each.index < RAILS_LIMIT or each.reading.arrived_frames]
        if self.engine.gone is None and all(each.farewell for each in in_use):
            self._end_engine(f"{self.name} has left", keep_arrived=True)

    def _end_engine(self, reason: str, *, evident: bool = False, keep_arrived: bool = False) -> None:
        """Drop all frames, and fail the calls that wait for the process; arguments are as of `Engine.end`."""
        self.departures.clear()
        self.engine.end(reason, evident=evident, keep_arrived=keep_arrived)

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Finish matched messages, send goodbyes, and wait until the other side has read all."""
        await self.wait_until(lambda: self.engine.gone is not None or self._has_sent_all())
        self.engine.gone = self.engine.gone or "this side has closed"
        for rail in self.rails:
            rail.bye_due = True
        self.flush()
        await self.wait_until(lambda: not self.rails)
        for rail in tuple(self.rails):
            rail.die(self.engine.gone)
        self._end_engine(self.engine.gone)

    def _has_sent_all(self) -> bool:
        """Whether all frames have left, and every dead rail's missing frames have been sent again."""
        settled = not self._lost_rails and not self.departures.due
        return self.engine.quiet and settled and all(rail.idle for rail in self.rails)

    def progress_counts(self) -> dict[Hashable, int]:
        """Return the bytes that each rail has read and written."""
        return {rail: rail.read_bytes + rail.written_bytes for rail in self.rails}


def _ignore_event(about: object) -> None:
    """Ignore an event of a rail."""
