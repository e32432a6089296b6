"""Paced: the latency and bandwidth of a real wire, emulated on the clock that Trio runs on.

Each directed pair of ranks has a wire of its own. A wire is a *plan*: the order in which its messages leave, and the
exact times at which they do. Only a new or a removed message changes the plan. So one task begins the messages of all
wires, and late wake-ups of that task never add up to a lower rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from transports.base import Transport
from transports.buffers import Buffer
from transports.failures import ArgumentError
from transports.request import Done, Request
from transports.wire import Wire
from transports.wrappers import Delaying, RelayedRequest, WrappedWire

#: A more urgent message waits at most this long for the one that is leaving. Half a millisecond is short compared with
#: the transfer of a gradient bucket. It costs nothing, because no task wakes at a boundary. A power of two keeps
#: virtual times exact.
QUANTUM_S = 2.0**-11


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """The speed of a wire.

    Raises:
        ArgumentError: A latency below zero or not finite; a bandwidth not above zero.
    """

    latency_s: float  # From the departure of a message's last byte to its arrival; other messages may leave in between
    bandwidth_bytes_per_s: float  # Bytes that leave per second; may be ``inf``

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ArgumentError(f"latency_s is {self.latency_s}; it must be 0 or more, and finite")
        if not self.bandwidth_bytes_per_s > 0:
            raise ArgumentError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; it must be above 0")


def by_kind(
    kind_of: Callable[[int, int], str], speeds: Mapping[str, LinkSpeed | None]
) -> Callable[[int, int], LinkSpeed | None]:
    """Return the `links` argument of `Paced` for a fabric with a few kinds of links.

    Args:
        kind_of: Called with two ranks, src and dst; returns the kind of the link between them, as text.
        speeds: The speed of each kind; None: links of that kind are not slowed down.

    Returns:
        A function that returns the speed between two ranks. It raises `ArgumentError` for a kind that ``speeds`` does
        not name.
    """

    def find_speed(src: int, dst: int) -> LinkSpeed | None:
        kind = kind_of(src, dst)
        if kind not in speeds:
            raise ArgumentError(f"no speed for links of kind {kind!r}; speeds names {', '.join(map(repr, speeds))}")
        return speeds[kind]

    return find_speed


@dataclass(slots=True, eq=False)
class PlannedTransfer:
    """A message on the plan of a wire."""

    tag: int
    left_bytes: float  # Bytes that have not left, at the time from which on the wire is planned
    # The effective priority: the message must follow earlier ones of its tag, so it is not more urgent than they are
    urgency: int
    planned: Callable[[float], None]  # Called with the time of arrival, at first and whenever that time changes
    sent_at_s: float = math.inf  # Planned time at which the last byte leaves


class PlannedWire:
    """The wire from one rank to another: a pure state machine; callers pass the time.

    One message leaves at a time, the most urgent first; among equally urgent ones the first that was added. The message
    that is leaving is interrupted only for a more urgent one, after a whole number of quanta.

    Args:
        speed: Latency and bandwidth of the wire.
        quantum_s: Length of a quantum in seconds.
    """

    def __init__(self, speed: LinkSpeed, *, quantum_s: float = QUANTUM_S) -> None:
        self._bytes_per_s = speed.bandwidth_bytes_per_s
        self._latency_s = speed.latency_s
        self._quantum_s = quantum_s
        self._queue: list[PlannedTransfer] = []  # in the order in which they leave
        # Start of the plan: until then the wire carries bytes that no call can change; then the queue leaves without
        # gaps.
        self._busy_until_s = -math.inf
        self._last_of_tag: dict[int, PlannedTransfer] = {}  # the message of each tag that was added last

    def add(
        self, tag: int, nbytes: int, *, priority: int, now_s: float, planned: Callable[[float], None]
    ) -> PlannedTransfer:
        """Add a message to the plan; ``planned`` is called with its time of arrival, now and whenever that changes.

        Cost: one call of ``planned`` for the message, and one for each message that it overtakes.

        Args:
            tag: Messages of one tag leave in the order of their calls.
            nbytes: Length of the message.
            priority: Lower is more urgent.
            now_s: The time, which never goes back.
            planned: Called with the time of arrival, on the clock of `now_s`.
        """
        self._drop_departed(now_s)
        last = self._last_of_tag.get(tag)
        # a higher number is less urgent
        urgency = priority if last is None else max(priority, last.urgency)
        transfer = self._last_of_tag[tag] = PlannedTransfer(tag, nbytes, urgency, planned)
        place = bisect_right(self._queue, urgency, key=lambda other: other.urgency)
        # more urgent than the message that is leaving now
        if place == 0:
            self._interrupt_first_transfer(now_s)
        self._queue.insert(place, transfer)
        self._plan_times_from(place)
        return transfer

    def remove(self, transfer: PlannedTransfer, *, now_s: float) -> None:
        """Remove a message from the plan, unless it has left.

        If the message is leaving now, the wire stays busy until the end of its present quantum.
        """
        self._drop_departed(now_s)
        if transfer.sent_at_s <= now_s:
            return
        if self._queue and transfer is self._queue[0]:
            self._interrupt_first_transfer(now_s)
        if transfer in self._queue:
            place = self._queue.index(transfer)
            del self._queue[place]
            self._forget_last_of_tag(transfer)
            self._plan_times_from(place)

    def _drop_departed(self, now_s: float) -> None:
        """Drop messages that left before `now_s`, not at `now_s`: calls at the same time may come in any order."""
        while self._queue and self._queue[0].sent_at_s < now_s:
            self._drop_first_transfer()
        if not self._queue:
            self._busy_until_s = max(self._busy_until_s, now_s)

    def _interrupt_first_transfer(self, now_s: float) -> None:
        """Let the plan begin at the next quantum boundary of the message that is leaving; nothing if none is.

        Bytes that leave before the boundary are no longer part of the plan.
        """
        if not self._queue or self._busy_until_s >= now_s:
            return
        first = self._queue[0]
        quanta = math.ceil((now_s - self._busy_until_s) / self._quantum_s)
        boundary_s = self._busy_until_s + quanta * self._quantum_s
        if boundary_s >= first.sent_at_s:
            self._drop_first_transfer()
        else:
            first.left_bytes -= quanta * self._quantum_s * self._bytes_per_s
            self._busy_until_s = boundary_s

    def _plan_times_from(self, place: int) -> None:
        """Compute the times of the messages at `place` and behind it in the queue, and report their arrivals."""
        at_s = self._queue[place - 1].sent_at_s if place else self._busy_until_s
        for transfer in self._queue[place:]:
            at_s += transfer.left_bytes / self._bytes_per_s
            transfer.sent_at_s = at_s
            transfer.planned(at_s + self._latency_s)

    def _drop_first_transfer(self) -> None:
        """Remove the first message of the queue, whose last byte has left, from the plan."""
        first = self._queue.pop(0)
        self._busy_until_s = first.sent_at_s
        self._forget_last_of_tag(first)

    def _forget_last_of_tag(self, transfer: PlannedTransfer) -> None:
        """Let later messages of a transfer's tag begin without regard to it."""
        if self._last_of_tag.get(transfer.tag) is transfer:
            del self._last_of_tag[transfer.tag]


class Paced(Delaying):
    """A transport that slows another one down to the speed of real links.

    A message is sent over the inner transport at the time at which its last byte would have arrived, so ``send``
    returns after delivery. The emulated transfer begins at the send, whether or not the receiver waits. Messages of a
    rank to itself are not slowed down.

    Times come from Trio's clock, which may be `trio.testing.MockClock` (``clock="virtual"`` has no transport). With a
    clock that does not run by itself, pass ``thread_copy_bytes=None`` to an inner `NeuronLink`. On the real clock, Trio
    on Linux wakes up to a millisecond late (``epoll`` counts whole milliseconds): a single message may be that late; a
    stream of messages keeps its rate.

    Args:
        inner: The transport that carries the bytes.
        links: Called once for each pair (src, dst); returns the speed from `src` to `dst`. None: that pair is not
            slowed down.
        quantum_s: Longest time that a more urgent message waits for the one that is leaving.

    Raises:
        ArgumentError: The quantum is not above zero, or not finite.
    """

    def __init__(
        self, inner: Transport, *, links: Callable[[int, int], LinkSpeed | None], quantum_s: float = QUANTUM_S
    ) -> None:
        if not 0 < quantum_s < math.inf:
            raise ArgumentError(f"quantum_s is {quantum_s}; it must be above 0, and finite")
        super().__init__(inner)
        self._links = links
        self._quantum_s = quantum_s
        self._planned: dict[tuple[int, int], PlannedWire | None] = {}

    def wrap(self, wire: Wire) -> Wire:
        """Return a wire with paced sends."""
        return _PacedWire(wire, self)

    def find_wire(self, src: int, dst: int) -> PlannedWire | None:
        """Return the plan of the wire from `src` to `dst`, made at the first call; None: it is not slowed down."""
        if (src, dst) not in self._planned:
            # a rank has no wire to itself
            speed = None if src == dst else self._links(src, dst)
            self._planned[src, dst] = None if speed is None else PlannedWire(speed, quantum_s=self._quantum_s)
        return self._planned[src, dst]


class _PacedWire(WrappedWire):
    """Wire of one rank, whose sends take the time that the links allow."""

    def __init__(self, inner: Wire, paced: Paced) -> None:
        super().__init__(inner, paced.peers)
        self._paced = paced

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Done, **options: Any
    ) -> Request | None:
        """Send a message when its last byte would have arrived over the wire; arguments are as of `Wire.begin_send`."""
        view, lane = self.check_send(dst, tag, data), (self.rank, dst, tag)
        begin = partial(self.inner.begin_send, dst, tag, view, priority=priority, **options)
        wire, later = self._paced.find_wire(self.rank, dst), self._paced.later
        if wire is None:
            return begin(done=done)
        request = RelayedRequest(done, view.nbytes, begin)
        later.hold(lane, request)
        planned = partial(later.plan, lane, request)
        transfer = wire.add(tag, view.nbytes, priority=priority, now_s=trio.current_time(), planned=planned)

        def leave() -> None:
            """Remove the message from the wire's plan, and from the messages that are held."""
            wire.remove(transfer, now_s=trio.current_time())
            later.drop(lane, request)

        request.leave = leave
        return request
