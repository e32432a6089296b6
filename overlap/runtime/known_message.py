"""Messages like one before, of the same line and size: their bytes move first, and all else follows where it must."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from transports import Request, Wire

from ..flight.recorder import Known
from ..timeline.recording import RawSpan
from .lane import wire_tag
from .memory.foreign import tensor_array
from .message import Message
from .signature import signature_of
from .transfer import MESSAGE_ALGORITHM

if TYPE_CHECKING:
    from .messages import MessagePort


class KnownMessage:
    """Common part of the messages between two ranks with one tag, dtype, shape and priority, begun at one line.

    A message whose bytes leave at once, or have arrived already, is counted and recorded, but never is in its lane.
    Any other gets its place there, as if it had been begun for the first time.

    Args:
        message: The first of them, which has its call.
        peer: Group rank of its other end.
        wire: Its wire.
        priority: Its priority in its stream.

    Attributes:
        place: Where they are begun.
        nbytes: Length of each.
        peer: World rank of the other end.
        wire: Their wire.
    """

    __slots__ = (
        "_call", "_ends", "_fields", "_flat", "_flight", "_lane", "_name", "_peer", "_port", "_priority", "_queue",
        "_receives", "_signature", "_tag", "nbytes", "peer", "place", "wire",
    )  # fmt: skip

    def __init__(self, message: Message[Any], peer: int, wire: Wire, priority: int) -> None:
        self._port: MessagePort = message.messages
        self._name, self._call, self._flat = message.name, message.call, message.flat
        self._receives, self._peer, self._ends = message.receives, peer, message.members
        self._priority: int = priority + self._port.stream.priority
        self._lane = self._port.lane_name(message)
        self._queue = self._lane[:3]
        self._tag = wire_tag(self._lane)
        self._signature = signature_of(message.call, message.place, flat=message.flat)
        self._flight, self._fields = Known(), message.flight_fields()
        self.place: tuple[CodeType, int] = message.place
        self.nbytes: int = message.call.nbytes
        self.peer: int = self._ends[not message.receives]
        self.wire: Wire = wire

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all these messages share."""
        return self._fields

    def begin(
        self, data: memoryview, step: int | None, make: Callable[[], Message[Any]], *, waits: bool = False
    ) -> Message[Any] | int | None:
        """Begin a message, on the loop's thread or in its place, unless that needs more than its bytes.

        Args:
            data: The bytes to send, or to receive into.
            step: Step of the program.
            make: Makes its future, with its arrays and its call.
            waits: Whether this thread waits for it next.

        Returns:
            Its number if it has ended well; its future if it has not; None: it must begin as if it were the first.
        """
        port, receives = self._port, self._receives
        context, inbox, shared = port.context, port.communicator, port.communicator.shared
        numbers, now_ns = inbox.numbers.get(self._lane), context.now_ns()
        if (
            numbers is None or self._lane in inbox.lanes or self._queue in inbox.queues or context.outstanding.draining
            or shared.intercept is not None or shared.left or shared.early or shared.broken
        ):  # fmt: skip
            return None
        if waits:
            self.wire.promise_wait(self.peer)
        request: Request | None
        try:
            if receives:
                request = self.wire.begin_recv(
                    self.peer, self._tag, data, self.nbytes, signature=self._signature, done=_leave_to_caller
                )
            else:
                request = self.wire.begin_send(
                    self.peer, self._tag, data, priority=(self._priority << 64) + now_ns, signature=self._signature,
                    done=_leave_to_caller,
                )  # fmt: skip
        except Exception:  # no memory, or no wire between the ranks: it fails as the first would
            return None
        if request is not None and (not request.ended or request.error is not None or request.withdrawn):
            message = make()
            message.wire, message.algorithm = self.wire, MESSAGE_ALGORITHM
            port.begin(message, request, now_ns)
            return message
        end_ns, call, seq = context.now_ns(), self._call, numbers[1][receives]
        numbers[1][receives] = seq + 1
        record = context.flight.issued(self, self._flight, call, seq, now_ns)
        group = port.group.label[0], self._ends, self._queue[2]
        meeting = call.kind.text, MESSAGE_ALGORITHM, group, seq, self.nbytes, call.dtype, now_ns
        info = meeting, now_ns, self._priority, *self.place, None, step
        span: RawSpan = "comm", port.stream.name, self._name, now_ns, end_ns, info
        context.flight.carried(record, now_ns, end_ns, span)
        return seq

    def future(self, tensor: object, timeout_s: float, caller: FrameType) -> Message[Any]:
        """Return the future of such a message of a tensor, whose memory it keeps."""
        receives, array = self._receives, tensor_array(tensor).reshape(-1)
        x, out = (None, array) if receives else (array, None)
        message: Message[Any] = Message(
            self._port, receives, self._peer, self._queue[2], x, out, 0, None, timeout_s, caller, self._flat
        )
        message.call, message.source, message.target = self._call, x, out
        message.pattern = self._call if receives else None
        return message


def _leave_to_caller(request: Request) -> None:
    """Do nothing at the end of a request: who has begun it looks."""
