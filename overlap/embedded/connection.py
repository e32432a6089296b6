"""Connection: one rank of a world, with the event loop in a thread of its own."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import sleep
from types import TracebackType
from typing import Self, TypeVar

import trio

from transports import TransportError

from ..diagnostics import line_in_thread
from ..errors import (
    OverlapError,
    PeerError,
    RankFailedError,
    RemoteError,
    UsageError,
    error_text,
    first_error_of_group,
    one_line_text,
    type_name,
)
from ..runtime.forks import register_for_forks
from ..runtime.group import Group
from ..runtime.interrupts import deferring_interrupts, interruption_point
from ..runtime.rank import Rank
from ..runtime.settling import Settling, settle, wait_until_settled
from ..runtime.world import World
from ..threads import start_thread

T = TypeVar("T")

# Longest wait of `fail` for the end of the loop's thread, in which a compute may still run. The other ranks get the
# error before.
_FAIL_S = 10.0
# The culprit leaves its world and Python in that time, and torchrun looks at its processes every 0.1 s.
_CULPRIT_S = 3.0

_Live = Callable[[Callable[[World], None], Callable[[Rank], Awaitable[None]]], Awaitable[object]]


class Connection:
    """One rank of a world, for programs that own their main thread. Made by `overlap.connect`.

    It is a context manager: the end of the block closes the connection. If an error leaves the block, the world fails.

    Args:
        index: Index of the rank in the world.
        size: Number of ranks.
        live: Sets up the world and runs its rank, in the event loop of the connection's thread. It gets two functions:
            one to call with the world at its start, and the async program of the rank.

    Attributes:
        rank: This process's rank. Any thread may issue operations on it.
        size: Number of ranks.
    """

    rank: Rank
    size: int

    def __init__(self, index: int, size: int, live: _Live) -> None:
        self.size, self._index = size, index
        self._live, self._owner = live, threading.get_ident()
        self._has_joined, self._ended = Settling(), Settling()
        self._world: World | None = None
        self._error: BaseException | None = None  # error of the program, with which `fail` ends the rank
        self._failure: BaseException | None = None  # error with which the world has ended
        # whether this is a fork of the process; whether the program has got the failure, so that `close` does not raise
        self._forked = self._reported = False
        self._is_given_up = False  # whether an interrupt has ended the wait in `open`, perhaps before the loop runs
        self._has_started = False  # whether the world has started, even if it has failed since
        self._interrupts = ExitStack()  # defers KeyboardInterrupt, from `open` until `close` or `fail` has ended
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=self._thread_main, name=f"overlap rank {index}", daemon=True)

    def __repr__(self) -> str:
        state = "failed" if self._failure is not None else "closed" if self._ended.done else "open"
        return f"<Connection of rank {self._index} of {self.size}: {state}>"

    def __enter__(self) -> Self:
        try:
            interruption_point()
        except BaseException as error:  # Ctrl-C: the program never gets the connection
            self.fail(error)
            raise
        return self  # the interpreter looks for no signal until the program has it: see `connecting`

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    # -- groups ------------------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a group of ranks, in that order, without communication.

        Each member of the new group must make the same call; other ranks make none.

            pair = connection.group([0, 1], name="pair")

        Args:
            ranks: World ranks of the group, with this rank among them.
            name: Name for messages and timelines; None: one made of the ranks.

        Returns:
            The group, for this rank.

        Raises:
            UsageError: A rank is unknown or named twice, or this rank is missing.
        """
        return self.rank.group(ranks, name=name)

    def split(
        self, color: int | None, key: int = 0, *, within: Group | None = None, name: str | None = None
    ) -> Group | None:
        """Split the world, or a group, into one group for each color. A collective: it waits for all ranks of `within`.

            rows = connection.split(connection.rank.rank // 4)

        Args:
            color: Ranks of one color form a group; None: this rank gets no group.
            key: Ranks of a new group are sorted by this; equal ones keep the order of the group that is split.
            within: The group that is split; None: the world.
            name: Name of the new groups, for messages and timelines.

        Returns:
            The group of this rank's color; None if `color` is None.

        Raises:
            UsageError: `color` or `key` is no integer of 64 bits, or this is the thread of the event loop.
            PeerFailedError: The world has ended, or ends before the result.
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
            UsageError: This is the thread of the event loop, or a fork of the process.
            PeerFailedError: The world has ended, or ends before the function.
        """
        # without a token there is no loop to call: `open` sets it, and `on_fork` removes it
        if self._token is None or self._thread is threading.current_thread():
            raise UsageError("run: this is the thread of the event loop; await the function instead")
        try:
            return trio.from_thread.run(function, *args, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            assert self._world is not None
            raise self._world.ending.peer_error() from None

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until all issued operations have ended and the other ranks close, too; then end the thread.

        Later calls do nothing.

        Args:
            timeout_s: Longest wait in seconds; after it the rank leaves, and its unfinished operations fail on the
                others. None: there is no limit.

        Raises:
            RankFailedError: A rank has failed; or an operation here has failed, and nothing has waited for it.
            TimeoutError: The limit was reached.
        """
        self._request_end()
        with self._interrupts:
            if not wait_until_settled(self._ended, timeout_s):
                unfinished = self._world.reports.unfinished_lines(self._index) if self._world is not None else []
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
        """End the world with an error: every other rank gets an error that names this rank and `error`.

        Returns when the world has ended here, or after 10 s if a compute still runs. Nothing happens if the world has
        ended already.

        Args:
            error: The error of this rank.
        """
        with self._interrupts:
            if self._forked or self._ended.done:
                return
            self._reported = True
            self._error = error if isinstance(error, Exception) else RemoteError(type_name(error), error_text(error))
            self._request_end()
            wait_until_settled(self._ended, _FAIL_S)

    def describe(self, **meta: str) -> None:
        """Add keyword arguments as entries to the metadata of the timeline; nothing before the world has started."""
        if self._world is not None:
            self._world.described |= meta

    @property
    def error(self) -> BaseException | None:
        """Error with which the world has ended; None if it has not ended, or has ended without an error."""
        return self._failure

    def failure(self, timeout_s: float) -> BaseException | None:
        """Wait for the end of a world that fails, and return its error, which `close` then does not raise.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            The error; None if the world has not ended, or has ended without an error.
        """
        wait_until_settled(self._ended, timeout_s)
        self._reported = self._reported or self._failure is not None
        return self._failure

    @property
    def unraised_failure(self) -> BaseException | None:
        """Error with which the world has ended, if no operation has raised it; None otherwise.

        For example, ranks may have called a collective with different roots, in which no rank waits for another one.
        """
        return self._failure if self._world is not None and self._world.communicators.unraised_errors else None

    def _request_end(self) -> None:
        """Let the task of the rank end; nothing happens if the world has ended already."""
        if self._token is not None and not self._ended.done:
            self._run_in_loop(self._closing.set)

    def _run_in_loop(self, function: Callable[[], object]) -> None:
        """Call a function soon in the thread of the event loop, unless the loop has not started or has ended."""
        with suppress(trio.RunFinishedError):
            if self._token is not None:
                self._token.run_sync_soon(function)

    def on_fork(self) -> None:
        """Detach from the world in a child process after a fork, because only the parent process is a member.

        Waits for the end of the world return at once in the child.
        """
        self._forked = True
        self._token = None
        settle(self._ended, None)

    # -- the thread --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread, and return when the world has started. `overlap.connect` calls it, once.

        From then until `close` or `fail` ends, KeyboardInterrupt is deferred where it would leave the connection in an
        undefined state, see `runtime.interrupts`.

        Raises:
            JoinError: Not all ranks have joined in time.
            BaseException: Another error with which the start of the world has failed, or an interrupt of the wait.
        """
        with ExitStack() as interrupts:
            interrupts.enter_context(deferring_interrupts())
            start_thread(self._thread)
            register_for_forks(self)
            atexit.register(_close_at_exit, weakref.ref(self), _last_error())
            try:
                wait_until_settled(self._has_joined)
            except BaseException:  # KeyboardInterrupt, or an error of a signal handler of the program
                self._is_given_up = True
                self._run_in_loop(self._scope.cancel)
                wait_until_settled(self._ended, _FAIL_S)
                raise
            if self._failure is not None and not self._has_started:
                self._thread.join()
                raise self._failure
            self._interrupts = interrupts.pop_all()

    def _thread_main(self) -> None:
        """Run the event loop with the world, and store its error. This is the function of the connection's thread."""
        try:
            trio.run(self._run_world)
        except BaseException as error:
            self._failure = first_error_of_group(error)
            if isinstance(self._failure, RankFailedError) and self._failure.rank != self._index:
                _errors_of_others.append(one_line_text(self._failure.cause))
        finally:
            settle(self._ended, None)
            settle(self._has_joined, None)

    async def _run_world(self) -> None:
        """Run the world until it ends, or until `close` or `open` cancels `_scope`."""
        self._token, self._closing = trio.lowlevel.current_trio_token(), trio.Event()
        if self._is_given_up:  # `open` was interrupted before it could cancel the scope by the token
            return
        with self._scope:
            await self._live(self._on_start, self._wait_for_close)

    def _on_start(self, world: World) -> None:
        """Let other threads issue operations on a world that starts; called with the world."""
        self._world = world
        world.let_threads_issue()
        world.locate_programs_by(partial(line_in_thread, self._owner))  # for reports of ranks that wait for this one

    async def _wait_for_close(self, rank: Rank) -> None:
        """Keep the rank alive until `close` or `fail` is called; then raise the error of `fail`. The rank's program."""
        self.rank, self._has_started = rank, True
        settle(self._has_joined, None)
        await self._closing.wait()
        if self._error is not None:
            raise self._error
        if self._world is not None:
            await self._world.wait_until_sends_received()


def _last_error() -> BaseException | None:
    """Return the last uncaught error that the interpreter has printed; None: there was none."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


_errors_of_others: list[str] = []  # errors with which other ranks have failed the worlds of connections here


@atexit.register  # at the import: so it runs after the ends of all connections
def _let_culprit_end_first() -> None:
    """Give torchrun time to see the end of the process that failed: its "root cause" is the first one that it sees.

    It sends SIGTERM to all others then, which ends this process. A process that its own error ends does not wait.
    """
    if _errors_of_others and "TORCHELASTIC_RUN_ID" in os.environ and _comes_from_another_process(_last_error()):
        sleep(_CULPRIT_S)


def _comes_from_another_process(error: BaseException | None) -> bool:
    """Whether an error, or one in its causes, contexts and groups, tells of another process. None does not.

    Errors that have passed through C++, as those of a backward pass of torch, keep only their text.
    """
    links, visited = [error], set[int]()
    while links:
        link = links.pop()
        if link is not None and id(link) not in visited:
            text = error_text(link)
            if isinstance(link, (PeerError, TransportError)) or any(cause in text for cause in _errors_of_others):
                return True
            visited.add(id(link))
            links += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
    return False


def _close_at_exit(connection: weakref.ref[Connection], before: BaseException | None) -> None:
    """Close a connection left open at the program's exit; if an error ended the program, fail with it.

    `before` is the result of `_last_error` when the connection began: a later error is the one that ended the program,
    except at an interactive prompt, where a program continues after errors.
    """
    open_still = connection()
    if open_still is None:
        return
    error = _last_error()
    if error is not None and error is not before and not hasattr(sys, "ps1"):
        open_still.fail(error)
        return
    with suppress(OverlapError):  # threads that wait have got the error
        open_still.close()
