"""From a call of `send` or `recv` to one end of a message that is under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TypeVar, cast

from ..collectives.reduce import Array
from ..errors import UsageError
from ..flight.recorder import Known
from .any_source import AnyReceive
from .arguments import receive_like
from .enqueuing import Ends, Enqueuer
from .group_checks import check_peer
from .match import Key
from .operation import CollectiveFuture, Port
from .outstanding import Issued
from .stream import MessageLane, Stream

__all__ = ["MessageIssuer"]

# Sources and destinations of messages, with their tags, of which something is remembered; a tag for each message is no
# reason to remember more.
_PEERS = 256

T = TypeVar("T")


class MessageIssuer(Enqueuer):
    """Issues messages between two ranks of a group."""

    def send(
        self,
        operation: CollectiveFuture[Array],
        dst: int,
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None = None,
    ) -> CollectiveFuture[Array]:
        """Check and start the sender's end of a message."""
        if operation.input is None:
            raise UsageError("x: send needs an array, got None")
        check_peer(self._group, "dst", dst, tag)
        return self._start_message(operation, (self._group.rank, int(dst)), tag, stream, timeout_s)

    def receive(
        self,
        operation: CollectiveFuture[Array],
        like: object,
        src: int | None,
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None = None,
    ) -> Issued[Array]:
        """Check and start the receiver's end of a message, or wait for whoever sends one."""
        if src is None:
            return self._receive_any(operation, like, tag, stream, timeout_s)
        check_peer(self._group, "src", src, tag)
        operation.out = cast("Array", receive_like(like, self._context.arrays))  # until its memory is found
        return self._start_message(operation, (int(src), self._group.rank), tag, stream, timeout_s)

    def _receive_any(
        self,
        operation: CollectiveFuture[Array],
        like: object,
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None,
    ) -> AnyReceive:
        """Receive from whoever sends: the array is checked and locked now, and the source found later."""
        check_peer(self._group, "src", 0, tag)
        self._around.communicators.check_any_source()
        context, lane = self._context, self._streams.find(stream)
        operation.out = cast("Array", receive_like(like, context.arrays))
        self._prepare(operation, timeout_s)
        operation.deadline_s = None  # that of what is returned counts
        operation.lock()
        mine = self._group.rank
        keys = [Key(self._ranks, self._occurrence, "", src, mine, tag) for src in range(self._group.size)]

        def receive(src: int) -> None:
            self._enqueue(operation, self._message_port(True, (src, mine), tag, lane))

        found = AnyReceive(context, self._around.communicators, self._group, keys, operation, receive)
        found.deadline_s = timeout_s
        if get_ident() == context.thread:
            found.start()
        else:
            context.from_thread(found.start)
        return found

    def _start_message(
        self,
        operation: CollectiveFuture[Array],
        ends: tuple[int, int],
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None,
    ) -> CollectiveFuture[Array]:
        which = operation.input is None, ends, tag, self._streams.find(stream)
        self._prepare(operation, timeout_s)
        if get_ident() == self._context.thread:
            self._enqueue(operation, self._message_port(*which))
        else:
            self._enqueue_soon(operation, partial(self._message_port, *which))
        return operation

    def _message_port(self, receives: bool, ends: tuple[int, int], tag: int, stream: Stream) -> Port:
        """Return this end of the messages of one (source, destination, tag): strict FIFO, in no stream's window."""
        which = (receives, *ends, tag)
        kept = self._lasting.get(which)
        if kept is not None and not kept.communicator.closed and _goes_within(kept, stream):
            return kept
        src, dst = self._ranks[ends[0]], self._ranks[ends[1]]
        communicator = self._around.communicator(
            Key(self._ranks, self._occurrence, "", *ends, tag), self._group.name, (src, dst)
        )
        towards = (f" from rank {src}" if receives else f" to rank {dst}") + (f" with tag {tag}" if tag else "")
        port = communicator.message_port(self._context, stream, int(receives), towards)
        port.known = _remembered(self._messages, which, Known)
        if communicator.lasts:
            self._lasting.pop(which, None)
            _remembered(self._lasting, which, lambda: port)
        return port


def _remembered(known: dict[Ends, T], which: Ends, make: Callable[[], T]) -> T:
    """Return what is known of some messages, made anew if nothing is; the oldest are forgotten."""
    found = known.get(which)
    if found is None:
        if len(known) >= _PEERS:
            del known[next(iter(known))]
        found = known[which] = make()
    return found


def _goes_within(port: Port, stream: Stream) -> bool:
    """Whether what is issued on a stream may take the lane of some messages: it is the stream's, or in use."""
    lane = port.stream
    return isinstance(lane, MessageLane) and (lane.within is stream or not lane.idle)
