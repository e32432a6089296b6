"""An event loop in a thread of its own, for what must go on while programs keep theirs busy."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Generic, TypeVar

import trio
from trio.lowlevel import TrioToken, current_trio_token

T = TypeVar("T")


async def call_in(token: TrioToken, nursery: trio.Nursery, function: Callable[..., Awaitable[T]], *args: object) -> T:
    """Await `function(*args)` in a task of another loop; cancelling this cancels it, and waits until it has ended.

    Args:
        token: Of that loop.
        nursery: Of that loop; stays open until this has returned.
        function: To be called there.
        args: Its arguments.

    Raises:
        Exception: What it raises.
        trio.ClosedResourceError: The other loop has ended meanwhile.
    """
    home, done, scope = current_trio_token(), trio.Event(), trio.CancelScope()
    results: list[T] = []
    errors: list[Exception] = []

    async def work() -> None:
        try:
            with scope:
                results.append(await function(*args))
        except Exception as error:
            errors.append(error)
        finally:
            with suppress(trio.RunFinishedError):
                home.run_sync_soon(done.set)

    token.run_sync_soon(nursery.start_soon, work)
    try:
        await done.wait()
    finally:
        if not done.is_set():
            token.run_sync_soon(scope.cancel)
            with trio.CancelScope(shield=True):
                await done.wait()
    for error in errors:
        raise error
    if not results:
        raise trio.ClosedResourceError("the other loop has ended")
    return results[0]


class OwnLoop:
    """The loop, as the one that has started it sees it; `own_loop` makes it."""

    def __init__(self, name: str) -> None:
        self.home = current_trio_token()
        self._started, self._ended = trio.Event(), trio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._token: TrioToken
        self._nursery: trio.Nursery

    async def start(self) -> None:
        """Start it, and wait until it runs."""
        self._thread.start()
        with trio.CancelScope(shield=True):
            await self._started.wait()

    async def call(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` there; see `call_in`."""
        return await call_in(self._token, self._nursery, function, *args)

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Call a function there, in the order in which threads have asked; any thread. After the end, none is."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *args)

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a task there, which lives until it or the loop ends."""
        self.call_soon(self._nursery.start_soon, function, *args)

    @asynccontextmanager
    async def entered(self, manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Hold a context manager open there for the length of an ``async with`` here; if it fails, so does this."""
        with trio.CancelScope() as scope:
            held = _Held(manager, lambda: self.home.run_sync_soon(scope.cancel))
            value = await self.call(held.enter, self._nursery)
            try:
                yield value
            finally:
                with trio.CancelScope(shield=True):
                    await self.call(held.leave)
        if held.failure is not None:
            raise held.failure

    async def aclose(self) -> None:
        """End it, and join its thread."""
        self.call_soon(self._nursery.cancel_scope.cancel)
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        self._thread.join()

    def _run(self) -> None:
        try:
            trio.run(self._live)
        finally:
            with suppress(trio.RunFinishedError):
                self.home.run_sync_soon(self._ended.set)

    async def _live(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = current_trio_token()
            self.home.run_sync_soon(self._started.set)
            await trio.sleep_forever()


@asynccontextmanager
async def own_loop(name: str) -> AsyncIterator[OwnLoop]:
    """Run another loop for the length of an ``async with``.

    Args:
        name: Of its thread.
    """
    loop = OwnLoop(name)
    await loop.start()
    try:
        yield loop
    finally:
        await loop.aclose()


class _Held(Generic[T]):
    """A context manager that a task of the other loop holds open; everything here happens there."""

    def __init__(self, manager: AbstractAsyncContextManager[T], on_failure: Callable[[], None]) -> None:
        self._manager, self._on_failure = manager, on_failure
        self.failure: Exception | None = None
        self._values: list[T] = []
        self._scope = trio.CancelScope()

    async def enter(self, nursery: trio.Nursery) -> T:
        """Return what it gives once it is entered."""
        self._entered, self._left, self._gone = trio.Event(), trio.Event(), trio.Event()
        nursery.start_soon(self._hold)
        try:
            await self._entered.wait()
        except trio.Cancelled:
            self._scope.cancel()
            with trio.CancelScope(shield=True):
                await self._gone.wait()
            raise
        if self.failure is not None:
            raise self.failure
        return self._values[0]

    async def leave(self) -> None:
        """Leave it, and wait until that is done."""
        self._left.set()
        await self._gone.wait()

    async def _hold(self) -> None:
        try:
            with self._scope:
                async with self._manager as value:
                    self._values.append(value)
                    self._entered.set()
                    await self._left.wait()
        except Exception as error:
            self.failure = error
            if self._values:
                self._on_failure()
        finally:
            self._entered.set()
            self._gone.set()
