"""How processes find each other: each listens, tells where, and the lower member of each pair dials the higher one."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from transports.efa.address import PeerAddress, ends_of, host_identity, rail_addresses, rail_names
from transports.efa.door import Door, family
from transports.efa.tcp import prepare, shorten
from transports.factory import Exchange
from transports.failures import ArgumentError, LinkLostError, TransportError
from transports.handshake import HandshakeError, Hello, greet, welcome
from transports.patience import usable
from transports.tls import Tls

#: How long a handshake may take.
HANDSHAKE_S = 2.0
# So many connections may come to nothing because too much is lost on their way. Of 5 % of all packets, one in a hundred
# handshakes or so takes longer than it may.
_UNHEARD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A socket on which both sides have proved the secret."""

    socket: socket.socket  # As bare as the system gave it
    encrypted: trio.SSLStream[trio.abc.Stream] | None  # The encryption above it, if any
    detail: str = ""  # What the other side has said of it, where this one has dialled
    ends: str = ""  # Its addresses, for people, if it has any


@dataclass(kw_only=True)
class Joining:
    """One process's way into the fabric.

    Attributes:
        member: Its index.
        members: How many processes there are.
        secret: What all members know.
        job: Name of the world.
        epoch: Which of the job's successive worlds.
        rails: How many connections to each process, or the interfaces or addresses they use.
        host: The address to listen at if `rails` is a number.
        unix: Whether to use Unix sockets where both sides can.
        tls: Encrypts the connections.
        silence_s: How long TCP waits for an answer, or until a receiver reads; None: as long as the system does.
        join_s: How long to wait for all processes.
        watched: Whether somebody else knows which processes live.
        lasting: Whether a single TCP connection inside a host is to come back, too, should somebody end it.
        spared: Which processes need not be joined, once the addresses are exchanged.
        report: Takes a line about strangers.
        door: Where the others knock.
        refused: Why connections were refused; told at the end.
        identity: What this process shares with those that can reach its Unix socket.
    """

    member: int
    members: int
    secret: bytes
    job: str
    epoch: int
    rails: int | Sequence[str]
    host: str
    unix: bool
    tls: Tls | None
    silence_s: float | None
    join_s: float
    report: Callable[[str], None]
    watched: bool = False
    lasting: bool = False
    spared: Callable[[], Collection[int]] = tuple

    def __post_init__(self) -> None:
        if not self.secret:
            raise ArgumentError("the secret is empty; without one anybody is a member")
        if self.tls is not None:
            self.tls.check()
        self.identity = host_identity()
        self._names = rail_names(self.rails, self.host)
        self._addresses: tuple[str, ...] = ()
        self._joined: dict[tuple[int, int], Connection] = {}  # by (member, rail)
        self._reserved: set[tuple[int, int]] = set()
        self._complete = trio.Event()
        self.refused: list[str] = []
        self._said: set[str] = set()
        self._failure: TransportError | None = None
        self.door = Door((), unix=False, pending=0, stays=False)
        self._mine = PeerAddress(host="", unix="", tcp=())
        self._others: dict[int, PeerAddress] = {}
        self._wanted: frozenset[int] = frozenset()

    @property
    def rail_count(self) -> int:
        """How many connections there are to each other process."""
        return len(self._names)

    @property
    def returns(self) -> bool:
        """Whether a connection that has died is made again: somebody must know that its process lives."""
        return self.rail_count > 1 or self.watched

    def spans_hosts(self, members: Iterable[int]) -> bool:
        """Whether some processes, all of which have joined, live on different hosts, or do not know."""
        hosts = {self.identity if i == self.member else self._others[i].host for i in members}
        return len(hosts) > 1 or "" in hosts

    def may_part(self, member: int) -> bool:
        """Whether a single connection to a process that has joined may end before it, see `PeerAddress.may_part`."""
        return self._mine.may_part(self._others[member])

    def has_cores_to_spare(self) -> bool:
        """Whether other processes, all of which have joined, live on this host for sure, and a core for each of all."""
        others = [other.cores for other in self._others.values() if self.identity and other.host == self.identity]
        return 0 < len(others) < len(self._mine.cores.union(*others))

    async def join(self, exchange: Exchange) -> dict[tuple[int, int], Connection]:
        """Connect with every other process.

        Returns:
            The connections by (member, rail), which the caller owns.

        Raises:
            TransportError: Somebody did not come, or runs with other settings.
            ArgumentError: A rail has no address here.
        """
        self._addresses = await rail_addresses(self._names)
        pending = 2 * self.members * len(self._addresses)
        unix = self.unix and bool(self.identity)
        self.door = Door(self._addresses, unix=unix, pending=pending, stays=self.returns)
        listeners = self.door.open()
        try:
            return await self._meet(exchange, listeners)
        except BaseException:
            self.door.close()
            for connection in self._joined.values():
                await discard(connection)
            raise
        finally:
            for listener in listeners:
                listener.close()
            self.tell_refused()

    def tell_refused(self) -> None:
        """Tell the user of connections that were refused, if any were."""
        if self.refused:
            self.report(f"refused {len(self.refused)} connections; the last: {self.refused[-1]}")
        self.refused.clear()

    async def _meet(self, exchange: Exchange, listeners: list[socket.socket]) -> dict[tuple[int, int], Connection]:
        tcp = tuple(zip(self._addresses, self.door.ports, strict=True))
        self._mine = PeerAddress(host=self.identity, unix=self.door.unix, tcp=tcp, lasting=self.lasting, cores=usable())
        addresses = await exchange("efa", self._mine.pack())
        others = {i: PeerAddress.unpack(address, i) for i, address in enumerate(addresses) if i != self.member}
        self._others = others
        self._wanted = frozenset(others).difference(self.spared())
        self._check(others)
        with trio.move_on_after(self.join_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.door.serve, listeners, self._welcome)
                for member in self._wanted:
                    if member > self.member:
                        for index in range(len(self._addresses)):
                            nursery.start_soon(self._dial_first, member, index)
                await self._complete.wait()
                nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        self._note_missing()
        return self._joined

    def _check(self, others: dict[int, PeerAddress]) -> None:
        if len(others) != self.members - 1:
            raise TransportError(f"{len(others) + 1} processes told their addresses, {self.members} are expected")
        for member, address in others.items():
            if len(address.tcp) != len(self._addresses):
                raise TransportError(
                    f"process {member} has rails={len(address.tcp)}, process {self.member} has "
                    f"rails={len(self._addresses)}; start all with the same"
                )
        if not self._wanted:
            self._complete.set()

    def _note_missing(self) -> None:
        there = Counter(member for member, _ in self._joined)
        others = sorted(self._wanted)
        absent = [str(member) for member in others if not there[member]]
        partly = [str(member) for member in others if 0 < there[member] < len(self._addresses)]
        if absent or partly:
            what = "no connection" if absent else f"fewer than {len(self._addresses)} connections"
            who = ", ".join(absent or partly)
            raise LinkLostError(f"process {self.member} has {what} with process {who} after {self.join_s:g} s")

    def lose(self, member: int, reason: str) -> None:
        """Wait no longer for a process that will not come."""
        self._fail(LinkLostError(f"process {member} is lost: {reason}"))

    def _fail(self, error: TransportError) -> None:
        self._failure = self._failure or error
        self._complete.set()

    def _add(self, member: int, index: int, connection: Connection) -> None:
        self._joined[member, index] = connection
        if len(self._joined) == len(self._wanted) * len(self._addresses):
            self._complete.set()

    # -- the side that dials ------------------------------------------------------------------------------------------

    async def _dial_first(self, member: int, index: int) -> None:
        try:
            self._add(member, index, await self._dial_patiently(member, index))
        except TransportError as error:
            self._fail(error)

    async def _dial_patiently(self, member: int, index: int) -> Connection:
        """Connect, and again if the other side has hung up for having heard nothing: much is lost on some ways."""
        for _ in range(_UNHEARD):
            begun_s = trio.current_time()
            try:
                return await self.dial(member, index, str(index), deadline_s=self.join_s)
            except HandshakeError as error:
                if error.why != "left" or trio.current_time() - begun_s < HANDSHAKE_S:
                    raise
        return await self.dial(member, index, str(index), deadline_s=self.join_s)

    async def dial(self, member: int, index: int, detail: str, *, deadline_s: float) -> Connection:
        """Connect with another process by one of the rails.

        Args:
            member: Its index; it listens.
            index: Of the rail.
            detail: Which connection this is to be.
            deadline_s: For the handshake.

        Raises:
            HandshakeError: It does not want that.
            LinkLostError: It cannot be reached.
        """
        address = self._others[member]
        near = bool(self.door.unix and address.unix and self.identity == address.host)
        connection = socket.socket(socket.AF_UNIX if near else family(address.tcp[index][0]), socket.SOCK_STREAM)
        try:
            prepare(connection, self.silence_s)
            if not near and not isinstance(self.rails, int):
                connection.bind((self._addresses[index], 0))  # leave by the rail's own interface
            where = "\0" + address.unix if near else address.tcp[index]
            await trio.socket.from_stdlib_socket(connection).connect(where)
            stream = self._stream(connection, serving=False)
            answer = await greet(stream, self.hello(detail), self.secret, deadline_s=deadline_s)
            return self._made(connection, stream, answer.detail)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise LinkLostError(f"process {member} cannot be reached: {error.strerror}") from error
            raise

    def hello(self, detail: str) -> Hello:
        """Return what this process says of itself on a connection."""
        return Hello(
            role="rail", job=self.job, epoch=self.epoch, member=self.member, members=self.members, detail=detail
        )

    # -- the side that listens ----------------------------------------------------------------------------------------

    async def _welcome(self, connection: socket.socket) -> None:
        place: list[tuple[int, int]] = []
        welcomed = await self.welcome(connection, partial(self._judge, place))
        if welcomed is not None:
            self._add(*place[0], welcomed)
        else:
            self._reserved.difference_update(place)

    async def welcome(self, connection: socket.socket, judge: Callable[[Hello], Hello | str]) -> Connection | None:
        """Shake hands with who has called; None if that came to nothing, and the connection is closed."""
        kept = False
        try:
            prepare(connection, self.silence_s)
            stream = self._stream(connection, serving=True)
            await welcome(stream, self.secret, judge, deadline_s=HANDSHAKE_S)
            made = self._made(connection, stream)
            kept = True
            return made
        except (HandshakeError, OSError) as error:
            self.refused.append(str(error))
            return None
        finally:
            if not kept:
                connection.close()

    def stranger(self, hello: Hello) -> str:
        """Return why a process is of no use here, whatever it wants; empty if it is a member of this world."""
        expected = (("rail", "role"), (self.job, "job"), (self.epoch, "epoch"), (self.members, "members"))
        for value, name in expected:
            if getattr(hello, name) != value:
                return f"{name} {getattr(hello, name)!r} refused; here it is {value!r}"
        return ""

    def _judge(self, place: list[tuple[int, int]], hello: Hello) -> Hello | str:
        reason = self.stranger(hello)
        if reason:
            return reason
        if not 0 <= hello.member < self.member or hello.detail not in map(str, range(len(self._addresses))):
            return f"process {hello.member}, rail {hello.detail!r} is not expected to call process {self.member}"
        key = (hello.member, int(hello.detail))
        if key in self._reserved:
            return f"rail {hello.detail} of process {hello.member} has already joined"
        self._reserved.add(key)
        place.append(key)
        return self.hello(hello.detail)

    def _stream(
        self, connection: socket.socket, *, serving: bool
    ) -> trio.SSLStream[trio.abc.Stream] | trio.SocketStream:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        return stream if self.tls is None else self.tls.wrap(stream, serving=serving)

    def _made(self, connection: socket.socket, stream: trio.abc.Stream, detail: str = "") -> Connection:
        shorten(connection, self._say_once)
        encrypted = stream if isinstance(stream, trio.SSLStream) else None
        return Connection(socket=connection, encrypted=encrypted, detail=detail, ends=ends_of(connection))

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.report(line)


async def discard(connection: Connection) -> None:
    """Close a connection that nobody wants."""
    trio.lowlevel.notify_closing(connection.socket)
    connection.socket.close()
    if connection.encrypted is not None:
        await trio.aclose_forcefully(connection.encrypted)
