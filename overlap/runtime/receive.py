"""Receives: the receiver's end of a message, which can be withdrawn until a message has met it.

A receive with only one awaiting task gives its place back when that task is cancelled, so that no message is lost:

* If no message has met it, it leaves the queue of receives at once, and it is `PARKED`.
* If a message has met it, or the transport cannot decide at once, it is `UNWANTED` and goes on; at its end the message
  is put back, for the next receive.
* If it was done, and the await was cancelled at its checkpoint, the message is put back at once.

A parked receive takes part again, behind all others, once the program uses it again: by `await`, `result`,
`exception`, `wait`, `add_done_callback`, as an input, or by `done` if a message has arrived. None of this depends on
references to the future: a finalizer would run at an arbitrary time for cycles, held tracebacks and interpreters
without a GIL, and a receive that lives on by accident would swallow a message.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from threading import get_ident
from typing import Protocol, TypeVar

import numpy as np

from ..collectives.call import Call
from ..collectives.kinds import P2P
from ..collectives.reduce import Array
from ..errors import FutureCancelledError, PeerFailedError
from ..timeline.recording import RawMatch
from .failure import Failure
from .memory.foreign import as_input
from .operation import NOWHERE, CollectiveFuture, OperationPort, ReturnedMessage, StreamLike
from .outstanding import CallSite
from .settling import Flag, conclude, take_back
from .state import ADMITTED, CANCELLING, DONE, ISSUED, MATCHING, PARKED, RUNNING, STOPPING, UNWANTED

T_co = TypeVar("T_co", covariant=True)

LEFT_STATES = (UNWANTED, CANCELLING)
"""States of receives whose message goes to the next one, unless a task waits for them again."""

_ARRIVALS = count(1)  # a communicator's numbers would restart when it is opened again


class Receives(Protocol):
    """The issuer of a receive."""

    def receivers_port(self, operation: ReceiveFuture[object]) -> OperationPort:
        """Return the port of the messages from the source of a receive, which may have been closed since the call."""

    def receive_again(self, operation: ReceiveFuture[object]) -> None:
        """Issue a receive again that has left the queue."""


class ReceiveFuture(CollectiveFuture[T_co]):
    """Receiver's end of a message.

    Attributes:
        request: Issuer, source, tag and stream of the call; None once the message is taken, so that a future does not
            hold its group.
        order: Order of arrival of its message; 0 before.
    """

    __slots__ = ("_place", "_was_taken", "order", "request")

    request: tuple[Receives, int | None, int, StreamLike | str | None] | None

    def __init__(
        self,
        out: object,
        caller: CallSite,
        priority: int,
        name: str,
        request: tuple[Receives, int | None, int, StreamLike | str | None],
    ) -> None:
        super().__init__(P2P, None, out, caller, priority, name)
        self.request = request
        self._place = out
        self.order: int = 0

    @property
    def _taken(self) -> bool:
        return self._was_taken

    @_taken.setter
    def _taken(self, taken: bool) -> None:
        self._was_taken = taken
        if taken:
            self.request = None

    @property
    def done(self) -> Flag:
        """Whether the operation has ended, with a result or an error; `done()` is the same."""
        here = self.state is PARKED and get_ident() == self.context.thread
        if here and self.port.communicator.has_message(self.port):
            self._resume()
        return super().done

    def cancel(self) -> bool:
        """Withdraw the receive, unless a message has met it; see `Future.cancel`."""
        return self.cancelled() or self.context.on_loop(self._cancel_on_loop)

    # -- awaits that are cancelled ---------------------------------------------------------------------------------

    def _await_cancelled(self) -> None:
        """Leave the queue after a cancelled await, if the receive has no other user; put a taken message back."""
        if self.state in (PARKED, CANCELLING, STOPPING) or self._has_user():
            return
        if self.port is NOWHERE:  # issued by another thread, and not enqueued yet
            self._await_cancelled_elsewhere()
            return
        if self.state < DONE:
            if self._withdraw():
                self._park()
            elif self.state is not UNWANTED:
                self._enter(UNWANTED)
        elif self._failure is None:
            value, request = self._value, self.request
            if request is not None and take_back(self, PARKED):  # else a thread has just been given the result
                message, port = self._take_message(value), request[0].receivers_port(self)
                self._reset_for_reissue()
                port.communicator.put_back(port, message, self)

    def _await_cancelled_elsewhere(self) -> None:
        """Let the loop's thread handle a cancelled await, unless the loop has ended."""
        with suppress(PeerFailedError):  # the loop has ended
            self.context.from_thread(self._await_cancelled)

    def _has_user(self) -> bool:
        """Whether a task, a thread, a callback or another operation waits for the result, or was given it."""
        if self._taken or self._waiters or self._threads or self._anywhere or self._has_callers():
            return True
        return any(self in operation.inputs for operation in self.context.outstanding.operations)

    def _claim(self) -> None:
        """Take part again on the loop's thread, if the receive has left the queue or is about to."""
        if self.state is PARKED or self.state is UNWANTED:
            if get_ident() == self.context.thread:
                self._resume()
            else:
                self.context.from_thread(self._resume)

    def _ends_at_once(self) -> bool:
        """Whether the result is available without waiting, after taking part again."""
        if self.state >= UNWANTED and get_ident() == self.context.thread:
            self._claim()
        return super()._ends_at_once()

    def _resume(self) -> None:
        """Take part again: in its place, or, if it had left the queue, behind the receives issued since."""
        if self.state is UNWANTED:
            self._enter(MATCHING if self.scope is None else RUNNING)
        if self.state is not PARKED:
            return
        if self.context.closed:
            conclude(self, None, Failure(self.context.ended(), seen=True))
            return
        self._enter(ISSUED)
        self.out = self._place  # type: ignore[assignment]
        assert self.request is not None, "this is a bug in overlap: a parked receive has no request"
        self.request[0].receive_again(self)

    # -- leaving the queue -------------------------------------------------------------------------------------------

    def _withdraw(self) -> bool | None:
        """Remove the receive from the queue; False if a message has met it; None if that is not decided yet."""
        if self.state > ADMITTED:
            withdrawn = self.port.communicator.withdraw_receive(self, self._leave_late)
            if not withdrawn:
                return withdrawn
        self._leave_queue()
        return True

    def _leave_late(self) -> None:
        """Park or cancel the receive now that the transport has given it back; take part again if it has a user."""
        if self.state >= DONE:
            return
        self.port.communicator.forget_receive(self)
        self._leave_queue()
        self._park_or_cancel()
        if self.state is PARKED and self._has_user():
            self._resume()

    def _leave_queue(self) -> None:
        """Return the place and the number of the receive, and offer its messages to other receives."""
        self.context.flight.ended(self.record, self.context.now_ns())
        self.port.give_back(self.seq)
        self.port.stream.finished(self, None)
        self.port.communicator.offer_again()

    def _park(self) -> None:
        self._enter(PARKED)
        self._reset_for_reissue()

    def _reset_for_reissue(self) -> None:
        """Reset the values that the next issue of the receive sets again."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.release()
        self._value, self._input_locked, self.order, self.awaited_ns = None, False, 0, None
        self.priority -= self.port.stream.priority

    def _park_or_cancel(self) -> None:
        """End the receive if it is being cancelled; otherwise park it."""
        cancelled = self.state is CANCELLING
        self._park()
        if cancelled:
            self._conclude_cancelled()

    def _cancel_on_loop(self) -> bool:
        """Cancel the receive on the loop's thread; False if a message has met it."""
        if self.state >= DONE or self.state is CANCELLING:
            return self.state is CANCELLING or self.cancelled()
        if self.port is NOWHERE:  # issued by another thread, and not enqueued yet
            self.release()
        elif self.state is not PARKED:
            withdrawn = self._withdraw()
            if withdrawn is None:
                self._enter(CANCELLING)
            if not withdrawn:
                return withdrawn is None
            self._park()
        self._conclude_cancelled()
        return True

    def _conclude_cancelled(self) -> None:
        """End the receive with `FutureCancelledError`."""
        conclude(self, None, Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True))

    # -- messages that no task takes -----------------------------------------------------------------------------------

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Set the result, or put the message back for the next receive: see the module."""
        if self.state in LEFT_STATES and self.put_back_if_left():
            return
        if not self.order:  # else it is a returned message
            self.order = next(_ARRIVALS)
        super().finish(end_ns, meeting)

    def put_back_if_left(self) -> bool:
        """Put the arrived message back if no task waits for it or the receive is cancelled; return whether it was."""
        if not self._is_left:
            return False
        communicator, port, stream = self.port.communicator, self.port, self.port.stream
        communicator.put_back(port, self._take_message(None), self)
        stream.finished(self, None)  # the next receive, if any, takes it
        self._park_or_cancel()
        return True

    def fail(self, failure: Failure) -> None:
        """End with an error; a receive that no task waits for gives its place back instead."""
        if not self._is_left:
            super().fail(failure)
        elif self.scope is None:  # else the transport ends it
            self._leave_late()

    @property
    def _is_left(self) -> bool:
        """Whether the receive is being cancelled, or unwanted and without a user."""
        return self.state is CANCELLING or (self.state is UNWANTED and not self._has_user())

    def _take_message(self, value: object) -> ReturnedMessage:
        """Return the message: with `value`, or with the arrived bytes if there is no value yet."""
        self.order = self.order or next(_ARRIVALS)
        return ReturnedMessage(self.order, *self.call_and_bytes(value))

    def call_and_bytes(self, value: object) -> tuple[Call, Array | None]:
        """Return the call and the bytes of the message, as a flat copy."""
        if self.context.arrays.shapes_only:
            return self.call, None
        return self.call, np.array(as_input(value) if value is not None else self.out).reshape(-1)
