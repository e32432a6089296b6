"""Messages between a rank and another that are started by plain functions: their end is told by a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from transports.base import TAG_LIMIT
from transports.bounce import BounceBuffers
from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError, TransportError
from transports.link import Link
from transports.matching import Lane, Receive, Send
from transports.patience import Patience
from transports.starting import Call, Starter


class _StartedSend(Send, Call):
    """One that was started by a plain function."""

    link: Link

    def withdraw(self) -> None:
        self.link.take_back(self)

    def delivery(self) -> Delivery:
        raise AssertionError("only what was received is delivered")


class _StartedReceive(Receive, Call):
    """One that was started by a plain function."""

    link: Link

    def withdraw(self) -> None:
        self.link.take_back(self)

    def delivery(self) -> Delivery:
        return delivery_of(self, self.link.memory)


def delivery_of(receive: Receive, memory: BounceBuffers) -> Delivery:
    """Return what a receive without a place of its own has got."""
    lent = receive.lent
    assert lent is not None, "what is received without a place is lent"
    if lent.readonly:  # it came with its announcement, in memory of its own
        return Delivery(lent)
    return Delivery(lent[: receive.nbytes].toreadonly(), partial(memory.give_back, lent))


class Owner(Protocol):
    """What a starter needs of its transport."""

    state: str | None  # Why nothing can be sent or received; None while it can
    # How long to look at links before sleeping; None where none of them would have come sooner.
    patience: Patience | None
    at_once_bytes: int  # Longer messages never leave at once, see `Link.send_now`

    def refusal(self, lane: Lane, peer: int) -> TransportError:
        """Return why a message may not go to a rank, or come from there."""


class LinkStarter(Starter):
    """Starts the messages between a rank and one other.

    Made once for the two of them: which way leads there need not be found out for each message.

    Args:
        owner: The transport.
        link: The way to the other rank.
        rank: The rank that is here.
        peer: The other one.
    """

    __slots__ = ("_at_once_bytes", "_link", "_owner", "_peer", "_rank")

    def __init__(self, owner: Owner, link: Link, rank: int, peer: int) -> None:
        self._owner, self._link, self._rank, self._peer = owner, link, rank, peer
        self._at_once_bytes = owner.at_once_bytes

    def _lane_to(self, dst: int, tag: int) -> Lane:
        """Return the lane of a message that is sent, after checking that it may go there."""
        lane = (self._rank, dst, tag)
        if dst != self._peer or self._owner.state is not None or not 0 <= tag < TAG_LIMIT:
            raise self._refusal(lane, dst)
        if self._link.engine.gone is not None:
            self._link.engine.check(lane)
        return lane

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]
    ) -> Call | None:
        """Send at once if that needs no waiting, or start to."""
        view = as_bytes(data)
        lane, link = self._lane_to(dst, tag), self._link
        if view.nbytes <= self._at_once_bytes and link.send_now(lane, view):
            return None
        send = _StartedSend(lane, view, priority)
        send.link, send.wake = link, done
        link.post(send)
        return send

    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        done: Callable[[Call], None],
        consume: Callable[[int, memoryview], None] | None = None,
    ) -> Call:
        """Start a receive."""
        view = None if out is None else as_bytes(out, name="out", writable=True)
        lane = (src, self._rank, tag)
        if src != self._peer or self._owner.state is not None or not 0 <= tag < TAG_LIMIT:
            raise self._refusal(lane, src)
        link = self._link
        link.look()
        receive = _StartedReceive(lane, view, nbytes)
        receive.link, receive.wake, receive.consume = link, done, consume
        if link.engine.receive(receive):
            link.settle()
        return receive

    @property
    def patience(self) -> Patience | None:
        """Whether, and for how long, to catch up again and again before sleeping."""
        return self._owner.patience

    def catch_up(self, peer: int) -> bool:
        """Move what can be from and to the other rank."""
        if self._owner.state is not None:
            raise self._refusal((self._rank, peer, 0), peer)
        return self._link.catch_up()

    def _refusal(self, lane: Lane, peer: int) -> TransportError:
        if peer != self._peer:
            return ArgumentError(f"this starts messages between ranks {self._rank} and {self._peer}, not rank {peer}")
        return self._owner.refusal(lane, peer)
