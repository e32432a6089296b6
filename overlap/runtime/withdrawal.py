"""Receives that give their place back, or their message, because no task waits for them any more.

A receive with only one awaiting task gives its place back when that task is cancelled, so that no message is lost:

* If no message has met it, it leaves its lane at once, and it is `PARKED`.
* If a message has met it, or the transport cannot decide at once, it is `UNWANTED` and goes on; at its end the message
  is returned to the lane, for the next receive.
* If it was done, and the await was cancelled at its checkpoint, the message is returned at once.

A parked receive takes part again, behind all others, once the program uses it again: by `await`, `result`,
`exception`, `wait`, `add_done_callback`, as an input, or by `done` if a message has arrived. None of this depends on
references to the future: a finalizer would run at an arbitrary time for cycles, held tracebacks and interpreters
without a GIL, and a receive that lives on by accident would swallow a message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from threading import get_ident
from typing import NamedTuple, TypeVar

import numpy as np

from ..collectives.call import Call
from ..collectives.reduce import Array
from ..errors import FutureCancelledError, PeerFailedError
from .arguments import take_output
from .failure import Failure
from .memory.foreign import as_input, as_output
from .settling import Flag, settle_and_deliver, take_back
from .state import ADMITTED, CANCELLING, DONE, ISSUED, MATCHING, PARKED, RUNNING, STOPPING, UNWANTED
from .transfer import Transfer
from .trees import leaves_of

T_co = TypeVar("T_co", covariant=True)

LEFT_STATES = (UNWANTED, CANCELLING)
"""States of receives whose message goes to the next one, unless a task waits for them again."""

ARRIVALS = count(1)
"""Order of arrival of messages: numbers of a lane would restart when it is opened again."""


class Returned(NamedTuple):
    """A message in a lane without a sender that waits: received and not taken, or failed before it was sent."""

    order: int  # Order of arrival among the messages of one source and tag
    call: Call | None = None  # Kind, dtype, shape and form
    flat: bool = False  # Whether its shape is open
    data: Array | None = None  # Flat, in memory of its own; None in a simulation without data
    error: Callable[[], BaseException] | None = None  # Makes the error of the receive that meets it

    @classmethod
    def failed(cls, error: Callable[[], BaseException]) -> Returned:
        """Return the place of a message that was never sent."""
        return cls(next(ARRIVALS), error=error)


class Withdrawable(Transfer[T_co]):
    """One end of a message that may give its place back, if it is a receive."""

    __slots__ = ()

    @property
    def done(self) -> Flag:
        """Whether the message has ended, with a result or an error; `done()` is the same."""
        if self.state is PARKED and get_ident() == self.context.thread and self._inbox.has_message(self._message):
            self.at_once = True
            self._resume()
        return super().done

    def cancel(self) -> bool:
        """Withdraw a receive, unless a message has met it; see `Future.cancel`."""
        return self.receives and (self.cancelled() or self.context.on_loop(self._cancel_on_loop))

    def _await_cancelled(self) -> None:
        """Leave the lane after a cancelled await, if the receive has no other user; return a received message."""
        if not self.receives or self.state in (PARKED, CANCELLING, STOPPING) or self._has_user():
            return
        if self.lane is None and self.state < DONE:  # issued by another thread, and not on the loop yet
            self._await_cancelled_elsewhere()
        elif self.state < DONE:
            if self._withdraw():
                self._park()
            elif self.state is not UNWANTED:
                self._enter(UNWANTED)
        elif self._failure is None and self._past is not None and (messages := self._past()) is not None:
            value = self._value
            if take_back(self, PARKED):  # else a thread has just been given the result
                self.messages = messages
                message = self._take_message(value)
                self._reset_for_reissue()
                messages.inbox.put_back(messages.inbox.lane(self._message), message)

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
        """Take part again on the loop's thread, if the receive has left its lane or is about to."""
        if self.state is PARKED or self.state is UNWANTED:
            if get_ident() == self.context.thread:
                self._resume()
            else:
                self.context.from_thread(self._resume)

    def _resume(self) -> None:
        """Take part again: in its place, or, if it had left its lane, behind the receives issued since."""
        if self.state is UNWANTED:
            self._enter(MATCHING if self.scope is None and self.request is None else RUNNING)
        if self.state is not PARKED:
            return
        if self.context.closed:
            settle_and_deliver(self, None, Failure(self.context.ended(), seen=True))
            return
        self._enter(ISSUED)
        self.out = self._place  # type: ignore[assignment]
        assert self.messages is not None, "this is a bug in overlap: a parked receive has no messages"
        if self.out is not None and not (type(self.out) is np.ndarray and self.out.flags.carray):
            take_output(self)
        self.peer = self.asked
        self.messages.begin(self._message)

    def _withdraw(self) -> bool | None:
        """Remove the receive from its lane; False if a message has met it; None if that is not decided yet."""
        if self.state > ADMITTED:
            withdrawn = self._inbox.withdraw_receive(self._message, self._leave_late)
            if not withdrawn:
                return bool(withdrawn) if withdrawn is not None else None
        self._leave_lane()
        return True

    def _leave_late(self) -> None:
        """Park or cancel the receive now that the transport has given it back; take part again if it has a user."""
        if self.state >= DONE:
            return
        self._leave_lane()
        self._park_or_cancel()
        if self.state is PARKED and self._has_user():
            self._resume()

    def _leave_lane(self) -> None:
        """Return the place and the number of the receive."""
        self.context.flight.ended(self.record, self.context.now_ns())
        self._inbox.leave(self._message, None, gives_back=True)

    def _park(self) -> None:
        self._enter(PARKED)
        self._reset_for_reissue()

    def _reset_for_reissue(self) -> None:
        """Reset the values that the next issue of the receive sets again."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.release()
        self._value, self._input_locked, self.order, self.awaited_ns, self.lane = None, False, 0, None, None
        self.at_once, self._half_met, self.pattern, self._form = False, False, None, None
        self.priority -= self.stream.priority

    def _park_or_cancel(self) -> None:
        """End the receive if it is being cancelled; otherwise park it."""
        cancelled = self.state is CANCELLING
        self._park()
        if cancelled:
            self._end_cancelled()

    def _cancel_on_loop(self) -> bool:
        """Cancel the receive on the loop's thread; False if a message has met it."""
        if self.state >= DONE or self.state is CANCELLING:
            return self.state is CANCELLING or self.cancelled()
        if self.lane is None and self.state is not PARKED:  # issued by another thread, and not on the loop yet
            self.release()
        elif self.state is not PARKED:
            withdrawn = self._withdraw()
            if withdrawn is None:
                self._enter(CANCELLING)
            if not withdrawn:
                return withdrawn is None
            self._park()
        self._end_cancelled()
        return True

    def _end_cancelled(self) -> None:
        """End the receive with `FutureCancelledError`."""
        settle_and_deliver(
            self, None, Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True)
        )

    def return_if_left(self) -> bool:
        """Return the arrived message if no task waits for it or the receive is cancelled; return whether it was."""
        if not self._is_left:
            return False
        inbox, lane = self._inbox, self.lane
        assert lane is not None, "this is a bug in overlap: a message has arrived outside a lane"
        message = self._take_message(None)
        self.context.flight.ended(self.record, self.context.now_ns())
        inbox.put_back(lane, message, giver=self._message)
        inbox.leave(self._message, None)  # the next receive, if any, takes it
        self._park_or_cancel()
        return True

    @property
    def _is_left(self) -> bool:
        """Whether the receive is being cancelled, or unwanted and without a user."""
        return self.state is CANCELLING or (self.state is UNWANTED and not self._has_user())

    def _take_message(self, value: object) -> Returned:
        """Return the message: with `value`, or with the arrived bytes if there is no value yet."""
        self.order = self.order or next(ARRIVALS)
        pattern = self.pattern
        assert pattern is not None, "this is a bug in overlap: a receive without a message returns it"
        if self.context.arrays.shapes_only:
            return Returned(self.order, pattern, self.flat)
        if value is None or not pattern.form:
            data = np.array(as_input(value) if value is not None else self.out).reshape(-1)
        else:  # the leaves of a tree as one flat copy of bytes
            leaves = [as_output(leaf, "like").reshape(-1).view(np.uint8) for leaf in leaves_of(value)]
            assert pattern.dtype is not None, "this is a bug in overlap: a received message has no dtype"
            data = np.concatenate(leaves).view(pattern.dtype)
        return Returned(self.order, pattern, self.flat, data)
