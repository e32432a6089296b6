"""Paced: the latency and bandwidth of a real wire, emulated on the clock that Trio runs on.

Each directed pair of ranks has a wire of its own. A wire is a *plan*: the order and the ideal instants at which the
messages handed to it leave. A new message changes the plan; nothing else does. So no task has to be awake when a
message starts or ends, one task begins all messages, and late wake-ups never add up to a lower rate.
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

#: A more urgent message waits at most this long for the one that is leaving. Half a millisecond is short against a
#: gradient bucket and costs nothing here, where no task wakes at a boundary; a power of two keeps virtual times exact.
QUANTUM_S = 2.0**-11


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """The speed of a wire.

    Raises:
        ArgumentError: A latency below zero or not finite; a bandwidth not above zero.
    """

    latency_s: float  # From the last byte leaving to the message being there; the next message may leave meanwhile
    bandwidth_bytes_per_s: float  # Bytes leaving per second; may be ``inf``

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ArgumentError(f"latency_s is {self.latency_s}; it must be 0 or more, and finite")
        if not self.bandwidth_bytes_per_s > 0:
            raise ArgumentError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; it must be above 0")


def by_kind(
    kind_of: Callable[[int, int], str], speeds: Mapping[str, LinkSpeed | None]
) -> Callable[[int, int], LinkSpeed | None]:
    """Return a function that gives each pair of ranks the speed of its kind of link.

    Args:
        kind_of: Names the kind of link between two ranks.
        speeds: The speed of each kind; None leaves links of that kind alone.

    Returns:
        A function for `Paced`. It raises `ArgumentError` for a kind that ``speeds`` does not name.
    """

    def find_speed(src: int, dst: int) -> LinkSpeed | None:
        """Return the speed of the link between two ranks."""
        kind = kind_of(src, dst)
        if kind not in speeds:
            raise ArgumentError(f"no speed for links of kind {kind!r}; speeds names {', '.join(map(repr, speeds))}")
        return speeds[kind]

    return find_speed


class PlannedTransfer:
    """A message on a wire's plan.

    Args:
        nbytes: Length of the message.
        planned: Takes the time of its last byte whenever that changes.

    Attributes:
        urgency: The priority it really has: no more urgent than an earlier message of its tag, which it must follow.
        left_bytes: Bytes that have not left yet, as of the wire's last decision.
        sent_at_s: When its last byte leaves, if nothing more urgent comes.
    """

    __slots__ = ("left_bytes", "planned", "sent_at_s", "tag", "urgency")

    def __init__(self, tag: int, nbytes: int, urgency: int, planned: Callable[[float], None]) -> None:
        self.tag: int = tag
        self.left_bytes: float = nbytes
        self.urgency: int = urgency
        self.planned: Callable[[float], None] = planned
        self.sent_at_s: float = math.inf


class PlannedWire:
    """One direction between two ranks: a pure state machine; callers pass the time.

    One message leaves at a time, the most urgent first, in order of arrival among equals. A strictly more urgent
    arrival takes the wire at the next quantum boundary of the message that holds it.

    Args:
        speed: Latency and bandwidth of the wire.
        quantum_s: Time for which a message holds the wire at least.
    """

    def __init__(self, speed: LinkSpeed, *, quantum_s: float = QUANTUM_S) -> None:
        self._bytes_per_s = speed.bandwidth_bytes_per_s
        self._latency_s = speed.latency_s
        self._quantum_s = quantum_s
        self._queue: list[PlannedTransfer] = []  # in the order in which they leave
        self._busy_until_s = -math.inf  # transfers before are decided; from then on the queue leaves, back to back
        self._last_of_tag: dict[int, PlannedTransfer] = {}

    def add(
        self, tag: int, nbytes: int, *, priority: int, now_s: float, planned: Callable[[float], None]
    ) -> PlannedTransfer:
        """Add a message to the plan; ``planned`` is called with its time of arrival, also whenever that changes.

        Cost: O(1) behind messages that are as urgent, plus one call for each message that it overtakes.
        """
        self._drop_departed(now_s)
        last = self._last_of_tag.get(tag)
        urgency = priority if last is None else max(priority, last.urgency)
        transfer = self._last_of_tag[tag] = PlannedTransfer(tag, nbytes, urgency, planned)
        place = bisect_right(self._queue, urgency, key=lambda other: other.urgency)
        if place == 0:
            self._interrupt_first(now_s)
        self._queue.insert(place, transfer)
        self._plan_times_from(place)
        return transfer

    def remove(self, transfer: PlannedTransfer, *, now_s: float) -> None:
        """Remove a message that has not left; a quantum of it that is leaving leaves in full."""
        self._drop_departed(now_s)
        if transfer.sent_at_s <= now_s:
            return
        if self._queue and transfer is self._queue[0]:
            self._interrupt_first(now_s)
        if transfer in self._queue:
            place = self._queue.index(transfer)
            del self._queue[place]
            self._forget_tag(transfer)
            self._plan_times_from(place)

    def _drop_departed(self, now_s: float) -> None:
        """Drop messages that left before `now_s`; those that leave now stay, so that the order of calls decides
        nothing.
        """
        while self._queue and self._queue[0].sent_at_s < now_s:
            self._drop_first_transfer()
        if not self._queue:
            self._busy_until_s = max(self._busy_until_s, now_s)

    def _interrupt_first(self, now_s: float) -> None:
        """Free the wire at the next quantum boundary of the message that is leaving, if one is."""
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
        """Compute the times of the messages from a place in the queue on, and report their arrivals."""
        at_s = self._queue[place - 1].sent_at_s if place else self._busy_until_s
        for transfer in self._queue[place:]:
            at_s += transfer.left_bytes / self._bytes_per_s
            transfer.sent_at_s = at_s
            transfer.planned(at_s + self._latency_s)

    def _drop_first_transfer(self) -> None:
        first = self._queue.pop(0)
        self._busy_until_s = first.sent_at_s
        self._forget_tag(first)

    def _forget_tag(self, transfer: PlannedTransfer) -> None:
        """Forget a message as the latest one of its tag."""
        if self._last_of_tag.get(transfer.tag) is transfer:
            del self._last_of_tag[transfer.tag]


class Paced(Delaying):
    """Gives a fast transport the speed of a slower one.

    A message enters the inner transport when its last byte would have arrived, so ``send`` returns after delivery.
    Wires start to carry a message at its send, whether or not its receiver waits. A rank has no wire to itself.

    Only `trio.current_time` and deadlines are used, so it works on any clock of Trio: `trio.testing.MockClock` too
    (``clock="virtual"`` has no transport); on one that does not run by itself, give `NeuronLink` inside
    ``thread_copy_bytes=None``. On the real clock Trio on Linux wakes up to a millisecond late (``epoll`` counts whole
    milliseconds): a single message may be that late, a stream of them keeps its rate.

    Args:
        inner: The transport that carries the bytes.
        links: The speed from a rank to a rank, asked once per pair; None leaves that pair alone.
        quantum_s: How long a more urgent message waits at most for the one that is leaving.

    Raises:
        ArgumentError: A quantum that is not above zero.
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
        """Return the wire between two ranks; None if the pair is not paced."""
        if (src, dst) not in self._planned:
            speed = None if src == dst else self._links(src, dst)
            self._planned[src, dst] = None if speed is None else PlannedWire(speed, quantum_s=self._quantum_s)
        return self._planned[src, dst]


class _PacedWire(WrappedWire):
    def __init__(self, inner: Wire, paced: Paced) -> None:
        super().__init__(inner, paced.peers)
        self._paced = paced

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Done, **options: Any
    ) -> Request | None:
        """Send a message when its last byte would have arrived over the wire."""
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
            """Make room on the wire, and on the lane."""
            wire.remove(transfer, now_s=trio.current_time())
            later.drop(lane, request)

        request.leave = leave
        return request
