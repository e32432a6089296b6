"""One end of a message between two ranks, as the wire brings it: it needs neither a schedule nor a program."""

from __future__ import annotations

from collections.abc import Callable

import trio

from transports import Call, Starter

from ...collectives.reduce import Array
from .host_bytes import bytes_of
from .lingering import linger


class MessageRun:
    """A message under way, seen from one of its ends.

    Args:
        starter: What starts messages to the other end, and from it.
        peer: World rank of that.
        tag: Transport tag of the message.
        spawn: Starts a task, which is needed only to give up, or to tell of an error.
    """

    __slots__ = ("_call", "_ended", "_failure", "_over", "_peer", "_spawn", "_starter", "_tag")

    def __init__(self, starter: Starter, peer: int, tag: int, *, spawn: Callable[..., None]) -> None:
        self._starter, self._peer, self._tag, self._spawn = starter, peer, tag, spawn
        self._call: Call | None = None
        self._ended: Callable[[BaseException | None], None] | None = None
        self._failure: BaseException | None = None
        self._over = False

    def send(self, array: Array, priority: int, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin to send a C-contiguous array; True if it has left.

        Args:
            array: Must not change until then.
            priority: Lower is more urgent.
            ended: Called once if it has not: when nothing is under way any more, with what it failed with.
        """
        call = self._starter.begin_send(self._peer, self._tag, _bytes(array), priority=priority, done=self._done)
        return call is None or self._begun(call, ended)

    def receive(self, array: Array, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin to receive into a C-contiguous array, as `send`."""
        view = _bytes(array)
        return self._begun(self._starter.begin_recv(self._peer, self._tag, view, view.nbytes, done=self._done), ended)

    def look(self) -> None:
        """Take in what has come, before whoever waits for it sleeps."""
        if not self._over:
            linger({self._peer: self._starter}, self._is_over)

    def _is_over(self) -> bool:
        return self._over

    def cancel(self) -> None:
        """Withdraw it; what cannot be withdrawn is waited for."""
        if self._failure is None:
            self._failure = trio.ClosedResourceError("the message was given up")
            self._spawn(self._give_up)

    async def _give_up(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        if self._call is not None and not self._over:
            self._call.withdraw()

    def _begun(self, call: Call, ended: Callable[[BaseException | None], None]) -> bool:
        if self._over and call.error is None:
            return True
        self._call, self._ended = call, ended
        if self._over:
            self._spawn(self._tell, call.error)
        return False

    def _done(self, call: Call) -> None:
        self._over = True
        error = call.error or self._failure
        if self._ended is None:
            return  # it is not even known to have begun
        if error is None:
            self._ended(None)
        else:  # by a task: who tells of an error may not be called back
            self._spawn(self._tell, error)

    async def _tell(self, error: BaseException) -> None:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        assert self._ended is not None, "it has begun"
        self._ended(error)


def _bytes(array: Array) -> memoryview:
    return bytes_of(array if array.ndim == 1 else array.reshape(-1))
