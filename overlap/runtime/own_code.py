"""Code of the program that a rank runs beside it: what computes and tasks have in common, and who hears its errors."""

from __future__ import annotations

from types import CodeType
from typing import Any, Literal, TypeAlias, TypeVar

from trio.lowlevel import checkpoint

from ..errors import UsageError, shown
from .context import RankContext
from .failure import Failure
from .outstanding import IssuedFuture

T_co = TypeVar("T_co", covariant=True)

# A task that a program starts runs in the next turn of the loop; what it calls may start one more.
_TURNS = 3

Errors: TypeAlias = Literal["raise", "await"]
"""When an error of a rank's own code that nobody awaits is raised: at once, or at the await; see `Rank.compute`."""


def check_errors(errors: str) -> None:
    """Raise `UsageError` unless it is one of `Errors`."""
    if errors not in ("raise", "await"):
        raise UsageError(
            f'errors: expected "raise" (at once) or "await" (at the await of the future), got {shown(errors)}'
        )


class OwnCode(IssuedFuture[T_co]):
    """The handle of a compute or a task."""

    __slots__ = ()
    runs_code = True
    context: RankContext
    name: str
    place: tuple[CodeType, int]

    def _deliver(self) -> None:
        """Deliver its end: the rank ends with its error unless the program awaits it."""
        context, failure, outstanding = self.context, self._failure, self.context.outstanding
        if outstanding.operations.pop(self, self) is None or outstanding.daemons.pop(self, self) is None:
            outstanding.note_end(self, failure)
        self._notify()
        if failure is not None and failure.prompt and not failure.seen and not context.closed:
            context.spawn(_judge, context, self, failure)


async def _judge(context: RankContext, operation: IssuedFuture[Any], failure: Failure) -> None:
    """End the rank because of an error of its own code, unless the program awaits it: as a child ends a nursery.

    Tasks that are about to run come first: those that were woken see the error, and those that have just been started
    begin to await it.
    """
    for _ in range(_TURNS):
        await checkpoint()
    for _ in range(2):  # twice: a task that was woken by a failed user of it in this turn has not been given it yet
        if failure.seen or context.outstanding.is_awaited(operation, failure):
            return
        await checkpoint()
    if not failure.seen:
        context.end_program(operation, failure)
