"""Rules of the contract suite: signatures are compared where messages meet, and say what a message is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transports._checking import Begun, BrokenPromise, Pair, Rule, each_size, make_message, require, settle
from transports.buffers import Buffer
from transports.failures import SignatureMismatchError
from transports.request import Request
from transports.signature import TEXT_BYTES, PlainSignature
from transports.wire import OPEN

# Two calls that differ in the last part, and one that leaves it open. The texts are of any bytes, the longest at most.
_FIVE = PlainSignature(7 << 40 | 1 << 20 | 5, b"five" + bytes(range(256 - TEXT_BYTES + 4, 256)))
_SIX = PlainSignature(7 << 40 | 1 << 20 | 6, b"\0six\0")
_ANY = PlainSignature(7 << 40 | 1 << 20, b"")


async def _both(send: Callable[[], Begun], receive: Callable[[], Begun], *, send_first: bool) -> tuple[Begun, Begun]:
    """Begin both ends of a message, one of them first; wait for them, and return them."""
    first = (send if send_first else receive)()
    await settle()
    second = (receive if send_first else send)()
    sent, received = (first, second) if send_first else (second, first)
    await received.wait()
    await sent.wait()
    return sent, received


@each_size
async def signatures_agree(p: Pair, nbytes: int) -> None:
    """Messages whose signatures are equal, or open on one side, arrive, the sender or the receiver first."""
    message, case = make_message(nbytes), f"{nbytes} bytes of one call"
    for mine, theirs in ((_FIVE, _FIVE), (_FIVE, _ANY), (_ANY, _SIX), (None, _SIX), (_FIVE, None)):
        out = bytearray(nbytes)
        ends = partial(p.begin_send, 21, message, theirs), partial(p.begin_recv, 21, out, nbytes, mine)
        for end in await _both(*ends, send_first=bool(nbytes % 2)):
            require(end.error is None, f"{case}: {end.error!r}")
        require(out == message, f"{case}: other bytes than those sent")


@each_size
async def signatures_differ(p: Pair, nbytes: int) -> None:
    """Both ends that wait fail with the other's signature, whatever the lengths; the next message arrives."""
    for expected_bytes, send_first in ((nbytes, True), (nbytes, False), (nbytes + 1, True), (OPEN, False)):
        out = None if expected_bytes == OPEN else bytearray(expected_bytes)
        send = partial(p.begin_send, 21, make_message(nbytes), _SIX)
        receive = partial(p.begin_recv, 21, out, expected_bytes, _FIVE)
        sent, received = await _both(send, receive, send_first=send_first)
        for who, end, theirs in (("receiver", received, _SIX), ("sender", sent, _FIVE)):
            error, told = end.error, f"the {who} of {nbytes} bytes"
            if who == "sender" and error is None:  # it may have left before
                continue
            if not isinstance(error, SignatureMismatchError) or end.request is None:
                raise BrokenPromise(f"{told}, of another call, ended with {error!r}")
            said = end.request.theirs
            require(error.theirs == said == theirs, f"{told} got the signature {said!r}, not {theirs!r}")
        await p.still_works(21, "the message after one of another call")


async def signatures_of_many_calls(p: Pair) -> None:
    """Each message is delivered with its own signature, though there are more of them than a wire may remember."""
    for number in range(1, 5000):
        said = PlainSignature(number << 40, b"call %d" % number)
        nbytes = OPEN if number % 100 == 0 else 1
        received = p.begin_recv(21, bytearray(1), nbytes, said) if number % 3 else None
        sent = p.begin_send(21, b"x", said)
        received = received or p.begin_recv(21, bytearray(1), 1, said)
        await received.wait()
        require(received.error is None, f"call {number}: {received.error!r}")
        await sent.wait()


@each_size
async def any_length(p: Pair, nbytes: int) -> None:
    """A receive of any length learns length and signature where it meets its message, which it gets whole."""
    message, case, seen = make_message(nbytes), f"{nbytes} bytes of any length", list[tuple[int, object]]()

    def allocate(request: Request) -> Buffer:
        seen.append((request.nbytes, request.theirs))
        return memory

    for lends in (True, False):
        memory = bytearray(nbytes)
        sent = p.begin_send(21, message, _SIX)
        if nbytes % 2:
            await settle()
        received = await p.begin_recv(21, None, OPEN, _ANY, None if lends else allocate).wait()
        if received is None or received.error is not None:
            raise BrokenPromise(f"{case}: {received and received.error!r}")
        require(received.theirs == _SIX, f"the signature of the sender is {received.theirs!r}, not {_SIX!r}")
        require(received.nbytes == nbytes, f"the length is {received.nbytes}, not {nbytes}")
        require(lends or seen == [(nbytes, _SIX)], f"allocate was called with {seen}")
        if lends:
            with received.delivery() as delivery:
                memory[:] = delivery.view
        await sent.wait()
        require(memory == message, f"{case}: other bytes than those sent")


@each_size
async def any_length_refused(p: Pair, nbytes: int) -> None:
    """A receive of any length whose memory cannot be made ends with that error; its sender ends, the next arrives."""

    def allocate(_: Request) -> Buffer:
        raise MemoryError("as the check wants it")

    send = partial(p.begin_send, 21, make_message(nbytes), _SIX)
    receive = partial(p.begin_recv, 21, None, OPEN, None, allocate)
    _, received = await _both(send, receive, send_first=True)
    told = f"without memory for {nbytes} bytes, the receive ended with {received.error!r}"
    require(isinstance(received.error, MemoryError), told)
    await p.still_works(21, "the message after one that was refused")


#: The rules of this file.
RULES: tuple[Rule, ...] = signatures_agree, signatures_differ, signatures_of_many_calls, any_length, any_length_refused
