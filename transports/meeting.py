"""Meetings of processes: listening, dialling, and the proof of membership on both sides of a connection.

Of each pair of processes the one with the lower index dials, and the other one listens. `Meeting` is used for sockets,
for shared memory, and for reconnection; a transport adds its own connections.
"""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from errno import EADDRINUSE, EADDRNOTAVAIL
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import trio

from transports.address import PeerAddress
from transports.factory import Exchange
from transports.failures import LinkLostError, TransportError
from transports.handshake import HandshakeError, advise_on_silence, check_secret, greet, welcome
from transports.identity import Hello, Identity

# Probes of an idle connection: the first one after a second, then one each second.
_KEEPALIVE_S = 1

Result = TypeVar("Result")
Place: TypeAlias = "tuple[int, int]"  # (member, index): one of the connections to another process
Stream: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.abc.Stream]"


class Meeting(Generic[Result]):
    """Makes connections from one process to others of its world, and proves membership on both sides of each.

    A place names one of these connections: (index of the other process, index of the connection to it).

    Args:
        identity: Identity of this process.
        role: Purpose of the connections, "rail" or "memory". A process that dials with another role is refused.
        join_s: Seconds to wait for all processes.
        handshake_s: Limit of a handshake with a process that dials, in seconds.
        prepare: Called with a socket before its handshake. The function sets options, and must make the socket
            non-blocking.
        finish: Called after a handshake with the socket, the stream over it, the index of the other process, and the
            detail of its hello ("" if this side has listened). Makes the result, which owns the socket. If it raises
            `LinkLostError`, the whole meeting fails.
        discard: Closes a result that is not wanted.

    Attributes:
        identity: Identity of this process.
        sockets: Sockets that listen for other processes.
        address: The address of this process, as the other processes get it; set by `join`.
        peers: Addresses of the other processes, by index; set by `join`.
        results: The result of `finish` for each connection, by place.
        refused: Why connections were refused, a text for each.

    Raises:
        ArgumentError: The secret is empty, or a file of the certificates is wrong.
    """

    identity: Identity
    join_s: float
    address: PeerAddress

    def __init__(
        self,
        identity: Identity,
        role: str,
        *,
        join_s: float,
        handshake_s: float,
        prepare: Callable[[socket.socket], None],
        finish: Callable[[socket.socket, Stream, int, str], Awaitable[Result]],
        discard: Callable[[Result], None],
    ) -> None:
        check_secret(identity.secret)
        if identity.tls is not None:
            identity.tls.check()
        self.identity, self.join_s, self._handshake_s = identity, join_s, handshake_s
        # until `join` passes the real ones: no address, so `close` does nothing
        self.sockets: ListeningSockets = ListeningSockets((), unix=False, pending=0, reopens=False)
        self.peers: dict[int, PeerAddress] = {}
        self.results: dict[Place, Result] = {}
        self.refused: list[str] = []
        self._role, self._prepare, self._finish, self._discard = role, prepare, finish, discard
        self._places: frozenset[Place] = frozenset()
        self._reserved: set[Place] = set()
        self._complete = trio.Event()
        self._failure: TransportError | None = None

    async def join(
        self,
        sockets: ListeningSockets,
        exchange: Exchange,
        make_address: Callable[[], PeerAddress],
        choose: Callable[[], Iterable[Place]],
        dial: Callable[[int, int], Awaitable[Result]],
    ) -> dict[Place, Result]:
        """Listen, exchange addresses, and connect with the others.

        Args:
            sockets: Sockets on which this process listens until all are connected.
            exchange: All-gather among the processes.
            make_address: Returns the address of this process; called once it listens.
            choose: Returns the places of the connections to make; called once `peers` has the addresses.
            dial: Called with a place, (member, index); connects with that process, which listens, by `greet`.

        Returns:
            The results by place, which the caller owns.

        Raises:
            TransportError: A process did not join, or is lost.
        """
        self.sockets = sockets
        listeners = sockets.listen()
        try:
            self.address = make_address()
            packed = await exchange(self._role, self.address.pack())
            self.peers = {i: PeerAddress.unpack(each, i) for i, each in enumerate(packed) if i != self.identity.member}
            await self.connect_all(choose(), listeners, dial)
        except BaseException:
            sockets.close()
            for result in self.results.values():
                self._discard(result)
            raise
        finally:
            for listener in listeners:
                listener.close()
        return self.results

    async def connect_all(
        self,
        places: Iterable[Place],
        listeners: Sequence[socket.socket],
        dial: Callable[[int, int], Awaitable[Result]],
    ) -> None:
        """Connect with all other processes within `join_s`; each result is recorded in `results`.

        Args:
            places: The connections to make. This process dials processes of a higher index; the others dial it.
            listeners: Sockets on which the others dial this process.
            dial: As of `join`.

        Raises:
            TransportError: A handshake failed, or a process did not connect in time.
        """
        self._places = frozenset(places)
        if self._places:
            with trio.move_on_after(self.join_s):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.sockets.serve, listeners, self._serve_place)
                    for place in self._places:
                        if place[0] > self.identity.member:
                            nursery.start_soon(self._dial_place, dial, place)
                    # set by the last result, and by the first failure
                    await self._complete.wait()
                    nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        if missing := self._places - self.results.keys():
            raise self._missing_processes_error(Counter(member for member, _ in missing))

    def _missing_processes_error(self, missing: Counter[int]) -> LinkLostError:
        """Return the error that names the processes without any connection; if there are none, those with too few."""
        wanted = Counter(member for member, _ in self._places)
        absent = [member for member, count in missing.items() if count == wanted[member]]
        connections = "no connection" if absent else f"fewer than {max(wanted.values())} connections"
        peers = ", ".join(map(str, sorted(absent or missing)))
        reason = f"process {self.identity.member} has {connections} with process {peers} after {self.join_s:g} s"
        return LinkLostError(f"{reason}; see whether these still run")

    async def _dial_place(self, dial: Callable[[int, int], Awaitable[Result]], place: Place) -> None:
        """Dial a place, and record the result; after an error the meeting fails."""
        try:
            self._record_result(place, await dial(*place))
        except TransportError as error:
            self._end_with_error(error)

    async def _serve_place(self, connection: socket.socket) -> None:
        """Shake hands on an accepted connection, and record the result at its place; a failure frees the place."""
        admitted: list[Place] = []
        try:
            result = await self.welcome(connection, partial(self._admit_dialler, admitted))
        except LinkLostError as error:
            self._end_with_error(error)
            return
        if result is not None:
            self._record_result(admitted[0], result)
        else:
            self._reserved.difference_update(admitted)

    def _record_result(self, place: Place, result: Result) -> None:
        """The meeting ends with the last result."""
        self.results[place] = result
        if self._places <= self.results.keys():
            self._complete.set()

    def _end_with_error(self, error: TransportError) -> None:
        """An error that the meeting has already stays."""
        self._failure = self._failure or error
        self._complete.set()

    def lose(self, member: int, reason: str) -> None:
        """Fail the meeting because a process is lost."""
        self._end_with_error(LinkLostError(f"process {member} is lost: {reason}"))

    # -- connections --------------------------------------------------------------------------------------------------

    def make_hello(self, detail: str = "") -> Hello:
        """Return the hello of this process for a connection of this meeting."""
        return self.identity.make_hello(self._role, detail)

    async def greet(
        self, connection: socket.socket, member: int, address: object, detail: str, *, source: str, deadline_s: float
    ) -> Result:
        """Connect a socket with another process that listens, shake hands, and return the result of `finish`.

        Args:
            connection: The socket, which the result owns. It is closed if this raises.
            member: Index of the other process.
            address: Address of the other process.
            detail: Detail of this side's hello, which names the connection.
            source: Local address to leave from; empty: any.
            deadline_s: Limit of the handshake.

        Raises:
            HandshakeError: The other process refused.
            LinkLostError: The other process cannot be reached.
        """
        try:
            self._prepare(connection)
            if source:
                connection.bind((source, 0))
            await trio.socket.from_stdlib_socket(connection).connect(address)
            stream = self._wrap_stream(connection, serving=False)
            answer = await greet(stream, self.make_hello(detail), self.identity.secret, deadline_s=deadline_s)
            return await self._finish(connection, stream, member, answer.detail)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                advice = advise_on_silence(connection, address)
                raise LinkLostError(f"process {member} cannot be reached: {error.strerror}; {advice}") from error
            raise

    async def welcome(self, connection: socket.socket, admit: Callable[[Hello], Hello | str]) -> Result | None:
        """Shake hands with a process that has dialled this one, and return the result of `finish`.

        If that fails, the socket is closed, the reason is added to `refused`, and the result is None.

        Args:
            connection: The socket, which the result owns.
            admit: As of `handshake.welcome`.

        Raises:
            LinkLostError: As raised by `finish`.
        """
        result: Result | None = None
        try:
            self._prepare(connection)
            stream = self._wrap_stream(connection, serving=True)
            hello = await welcome(stream, self.identity.secret, admit, deadline_s=self._handshake_s)
            result = await self._finish(connection, stream, hello.member, "")
        except (HandshakeError, OSError) as error:
            self.refused.append(str(error))
        finally:
            if result is None:
                connection.close()
        return result

    def _wrap_stream(self, connection: socket.socket, *, serving: bool) -> Stream:
        """Return the stream of a socket, encrypted if this process has certificates."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        return stream if self.identity.tls is None else self.identity.tls.wrap(stream, serving=serving)

    def stranger_refusal(self, hello: Hello) -> str:
        """Return why the sender of a hello is no member of this world; "" if it is one."""
        return self.identity.refusal_reason(hello, self._role)

    def unexpected_refusal(self, hello: Hello) -> str:
        """Return the text that refuses a member which this process does not expect to dial."""
        detail = f", {hello.role} {hello.detail!r}" if hello.detail else ""
        return f"process {hello.member}{detail} is not expected to call process {self.identity.member}"

    def _admit_dialler(self, admitted: list[Place], hello: Hello) -> Hello | str:
        """Reserve the place of a connection, add it to `admitted`, and return this side's hello.

        The detail of the other hello is the index of the connection. If the connection is refused, the reason is
        returned as text, and nothing is reserved.
        """
        # no place has the index -1
        place = hello.member, int(hello.detail) if hello.detail.isdecimal() else -1
        if reason := self.stranger_refusal(hello):
            return reason
        if place not in self._places or hello.member >= self.identity.member:
            return self.unexpected_refusal(hello)
        if place in self._reserved:
            return f"{hello.role} {hello.detail} of process {hello.member} has already joined"
        self._reserved.add(place)
        admitted.append(place)
        return self.make_hello(hello.detail)


class ListeningSockets:
    """The sockets on which a process listens: at first, and again whenever a connection is to be replaced.

    Args:
        addresses: Local addresses to listen at, one for each rail.
        unix: Whether to listen at a Unix socket, too.
        pending: Number of connections that may be in their handshake at once.
        reopens: Whether `listen` is called again later. Then the ports are kept while nothing listens.

    Attributes:
        addresses: The addresses of the arguments.
        ports: Port of each address; 0 before the first `listen`.
        unix: Name of the Unix socket; "" without one.
    """

    def __init__(self, addresses: Sequence[str], *, unix: bool, pending: int, reopens: bool) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self.ports: tuple[int, ...] = (0,) * len(self.addresses)
        self.unix: str = f"overlap-{secrets.token_hex(16)}" if unix else ""
        self._pending, self._reopens = pending, reopens
        self._port_holders: list[socket.socket] = []  # sockets that keep the ports while nothing listens

    def close(self) -> None:
        """Release the ports that are kept for a later `listen`."""
        for bound in self._port_holders:
            bound.close()
        self._port_holders.clear()

    def listen(self) -> list[socket.socket]:
        """Return non-blocking sockets that listen at the addresses, TCP first; the caller closes them.

        Raises:
            TransportError: A port is taken, or an address is not of this machine.
        """
        listeners: list[socket.socket] = []
        first, place = not self._port_holders, ""
        try:
            for address, port in zip(self.addresses, self.ports, strict=True):
                place = f"{address}:{port}" if port else address
                listeners.append(_make_bound_socket(address, port))
            if self.unix:
                listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                place = f"the Unix socket {self.unix}"
                # an abstract name: it needs no file, so nothing is left whatever ends this process
                listeners[-1].bind("\0" + self.unix)
            self.ports = tuple(listener.getsockname()[1] for listener in listeners[: len(self.addresses)])
            if first and self._reopens:
                for address, port in zip(self.addresses, self.ports, strict=True):
                    place = f"{address}:{port}"
                    self._port_holders.append(_make_bound_socket(address, port))
            for listener in listeners:
                place = str(listener.getsockname())
                listener.setblocking(False)
                listener.listen(self._pending)
        except OSError as error:
            for listener in listeners:
                listener.close()
            if first:
                self.close()
            advice = {EADDRINUSE: "another process has the port", EADDRNOTAVAIL: "name addresses of this machine"}
            hint = f"; {advice[error.errno]}" if error.errno in advice else ""
            raise TransportError(f"cannot listen at {place}: {error.strerror}{hint}") from error
        return listeners

    async def serve(
        self, listeners: Sequence[socket.socket], handle: Callable[[socket.socket], Awaitable[object]]
    ) -> None:
        """Accept connections until cancelled, and handle each in a task of its own.

        Args:
            listeners: Sockets that listen.
            handle: Called with each accepted connection, which it has to close. An error that it raises ends `serve`.
        """
        # bounds the handshakes with strangers; further members wait in the system's queue
        free_places = trio.Semaphore(self._pending)

        async def handle_one(connection: socket.socket) -> None:
            """Handle a connection, and let another one be accepted after it."""
            try:
                await handle(connection)
            finally:
                free_places.release()

        async def accept_connections(listener: socket.socket) -> None:
            """Accept the connections of a listener, as long as few handshakes are unfinished."""
            while True:
                await free_places.acquire()
                connection: socket.socket | None = None
                try:
                    while connection is None:
                        await trio.lowlevel.wait_readable(listener)
                        with suppress(BlockingIOError, ConnectionAbortedError):  # the dialler has left again
                            connection = listener.accept()[0]
                except BaseException:
                    free_places.release()
                    raise
                nursery.start_soon(handle_one, connection)

        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(accept_connections, listener)


def _make_bound_socket(address: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to a port, but does not listen; 0 is any free port.

    Other sockets may be bound to the same port, so that one of them keeps the port while another one listens.
    """
    bound = socket.socket(address_family(address), socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except BaseException:
        bound.close()
        raise
    return bound


def address_family(address: str) -> socket.AddressFamily:
    """Return `AF_INET` or `AF_INET6` for an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def set_keep_alive_options(setsockopt: Callable[[int, int, int], None], idle_s: float, silence_s: float | None) -> None:
    """Set TCP options: short messages leave at once, and a connection breaks if the other host does not answer.

    Args:
        setsockopt: Sets an option of the socket, as `socket.setsockopt` does.
        idle_s: Seconds without an answer after which an idle connection breaks.
        silence_s: Seconds after which a connection breaks whose data is not acknowledged, or not read by the receiver;
            None: the system's default.
    """
    setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", max(1, round(idle_s) - _KEEPALIVE_S)),
        ("TCP_USER_TIMEOUT", round((silence_s or 0) * 1000)),
    ):
        if hasattr(socket, name):  # not every system has every one
            setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
