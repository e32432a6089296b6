"""Transfer: the part of a message that moves it over a wire."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar, cast
from weakref import ref

import numpy as np
import trio

from transports import OPEN, Buffer, LengthMismatchError, Request, SignatureMismatchError, TransportError, Wire

from ..collectives.call import Call, call
from ..collectives.kinds import P2P, Collective
from ..errors import CollectiveMismatchError
from .engine.host_bytes import bytes_of
from .failure import Failure
from .forms import pack_form, unpack_form
from .operation import CollectiveFuture
from .received import ReceiveBuffers, call_of_form
from .signature import parse, signature_of
from .state import DONE

if TYPE_CHECKING:
    from .inbox import Inbox
    from .lane import Lane
    from .message import Message
    from .messages import Messages
    from .stream import Stream

T_co = TypeVar("T_co", covariant=True)

MESSAGE_ALGORITHM: Final = "mesh"
"""Name of a message over a wire in timelines."""


def _release(request: Request) -> None:
    """Release a message that was received for nobody."""
    if request.error is None and not request.withdrawn:
        request.delivery().release()


def form_call(form: str, nbytes: int) -> Call:
    """Return the call of the message with the form of a tree, which travels ahead of its data."""
    return call(P2P.text, None, np.dtype(np.uint8), (nbytes,), 2, 0, (), (), False, False, None, form)


class Transfer(CollectiveFuture[T_co]):
    """The transfer of one end of a message over a wire.

    Attributes:
        messages: Messages of its rank and group; None once a receive is taken, so that a future does not hold a group.
        receives: Whether it is the receiver's end.
        peer: Group rank of the other end; None: any source, none chosen yet.
        asked: The same, as the program has asked for it.
        stream: Stream of its name in the timeline, and of its priority.
        lane: Lane of its messages; None until the loop has put it there.
        order: Order of arrival of the message of a receive; 0 before.
        pattern: Call of the message that has met a receive.
        buffers: Arrays that a receive of a tree, or of any message, fills.
        flat: Whether its shape is open: it agrees with any shape of as many elements.
        at_once: Whether its data must move within its match, without modelled time.
        request: Its transfer over a wire, while that goes on.
        wire: That wire.
    """

    __slots__ = (
        "_form",
        "_half_met",
        "_on_withdrawn",
        "_over",
        "_past",
        "_place",
        "_refused",
        "_tree_locked",
        "asked",
        "at_once",
        "buffers",
        "flat",
        "lane",
        "messages",
        "order",
        "pattern",
        "peer",
        "receives",
        "request",
        "stream",
        "tag",
        "wire",
    )

    kind: Final[Collective] = P2P  # type: ignore[misc]
    reduction: Final[None] = None  # type: ignore[misc]
    root: Final[int] = 0  # type: ignore[misc]
    pairs: Final[tuple[()]] = ()  # type: ignore[misc]
    counts: Final[None] = None  # type: ignore[misc]
    exact: Final[bool] = False  # type: ignore[misc]
    shared: Final[bool] = False  # type: ignore[misc]
    requested_algorithm: Final[None] = None  # type: ignore[misc]
    messages: Messages | None
    receives: bool
    peer: int | None
    asked: int | None
    tag: int
    pattern: Call | None
    stream: Stream
    lane: Lane | None
    buffers: ReceiveBuffers | None
    order: int
    at_once: bool
    flat: bool
    request: Request | None
    wire: Wire
    _form: bytes | bytearray | None  # Form of a tree, while it travels
    _half_met: bool  # Whether the form of a tree has arrived, and its data has not
    _on_withdrawn: Callable[[], None] | None  # Called once the wire has given a receive back
    _refused: Request | None  # Form of a tree that the receiver has refused
    _place: object  # The array that the caller has given a receive
    _past: ref[Messages] | None  # Its messages, once it has ended well
    _over: trio.Event | None  # Set at the end of a transfer that is given up

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of the sender and the receiver; empty for a receive without a sender."""
        if self.peer is None:
            return ()
        ranks, own = self.member.label[1], self.member.rank
        return (ranks[self.peer], ranks[own]) if self.receives else (ranks[own], ranks[self.peer])

    @property
    def _inbox(self) -> Inbox:
        assert self.messages is not None, "this is a bug in overlap: a message that was taken goes on"
        return self.messages.inbox

    @property
    def _message(self) -> Message[object]:
        return cast("Message[object]", self)

    def _send_form(self, tag: int, form: str) -> None:
        """Begin to send the form of a tree, ahead of its data."""
        packed = pack_form(form)
        signature = signature_of(form_call(form, len(packed)), self.place)
        self.wire.begin_send(
            self.members[1], tag, packed, priority=self.urgency, signature=signature, done=self._form_sent
        )

    def _begin_receive(self, tag: int, call: Call) -> Request:
        """Begin to receive data of a known call."""
        self._message.fit(call)
        assert self.target is not None
        return self._receive(tag, bytes_of(self.target.reshape(-1)), call)

    def _receive(
        self,
        tag: int,
        out: memoryview | None,
        call: Call,
        allocate: Callable[[Request], Buffer] | None = None,
    ) -> Request:
        """Begin to receive one message of the wire; `allocate` returns its place if its length is open."""
        src, _ = self.members
        nbytes = OPEN if out is None else out.nbytes
        signature = signature_of(call, self.place, flat=self.flat)
        return self.wire.begin_recv(
            src, tag, out, nbytes, signature=signature, done=self._message.request_done, allocate=allocate
        )

    def _allocate(self, request: Request) -> Buffer:
        """Return the place of a message whose sender alone knows its shape, or the form of its tree."""
        assert request.theirs is not None
        call = parse(request.theirs.text, request.theirs.fingerprint).call
        if call is None or call.form:
            self._form = bytearray(request.nbytes)
            return self._form
        self._message.fit(call)
        assert self.target is not None
        return bytes_of(self.target.reshape(-1))

    def _form_sent(self, request: Request) -> None:
        """Note that the receiver has refused the form of a tree; it receives the data all the same, for nobody."""
        if request.error is not None:
            self._refused = request

    def _request_ended(self, request: Request) -> None:
        """End the message, or go on with the data of a tree."""
        self.request = self.poll = None
        if request.withdrawn:
            if self._on_withdrawn is not None:
                self._on_withdrawn()
        elif request.error is not None:
            self._wire_failed(request, request.error)
        elif self._refused is not None and self._refused.error is not None:
            self._wire_failed(self._refused, self._refused.error)
        elif self.receives and self._form is not None:
            self._receive_tree()
        else:
            self._end()
        if self._over is not None and self.request is None:
            self._over.set()

    def _receive_tree(self) -> None:
        """Receive the data of a tree whose form has arrived."""
        form, self._form, self._half_met = self._form, None, True
        assert form is not None, "this is a bug in overlap: a tree without a form"
        assert self.lane is not None
        call = self.call
        try:
            if call.dtype is None:
                call = call_of_form(unpack_form(bytes(form)))
            request = self._begin_receive(self.lane.queue.tag, call)
        except Exception as error:  # no memory, or an invalid form
            self._inbox.fail_broken_wire(self._message, error)
            return
        if not request.ended:
            self._message.go_on(request)

    def _end(self) -> None:
        """End the message well, unless it has failed in the meantime."""
        self.stopped()
        if self.state < DONE:
            self._message.finish(self.context.now_ns(), None)

    def _wire_failed(self, request: Request, error: Exception) -> None:
        """Fail the message: the ends differ, or the wire is broken."""
        theirs = request.theirs
        self._form = None
        self.stopped()
        if self.state >= DONE:
            return
        if theirs is None or not isinstance(error, (SignatureMismatchError, LengthMismatchError)):
            if isinstance(error, TransportError):
                error.operation = f"{self.label} ({self.call_site})"
            self._inbox.fail_broken_wire(self._message, error)
            return
        other, (src, dst) = parse(theirs.text, theirs.fingerprint), self.members
        if self.receives and (other.call is None or other.call.form):
            self._drop_tree_data()
        ends = [(str(self.call), self.call_site), (other.what, other.site)]
        sent, received = reversed(ends) if self.receives else ends
        mismatch = CollectiveMismatchError(
            group=self.member.name,
            seq=self.seq,
            ranks=(src, dst),
            calls=(sent[0], received[0]),
            call_sites=(sent[1], received[1]),
        )
        self.fail(Failure(mismatch))

    def _drop_tree_data(self) -> None:
        """Receive the data of a tree for nobody, because the receive differs from its form."""
        assert self.lane is not None, "this is a bug in overlap: a message without a lane"
        tag, src = self.lane.queue.tag, self.members[0]
        with suppress(TransportError):
            self.wire.begin_recv(src, tag, None, OPEN, done=_release)

    def withdraw_request(self, later: Callable[[], None]) -> bool | None:
        """Withdraw the transfer of a receive; see `Inbox.withdraw_receive`."""
        request = self.request
        if request is None or self._half_met:
            return False
        self._on_withdrawn = None
        request.withdraw()
        if request.ended:
            return request.withdrawn
        self._on_withdrawn = later
        return False

    async def _give_up_transfer(self) -> None:
        """Withdraw the transfer, or wait for its end, because it uses the caller's memory."""
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()  # a callback of a transport may not call it back
            if self.request is not None:
                self._over, self._on_withdrawn = trio.Event(), self.stopped
                self.request.withdraw()
                if self.request is not None:
                    await self._over.wait()
