"""Checks of the contract suite: signatures are compared where messages meet, and say what a message is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from transports._checking import BrokenPromise, Scale, expect_message, make_message, require, wait_until_blocked
from transports.buffers import Buffer
from transports.failures import SignatureMismatchError
from transports.request import Request
from transports.signature import TEXT_BYTES, PlainSignature
from transports.wire import OPEN, Wire

_TAG = 21
# Two calls that differ in the last part, and one that leaves it open. The texts are of any bytes, the longest at most.
_FIVE = PlainSignature(7 << 40 | 1 << 20 | 5, b"five" + bytes(range(256 - TEXT_BYTES + 4, 256)))
_SIX = PlainSignature(7 << 40 | 1 << 20 | 6, b"\0six\0")
_ANY = PlainSignature(7 << 40 | 1 << 20, b"")


class _Begun:
    """A request, with an event that is set at its end."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.ends: list[Request] = []
        self._ended = trio.Event()

    def done(self, request: Request) -> None:
        """Note the end."""
        self.ends.append(request)
        self._ended.set()

    async def wait(self) -> Request | None:
        """Wait for the end; None for a send that has left."""
        if self.request is not None:
            await self._ended.wait()
        require(len(self.ends) <= 1, "done was called twice")
        return self.request


def _send(a: Wire, b: Wire, data: Buffer, signature: PlainSignature | None) -> _Begun:
    """Begin a send of rank ``a``."""
    begun = _Begun()
    begun.request = a.begin_send(b.rank, _TAG, data, signature=signature, done=begun.done)
    return begun


def _receive(
    a: Wire,
    b: Wire,
    out: Buffer | None,
    nbytes: int,
    signature: PlainSignature | None,
    allocate: Callable[[Request], Buffer] | None = None,
) -> _Begun:
    """Begin a receive of rank ``b``."""
    begun = _Begun()
    begun.request = b.begin_recv(a.rank, _TAG, out, nbytes, signature=signature, done=begun.done, allocate=allocate)
    return begun


async def signatures_agree(a: Wire, b: Wire, scale: Scale) -> None:
    """Messages whose signatures are equal, or open on one side, arrive, the sender or the receiver first."""
    for nbytes in (0, *scale.sizes):
        for mine, theirs in ((_FIVE, _FIVE), (_FIVE, _ANY), (_ANY, _SIX), (None, _SIX), (_FIVE, None)):
            message, out = make_message(nbytes), bytearray(nbytes)
            if nbytes % 2:
                sent = _send(a, b, message, theirs)
                await wait_until_blocked()
                received = _receive(a, b, out, nbytes, mine)
            else:
                received = _receive(a, b, out, nbytes, mine)
                await wait_until_blocked()
                sent = _send(a, b, message, theirs)
            for end in (await received.wait(), await sent.wait()):
                require(end is None or end.error is None, f"{nbytes} bytes of one call: {end and end.error!r}")
            require(out == message, f"{nbytes} bytes of one call: other bytes than those sent")


async def signatures_differ(a: Wire, b: Wire, scale: Scale) -> None:
    """Both ends that wait fail with the other's signature, whatever the lengths; the next message arrives."""
    for nbytes in (0, *scale.sizes):
        for expected_bytes, sender_first in ((nbytes, True), (nbytes, False), (nbytes + 1, True), (OPEN, False)):
            out = None if expected_bytes == OPEN else bytearray(expected_bytes)
            if sender_first:
                sent = _send(a, b, make_message(nbytes), _SIX)
                await wait_until_blocked()
                received = _receive(a, b, out, expected_bytes, _FIVE)
            else:
                received = _receive(a, b, out, expected_bytes, _FIVE)
                await wait_until_blocked()
                sent = _send(a, b, make_message(nbytes), _SIX)
            _check_differs(await received.wait(), _SIX, f"the receiver of {nbytes} bytes")
            end = await sent.wait()
            if end is not None and end.error is not None:  # it may have left before
                _check_differs(end, _FIVE, f"the sender of {nbytes} bytes")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.send, b.rank, _TAG, b"next")
                await expect_message(b, a, _TAG, b"next", "the message after one of another call")


def _check_differs(end: Request | None, theirs: PlainSignature, who: str) -> None:
    """Require the error of different signatures, with the other end's."""
    error = None if end is None else end.error
    require(isinstance(error, SignatureMismatchError), f"{who}, of another call, ended with {error!r}")
    if isinstance(error, SignatureMismatchError) and end is not None:
        require(error.theirs == end.theirs == theirs, f"{who} got the signature {end.theirs!r}, not {theirs!r}")


async def signatures_of_many_calls(a: Wire, b: Wire, scale: Scale) -> None:
    """Each message is delivered with its own signature, though there are more of them than a wire may remember."""
    for number in range(1, 5000):
        said = PlainSignature(number << 40, b"call %d" % number)
        received = _receive(a, b, bytearray(1), OPEN if number % 100 == 0 else 1, said) if number % 3 else None
        sent = _send(a, b, b"x", said)
        end = await (received or _receive(a, b, bytearray(1), 1, said)).wait()
        require(end is not None and end.error is None, f"call {number}: {end and end.error!r}")
        await sent.wait()


async def any_length(a: Wire, b: Wire, scale: Scale) -> None:
    """A receive of any length learns length and signature where it meets its message, which it gets whole."""
    for nbytes in (0, *scale.sizes):
        for lends in (True, False):
            message, memory = make_message(nbytes), bytearray(nbytes)
            seen: list[tuple[int, object]] = []
            allocate = partial(_note_and_return, seen, memory)
            sent = _send(a, b, message, _SIX)
            if nbytes % 2:
                await wait_until_blocked()
            received = await _receive(a, b, None, OPEN, _ANY, None if lends else allocate).wait()
            if received is None or received.error is not None:
                raise BrokenPromise(f"{nbytes} bytes of any length: {received and received.error!r}")
            require(received.theirs == _SIX, f"the signature of the sender is {received.theirs!r}, not {_SIX!r}")
            require(received.nbytes == nbytes, f"the length is {received.nbytes}, not {nbytes}")
            require(lends or seen == [(nbytes, _SIX)], f"allocate was called with {seen}")
            if lends:
                with received.delivery() as delivery:
                    require(delivery.view == message, f"{nbytes} bytes of any length: other bytes than those sent")
                await sent.wait()
            else:
                await sent.wait()
                require(memory == message, f"{nbytes} bytes of any length: other bytes than those sent")


def _note_and_return(seen: list[tuple[int, object]], memory: bytearray, request: Request) -> Buffer:
    seen.append((request.nbytes, request.theirs))
    return memory


async def any_length_refused(a: Wire, b: Wire, scale: Scale) -> None:
    """A receive of any length whose memory cannot be made ends with that error; its sender ends, the next arrives."""

    def allocate(_: Request) -> Buffer:
        raise MemoryError("as the check wants it")

    for nbytes in (0, *scale.sizes):
        sent = _send(a, b, make_message(nbytes), _SIX)
        if nbytes % 2:
            await wait_until_blocked()
        received = await _receive(a, b, None, OPEN, None, allocate).wait()
        error = None if received is None else received.error
        require(isinstance(error, MemoryError), f"without memory for {nbytes} bytes, the receive ended with {error!r}")
        await sent.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send, b.rank, _TAG, b"next")
            await expect_message(b, a, _TAG, b"next", "the message after one that was refused")
