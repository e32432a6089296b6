"""What async tests share: a run that cannot hang, and lines that a test can wait for."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

Result = TypeVar("Result")

# Far above what any test here takes on a busy machine: it bounds a hang and decides nothing else.
TIMEOUT_S = 60.0


def run(main: Callable[..., Awaitable[Result]], *args: object) -> Result:
    """Run a test, which may fail but not hang."""

    async def bounded() -> Result:
        with trio.fail_after(TIMEOUT_S):
            return await main(*args)

    return trio.run(bounded)


class Lines(list[str]):
    """What a process has reported; a test can wait for more."""

    def __init__(self) -> None:
        super().__init__()
        self._more = trio.Event()

    def append(self, line: str) -> None:
        super().append(line)
        self._more.set()
        self._more = trio.Event()

    async def holding(self, words: str, *, count: int = 1) -> list[str]:
        """Wait for so many lines with these words in them, and return them."""
        while len(found := [line for line in self if words in line]) < count:
            await self._more.wait()
        return found
