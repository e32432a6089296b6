"""Faulty: drops, delays, corrupts and cuts messages, alike in every run with one seed."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import trio

from transports.base import Transport
from transports.buffers import Buffer
from transports.failures import ArgumentError, LinkLostError
from transports.request import Done, Request
from transports.wire import Envelope, Wire
from transports.wrappers import Delaying, RelayedRequest, WrappedWire

FaultKind: TypeAlias = Literal["cut", "drop", "corrupt", "delay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected into one message."""

    kind: FaultKind
    envelope: Envelope


class Faulty(Delaying):
    """Damages messages as bad fabrics do.

    The fate of a message follows from the seed, its src, dst and tag, and how many its sender sent there before; it
    does not depend on timing. Raising one probability does not change which messages another one hits.

    Args:
        inner: The transport to damage.
        seed: Chooses the messages.
        drop: Probability that a message vanishes; its send returns as if all were well.
        corrupt: Probability that one bit of a message arrives flipped. Empty messages have none.
        delay: Probability that a message is held up.
        delay_s: How long at most; uniform from 0.
        cut: Probability that the link breaks at a message, for good, in both directions. Pending and later operations
            on it raise `LinkLostError`, as far as their ends are wires of this object.

    Attributes:
        faults: The faults so far, in order.

    Raises:
        ArgumentError: A probability outside 0 ... 1, or a delay below 0.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        seed: int,
        drop: float = 0.0,
        corrupt: float = 0.0,
        delay: float = 0.0,
        delay_s: float = 0.0,
        cut: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self._probabilities: dict[FaultKind, float] = {"cut": cut, "drop": drop, "corrupt": corrupt, "delay": delay}
        for kind, probability in self._probabilities.items():
            if not 0 <= probability <= 1:
                raise ArgumentError(f"{kind} is {probability}; a probability is between 0 and 1")
        if not delay_s >= 0:
            raise ArgumentError(f"delay_s is {delay_s}; it must be 0 or more")
        self.faults: list[InjectedFault] = []
        self._seed = seed
        self.delay_s: float = delay_s
        self._counts: Counter[tuple[int, int, int]] = Counter()
        self._cut_links: set[frozenset[int]] = set()
        # requests under way with their lanes, by link, and functions to call at a cut
        self.requests: defaultdict[frozenset[int], dict[RelayedRequest, tuple[int, int, int]]] = defaultdict(dict)
        self.watchers: list[Callable[[], None]] = []

    def wrap(self, wire: Wire) -> Wire:
        """Return a wire that injects faults into its sends."""
        return _FaultyWire(wire, self)

    def cut(self, a: int, b: int) -> None:
        """Break the link between two ranks now, for good, in both directions."""
        link = frozenset((a, b))
        self._cut_links.add(link)
        for request, (src, dst, tag) in tuple(self.requests[link].items()):
            request.fail(LinkLostError("the link was cut", src=src, dst=dst, tag=tag))
        for notify in tuple(self.watchers):
            notify()

    def lost(self, src: int, dst: int, tag: int) -> LinkLostError | None:
        """Return the error of a new message on a link that was cut."""
        if frozenset((src, dst)) not in self._cut_links:
            return None
        return LinkLostError("the link was cut", src=src, dst=dst, tag=tag)

    def draw_faults(self, envelope: Envelope) -> tuple[set[FaultKind], random.Random]:
        """Return the faults of the next message of a lane, and the random generator for their details."""
        lane = (envelope.src, envelope.dst, envelope.tag)
        chance = random.Random(f"{self._seed}/{lane}/{self._counts[lane]}")
        self._counts[lane] += 1
        kinds = {kind for kind, probability in self._probabilities.items() if chance.random() < probability}
        exclusive: tuple[FaultKind, ...] = ("cut", "drop")  # nothing more can happen to a message that one of them hits
        kinds = next(({kind} for kind in exclusive if kind in kinds), kinds)
        if not envelope.nbytes:
            kinds.discard("corrupt")
        self.faults += (InjectedFault(kind=kind, envelope=envelope) for kind in self._probabilities if kind in kinds)
        return kinds, chance


class _FaultyWire(WrappedWire):
    def __init__(self, inner: Wire, faulty: Faulty) -> None:
        super().__init__(inner, faulty.peers)
        self._faulty = faulty

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Send a message with the faults that the seed gives it."""
        view, faulty, lane = self.check_send(dst, tag, data), self._faulty, (self.rank, dst, tag)
        kinds, chance = faulty.draw_faults(Envelope(src=self.rank, dst=dst, tag=tag, nbytes=view.nbytes))
        if "cut" in kinds:
            faulty.cut(self.rank, dst)
        delay_s = chance.uniform(0, faulty.delay_s) if "delay" in kinds else 0.0
        payload = _flip_one_bit(view, chance) if "corrupt" in kinds else view
        if (error := faulty.lost(*lane)) is not None:
            raise error
        if "drop" in kinds:
            return None
        request = self._relay(lane, partial(self.inner.begin_send, dst, tag, payload, **options), view.nbytes, done)
        if "delay" in kinds or faulty.later.holds(lane):
            faulty.later.hold(lane, request)
            faulty.later.plan(lane, request, trio.current_time() + delay_s)
        else:
            request.begin()
        return self._end_at_cut(lane, request)

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Receive, until the link is cut."""
        lane = (src, self.rank, tag)
        if (error := self._faulty.lost(*lane)) is not None:
            raise error
        request = self._relay(lane, partial(self.inner.begin_recv, src, tag, out, nbytes, **options), nbytes, done)
        request.begin()
        return self._end_at_cut(lane, request)

    def _relay(
        self, lane: tuple[int, int, int], begin: Callable[..., Request | None], nbytes: int, done: Done
    ) -> RelayedRequest:
        """Return the request of a message, which is not begun yet."""

        def end(request: Request) -> None:
            """Forget the request, and call its callback."""
            self._faulty.requests[frozenset(lane[:2])].pop(request, None)  # type: ignore[call-overload]  # it is that
            done(request)

        return RelayedRequest(end, nbytes, begin)

    def _end_at_cut(self, lane: tuple[int, int, int], request: RelayedRequest) -> Request:
        """Let a cut of its link end a request that is under way."""
        if not request.ended:
            self._faulty.requests[frozenset(lane[:2])][request] = lane
        return request

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive over a link that was cut, or that has ended."""
        return self._faulty.lost(src, self.rank, tag) or self.inner.lost(src, tag)

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        """Watch the inner wire, and cuts."""
        self._faulty.watchers.append(notify)
        try:
            with self.inner.watch(notify):
                yield
        finally:
            self._faulty.watchers.remove(notify)


def _flip_one_bit(view: memoryview, chance: random.Random) -> bytearray:
    """Return a copy of a message with one bit flipped."""
    damaged = bytearray(view)
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return damaged
