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

    A wire may derive its own, or make this one and call `end`.

    Args:
        done: Called at the end.
        nbytes: Length of the message.
        withdraw: Cancels the request if it has not matched; None: it is left alone.

    Attributes:
        ended: The request has finished, failed or been withdrawn, and its callback has been called.
        error: The error of a failed request.
        withdrawn: The request was cancelled before it matched, as if it had never been made.
        nbytes: Length of the message; of a receive of any length once it has matched.
        theirs: Signature of the other end, where the two ends differ, or the length was `OPEN`.
        loan: The message of a receive without a buffer.
    """

    ended: bool = False
    withdrawn: bool = False
    error: Exception | None = None
    nbytes: int = 0
    theirs: PlainSignature | None = None
    loan: memoryview | None = None
    done: Done | None
    _withdraw: Callable[[Any], None] | None

    def __init__(self, done: Done, nbytes: int = 0, withdraw: Callable[[Request], None] | None = None) -> None:
        self.done, self.nbytes, self._withdraw = done, nbytes, withdraw

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """End the request, and call `done`; for wires. A request that has ended stays as it is."""
        if not self.ended:
            self.ended, self.error, self.withdrawn = True, error, withdrawn
            done, self.done = self.done, None
            if done is not None:
                done(self)

    def make_memory(self, allocate: Callable[[Any], Buffer]) -> memoryview:
        """Return the memory of `allocate` for a message whose length is known now; for wires.

        Raises:
            ArgumentError: It has another length, or cannot be written.
            Exception: `allocate` has raised it.
        """
        view = as_bytes(allocate(self), name="the memory of allocate", writable=True)
        if view.nbytes != self.nbytes:
            raise ArgumentError(f"allocate returned {view.nbytes} bytes for a message of {self.nbytes}")
        return view

    def withdraw(self) -> None:
        """Cancel the request if it has not matched; its callback is called all the same, at once or later."""
        if not self.ended and self._withdraw is not None:
            self._withdraw(self)

    def look(self) -> bool:
        """Poll for a moment, on behalf of a task that is about to sleep; return False where a wire cannot.

        The callback may be called during the poll. The event loop's thread only.
        """
        return False

    def wait(self, seconds: float) -> bool:
        """Wait in a thread, without the interpreter lock, until no more bytes move; False if they may, or unsupported.

        After True, the thread calls `settle_in_thread`, or lets the event loop call `settle`.
        """
        return False

    def settle(self) -> None:
        """Record the end that a thread has waited for, and call the callback once."""

    def settle_in_thread(self) -> bool:
        """Settle in the calling thread, which runs in place of the event loop; return whether that was possible."""
        return False

    def delivery(self) -> Delivery:
        """Return the message of a receive without a buffer; once."""
        assert self.loan is not None, "only a receive without a buffer delivers its message"
        return Delivery(self.loan.toreadonly())
