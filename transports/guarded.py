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
_rule_breakers: set[type[Wire]] = set()


def find_guarded_wire(wire: Wire, peer: int, spawn: Callable[[Callable[[], Any]], None]) -> Wire:
    """Return the wire that carries the messages with a peer. A wire of another package is returned within a guard.

    The guard checks the wire while the program runs.

    Args:
        wire: The wire of a rank.
        peer: The other rank.
        spawn: Starts an async function as a task, which is cancelled at the end of the run.
    """
    route = wire.route(peer)
    ours = type(route).__module__.partition(".")[0] == "transports"
    return route if ours else _GuardedWire(route, peer, spawn)


_NO_CALLBACK_TEXT = "a request has not ended, though its operation has been given up"


class _GuardedWire(WrappedWire):
    """A guard around a wire of another package, which checks how the requests of that wire end.

    Args:
        inner: The wire of another package.
        peer: The rank with which messages are exchanged.
        spawn: Starts an async function as a task, which is cancelled at the end of the run.
    """

    def __init__(self, inner: Wire, peer: int, spawn: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__(inner, [peer])
        self.within_host, self.peer, self._spawn, self._watcher_runs = inner.within_host, peer, spawn, False
        self.requests: dict[_GuardedRequest, None] = {}
        self._idle = trio.Event()
        self.thread, self.token = get_ident(), trio.lowlevel.current_trio_token()

    def takes_threads(self, peer: int) -> bool:
        """Whether the inner wire lets any thread begin messages with a rank."""
        return self.inner.takes_threads(peer)

    def promise_wait(self, peer: int) -> None:
        """Pass the promise on to the inner wire; see `Wire.promise_wait`."""
        self.inner.promise_wait(peer)

    def catch_up(self, peer: int) -> bool:
        """Let the inner wire move bytes of messages with a rank; return whether any have moved."""
        return self.inner.catch_up(peer)

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Begin a send of the inner wire, and return its request; arguments are as of `Wire.begin_send`.

        Before `done` is called, the end of the inner request is checked: if it breaks the contract of wires, the
        request ends with a `TransportError`. For a message that has left at once, the result is a request that has
        ended, and not None.
        """
        return self._begin_request(
            _GuardedRequest(self, done, partial(self.inner.begin_send, dst, tag, data, **options))
        )

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Begin a receive of the inner wire, and return its request; arguments are as of `Wire.begin_recv`.

        Before `done` is called, the end of the inner request is checked, as by `begin_send`.
        """
        request = _GuardedRequest(self, done, partial(self.inner.begin_recv, src, tag, out, nbytes, **options))
        request.receives, request.loans = True, out is None and options.get("allocate") is None
        return self._begin_request(request)

    def _begin_request(self, request: _GuardedRequest) -> Request:
        """Begin a message; a task then looks for requests that the inner wire ends without calling `done`."""
        self.requests[request] = None
        try:
            request.begin()
        except BaseException:
            self.forget_request(request)
            raise
        if self.requests and not self._watcher_runs:
            self._watcher_runs = True
            self._spawn(self._end_requests_without_callback)
        return request

    async def _end_requests_without_callback(self) -> None:
        """End requests whose `done` the inner wire has not called, or will not call; run until no request is left.

        At the end of the run, operations that were given up still wait for their requests. So all requests that are
        left then fail here.
        """
        try:
            while self.requests:
                await self._wait_until_idle()
                for request in tuple(self.requests):
                    request.end_without_callback()
                    if request.given_up and type(self.inner) in _rule_breakers:
                        request.end(self.broken_rule_error(_NO_CALLBACK_TEXT))
        finally:
            self._watcher_runs = False
            with trio.CancelScope(shield=True):
                await self._wait_until_idle()
            for request in tuple(self.requests):
                request.end(self.broken_rule_error(_NO_CALLBACK_TEXT))

    async def _wait_until_idle(self) -> None:
        """Wait until no request is under way, or for `_LOOK_S`."""
        self._idle = trio.Event()
        if self.requests:
            with trio.move_on_after(_LOOK_S):
                await self._idle.wait()

    def forget_request(self, request: _GuardedRequest) -> None:
        """Remove a request that has ended; after the last one, the task that looks for lost ends may end."""
        self.requests.pop(request, None)
        if not self.requests:
            self._idle.set()

    def broken_rule_error(self, rule: str) -> TransportError:
        """Return the error of a broken rule, and remember that wires of this class break rules.

        Args:
            rule: What the wire did, for the message.
        """
        kind = type(self.inner)
        _rule_breakers.add(kind)
        reason = f"{kind.__module__}.{kind.__qualname__} broke the contract of transports: {rule}"
        return TransportError(f"{reason}; run transports.testing.check_transport on it")


class _GuardedRequest(RelayedRequest):
    """A guard around a request of a wire of another package.

    Args:
        wire: The guard of that wire.
        done: Called once with this request at its end.
        begin: Called with `done=`, begins the inner request and returns it.

    Attributes:
        given_up: Whether the request's operation has called `withdraw`.
        receives: Whether the request is a receive.
        loans: Whether the request is a receive without a buffer, whose message the wire loans.
    """

    given_up: bool = False
    receives: bool = False
    loans: bool = False
    _received: object = None  # result of the inner request's `delivery`, if `loans`

    def __init__(self, wire: _GuardedWire, done: Done, begin: Callable[..., Request | None]) -> None:
        # length 0: the inner request knows the length, and names it at the end
        super().__init__(done, 0, begin)
        self._wire = wire

    def begin(self) -> None:
        """Begin the message; raise the error of a broken rule if `begin_recv` of the inner wire returned None."""
        super().begin()
        if self.receives and self.ended and self._inner is None:
            raise self._wire.broken_rule_error("begin_recv returned None, not a Request")

    def _on_end(self, inner: Request) -> None:
        """End the request as the inner one has ended, or with an error if the wire breaks a rule.

        The inner request calls it as its `done`, perhaps in a wrong thread, or a second time.
        """
        if get_ident() != self._wire.thread and not self._wire.takes_threads(self._wire.peer):
            error = self._wire.broken_rule_error("done was called in another thread than the event loop's")
            # only the loop's thread may end the operation
            self._wire.token.run_sync_soon(self.end, error)
        elif self.ended:
            raise self._wire.broken_rule_error("done was called twice for one request")
        else:
            if self.loans and inner.error is None and not inner.withdrawn:
                self._received = inner.delivery()
                if not isinstance(self._received, Delivery):
                    self.error = self._wire.broken_rule_error(
                        f"delivery() must return the Delivery, not {self._received!r}"
                    )
            super()._on_end(inner)

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """End the request, once."""
        self._wire.forget_request(self)
        super().end(error, withdrawn=withdrawn)

    def withdraw(self) -> None:
        """Withdraw the message."""
        self.given_up = True
        super().withdraw()

    def end_without_callback(self) -> None:
        """End this request with an error if the inner request has ended, but its `done` was not called."""
        if not self.ended and self._inner is not None and self._inner.ended:
            if self.loans and self._inner.error is None and not self._inner.withdrawn:
                self._inner.delivery().release()  # its sender may wait for that
            self.end(self._wire.broken_rule_error("done was not called for a request that has ended"))

    def delivery(self) -> Delivery:
        """Return the message of a receive without a buffer that has ended without an error."""
        assert isinstance(self._received, Delivery), "`_on_end` has checked it"
        return self._received
