"""Ends of messages over a wire, and memory of messages whose sender alone knows what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import trio

from transports import Buffer, LengthMismatchError, Request, SignatureMismatchError, TransportError

from ..errors import CollectiveMismatchError
from .engine.host_bytes import bytes_of
from .failure import Failure
from .received import read_tree
from .signature import parse
from .state import DONE

if TYPE_CHECKING:
    from ..collectives.reduce import Array
    from .message import Message
    from .operation import CollectiveFuture

MESSAGE_ALGORITHM: Final = "mesh"
"""Name of a message over a wire in timelines."""


def allocate(message: Message[Any], request: Request) -> Buffer:
    """Return the place of a message whose sender alone knows its shape, or its tree."""
    assert request.theirs is not None
    call = parse(request.theirs.text, request.theirs.fingerprint).call
    if call is not None and not call.form:
        message.fit(call)
        return bytes_of(cast("Array", message.target).reshape(-1))
    message.tree_memory = message.context.arrays.empty((request.nbytes,), np.dtype(np.uint8))
    return message.tree_memory


def request_ended(message: Message[Any], request: Request) -> None:
    """End the message with the end of its transfer."""
    operation: CollectiveFuture[Any] = message  # which declares some
    message.request = operation.poll = None
    error = request.error
    if message.receives and message.tree_memory is not None and error is None and not request.withdrawn:
        try:
            message.pattern, operation.out = read_tree(message.tree_memory)
        except Exception as invalid:
            error = invalid
    if request.withdrawn:
        if message.on_withdrawn is not None:
            message.on_withdrawn()
    elif error is not None:
        _wire_failed(message, request, error)
    else:
        message.stopped()
        if message.state < DONE:
            sent = message.pattern or message.call
            message.finish(message.context.now_ns(), message.describe(sent, message.started_ns))
    if message.over is not None and message.request is None:
        message.over.set()


def _wire_failed(message: Message[Any], request: Request, error: Exception) -> None:
    """Fail the message: the ends differ, or the wire is broken."""
    theirs = request.theirs
    message.stopped()
    if message.state >= DONE:
        return
    if theirs is None or not isinstance(error, (SignatureMismatchError, LengthMismatchError)):
        if isinstance(error, TransportError):
            error.operation = f"{message.label} ({message.call_site})"
        message.inbox.fail_broken_wire(message, error)
        return
    other = parse(theirs.text, theirs.fingerprint)
    ends = [(str(message.call), message.call_site), (other.what, other.site)]
    sent, received = reversed(ends) if message.receives else ends
    mismatch = CollectiveMismatchError(
        group=message.member.name,
        seq=message.seq,
        ranks=(message.members[0], message.members[1]),
        calls=(sent[0], received[0]),
        call_sites=(sent[1], received[1]),
    )
    message.fail(Failure(mismatch))


def withdraw(message: Message[Any], later: Callable[[], None]) -> bool:
    """Withdraw the transfer of a receive; see `Inbox.withdraw_receive`."""
    request = message.request
    if request is None:
        return False
    message.on_withdrawn = None
    request.withdraw()
    if request.ended:
        return request.withdrawn
    message.on_withdrawn = later
    return False


async def give_up(message: Message[Any]) -> None:
    """Withdraw the transfer, or wait for its end, because it uses the caller's memory."""
    with trio.CancelScope(shield=True):
        await trio.lowlevel.checkpoint()  # a callback of a transport may not call it back
        if message.request is not None:
            message.over, message.on_withdrawn = trio.Event(), message.stopped
            message.request.withdraw()
            if message.request is not None:
                await message.over.wait()
