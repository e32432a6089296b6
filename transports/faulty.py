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
from transports.failures import ArgumentError, LinkLostError, lane_fields
from transports.request import Done, Request
from transports.wire import Envelope, Wire, add_to_watchers
from transports.wrappers import Delaying, RelayedRequest, WrappedWire

FaultKind: TypeAlias = Literal["cut", "drop", "corrupt", "delay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected into one message."""

    kind: FaultKind
    envelope: Envelope


class Faulty(Delaying):
    """A transport that damages messages, as a bad network does.

    Which faults hit a message follows from the seed, from its src, dst and tag, and from the number of earlier messages
    with the same three. It does not depend on timing. A change of one probability does not change which messages the
    other faults hit.

    Args:
        inner: The transport that carries the messages.
        seed: Seed of the random choice of messages.
        drop: Probability that a message vanishes; its send returns without an error.
        corrupt: Probability that one bit of a message arrives flipped. Messages without bytes are never hit.
        delay: Probability that a message is delayed.
        delay_s: Longest delay in seconds; each delay is drawn uniformly between 0 and this.
        cut: Probability that the link between the two ranks breaks at a message, in both directions and for good.
            Pending and later operations on that link raise `LinkLostError` if they use wires of this object.

    Attributes:
        faults: The injected faults so far, in order.

    Raises:
        ArgumentError: A probability is outside 0 ... 1, or the delay is below 0.
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
        # by link, an unordered pair of ranks: the requests under way, each with its lane (src, dst, tag)
        self.requests: defaultdict[frozenset[int], dict[RelayedRequest, tuple[int, int, int]]] = defaultdict(dict)
        self.watchers: list[Callable[[], None]] = []  # functions to call at a cut

    def wrap(self, wire: Wire) -> Wire:
        """Return a wire that injects faults into its sends."""
        return _FaultyWire(wire, self)

    def cut(self, a: int, b: int) -> None:
        """Break the link between two ranks now, for good, in both directions."""
        link = frozenset((a, b))
        self._cut_links.add(link)
        for request, lane in tuple(self.requests[link].items()):
            request.fail(LinkLostError("the link was cut", **lane_fields(lane)))
        for notify in tuple(self.watchers):
            notify()

    def lost(self, src: int, dst: int, tag: int) -> LinkLostError | None:
        """Return the error of a new message from `src` to `dst` with a tag, if their link was cut; else None."""
        if frozenset((src, dst)) not in self._cut_links:
            return None
        return LinkLostError("the link was cut", src=src, dst=dst, tag=tag)

    def draw_faults(self, envelope: Envelope) -> tuple[set[FaultKind], random.Random]:
        """Draw the faults of the next message from `src` to `dst` with a tag, count the message, and record its faults.

        Returns:
            The faults, and the random generator that decides their details, such as the length of a delay.
        """
        lane = (envelope.src, envelope.dst, envelope.tag)
        chance = random.Random(f"{self._seed}/{lane}/{self._counts[lane]}")
        self._counts[lane] += 1
        kinds = {kind for kind, probability in self._probabilities.items() if chance.random() < probability}
        exclusive: tuple[FaultKind, ...] = ("cut", "drop")  # a message with one of these has no other fault
        kinds = next(({kind} for kind in exclusive if kind in kinds), kinds)
        if not envelope.nbytes:
            kinds.discard("corrupt")
        self.faults += (InjectedFault(kind=kind, envelope=envelope) for kind in self._probabilities if kind in kinds)
        return kinds, chance


class _FaultyWire(WrappedWire):
    """Wire of one rank, on which the faults of the seed happen."""

    def __init__(self, inner: Wire, faulty: Faulty) -> None:
        super().__init__(inner, faulty.peers)
        self._faulty = faulty

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Send a message with the faults that `Faulty.draw_faults` draws for it; arguments are as of `Wire.begin_send`.

        For a dropped message the result is None, as for a message that has left.

        Raises:
            LinkLostError: The link was cut, perhaps by this very message.
        """
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
        request = self._make_request(
            lane, partial(self.inner.begin_send, dst, tag, payload, **options), view.nbytes, done
        )
        # a message waits behind delayed messages of its lane, so that the lane keeps its order
        if "delay" in kinds or faulty.later.holds(lane):
            faulty.later.hold(lane, request)
            faulty.later.plan(lane, request, trio.current_time() + delay_s)
        else:
            request.begin()
        return self._register_for_cut(lane, request)

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Receive, until the link is cut; arguments are as of `Wire.begin_recv`."""
        lane = (src, self.rank, tag)
        if (error := self._faulty.lost(*lane)) is not None:
            raise error
        request = self._make_request(
            lane, partial(self.inner.begin_recv, src, tag, out, nbytes, **options), nbytes, done
        )
        request.begin()
        return self._register_for_cut(lane, request)

    def _make_request(
        self, lane: tuple[int, int, int], begin: Callable[..., Request | None], nbytes: int, done: Done
    ) -> RelayedRequest:
        """Return the request of a message that is not begun yet."""

        def end_and_forget(request: Request) -> None:
            self._faulty.requests[frozenset(lane[:2])].pop(request, None)  # type: ignore[call-overload]  # it is that
            done(request)

        return RelayedRequest(end_and_forget, nbytes, begin)

    def _register_for_cut(self, lane: tuple[int, int, int], request: RelayedRequest) -> Request:
        """Let a request fail if its link is cut before its end; return it."""
        if not request.ended:
            self._faulty.requests[frozenset(lane[:2])][request] = lane
        return request

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive over a link that was cut or has ended; None if the link is whole."""
        return self._faulty.lost(src, self.rank, tag) or self.inner.lost(src, tag)

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        """Watch the inner wire, and cuts."""
        with add_to_watchers([self._faulty.watchers], notify), self.inner.watch(notify):
            yield


def _flip_one_bit(view: memoryview, chance: random.Random) -> bytearray:
    """Return a damaged copy."""
    damaged = bytearray(view)
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return damaged
