"""How far a program may be ahead of what it has issued."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable

from ..runtime.future import Future


class Ahead:
    """What `model.step()` returns; `await` it to wait until the program is only so many steps ahead.

    Nobody has to: it is for loops that would issue thousands of steps before the first has run.

    Args:
        pending: What is waited for.
    """

    __slots__ = ("_pending", "_then")

    def __init__(self, pending: Iterable[Future[object]]) -> None:
        self._pending = list(pending)
        self._then: Callable[[], Coroutine[object, object, None]] | None = None

    def then(self, work: Callable[[], Coroutine[object, object, None]]) -> Ahead:
        """Do something afterwards, if it is awaited; return this."""
        self._then = work
        return self

    def __await__(self) -> Generator[object, object, None]:
        for future in self._pending:
            yield from future.__await__()
        if self._then is not None:
            yield from self._then().__await__()
