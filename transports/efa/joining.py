"""Joining of processes by sockets: every process listens, tells its addresses, and dials the higher members."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import trio

from transports.efa.address import PeerAddress, ends_of, host_identity, rail_addresses, rail_names
from transports.efa.tcp import prepare, shorten
from transports.factory import Exchange
from transports.failures import LinkLostError, TransportError
from transports.handshake import HandshakeError
from transports.identity import Hello
from transports.meeting import Door, Meeting, Place, Stream, family
from transports.patience import usable

#: How long a handshake may take.
HANDSHAKE_S = 2.0
# So many connections may come to nothing because too much is lost on their way. Of 5 % of all packets, one in a hundred
# handshakes or so takes longer than it may.
_UNHEARD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A socket on which both sides have proved the secret."""

    socket: socket.socket  # The socket, as the system gave it
    encrypted: trio.SSLStream[trio.abc.Stream] | None  # The encryption above it, if any
    detail: str = ""  # The detail in the other side's hello, where this side has dialled
    ends: str = ""  # Its two addresses, for messages, if it has addresses


class Joining:
    """One process's way into the fabric.

    Args:
        meeting: Its meeting with the other processes.
        rails: How many connections to each process, or the interfaces or addresses they use.
        host: The address to listen at if `rails` is a number.
        unix: Whether to use Unix sockets where both sides can.
        silence_s: How long TCP waits for an answer or a reader; None: as long as the system does.
        watched: Whether something else knows which processes live.
        lasting: Whether a single TCP connection inside a host is to come back, too, should it end.
        spared: The processes that need not be joined, asked once addresses are exchanged.
        report: Takes a line about strangers.

    Attributes:
        identity: Shared with the processes that can reach this one's Unix socket.

    Raises:
        ArgumentError: No rails, or too many.
    """

    meeting: Meeting[Connection]
    lasting: bool
    member: int

    def __init__(
        self,
        meeting: Meeting[Connection],
        *,
        rails: int | Sequence[str],
        host: str,
        unix: bool,
        silence_s: float | None,
        report: Callable[[str], None],
        watched: bool = False,
        lasting: bool = False,
        spared: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.meeting, self.lasting = meeting, lasting
        self.member, self._members = meeting.mine.member, meeting.mine.members
        self.identity: str = host_identity()
        self._names, self._bound = rail_names(rails, host), not isinstance(rails, int)
        self._unix, self._silence_s, self._watched, self._spared = unix, silence_s, watched, spared
        self._report = report
        self._addresses: tuple[str, ...] = ()
        self._said: set[str] = set()
        self._mine = PeerAddress(host="", unix="", tcp=())
        self._others: dict[int, PeerAddress] = {}

    @property
    def rail_count(self) -> int:
        """Number of connections to each other process."""
        return len(self._names)

    @property
    def returns(self) -> bool:
        """Whether a dead connection is made again, which needs another sign that its process lives."""
        return self.rail_count > 1 or self._watched

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

    async def join(self, exchange: Exchange) -> dict[Place, Connection]:
        """Connect with every other process.

        Returns:
            The connections by (member, rail), which the caller owns.

        Raises:
            TransportError: A process did not come, or runs with other settings.
            ArgumentError: A rail has no address here.
        """
        self._addresses = await rail_addresses(self._names)
        pending = 2 * self._members * len(self._addresses)
        unix = self._unix and bool(self.identity)
        self.meeting.door = door = Door(self._addresses, unix=unix, pending=pending, stays=self.returns)
        listeners = door.open()
        try:
            return await self._meet(exchange, listeners)
        except BaseException:
            door.close()
            for connection in self.meeting.found.values():
                await discard(connection)
            raise
        finally:
            for listener in listeners:
                listener.close()
            self.tell_refused()

    def close(self) -> None:
        """Close the door, and tell the user of connections that were refused."""
        self.meeting.door.close()
        self.tell_refused()

    def tell_refused(self) -> None:
        """Tell the user of connections that were refused, if any were."""
        refused = self.meeting.refused
        if refused:
            self._report(f"refused {len(refused)} connections; the last: {refused[-1]}")
        refused.clear()

    async def _meet(self, exchange: Exchange, listeners: list[socket.socket]) -> dict[Place, Connection]:
        door = self.meeting.door
        tcp = tuple(zip(self._addresses, door.ports, strict=True))
        self._mine = PeerAddress(host=self.identity, unix=door.unix, tcp=tcp, lasting=self.lasting, cores=usable())
        addresses = await exchange("efa", self._mine.pack())
        self._others = {i: PeerAddress.unpack(address, i) for i, address in enumerate(addresses) if i != self.member}
        self._check(self._others)
        wanted = set(self._others).difference(self._spared())
        places = product(wanted, range(len(self._addresses)))
        missing = await self.meeting.gather(places, listeners, self._dial_patiently, self._welcome)
        if missing:
            raise self._incomplete(Counter(member for member, _ in missing))
        return self.meeting.found

    def _check(self, others: dict[int, PeerAddress]) -> None:
        if len(others) != self._members - 1:
            raise TransportError(f"{len(others) + 1} processes told their addresses, {self._members} are expected")
        for member, address in others.items():
            if len(address.tcp) != len(self._addresses):
                raise TransportError(
                    f"process {member} has rails={len(address.tcp)}, process {self.member} has "
                    f"rails={len(self._addresses)}; start all with the same"
                )

    def _incomplete(self, missing: Counter[int]) -> LinkLostError:
        rails = len(self._addresses)
        absent = [member for member, count in missing.items() if count == rails]
        what = "no connection" if absent else f"fewer than {rails} connections"
        who = ", ".join(map(str, sorted(absent or missing)))
        return LinkLostError(f"process {self.member} has {what} with process {who} after {self.meeting.join_s:g} s")

    # -- the side that dials ------------------------------------------------------------------------------------------

    async def _dial_patiently(self, member: int, index: int) -> Connection:
        """Connect, and again if the other side has hung up for having heard nothing: much is lost on some ways."""
        for _ in range(_UNHEARD):
            begun_s = trio.current_time()
            try:
                return await self.dial(member, index, str(index), deadline_s=self.meeting.join_s)
            except HandshakeError as error:
                if error.why != "left" or trio.current_time() - begun_s < HANDSHAKE_S:
                    raise
        return await self.dial(member, index, str(index), deadline_s=self.meeting.join_s)

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
        near = bool(self.meeting.door.unix and address.unix and self.identity == address.host)
        connection = socket.socket(socket.AF_UNIX if near else family(address.tcp[index][0]), socket.SOCK_STREAM)
        try:
            prepare(connection, self._silence_s)
            if not near and self._bound:
                connection.bind((self._addresses[index], 0))  # leave by the rail's own interface
            where = "\0" + address.unix if near else address.tcp[index]
            stream, answer = await self.meeting.greet(connection, member, where, detail, deadline_s=deadline_s)
            return self._made(connection, stream, answer.detail)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise LinkLostError(f"process {member} cannot be reached: {error.strerror}") from error
            raise

    # -- the side that listens ----------------------------------------------------------------------------------------

    async def _welcome(self, connection: socket.socket) -> None:
        places: list[Place] = []

        def judge(hello: Hello) -> Hello | str:
            index = int(hello.detail) if hello.detail.isdecimal() else -1
            verdict = self.meeting.admit(hello, index)
            if isinstance(verdict, Hello):
                places.append((hello.member, index))
            return verdict

        welcomed = await self.welcome(connection, judge)
        if welcomed is not None:
            self.meeting.settle(places[0], welcomed)
        elif places:
            self.meeting.release(places[0])

    async def welcome(self, connection: socket.socket, judge: Callable[[Hello], Hello | str]) -> Connection | None:
        """Shake hands with a process that has dialled; None if that came to nothing, and the connection is closed."""
        kept = False
        try:
            prepare(connection, self._silence_s)
            stream = await self.meeting.welcome(connection, judge, deadline_s=HANDSHAKE_S)
            made = self._made(connection, stream)
            kept = True
            return made
        except (HandshakeError, OSError) as error:
            self.meeting.refused.append(str(error))
            return None
        finally:
            if not kept:
                connection.close()

    def _made(self, connection: socket.socket, stream: Stream, detail: str = "") -> Connection:
        shorten(connection, self._say_once)
        encrypted = stream if isinstance(stream, trio.SSLStream) else None
        return Connection(socket=connection, encrypted=encrypted, detail=detail, ends=ends_of(connection))

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._report(line)


async def discard(connection: Connection) -> None:
    """Close an unwanted connection."""
    trio.lowlevel.notify_closing(connection.socket)
    connection.socket.close()
    if connection.encrypted is not None:
        await trio.aclose_forcefully(connection.encrypted)
