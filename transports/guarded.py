"""Checks of wires of other packages: a wire that breaks the contract ends the run, with an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import trio

from transports.buffers import Buffer, Delivery
from transports.failures import TransportError
from transports.request import Done, Request
from transports.wire import Wire
from transports.wrappers import RelayedRequest, WrappedWire

# Time between two looks for requests that have ended without a callback.
_LOOK_S = 1.0
# Classes of wires that have broken a rule: their other requests may never end, too.
_BROKEN: set[type[Wire]] = set()


def guard(wire: Wire, peer: int, spawn: Callable[[Callable[[], Any]], None]) -> Wire:
    """Return the wire that carries messages with a peer, with checks if it is not ours.

    Args:
        wire: The wire of a rank.
        peer: The other rank.
        spawn: Starts a task that is cancelled at the end of the run.
    """
    route = wire.route(peer)
    ours = type(route).__module__.partition(".")[0] == "transports"
    return route if ours else _GuardedWire(route, peer, spawn)


_UNENDED = "a request has not ended, though its operation has been given up"


class _GuardedWire(WrappedWire):
    """A wire of another package, whose ends are checked.

    Args:
        inner: The wire of another package.
        peer: The other end.
        spawn: Starts a task.
    """

    def __init__(self, inner: Wire, peer: int, spawn: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__(inner, [peer])
        self.within_host, self.peer, self._spawn, self._looks = inner.within_host, peer, spawn, False
        self.requests: dict[_GuardedRequest, None] = {}
        self._idle = trio.Event()
        self.thread, self.token = get_ident(), trio.lowlevel.current_trio_token()

    def takes_threads(self, peer: int) -> bool:
        """Return what the inner wire says."""
        return self.inner.takes_threads(peer)

    def promise_wait(self, peer: int) -> None:
        """Tell the inner wire."""
        self.inner.promise_wait(peer)

    def catch_up(self, peer: int) -> bool:
        """Let the inner wire move bytes."""
        return self.inner.catch_up(peer)

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Begin a send whose end is checked."""
        return self._begin(_GuardedRequest(self, done, partial(self.inner.begin_send, dst, tag, data, **options)))

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Begin a receive whose end is checked."""
        request = _GuardedRequest(self, done, partial(self.inner.begin_recv, src, tag, out, nbytes, **options))
        request.receives, request.loans = True, out is None
        return self._begin(request)

    def _begin(self, request: _GuardedRequest) -> Request:
        self.requests[request] = None
        try:
            request.begin()
        except BaseException:
            self.forget(request)
            raise
        if self.requests and not self._looks:
            self._looks = True
            self._spawn(self._end_forgotten)
        return request

    async def _end_forgotten(self) -> None:
        """End requests that have ended without their callback, until no request is under way.

        Operations that are given up wait for their requests, so at the end of the run all that are left end here.
        """
        try:
            while self.requests:
                await self._wait_idle()
                for request in tuple(self.requests):
                    request.check_called()
                    if request.given_up and type(self.inner) in _BROKEN:
                        request.end(self.error(_UNENDED))
        finally:
            self._looks = False
            with trio.CancelScope(shield=True):
                await self._wait_idle()
            for request in tuple(self.requests):
                request.end(self.error(_UNENDED))

    async def _wait_idle(self) -> None:
        """Wait until no request is under way, for a while."""
        self._idle = trio.Event()
        if self.requests:
            with trio.move_on_after(_LOOK_S):
                await self._idle.wait()

    def forget(self, request: _GuardedRequest) -> None:
        """Forget a request that has ended; without any, no task looks."""
        self.requests.pop(request, None)
        if not self.requests:
            self._idle.set()

    def error(self, rule: str) -> TransportError:
        """Return the error of a broken rule."""
        kind = type(self.inner)
        _BROKEN.add(kind)
        return TransportError(
            f"{kind.__module__}.{kind.__qualname__} broke the contract of transports: {rule}; run "
            "transports.testing.check_transport on it"
        )


class _GuardedRequest(RelayedRequest):
    """A request of a wire of another package.

    Args:
        done: Called once at its end.
        begin: Begins the request of the wire.

    Attributes:
        given_up: Whether its operation has withdrawn it.
        receives: Whether it is a receive.
        loans: Whether it is one without a buffer.
    """

    given_up: bool = False
    receives: bool = False
    loans: bool = False
    _delivery: object = None

    def __init__(self, wire: _GuardedWire, done: Done, begin: Callable[..., Request | None]) -> None:
        super().__init__(done, 0, begin)
        self._wire = wire

    def begin(self) -> None:
        """Begin the message; a receive must be returned."""
        super().begin()
        if self.receives and self.ended and self._inner is None:
            raise self._wire.error("begin_recv returned None, not a Request")

    def _on_end(self, inner: Request) -> None:
        if get_ident() != self._wire.thread and not self._wire.takes_threads(self._wire.peer):
            error = self._wire.error("done was called in another thread than the event loop's")
            self._wire.token.run_sync_soon(self.end, error)
        elif self.ended:
            raise self._wire.error("done was called twice for one request")
        else:
            if self.loans and inner.error is None and not inner.withdrawn:
                self._delivery = inner.delivery()
                if not isinstance(self._delivery, Delivery):
                    self.error = self._wire.error(f"delivery() must return the Delivery, not {self._delivery!r}")
            super()._on_end(inner)

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """End the request, once."""
        self._wire.forget(self)
        super().end(error, withdrawn=withdrawn)

    def withdraw(self) -> None:
        """Withdraw the message."""
        self.given_up = True
        super().withdraw()

    def check_called(self) -> None:
        """End the request if the wire has ended it, and has not called its callback."""
        if not self.ended and self._inner is not None and self._inner.ended:
            if self.loans and self._inner.error is None and not self._inner.withdrawn:
                self._inner.delivery().release()  # its sender may wait for that
            self.end(self._wire.error("done was not called for a request that has ended"))

    def delivery(self) -> Delivery:
        """Return the message of the inner receive."""
        assert isinstance(self._delivery, Delivery), "checked at the end"
        return self._delivery
