"""An async function that runs beside a rank's program, and the future of what it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from types import FrameType
from typing import TypeVar

from ..errors import UsageError, shown
from .context import RankContext
from .future import Failure, settle, tell
from .outstanding import Issued

T_co = TypeVar("T_co", covariant=True)


class TaskFuture(Issued[T_co]):
    """The handle of an async function; `await` it for what the function returns. The rank waits for it at its end."""

    __slots__ = ("_context",)

    def __init__(self, context: RankContext, name: str, frame: FrameType) -> None:
        super().__init__()
        self.name, self.place = name, (frame.f_code, frame.f_lasti)
        self._context = context

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return f"task '{self.name}'"

    def _loop_thread(self) -> int | None:
        return self._context.thread

    def start(self, function: Callable[..., Awaitable[T_co]], args: tuple[object, ...]) -> None:
        """Begin; the loop's thread only."""
        self._context.outstanding.operations[self] = None
        self._context.spawn(self._run, function, args)

    async def _run(self, function: Callable[..., Awaitable[T_co]], args: tuple[object, ...]) -> None:
        try:
            running = function(*args)
            if not isawaitable(running):
                raise UsageError(f"fn: expected an async function, but {self.name} returned {shown(running)}")
            value, failure = await running, None
        except Exception as error:
            value, failure = None, Failure(error)
        self._end(value, failure)

    def abandon(self, error: BaseException) -> None:
        """Fail it because the world has ended, which also cancels it."""
        self._end(None, Failure(error, seen=True))

    def _end(self, value: object, failure: Failure | None) -> None:
        if not settle(self, value, failure):
            return
        outstanding = self._context.outstanding
        outstanding.operations.pop(self, None)
        outstanding.note_end(self, failure)
        tell(self)
