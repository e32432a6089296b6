"""Checks of the contract suite: wrong calls, cancelled calls, and calls that need not wait."""

from __future__ import annotations

from functools import partial

import numpy as np
import trio
from trio.testing import assert_checkpoints

from transports._checking import (
    BrokenPromise,
    Scale,
    delivery_from,
    expect_message,
    expect_rejection,
    make_message,
    note_outcome,
    require,
    wait_until_blocked,
)
from transports.failures import LengthMismatchError
from transports.wire import TAG_LIMIT, Wire


async def bad_arguments(a: Wire, b: Wire, scale: Scale) -> None:
    """Buffers, tags, ranks and lengths that cannot work are rejected at the call, and leave nothing behind."""
    scattered, frozen = np.zeros((4, 4))[:, ::2], np.zeros(4)
    frozen.flags.writeable = False
    with expect_rejection("sending a buffer that is not contiguous"):
        await a.send(b.rank, 6, scattered)
    with expect_rejection("receiving into a buffer that is not contiguous"):
        await b.recv_into(a.rank, 6, scattered)
    with expect_rejection("receiving into a read-only array"):
        await b.recv_into(a.rank, 6, frozen)
    with expect_rejection("receiving into bytes"):
        await b.recv_into(a.rank, 6, b"12345678")
    with expect_rejection("receiving a negative length"):
        await b.recv(a.rank, 6, -1)
    for tag in (-1, TAG_LIMIT):
        with expect_rejection(f"sending with tag {tag}"):
            await a.send(b.rank, tag, b"12345678")
        with expect_rejection(f"receiving with tag {tag}"):
            await b.recv_into(a.rank, tag, bytearray(8))
    nobody = max(a.rank, b.rank) + 10**6
    with expect_rejection("sending to a rank that does not exist"):
        await a.send(nobody, 6, b"12345678")
    with expect_rejection("receiving from a rank that does not exist"):
        await b.recv(nobody, 6, 8)
    for choices in ([], [(a.rank, -1)], [(nobody, 6)]):
        with expect_rejection(f"waiting for any of {choices}"):
            await b.wait_any(choices)
    await wait_until_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.send, b.rank, 6, b"after it")
        await expect_message(b, a, 6, b"after it", "the tag of rejected calls, used again")


async def lengths_disagree(a: Wire, b: Wire, scale: Scale) -> None:
    """Both ends raise an error that names both lengths, whichever comes first; the tag works on.

    The send of a message that leaves before its receiver is known has no error. The check finds these by trying.
    """
    shortest, *longer = scale.lengths
    sender_raised = await _require_all_length_errors(a, b, scale, shortest)
    for nbytes in longer:
        if sender_raised:
            return
        if await _require_length_errors(a, b, scale, nbytes, nbytes - 1, send_first=True, loan=False):
            sender_raised = await _require_all_length_errors(a, b, scale, nbytes)


async def _require_all_length_errors(a: Wire, b: Wire, scale: Scale, sent_bytes: int) -> bool:
    """Try every order of two ends with different lengths; return whether the sender raised in every case."""
    raised = [
        await _require_length_errors(a, b, scale, sent_bytes, expected_bytes, send_first=send_first, loan=loan)
        for expected_bytes in (sent_bytes - 1, sent_bytes + 1, 0)
        for send_first in (True, False)
        for loan in (True, False)
    ]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.send, b.rank, 3, b"after it")
        await expect_message(b, a, 3, b"after it", "the tag of a failed message, used again")
    return all(raised)


async def _require_length_errors(
    a: Wire, b: Wire, scale: Scale, sent_bytes: int, expected_bytes: int, *, send_first: bool, loan: bool
) -> bool:
    """Let two ends name different lengths, and require their errors; False if the message had left its sender."""

    async def receive() -> None:
        if loan:
            (await delivery_from(b, a, 3, expected_bytes)).release()
        else:
            await b.recv_into(a.rank, 3, bytearray(expected_bytes))

    sender: list[BaseException | None] = []
    receiver: list[BaseException | None] = []
    send = partial(note_outcome, partial(a.send, b.rank, 3, bytes(sent_bytes)), sender)
    calls = [send, partial(note_outcome, receive, receiver)]
    async with trio.open_nursery() as nursery:
        for call in calls if send_first else reversed(calls):
            nursery.start_soon(call)
            await wait_until_blocked()
    case = f"{sent_bytes} bytes sent, {expected_bytes} expected"
    _require_mismatch(receiver[0], sent_bytes, expected_bytes, f"the receiver, with {case},")
    if sender == [None] and await _leaves_unreceived(a, b, scale, sent_bytes):
        return False
    _require_mismatch(sender[0], sent_bytes, expected_bytes, f"the sender, with {case},")
    return True


async def _leaves_unreceived(a: Wire, b: Wire, scale: Scale, nbytes: int) -> bool:
    """Return whether a send of this length ends although nobody receives."""
    with trio.move_on_after(scale.patience_s) as waiting:
        await a.send(b.rank, 5, bytes(nbytes))
    if not waiting.cancelled_caught:
        await expect_message(b, a, 5, bytes(nbytes), "a message that had left its sender")
    return not waiting.cancelled_caught


def _require_mismatch(error: BaseException | None, sent_bytes: int, expected_bytes: int, who: str) -> None:
    """Raise `BrokenPromise` unless an error is a `LengthMismatchError` with both lengths."""
    if not isinstance(error, LengthMismatchError):
        raise BrokenPromise(f"{who} got {error!r}; a LengthMismatchError is promised")
    named = (error.sent_bytes, error.expected_bytes)
    require(named == (sent_bytes, expected_bytes), f"{who} got an error with the lengths {named}")


async def checkpoints(a: Wire, b: Wire, scale: Scale) -> None:
    """Every call is a checkpoint, also when the other end is already there."""
    for receive_first in (True, False):
        for loan in (True, False):
            async with trio.open_nursery() as nursery:
                if receive_first:
                    nursery.start_soon(partial(_receive_8_bytes, a, b, loan=loan))
                    await wait_until_blocked()
                    with assert_checkpoints():
                        await a.send(b.rank, 2, b"12345678")
                else:
                    nursery.start_soon(a.send, b.rank, 2, b"12345678")
                    await wait_until_blocked()
                    with assert_checkpoints():
                        await _receive_8_bytes(a, b, loan=loan)


async def _receive_8_bytes(a: Wire, b: Wire, *, loan: bool) -> None:
    """Receive 8 bytes on tag 2, on loan or into a buffer."""
    if loan:
        (await delivery_from(b, a, 2, 8)).release()
    else:
        await b.recv_into(a.rank, 2, bytearray(8))


async def cancelled_at_the_call(a: Wire, b: Wire, scale: Scale) -> None:
    """A call in a cancelled scope raises Cancelled and does nothing, also when the other end is already there."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_message, b, a, 2, b"real one", "after a send that was cancelled at the call")
        await wait_until_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await a.send(b.rank, 2, b"no such!")
        require(scope.cancelled_caught, "send did not notice that it was cancelled")
        await a.send(b.rank, 2, b"real one")
    for loan in (True, False):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send, b.rank, 2, b"real one")
            await wait_until_blocked()
            with trio.CancelScope() as scope:
                scope.cancel()
                await _receive_8_bytes(a, b, loan=loan)
            require(scope.cancelled_caught, "a receive did not notice that it was cancelled")
            await expect_message(b, a, 2, b"real one", "after a receive that was cancelled at the call")


async def cancelled_before_match(a: Wire, b: Wire, scale: Scale) -> None:
    """A call that is cancelled while it waits for its other end is withdrawn; the next one takes its place."""
    for loan in (True, False):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(_receive_8_bytes, a, b, loan=loan))
            await wait_until_blocked()
            nursery.cancel_scope.cancel()
    for nbytes in scale.lengths:
        if await _is_send_withdrawn(a, b, nbytes):
            return


async def _is_send_withdrawn(a: Wire, b: Wire, nbytes: int) -> bool:
    """Cancel a send, and return whether it was withdrawn; False if it had ended before."""
    first, second = make_message(nbytes, 1), make_message(nbytes, 2)
    sender: list[BaseException | None] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note_outcome, partial(a.send, b.rank, 2, first), sender)
        await wait_until_blocked()
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.send, b.rank, 2, second)
        if sender == [None]:
            await expect_message(b, a, 2, first, "a send that had returned before it was cancelled")
        await expect_message(b, a, 2, second, "after receives and a send that were withdrawn")
    return sender != [None]


async def cancelled_after_match(a: Wire, b: Wire, scale: Scale) -> None:
    """A sender that is cancelled while its message is on loan waits for the release, and its send succeeds."""
    for nbytes in (8, max(scale.sizes)):
        message = make_message(nbytes)
        sent = bytes(message)
        sender: list[BaseException | None] = []
        scope = trio.CancelScope()

        async def send(
            scope: trio.CancelScope = scope,
            message: bytearray = message,
            sender: list[BaseException | None] = sender,
        ) -> None:
            with scope:
                await note_outcome(partial(a.send, b.rank, 2, message), sender)
            message[:] = bytes(len(message))  # the buffer is the sender's again: overwrite it

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with await delivery_from(b, a, 2, nbytes) as delivery:
                scope.cancel()
                await wait_until_blocked()
                require(delivery.view == sent, "the send returned while its memory was on loan")
        require(sender == [None], f"the message was received, but its send ended with {sender[0]!r}")
