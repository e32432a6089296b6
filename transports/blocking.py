"""Adapters in both directions between `await send()` and `begin_send(done=...)`, and for receives.

A transport implements one of the two. Our own begin messages: `StartingEndpoint` derives the awaiting calls from that.
Wrappers, and transports of other packages, have awaiting calls only: `TaskStarter` begins each message in a task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from threading import get_ident
from typing import TypeAlias

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

from transports.base import Endpoint, check_length
from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import TransportClosedError, TransportError
from transports.starter import Call, Starter


class StartingEndpoint(Endpoint, Starter):
    """An endpoint that begins messages without tasks; its awaiting calls wait for the end of begun ones."""

    def starter(self, peer: int) -> Starter:
        """Return itself."""
        return self

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        """Begin a send and wait for its end."""
        await checkpoint_if_cancelled()
        end = _AwaitedEnd()
        await end.of(self.begin_send(dst, tag, data, priority=priority, done=end.told))

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        """Begin a receive and wait for its end."""
        view = as_bytes(out, name="out", writable=True)
        await checkpoint_if_cancelled()
        end = _AwaitedEnd()
        await end.of(self.begin_recv(src, tag, view, view.nbytes, done=end.told))

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        """Begin a receive without a place of its own and wait for its end."""
        check_length(nbytes)
        await checkpoint_if_cancelled()
        end = _AwaitedEnd()
        call = self.begin_recv(src, tag, None, nbytes, done=end.told)
        await end.of(call)
        return call.delivery()


class _AwaitedEnd:
    """The end of one call, awaited by the task that has begun it."""

    __slots__ = ("_call", "_cancelling", "_raise_cancel", "_task", "_thread", "_token")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._thread, self._token = get_ident(), trio.lowlevel.current_trio_token()
        self._cancelling = False

    def told(self, call: Call) -> None:
        """Wake the task, unless it is being cancelled and the call was taken back in time."""
        if self._task is None or (self._cancelling and call.withdrawn):
            return
        if get_ident() == self._thread:
            reschedule(self._task)
        else:  # a thread that has the loop's place
            self._token.run_sync_soon(reschedule, self._task)

    async def of(self, call: Call | None) -> None:
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
        self._raise_cancel, self._cancelling = raise_cancel, True
        self._call.withdraw()
        self._cancelling = False
        return Abort.SUCCEEDED if self._call.ended and self._call.withdrawn else Abort.FAILED


_Lane: TypeAlias = "tuple[bool, int]"  # whether it sends, and the other rank


class TaskStarter(Starter):
    """Begins messages of an endpoint that only has awaiting calls: each takes a task.

    Messages to one rank are handed over in the order in which they were begun, whatever their tags: of two that share a
    wire, the first one leaves first.

    Args:
        endpoint: The endpoint that sends and receives.
        spawn: Starts a task, which may start in any order beside others.
    """

    __slots__ = ("_endpoint", "_last", "_spawn")

    def __init__(self, endpoint: Endpoint, spawn: Callable[..., None]) -> None:
        self._endpoint, self._spawn = endpoint, spawn
        self._last: dict[_Lane, _TaskCall] = {}  # the last call of each that is under way

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]
    ) -> Call | None:
        """Start a task that sends."""
        return self._begin((True, dst), partial(self._endpoint.send, dst, tag, data, priority=priority), done)

    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        done: Callable[[Call], None],
        consume: Callable[[int, memoryview], None] | None = None,
    ) -> Call:
        """Start a task that receives."""
        receive: Callable[[], Awaitable[Delivery | None]] = (
            partial(self._delivered, src, tag, nbytes)
            if out is None
            else partial(self._endpoint.recv_into, src, tag, out)
        )
        return self._begin((False, src), receive, done)

    async def _delivered(self, src: int, tag: int, nbytes: int) -> Delivery:
        delivery: object = await self._endpoint.recv(src, tag, nbytes)
        if not isinstance(delivery, Delivery):
            name = type(self._endpoint).__name__
            raise TransportError(f"recv of {name} must return the Delivery, and it returned {delivery!r}")
        return delivery

    def _begin(self, lane: _Lane, run: Callable[[], Awaitable[Delivery | None]], done: Callable[[Call], None]) -> Call:
        call = _TaskCall(self._last.get(lane), done)
        self._last[lane] = call
        self._spawn(self._run, lane, call, run)
        return call

    async def _run(self, lane: _Lane, call: _TaskCall, run: Callable[[], Awaitable[Delivery | None]]) -> None:
        try:
            await call.run(run)
        finally:
            if self._last.get(lane) is call:  # calls to one rank end in any order
                del self._last[lane]
            call.end()


class _TaskCall(Call):
    """A send or receive in a task of its own, which begins after the one before has begun."""

    __slots__ = ("_before", "_begun", "_delivery", "_done", "_scope", "ended", "error", "withdrawn")

    def __init__(self, before: _TaskCall | None, done: Callable[[Call], None]) -> None:
        self._before, self._done = before, done
        self._begun, self._scope = trio.Event(), trio.CancelScope()
        self._delivery: Delivery | None = None
        self.ended = self.withdrawn = False
        self.error: TransportError | None = TransportClosedError("the world has ended")  # unless it ends otherwise

    def withdraw(self) -> None:
        self._scope.cancel()

    def delivery(self) -> Delivery:
        assert self._delivery is not None, "a receive with a place of its own delivers nothing"
        return self._delivery

    async def run(self, run: Callable[[], Awaitable[Delivery | None]]) -> None:
        try:
            with self._scope:
                await self._turn()
                self._delivery = await run()
            self.error, self.withdrawn = None, self._scope.cancelled_caught
        except Exception as error:
            self.error = error  # type: ignore[assignment]  # transports of other packages may raise any

    async def _turn(self) -> None:
        """Wait until the previous call has begun, then mark this one as begun.

        The task of the next call runs only after this one suspends, which is inside the transport.
        """
        before, self._before = self._before, None
        try:
            if before is not None:
                await before._begun.wait()
        finally:
            self._begun.set()

    def end(self) -> None:
        self.ended = True
        self._done(self)
