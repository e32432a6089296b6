"""Tasks: async functions that run in parallel with the program of a rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from types import FrameType
from typing import TypeVar

import trio

from ..errors import FutureCancelledError, RankLeftError, UsageError, shown
from .context import RankContext
from .failure import Failure
from .interrupts import calls_program
from .outstanding import CallSite, IssuedFuture, arose_here, code_place
from .own_code import OwnCode
from .settling import settle_and_deliver
from .state import DONE, RUNNING

T_co = TypeVar("T_co", covariant=True)


class TaskFuture(OwnCode[T_co]):
    """Handle of an async function; `await` it for the function's result.

    Args:
        context: What all operations of the rank share.
        name: Name in timelines.
        caller: Where it was issued.
        prompt: Whether an error ends the world at once, before anybody awaits it.

    Attributes:
        daemon: Whether the task ends with the program; the rank waits for any other task at its end.
    """

    __slots__ = ("_prompt", "_scope", "daemon")

    def __init__(self, context: RankContext, name: str, caller: CallSite, *, prompt: bool, daemon: bool) -> None:
        super().__init__()
        issued: IssuedFuture[T_co] = self  # which declares these
        issued.name, issued.context = name, context
        issued.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)
        self._prompt, self._scope = prompt, trio.CancelScope()
        self.daemon: bool = daemon

    @property
    def label(self) -> str:
        """Name of the task in messages."""
        return f"{'daemon' if self.daemon else 'task'} '{self.name}'"

    def cancel(self) -> bool:
        """Cancel the task, as its cancel scope would; any thread. It ends once it has left its `finally` blocks.

        Returns:
            Whether it is cancelled, now or since an earlier call; False if it has ended.
        """
        return self.cancelled() or self.context.on_loop(self._cancel)

    def _cancel(self) -> bool:
        """Cancel the task; False if it has ended."""
        if self.state < DONE and not self._scope.cancel_called:
            self._scope.cancel(reason=f"{self.label} ({self.call_site}) was cancelled")
        return self.state < DONE

    def start(self, function: Callable[..., Awaitable[T_co]], args: tuple[object, ...]) -> None:
        """Start the task; the loop's thread only."""
        outstanding = self.context.outstanding
        (outstanding.daemons if self.daemon else outstanding.operations)[self] = None
        self._enter(RUNNING)
        self.context.spawn(self._run, function, args)

    @calls_program
    async def _run(self, function: Callable[..., Awaitable[T_co]], args: tuple[object, ...]) -> None:
        """Run the function as a task, and settle the future with its outcome."""
        value, failure = None, None
        try:
            with self._scope:
                running = function(*args)
                if not isawaitable(running):
                    raise UsageError(f"fn: expected an async function, but {self.name} returned {shown(running)}")
                value = await running
            if self._scope.cancelled_caught:
                failure = Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True)
        except Exception as error:
            clients_ended = self.daemon and isinstance(error, RankLeftError)  # a server without clients
            failure = Failure(error, prompt=self._prompt and arose_here(error), seen=clients_ended)
        except BaseException:  # the rank ends
            self.abandon(self.context.ended())
            raise
        settle_and_deliver(self, value, failure)
        del self, value, failure  # as in a compute's thread

    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended, which also cancels it."""
        settle_and_deliver(self, None, Failure(error, seen=True))
