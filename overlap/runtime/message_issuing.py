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
from .enqueuing import Asked, Enqueuer
from .group_checks import check_peer
from .match import Key
from .operation import CollectiveFuture, Port
from .outstanding import Issued
from .stream import MessageLane, Stream

# Sources and destinations of messages, with their tags, of which something is remembered; a tag for each message is no
# reason to remember more.
_PEERS = 256

K = TypeVar("K")
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
        self._prepare(operation, timeout_s)
        return self._start_message(operation, False, dst, tag, stream)

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
        operation.out = receive_like(like, self._context.arrays)  # type: ignore[assignment]  # its memory is found next
        self._prepare(operation, timeout_s)
        return self._start_message(operation, True, src, tag, stream)

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
            self._enqueue(operation, self._message_port((True, src, tag, lane), lane))

        found = AnyReceive(context, self._around.communicators, self._group, keys, operation, receive)
        found.deadline_s = timeout_s
        if get_ident() == context.thread:
            found.start()
        else:
            context.from_thread(found.start)
        return found

    def _start_message(
        self, operation: CollectiveFuture[Array], receives: bool, peer: int, tag: int, stream: Stream | str | None
    ) -> CollectiveFuture[Array]:
        """Start one end of a message to or from a peer; all else is checked."""
        asked = receives, peer, tag, stream
        here = get_ident() == self._context.thread
        if here and type(peer) is int and type(tag) is int:  # 1.0 would be the same key as 1
            port = self._known_port(asked)
            if port is not None:
                self._enqueue(operation, port)
                return operation
        check_peer(self._group, "src" if receives else "dst", peer, tag)
        within = self._streams.find(stream)
        if here:
            self._enqueue(operation, self._message_port(asked, within))
        else:
            self._enqueue_soon(operation, partial(self._message_port, asked, within))
        return operation

    def _known_port(self, asked: Asked) -> Port | None:
        """Return the end of messages that was found when this was asked for before, if it is still the one."""
        try:
            port, lane = self._lasting[asked]
        except (KeyError, TypeError):  # not hashable, and so no stream, which is said where streams are found
            return None
        return port if port.stream is lane and not port.communicator.closed else None

    def _message_port(self, asked: Asked, stream: Stream) -> Port:
        """Return this end of the messages of one (source, destination, tag): strict FIFO, in no stream's window."""
        receives, peer, tag, _ = asked
        ends = (int(peer), self._group.rank) if receives else (self._group.rank, int(peer))
        src, dst = self._ranks[ends[0]], self._ranks[ends[1]]
        communicator = self._around.communicator(
            Key(self._ranks, self._occurrence, "", *ends, tag), self._group.name, (src, dst)
        )
        towards = (f" from rank {src}" if receives else f" to rank {dst}") + (f" with tag {tag}" if tag else "")
        port = communicator.message_port(self._context, stream, int(receives), towards)
        port.group = self._group.name, communicator.members  # of the group, only these are in it
        port.known = _remembered(self._messages, (receives, *ends, tag), Known)
        lane = port.stream
        if communicator.lasts and isinstance(lane, MessageLane) and lane.within is stream:
            self._lasting.pop(asked, None)
            _remembered(self._lasting, asked, lambda: (port, lane))
        return port


def _remembered(known: dict[K, T], which: K, make: Callable[[], T]) -> T:
    """Return what is known of some messages, made anew if nothing is; the oldest are forgotten."""
    found = known.get(which)
    if found is None:
        if len(known) >= _PEERS:
            del known[next(iter(known))]
        found = known[which] = make()
    return found
