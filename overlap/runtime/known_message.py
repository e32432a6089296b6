"""Shorter path for repeated messages: one with the line, ends and size of an earlier one need not enter a lane."""

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
    """Facts that are the same for all messages of one line, between two ranks, with one tag, dtype, shape and priority.

    A message whose bytes leave at once, or have arrived already, is only counted and recorded. Any other message enters
    its lane, as if there had been no earlier one.

    Args:
        message: The first of these messages, which has its call.
        peer: Group rank of the other end.
        wire: Wire of the messages.
        priority: Priority that the program gave the message, without that of the stream.

    Attributes:
        place: Code and instruction of the line.
        nbytes: Length of each message.
        peer: World rank of the other end.
        wire: Wire of the messages.
    """

    __slots__ = (
        "_call", "_ends", "_fields", "_flat", "_flight", "_lane", "_name", "_peer", "_port", "_priority",
        "_program_tag", "_queue", "_receives", "_signature", "_tag", "nbytes", "peer", "place", "wire",
    )  # fmt: skip

    def __init__(self, message: Message[Any], peer: int, wire: Wire, priority: int) -> None:
        self._port: MessagePort = message.messages
        self._name, self._call, self._flat = message.name, message.call, message.flat
        self._receives, self._peer, self._ends = message.receives, peer, message.members
        self._priority: int = priority + self._port.stream.priority
        self._lane = self._port.lane_name(message)
        self._queue, self._program_tag = self._lane[:3], message.tag
        self._tag = wire_tag(self._lane)
        self._signature = signature_of(message.call, message.place, flat=message.flat)
        self._flight, self._fields = Known(), message.flight_fields()
        self.place: tuple[CodeType, int] = message.place
        self.nbytes: int = message.call.nbytes
        self.peer: int = message.peer_rank
        self.wire: Wire = wire

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all these messages share."""
        return self._fields

    def begin(
        self, data: memoryview, step: int | None, make_message: Callable[[], Message[Any]], *, waits: bool = False
    ) -> Message[Any] | int | None:
        """Begin a message like the earlier one, on the loop's thread or in its place.

        Args:
            data: The bytes to send, or the memory to receive into.
            step: Step of the program.
            make_message: Makes the future of the message, with its arrays and its call.
            waits: Whether this thread waits for the message next. Then it polls for a moment here, if its wire can.

        Returns:
            The number of the message if it has ended well already; its future if it has not ended, or has failed; None
            if nothing was begun: the caller must begin it as if there had been no earlier one.
        """
        port, receives = self._port, self._receives
        context, inbox, shared = port.context, port.communicator, port.communicator.shared
        numbers, now_ns = inbox.numbers.get(self._lane), context.now_ns()
        # other messages are before it, or something must look at it first
        if (
            numbers is None or self._lane in inbox.lanes or self._queue in inbox.queues or context.outstanding.draining
            or shared.intercept is not None or shared.finished_ranks or shared.early_reports or shared.broken_errors
        ):  # fmt: skip
            return None
        if waits:
            self.wire.promise_wait(self.peer)
        request: Request | None
        try:
            if receives:
                request = self.wire.begin_recv(
                    self.peer, self._tag, data, self.nbytes, signature=self._signature, done=_ignore_request_end
                )
            else:
                request = self.wire.begin_send(
                    self.peer, self._tag, data, priority=(self._priority << 64) + now_ns, signature=self._signature,
                    done=_ignore_request_end,
                )  # fmt: skip
        except Exception:  # no memory, or no wire between the ranks: the usual path raises it again
            return None
        if waits and request is not None and not request.ended:
            request.look()  # a message that arrives within a moment needs no future
        # No request: a send that has left. A request that goes on, or has ended badly, needs a message in a lane.
        if request is not None and (not request.ended or request.error is not None or request.withdrawn):
            message = make_message()
            message.wire, message.algorithm = self.wire, MESSAGE_ALGORITHM
            port.begin(message, request, now_ns)
            return message
        # `numbers` is (world ranks of both ends, [next number of a send, next number of a receive])
        end_ns, call, seq = context.now_ns(), self._call, numbers[1][receives]
        numbers[1][receives] = seq + 1
        record = context.flight.record_issue(self, self._flight, call, seq, now_ns)
        group = port.group.label[0], self._ends, self._program_tag
        meeting = call.kind.text, MESSAGE_ALGORITHM, group, seq, self.nbytes, call.dtype, now_ns
        info = meeting, now_ns, self._priority, *self.place, None, step
        span: RawSpan = "comm", port.stream.name, self._name, now_ns, end_ns, info
        context.flight.record_success(record, now_ns, end_ns, span)
        return seq

    def make_future(self, tensor: object, timeout_s: float, caller: FrameType) -> Message[Any]:
        """Make the future of a message like the earlier one.

        Args:
            tensor: The CPU tensor that is sent or filled; the future keeps its memory.
            timeout_s: Time in seconds within which the message must end.
            caller: Frame of the program's line.
        """
        receives, array = self._receives, tensor_array(tensor).reshape(-1)
        x, out = (None, array) if receives else (array, None)
        message: Message[Any] = Message(
            self._port, receives, self._peer, self._program_tag, x, out, 0, None, timeout_s, caller, self._flat
        )  # no priority and no name of its own
        message.call, message.source, message.target = self._call, x, out
        message.pattern = self._call if receives else None
        return message


def _ignore_request_end(request: Request) -> None:
    """Do nothing at the end of a request: the code that has begun it looks at it itself."""
