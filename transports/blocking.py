"""Adapters between awaiting calls (`send`) and calls with a callback (`begin_send`), in both directions.

A transport implements one of the two. Our own implement `begin_send`, and `StartingEndpoint` derives `send` from it.
Wrappers, and transports of other packages, have awaiting calls only: `TaskStarter` begins each message in a task.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    cancel_shielded_checkpoint,
    checkpoint_if_cancelled,
    current_task,
    reschedule,
    wait_task_rescheduled,
)

from transports.base import OPEN, Endpoint, Envelope, check_length
from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError, TransportClosedError, TransportError
from transports.signature import PlainSignature, Signature
from transports.starter import Request, Starter


class StartingEndpoint(Endpoint, Starter):
    """An endpoint that begins messages without tasks; its awaiting calls wait for the end of begun ones."""

    def starter(self, peer: int) -> Starter:
        """Return this endpoint, which begins messages itself."""
        return self

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        """Begin a send and wait for its end."""
        await checkpoint_if_cancelled()
        end = _AwaitedEnd()
        await end.wait(self.begin_send(dst, tag, data, priority=priority, done=end.notify))

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        """Begin a receive and wait for its end."""
        view = as_bytes(out, name="out", writable=True)
        await checkpoint_if_cancelled()
        end = _AwaitedEnd()
        await end.wait(self.begin_recv(src, tag, view, view.nbytes, done=end.notify))

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        """Begin a receive without a buffer and wait for its end."""
        check_length(nbytes)
        await checkpoint_if_cancelled()
        end = _AwaitedEnd()
        call = self.begin_recv(src, tag, None, nbytes, done=end.notify)
        await end.wait(call)
        return call.delivery()


class AnnouncingEndpoint(StartingEndpoint):
    """An endpoint that knows announced messages; it waits for one until `announced` returns it."""

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        """Wait until a message of the choices is announced."""
        lanes, changed = self.checked_lanes(choices), trio.Event()
        await trio.lowlevel.checkpoint()
        with self.watching([src for src, _ in choices], lambda: changed.set()):
            while (envelope := self.announced(choices, free_bits=free_bits)) is None:
                for lane in lanes:
                    self.require_alive(lane)
                await changed.wait()
                changed = trio.Event()
        return envelope

    @abstractmethod
    def checked_lanes(self, choices: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return the lanes of some choices; raises `ArgumentError` or `TransportError` if one is impossible."""

    @abstractmethod
    def watching(self, sources: Iterable[int], notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function, for the length of a block, whenever a message of the sources or a loss may have arrived."""

    def require_alive(self, lane: tuple[int, int, int]) -> None:
        """Raise `LinkLostError` if the process of a lane's source is lost."""


class _AwaitedEnd:
    """The end of one call, awaited by the task that issued it."""

    __slots__ = ("_call", "_cancelling", "_raise_cancel", "_task", "_thread", "_token")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._thread, self._token = get_ident(), trio.lowlevel.current_trio_token()
        self._cancelling = False

    def notify(self, call: Request) -> None:
        """Wake the task, unless its cancellation has withdrawn the call."""
        if self._task is None or (self._cancelling and call.withdrawn):
            return
        if get_ident() == self._thread:
            reschedule(self._task)
        else:  # a thread that runs in place of the event loop
            self._token.run_sync_soon(reschedule, self._task)

    async def wait(self, call: Request | None) -> None:
        """Wait until a call ends, and raise the error that it ended with."""
        if call is None or call.ended:
            await cancel_shielded_checkpoint()
        else:
            self._call, self._task = call, current_task()
            await wait_task_rescheduled(self._cancel)
        if call is None:
            return
        if call.withdrawn:
            self._raise_cancel()
        if call.error is not None:
            raise call.error

    def _cancel(self, raise_cancel: RaiseCancelT) -> Abort:
        """Withdraw the call of a cancelled task, which wakes now if that succeeded, and otherwise at the end."""
        self._raise_cancel, self._cancelling = raise_cancel, True
        self._call.withdraw()
        self._cancelling = False
        return Abort.SUCCEEDED if self._call.ended and self._call.withdrawn else Abort.FAILED


_Lane: TypeAlias = "tuple[bool, int]"  # (is a send, the other rank)


class TaskStarter(Starter):
    """Begins messages of an endpoint that only has awaiting calls: each takes a task.

    Calls to one rank start in the order in which they were begun, whatever their tags, so that messages leave in order.

    Args:
        endpoint: The endpoint that sends and receives.
        spawn: Starts a task; tasks may start in any order.
    """

    __slots__ = ("_endpoint", "_last", "_spawn")

    def __init__(self, endpoint: Endpoint, spawn: Callable[..., None]) -> None:
        self._endpoint, self._spawn = endpoint, spawn
        self._last: dict[_Lane, _TaskRequest] = {}  # the last unfinished call of each lane

    def begin_send(
        self,
        dst: int,
        tag: int,
        data: Buffer,
        *,
        priority: int = 0,
        signature: Signature | None = None,
        done: Callable[[Request], None],
    ) -> Request | None:
        """Start a task that sends; the returned request ends with the task."""
        return self._begin((True, dst), partial(self._endpoint.send, dst, tag, data, priority=priority), done)

    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        signature: Signature | None = None,
        done: Callable[[Request], None],
        consume: Callable[[int, memoryview], None] | None = None,
        allocate: Callable[[Any], Buffer] | None = None,
    ) -> Request:
        """Start a task that receives; the returned request ends with the task."""
        if nbytes == OPEN:
            raise ArgumentError(f"{type(self._endpoint).__name__} receives messages of known lengths only")
        receive: Callable[[], Awaitable[Delivery | None]] = (
            partial(self._receive_delivery, src, tag, nbytes)
            if out is None
            else partial(self._endpoint.recv_into, src, tag, out)
        )
        return self._begin((False, src), receive, done)

    async def _receive_delivery(self, src: int, tag: int, nbytes: int) -> Delivery:
        """Receive a message on loan; `TransportError` if the endpoint returns anything else."""
        delivery: object = await self._endpoint.recv(src, tag, nbytes)
        if not isinstance(delivery, Delivery):
            name = type(self._endpoint).__name__
            raise TransportError(f"recv of {name} must return the Delivery, and it returned {delivery!r}")
        return delivery

    def _begin(
        self, lane: _Lane, run: Callable[[], Awaitable[Delivery | None]], done: Callable[[Request], None]
    ) -> Request:
        """Start a task for a call, after the last unfinished call to the same rank."""
        call = _TaskRequest(self._last.get(lane), done)
        self._last[lane] = call
        self._spawn(self._run_request, lane, call, run)
        return call

    async def _run_request(
        self, lane: _Lane, call: _TaskRequest, run: Callable[[], Awaitable[Delivery | None]]
    ) -> None:
        """Run a call in its task, and record its end."""
        try:
            await call.run(run)
        finally:
            if self._last.get(lane) is call:  # calls to one rank end in any order
                del self._last[lane]
            call.end()


class _TaskRequest(Request):
    """A send or receive in a task of its own, which starts after the previous call of its lane has started."""

    __slots__ = ("_delivery", "_done", "_previous", "_scope", "_started", "ended", "error", "theirs", "withdrawn")

    def __init__(self, previous: _TaskRequest | None, done: Callable[[Request], None]) -> None:
        self._previous, self._done = previous, done
        self._started, self._scope = trio.Event(), trio.CancelScope()
        self._delivery: Delivery | None = None
        self.ended = self.withdrawn = False
        self.theirs: PlainSignature | None = None
        self.error: Exception | None = TransportClosedError("the world has ended")  # replaced by the result of `run`

    def withdraw(self) -> None:
        self._scope.cancel()

    def delivery(self) -> Delivery:
        assert self._delivery is not None, "a receive into a buffer delivers nothing"
        return self._delivery

    async def run(self, run: Callable[[], Awaitable[Delivery | None]]) -> None:
        """Await the call of the endpoint when its turn has come, and keep its delivery or its error."""
        try:
            with self._scope:
                await self._wait_for_turn()
                self._delivery = await run()
            self.error, self.withdrawn = None, self._scope.cancelled_caught
        except Exception as error:
            self.error = error

    async def _wait_for_turn(self) -> None:
        """Wait until the previous call has started, then mark this one as started.

        The task of the next call runs only after this one suspends, which is inside the transport.
        """
        previous, self._previous = self._previous, None
        try:
            if previous is not None:
                await previous._started.wait()
        finally:
            self._started.set()

    def end(self) -> None:
        self.ended = True
        self._done(self)
