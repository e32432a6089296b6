"""Tasks: async functions that run in parallel with the program; and errors of tasks and computes that nobody awaits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from types import FrameType
from typing import Any, Literal, TypeAlias, TypeVar

import trio
from trio.lowlevel import checkpoint

from ..errors import FutureCancelledError, RankLeftError, UsageError, argument_text
from .context import RankContext
from .failure import Failure
from .interrupts import calls_program
from .outstanding import TURNS, CallSite, IssuedFuture, code_place, is_own_error
from .settling import settle_and_deliver
from .state import DONE, RUNNING

T_co = TypeVar("T_co", covariant=True)


Errors: TypeAlias = Literal["raise", "await"]
"""Time at which an unawaited error of a rank's own code is raised: at once, or at the await (see `Rank.compute`)."""


def check_errors_option(errors: str) -> None:
    """Raise `UsageError` unless `errors` is one of `Errors`."""
    if errors not in ("raise", "await"):
        raise UsageError(
            f'errors: expected "raise" (at once) or "await" (at the await of the future), got {argument_text(errors)}'
        )


class OwnCode(IssuedFuture[T_co]):
    """Handle of a compute or a task."""

    __slots__ = ()
    runs_code = True

    def _deliver(self) -> None:
        """Notify those that wait. An error of the program's own code that nobody awaits ends the rank."""
        context, failure, outstanding = self.context, self._failure, self.context.outstanding
        # the values of both dicts are None: `pop` returns None for a key, and the default `self` without one
        was_daemon = outstanding.daemons.pop(self, self) is None
        was_unfinished = outstanding.operations.pop(self, self) is None
        if was_daemon or (was_unfinished and (outstanding.draining or failure is not None)):
            outstanding.record_end(self, failure)
        self._notify()
        if failure is not None and failure.prompt and not failure.seen and not context.closed:
            context.spawn(_end_rank_unless_awaited, context, self, failure)


async def _end_rank_unless_awaited(context: RankContext, operation: IssuedFuture[Any], failure: Failure) -> None:
    """End the rank because of an error of its own code that nobody awaits, as a child ends its nursery.

    Tasks that are about to run go first: a task that was woken sees the error, a new task may begin to await it.
    """
    for _ in range(TURNS):
        await checkpoint()
    for _ in range(2):  # twice: a task that awaits an operation with this input may be woken in this turn only
        if failure.seen or context.outstanding.is_awaited(operation, failure):
            return
        await checkpoint()
    if not failure.seen:
        context.fail_for_unawaited_error(operation, failure)


class TaskFuture(OwnCode[T_co]):
    """Handle of an async function; `await` it for the function's result.

    Args:
        context: What all operations of the rank share.
        name: Name in timelines.
        caller: Where it was issued.
        prompt: Whether an error that nobody awaits ends the rank at once.

    Attributes:
        daemon: Whether the task ends with the program; the rank waits for any other task at its end.
    """

    __slots__ = ("_prompt", "_scope", "daemon")

    def __init__(self, context: RankContext, name: str, caller: CallSite, *, prompt: bool, daemon: bool) -> None:
        super().__init__()
        issued: OwnCode[T_co] = self  # the base class, which declares some of the attributes
        issued.name, issued.context = name, context
        issued.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)
        self._prompt, self._scope = prompt, trio.CancelScope()
        self.daemon: bool = daemon

    @property
    def label(self) -> str:
        """Name of the task in messages."""
        return f"{'daemon' if self.daemon else 'task'} '{self.name}'"

    def cancel(self) -> bool:
        """Cancel the task, as its cancel scope would. It ends once it has left its `finally` blocks.

        Any thread may call this.

        Returns:
            Whether it is cancelled, now or since an earlier call; False if it has ended.
        """
        return self.cancelled() or self.context.call_on_loop(self._cancel_on_loop)

    def _cancel_on_loop(self) -> bool:
        """Return False if the task has ended."""
        if self.state < DONE and not self._scope.cancel_called:
            self._scope.cancel(reason=f"{self.label} ({self.call_site}) was cancelled")
        return self.state < DONE

    def start(self, function: Callable[..., Awaitable[T_co]], args: tuple[object, ...]) -> None:
        """Start the task, which awaits `function(*args)`. Only the loop's thread may call this."""
        outstanding = self.context.outstanding
        (outstanding.daemons if self.daemon else outstanding.operations)[self] = None
        self._enter(RUNNING)
        self.context.spawn(self._run, function, args)

    @calls_program
    async def _run(self, function: Callable[..., Awaitable[T_co]], args: tuple[object, ...]) -> None:
        """Settle the future with the function's end; if the rank is cancelled, with the error of the world's end."""
        value, failure = None, None
        try:
            with self._scope:
                running = function(*args)
                if not isawaitable(running):
                    raise UsageError(
                        f"fn: expected an async function, but {self.name} returned {argument_text(running)}"
                    )
                value = await running
            if self._scope.cancelled_caught:
                failure = Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True)
        except Exception as error:
            clients_ended = self.daemon and isinstance(error, RankLeftError)  # a server without clients
            failure = Failure(error, prompt=self._prompt and is_own_error(error), seen=clients_ended)
        except BaseException:  # the rank ends
            self.abandon(self.context.closed_rank_error())
            raise
        settle_and_deliver(self, value, failure)
        del self, value, failure  # as in a compute's thread

    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended, which also cancels it."""
        settle_and_deliver(self, None, Failure(error, seen=True))
