"""Code of the program that a rank runs: the common part of computes and tasks, and the delivery of their errors."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

from trio.lowlevel import checkpoint

from ..errors import UsageError, shown
from .context import RankContext
from .failure import Failure
from .outstanding import TURNS, IssuedFuture

T_co = TypeVar("T_co", covariant=True)

Errors: TypeAlias = Literal["raise", "await"]
"""Time at which an unawaited error of a rank's own code is raised: at once, or at the await; see `Rank.compute`."""


def check_errors(errors: str) -> None:
    """Raise `UsageError` unless `errors` is one of `Errors`."""
    if errors not in ("raise", "await"):
        raise UsageError(
            f'errors: expected "raise" (at once) or "await" (at the await of the future), got {shown(errors)}'
        )


class OwnCode(IssuedFuture[T_co]):
    """Handle of a compute or a task."""

    __slots__ = ()
    runs_code = True

    def _deliver(self) -> None:
        """Deliver the end; an error ends the rank unless the program awaits it."""
        context, failure, outstanding = self.context, self._failure, self.context.outstanding
        daemon = outstanding.daemons.pop(self, self) is None
        known = outstanding.operations.pop(self, self) is None or daemon
        if daemon or (known and (outstanding.draining or failure is not None)):
            outstanding.record_end(self, failure)
        self._notify()
        if failure is not None and failure.prompt and not failure.seen and not context.closed:
            context.spawn(_end_unless_awaited, context, self, failure)


async def _end_unless_awaited(context: RankContext, operation: IssuedFuture[Any], failure: Failure) -> None:
    """End the rank because of an error of its own code, unless the program awaits it: as a child ends a nursery.

    Tasks that are about to run come first: woken ones see the error, and new ones begin to await it.
    """
    for _ in range(TURNS):
        await checkpoint()
    for _ in range(2):  # twice: a task woken in this turn by a failed user has not been given the error yet
        if failure.seen or context.outstanding.is_awaited(operation, failure):
            return
        await checkpoint()
    if not failure.seen:
        context.end_program(operation, failure)
