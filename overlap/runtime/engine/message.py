"""One message outside a program: its end calls back, and only a failed message needs a task."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import cast

from trio import RunFinishedError

from transports import Request

from ..event_loop import Withdraws
from ..handover import Handover
from ..settling import LONGEST_WAIT_S
from .execution import Execution, Station
from .laid_out import LaidStep


class MessageTransfer(Execution, Withdraws):
    """One message with one peer, which needs no program; `spawn` starts a task only for a failed one."""

    def __init__(self, station: Station, peer: int, spawn: Callable[..., None]) -> None:
        self._station, self._peer, self._spawn = station, peer, spawn
        self._wire = station.wires[peer]
        self._running, self._waiting = {}, {}
        self._withdrawn: Callable[[], None] = _nothing

    def send(self, tag: int, data: memoryview, priority: int, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin to send; return whether the message is over, as `begin` does."""
        call = self._wire.begin_send(self._peer, tag, data, priority=priority, done=self._call_ended)
        return call is None or self._began(call, ended)

    def receive(self, tag: int, place: memoryview, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin to receive; return whether the message is over, as `begin` does."""
        return self._began(self._wire.begin_recv(self._peer, tag, place, place.nbytes, done=self._call_ended), ended)

    def _began(self, call: Request, ended: Callable[[BaseException | None], None]) -> bool:
        """Note a started call; True if it has ended already, and well."""
        if call.ended and self._failure is None:
            return True
        if not call.ended:
            self._running[_ONLY] = call
        self._ended = ended
        if self._failure is not None:
            self._give_up_soon()
        return False

    def withdraw(self, later: Callable[[], None]) -> bool | None:
        """Withdraw the receive, unless a message has met it.

        Args:
            later: Called if the transport needs a task for that, and no message has met the receive before.

        Returns:
            Whether it is withdrawn now; None if that is still open, as in a task.
        """
        call = self._running.get(_ONLY)
        if call is None or self._failure is not None:
            return False
        self._withdrawn = _nothing
        call.withdraw()
        if call.ended:
            return call.withdrawn
        self._withdrawn = later
        return False

    def _call_ended(self, call: Request) -> None:
        """End the message with the end of its call: well, withdrawn, or with an error."""
        self._running.clear()
        if call.withdrawn and self._failure is None:
            self._withdrawn()
            return
        if call.error is None and self._failure is None:
            self._end(None)
        else:
            self._stopped(call.error)

    # -- waiting -------------------------------------------------------------------------------------------------

    def look_before_sleeping(self) -> None:
        """Wait for a moment, before a task sleeps until the end."""
        call = self._running.get(_ONLY)
        if call is not None and not call.look():
            super().look_before_sleeping()

    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Wait, in a thread that waits for the end, if the wire lets threads; then end it in the loop's place."""
        call = self._running.get(_ONLY)
        if call is None:
            return
        settled = False
        try:
            came = call.wait(LONGEST_WAIT_S if longest_s is None else min(longest_s, LONGEST_WAIT_S))
            settled = not came or handover.in_place(call.settle_in_thread, False)
        finally:  # a signal handler may raise anywhere
            if not settled:
                with suppress(RunFinishedError):  # no task waits any more
                    handover.post(call.settle)


def _nothing() -> None:
    """Do nothing: `withdraw` has returned the result."""


_ONLY = cast("LaidStep", None)  # in place of the step of a message
