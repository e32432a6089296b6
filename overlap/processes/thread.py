"""Context manager that is open in the event loop of another thread: it goes on while the program is busy."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Generic, TypeVar

import trio
from trio.lowlevel import TrioToken, current_trio_token

from ..threads import start_thread

T = TypeVar("T")


@asynccontextmanager
async def in_own_thread(name: str, manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter `manager` in another event loop for the length of an ``async with`` here; its error is raised here.

    Args:
        name: Name of the thread.
        manager: Entered and left in the other loop; its value is used here.
    """
    holder = _ManagerThread(name, manager)
    await holder.start()
    with holder.here:
        try:
            await holder.entered.wait()
            if holder.error is None:
                yield holder.value
        finally:
            await holder.end()
    if holder.error is not None:
        try:
            raise holder.error
        finally:
            holder.error = None  # or it would keep this frame alive, which keeps it alive


class _ManagerThread(Generic[T]):
    """Thread with an event loop in which a context manager is open."""

    value: T

    def __init__(self, name: str, manager: AbstractAsyncContextManager[T]) -> None:
        self.here = trio.CancelScope()  # cancelled when the manager fails
        self.entered = trio.Event()  # or failed
        self.error: BaseException | None = None
        self._manager, self._home = manager, current_trio_token()
        self._started, self._ended, self._left = trio.Event(), trio.Event(), trio.Event()
        self._token: TrioToken
        self._entering = trio.CancelScope()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)

    async def start(self) -> None:
        """Start the thread, and wait until its loop runs."""
        start_thread(self._thread)
        with trio.CancelScope(shield=True):
            await self._started.wait()

    async def end(self) -> None:
        """Leave the manager, or give up entering it, and join the thread."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._left.set if self.entered.is_set() else self._entering.cancel)
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        self._thread.join()

    def _run_loop(self) -> None:
        """Run an event loop in the thread until the manager is left; store its error."""
        try:
            trio.run(self._hold_manager)
        except BaseException as error:
            self.error = error
        self._run_in_home_loop(self._report_end)

    async def _hold_manager(self) -> None:
        """Enter the manager, and leave it when `end` requests that."""
        self._token = current_trio_token()
        self._run_in_home_loop(self._started.set)
        with self._entering:
            async with self._manager as self.value:
                self._run_in_home_loop(self.entered.set)
                await self._left.wait()

    def _report_end(self) -> None:
        """Release the tasks that wait in the home loop, and cancel the block if the manager has failed."""
        if self.error is not None:
            self.here.cancel()
        self.entered.set()
        self._ended.set()

    def _run_in_home_loop(self, function: object) -> None:
        """Call a function in the event loop that has started the thread, unless it has ended."""
        with suppress(trio.RunFinishedError):
            self._home.run_sync_soon(function)  # type: ignore[arg-type]
