"""Requests: sends and receives under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError
from transports.signature import PlainSignature

#: Called once with a request at its end, perhaps before the call that began it returns. It neither raises nor waits.
Done: TypeAlias = "Callable[[Request], None]"


class Request:
    """A send or receive under way.

    A wire may make requests of this class and call `end`, or requests of a subclass.

    Args:
        done: Called once with the request at its end.
        nbytes: Length of the message.
        withdraw: Called with the request to cancel it if it has not matched; None: it cannot be cancelled.

    Attributes:
        ended: The request has finished, failed or been withdrawn, and its callback has been called.
        error: The error of a failed request.
        withdrawn: The request was cancelled before it matched, as if it had never been made.
        matched: The receive has met its message, so that it finishes even if it is cancelled. Not every wire sets it:
            only one whose `withdraw` takes effect at once.
        nbytes: Length of the message; of a receive of any length only once it has matched.
        view: The caller's bytes, for wires; None after the end, when the caller may resize its buffer.
        theirs: Signature of the other end, if the two ends differ, or the length was `OPEN`; otherwise None.
        loan: The message of a receive without a buffer.
    """

    ended: bool = False
    withdrawn: bool = False
    matched: bool = False
    error: Exception | None = None
    nbytes: int = 0
    view: memoryview | None = None
    theirs: PlainSignature | None = None
    loan: memoryview | None = None
    done: Done | None
    _withdraw: Callable[[Any], None] | None

    def __init__(self, done: Done, nbytes: int = 0, withdraw: Callable[[Request], None] | None = None) -> None:
        self.done, self.nbytes, self._withdraw = done, nbytes, withdraw

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """End the request, and call `done`. Wires call this; on a request that has ended it does nothing.

        Args:
            error: Error of a request that failed; None: the request has succeeded, or was withdrawn.
            withdrawn: Whether the request was cancelled before it met its other end.
        """
        if not self.ended:
            self.ended, self.error, self.withdrawn, self.view = True, error, withdrawn, None
            # cleared before the call, so that nothing holds the callback's objects longer
            done, self.done = self.done, None
            if done is not None:
                done(self)

    def make_memory(self, allocate: Callable[[Any], Buffer]) -> memoryview:
        """Call `allocate` with this request, whose length is known now, and return the memory as bytes. For wires.

        Raises:
            ArgumentError: The memory has another length than the message, or cannot be written.
            Exception: Any error of `allocate`.
        """
        view = as_bytes(allocate(self), name="the memory of allocate", writable=True)
        if view.nbytes != self.nbytes:
            raise ArgumentError(
                f"allocate returned {view.nbytes} bytes for a message of {self.nbytes}; return request.nbytes bytes"
            )
        return view

    def withdraw(self) -> None:
        """Cancel the request if it has not matched; its callback is called all the same, at once or later."""
        if not self.ended and self._withdraw is not None:
            self._withdraw(self)

    def look(self) -> bool:
        """Poll for a moment before a task or a thread sleeps; return whether the wire can poll. By default it cannot.

        The request may end well during the poll; the event loop ends it after a failure. To be called on the event
        loop's thread, or in its place.
        """
        return False

    def wait(self, seconds: float) -> bool:
        """Block the calling thread, without the interpreter lock, until all bytes have moved, `seconds` at most.

        Returns:
            Whether the bytes have moved. Then the thread calls `settle_in_thread`, or lets the event loop call
            `settle`. False: the time is over, or the wire cannot wait in a thread, as by default.
        """
        return False

    def settle(self) -> None:
        """End the request after a thread has waited for it with `wait`; this default does nothing."""

    def settle_in_thread(self) -> bool:
        """Do what `settle` does, in a thread that runs in place of the event loop; False if that is impossible."""
        return False

    def delivery(self) -> Delivery:
        """Return the message of a receive without a buffer that has ended without an error. Call it once."""
        assert self.loan is not None, "only a receive without a buffer delivers its message"
        return Delivery(self.loan.toreadonly())
