"""Transfers of messages over a wire, from their begin to their end; the form of a tree travels ahead of its data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import trio

from transports import OPEN, Buffer, LengthMismatchError, Request, SignatureMismatchError, TransportError

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..errors import CollectiveMismatchError
from .engine.host_bytes import bytes_of
from .failure import Failure
from .forms import pack_form, unpack_form
from .received import call_of_form
from .signature import parse, signature_of
from .state import DONE

if TYPE_CHECKING:
    from ..collectives.reduce import Array
    from .lane import Lane
    from .message import Message

MESSAGE_ALGORITHM: Final = "mesh"
"""Name of a message over a wire in timelines."""


def form_call(form: str, nbytes: int) -> Call:
    """Return the call of the message with the form of a tree, which travels ahead of its data."""
    return call(P2P.text, None, np.dtype(np.uint8), (nbytes,), 2, 0, (), (), False, False, None, form)


def send_form(message: Message[Any], tag: int, form: str) -> None:
    """Begin to send the form of a tree, ahead of its data."""

    def sent(request: Request) -> None:
        """Note that the receiver has refused the form; it receives the data all the same, for nobody."""
        if request.error is not None:
            message.refused = request

    packed = pack_form(form)
    signature = signature_of(form_call(form, len(packed)), message.place)
    message.wire.begin_send(message.members[1], tag, packed, priority=message.urgency, signature=signature, done=sent)


def receive(
    message: Message[Any],
    tag: int,
    out: memoryview | None,
    call: Call,
    allocate: Callable[[Request], Buffer] | None = None,
) -> Request:
    """Begin to receive one message of the wire; `allocate` returns its place if its length is open."""
    nbytes = OPEN if out is None else out.nbytes
    signature = signature_of(call, message.place, flat=message.flat)
    return message.wire.begin_recv(
        message.members[0], tag, out, nbytes, signature=signature, done=message.request_done, allocate=allocate
    )


def _fitted(message: Message[Any], call: Call) -> memoryview:
    """Return the bytes of the array for the data of a call."""
    message.fit(call)
    return bytes_of(cast("Array", message.target).reshape(-1))


def allocate(message: Message[Any], request: Request) -> Buffer:
    """Return the place of a message whose sender alone knows its shape, or the form of its tree."""
    assert request.theirs is not None
    call = parse(request.theirs.text, request.theirs.fingerprint).call
    if call is not None and not call.form:
        return _fitted(message, call)
    message.form = bytearray(request.nbytes)
    return message.form


def request_ended(message: Message[Any], request: Request) -> None:
    """End the message, or go on with the data of a tree."""
    message.request = message.poll = None
    if request.withdrawn:
        if message.on_withdrawn is not None:
            message.on_withdrawn()
    elif request.error is not None:
        _wire_failed(message, request, request.error)
    elif message.refused is not None and message.refused.error is not None:
        _wire_failed(message, message.refused, message.refused.error)
    elif message.receives and message.form is not None:
        _receive_data(message)
    else:
        message.stopped()
        if message.state < DONE:
            sent = message.pattern or message.call
            message.finish(message.context.now_ns(), message.describe(sent, message.started_ns))
    if message.over is not None and message.request is None:
        message.over.set()


def _receive_data(message: Message[Any]) -> None:
    """Receive the data of a tree whose form has arrived."""
    form, message.form, message.half_met, call = message.form, None, True, message.call
    try:
        if call.dtype is None:
            call = call_of_form(unpack_form(bytes(form or b"")))
        request = receive(message, cast("Lane", message.lane).queue.tag, _fitted(message, call), call)
    except Exception as error:  # no memory, or an invalid form
        message.inbox.fail_broken_wire(message, error)
        return
    if not request.ended:
        message.request, message.poll = request, message.look


def _wire_failed(message: Message[Any], request: Request, error: Exception) -> None:
    """Fail the message: the ends differ, or the wire is broken."""
    theirs, message.form = request.theirs, None
    message.stopped()
    if message.state >= DONE:
        return
    if theirs is None or not isinstance(error, (SignatureMismatchError, LengthMismatchError)):
        if isinstance(error, TransportError):
            error.operation = f"{message.label} ({message.call_site})"
        message.inbox.fail_broken_wire(message, error)
        return
    other = parse(theirs.text, theirs.fingerprint)
    if message.receives and (other.call is None or other.call.form):  # receive the data of a tree for nobody
        with suppress(TransportError):
            tag = cast("Lane", message.lane).queue.tag
            message.wire.begin_recv(message.members[0], tag, None, OPEN, done=_release)
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


def _release(request: Request) -> None:
    """Release a message that was received for nobody."""
    if request.error is None and not request.withdrawn:
        request.delivery().release()


def withdraw(message: Message[Any], later: Callable[[], None]) -> bool:
    """Withdraw the transfer of a receive; see `Inbox.withdraw_receive`."""
    request = message.request
    if request is None or message.half_met:
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
