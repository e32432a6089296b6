"""Connection: one rank of a world, with the event loop in a thread of its own."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import trio

from ..diagnostics import line_in_thread
from ..errors import OverlapError, RemoteError, UsageError, first_of_group, text_of, type_name
from ..runtime.ending import register_for_forks
from ..runtime.group import Group
from ..runtime.interrupts import deferring_interrupts
from ..runtime.rank import Rank
from ..runtime.settling import Settling, settle, wait_until_settled
from ..runtime.world import World
from ..threads import start_thread

T = TypeVar("T")

# Longest wait of `fail` for its thread, in which a compute may still run; the other ranks have the error before.
_FAIL_S = 10.0

_Live = Callable[[Callable[[World], None], Callable[[Rank], Awaitable[None]]], Awaitable[object]]


class Connection:
    """One rank of a world, for programs that own their main thread. Made by `overlap.connect`.

    A context manager: leaving the block closes it, and an error that leaves the block fails the world.

    Args:
        index: Rank in the world.
        live: What the ranks of this process share while they are connected.

    Attributes:
        rank: This process's rank. Any thread may issue on it.
        size: How many ranks there are.
    """

    rank: Rank
    size: int

    def __init__(self, index: int, size: int, live: _Live) -> None:
        self.size, self._index = size, index
        self._live, self._owner = live, threading.get_ident()
        self._has_joined, self._ended = Settling(), Settling()
        self._world: World | None = None
        self._error: BaseException | None = None  # of the program, with which the rank is to end
        self._failure: BaseException | None = None  # with which the world has ended
        self._forked = self._reported = False
        self._has_started = False  # whether the world has started, even if it has failed since
        self._interrupts = ExitStack()  # handles Ctrl-C until the end
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=self._thread_main, name=f"overlap rank {index}", daemon=True)

    def __repr__(self) -> str:
        state = "failed" if self._failure is not None else "closed" if self._ended.done else "open"
        return f"<Connection of rank {self._index} of {self.size}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    # -- groups ------------------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a group of ranks, in that order; every member must make the same call. No communication.

            pair = connection.group([0, 1], name="pair")

        Args:
            ranks: World ranks, this one among them.
            name: For messages and timelines; by default the ranks.

        Returns:
            The group, as this rank sees it.

        Raises:
            UsageError: If a rank is unknown or named twice, or this rank is not among them.
        """
        return self.rank.group(ranks, name=name)

    def split(
        self, color: int | None, key: int = 0, *, within: Group | None = None, name: str | None = None
    ) -> Group | None:
        """Split the world, or a group, into one group for each color. A collective, which waits for all its ranks.

            rows = connection.split(connection.rank.rank // 4)

        Args:
            color: Ranks of one color form a group; with None, this rank is in none.
            key: Position of this rank in its group; by default in the order of the group that is split.
            within: The group that is split; by default the world.
            name: Name of the groups, for messages and timelines.

        Returns:
            The group of this rank's color; None without a color.

        Raises:
            UsageError: If `color` or `key` is no integer of 64 bits, or this is the thread of the event loop.
            PeerFailedError: If the world has ended, or ends in the meantime.
        """
        parent_group = within or self.rank.world

        async def split_in_loop() -> Group | None:
            return await parent_group.split(color, key, name=name)

        return self.run(split_in_loop)

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` in the thread of the event loop.

            total = connection.run(train, connection.rank)

        Args:
            function: An async function, such as the `main` of `overlap.run`.
            args: Its arguments.

        Returns:
            The result of the function.

        Raises:
            UsageError: On that thread.
            PeerFailedError: If the world has ended, or ends in the meantime.
        """
        if self._token is None or self._thread is threading.current_thread():
            raise UsageError("run: this is the thread of the event loop; await the function instead")
        try:
            return trio.from_thread.run(function, *args, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            assert self._world is not None
            raise self._world.ending.peer_failed() from None

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for everything issued and for the other ranks to close, and end the thread. Once: later calls return.

        Args:
            timeout_s: Seconds to wait at most; then the rank leaves, and what is not done fails on the others.

        Raises:
            RankFailedError: If a rank has failed, or an operation here has, and its error was never asked for.
            TimeoutError: If it took too long.
        """
        self._request_end()
        with self._interrupts:
            if not wait_until_settled(self._ended, timeout_s):
                unfinished = self._world.reports.doing(self._index) if self._world is not None else []
                self._run_in_loop(self._scope.cancel)
                wait_until_settled(self._ended, _FAIL_S)
                awaited = ", ".join(unfinished) or "the other ranks"
                raise TimeoutError(
                    f"close: rank {self._index} has not been done within {timeout_s:g} s: it waits for {awaited}; "
                    "let all ranks close, or pass a longer timeout_s"
                )
            self._thread.join()
        if self._failure is not None and not self._reported:
            self._reported = True
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """End the world: every other rank gets an error that names this rank and its error. Returns when it is over.

        Args:
            error: Why.
        """
        with self._interrupts:
            if self._forked or self._ended.done:
                return
            self._reported = True
            self._error = error if isinstance(error, Exception) else RemoteError(type_name(error), text_of(error))
            self._request_end()
            wait_until_settled(self._ended, _FAIL_S)

    def describe(self, **meta: str) -> None:
        """Add entries to the metadata of the timeline."""
        if self._world is not None:
            self._world.described |= meta

    @property
    def error(self) -> BaseException | None:
        """Error with which the world has ended; None while it goes on, or if it ended well."""
        return self._failure

    def failure(self, timeout_s: float) -> BaseException | None:
        """Wait for the end of a world that fails, and return its error, which `close` then does not raise.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            None if the world lives on, or has ended well.
        """
        wait_until_settled(self._ended, timeout_s)
        self._reported = self._reported or self._failure is not None
        return self._failure

    @property
    def unraised_failure(self) -> BaseException | None:
        """Error with which the world has ended, if no operation was left to raise it: ranks took other roots."""
        return self._failure if self._world is not None and self._world.communicators.unraised else None

    def _request_end(self) -> None:
        """Ask the task of the rank to end; nothing happens if the world has ended already."""
        if self._token is not None and not self._ended.done:
            self._run_in_loop(self._closing.set)

    def _run_in_loop(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the event loop, unless the loop has ended."""
        with suppress(trio.RunFinishedError):
            if self._token is not None:
                self._token.run_sync_soon(function)

    def forked(self) -> None:
        """Detach from the world in a child process after a fork: only the parent process is a member."""
        self._forked = True
        self._token = None
        settle(self._ended, None)

    # -- the thread --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread, and return when the world lives. Called by `overlap.connect`."""
        with ExitStack() as interrupts:
            interrupts.enter_context(deferring_interrupts())
            start_thread(self._thread)
            register_for_forks(self)
            atexit.register(_end_at_exit, weakref.ref(self), _last_error())
            try:
                wait_until_settled(self._has_joined)
            except BaseException:  # Ctrl-C
                self._run_in_loop(self._scope.cancel)
                raise
            if self._failure is not None and not self._has_started:
                self._thread.join()
                raise self._failure
            self._interrupts = interrupts.pop_all()

    def _thread_main(self) -> None:
        """Run the world in the thread of the event loop, and note its error."""
        try:
            trio.run(self._run_world)
        except BaseException as error:
            self._failure = first_of_group(error)
        finally:
            settle(self._ended, None)
            settle(self._has_joined, None)

    async def _run_world(self) -> None:
        self._token, self._closing = trio.lowlevel.current_trio_token(), trio.Event()
        with self._scope:
            await self._live(self._on_start, self._wait_for_end)

    def _on_start(self, world: World) -> None:
        """Let other threads issue on the world that has started."""
        self._world = world
        world.let_threads_in()
        world.runs_elsewhere(partial(line_in_thread, self._owner))  # for reports of ranks that wait for this one

    async def _wait_for_end(self, rank: Rank) -> None:
        """Keep the rank alive until `close` or `fail` ends it; raise the error of `fail`."""
        self.rank, self._has_started = rank, True
        settle(self._has_joined, None)
        await self._closing.wait()
        if self._error is not None:
            raise self._error
        if self._world is not None:
            await self._world.wait_until_received()


def _last_error() -> BaseException | None:
    """Return the last error that has reached the top level of the interpreter; None if none has."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _end_at_exit(connection: weakref.ref[Connection], before: BaseException | None) -> None:
    """End a connection that the program has left open; if the program ends with an error, fail with it.

    Args:
        connection: The connection.
        before: The last error when the connection began. At an interactive prompt a program goes on after errors.
    """
    open_still = connection()
    if open_still is None:
        return
    error = _last_error()
    if error is not None and error is not before and not hasattr(sys, "ps1"):
        open_still.fail(error)
        return
    with suppress(OverlapError):  # waiting threads have been given the error
        open_still.close()
