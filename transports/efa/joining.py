"""Joining of processes by sockets: every process listens, sends its addresses, and dials the higher members."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import trio

from transports.efa.address import PeerAddress, describe_ends, host_identity, rail_names, resolve_address
from transports.efa.tcp import bound_queue, set_options
from transports.factory import Exchange
from transports.failures import LinkLostError, TransportError
from transports.handshake import HandshakeError, advise_on_silence
from transports.identity import Hello
from transports.meeting import ListeningSockets, Meeting, Place, Stream, address_family
from transports.patience import usable_cores

#: Longest duration of a handshake.
HANDSHAKE_S = 2.0
# Attempts that may fail because a lossy network drops packets. With 5 % losses about one handshake in a hundred takes
# longer than `HANDSHAKE_S`.
_LOSSY_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedSocket:
    """A socket on which both sides have proved the secret."""

    socket: socket.socket  # The bare socket
    encrypted: trio.SSLStream[trio.abc.Stream] | None  # The encryption above it, if any
    detail: str = ""  # Detail of the other side's hello, if this side has dialled
    ends: str = ""  # The two addresses, for messages; empty for Unix sockets


class SocketJoining:
    """The connections of one process to all others: at first, and again for lost ones.

    Args:
        meeting: The meeting with the other processes.
        rails: Number of connections to each process, or the interfaces or addresses to use.
        host: The address to listen at if `rails` is a number.
        unix: Whether to use Unix sockets where both sides can.
        silence_s: How long TCP waits for an answer or a reader; None: the system's default.
        watched: Whether the control plane detects lost processes.
        lasting: Whether a single TCP connection inside a host is replaced, too, when it ends.
        spared: The processes that need not be joined, asked once addresses are exchanged.
        report: Prints a line about refused connections.

    Attributes:
        identity: Identity of the host, shared with processes that can reach this one's Unix socket.

    Raises:
        ArgumentError: No rails, or too many.
    """

    meeting: Meeting[ProvedSocket]
    lasting: bool
    member: int

    def __init__(
        self,
        meeting: Meeting[ProvedSocket],
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
        self.member, self._members = meeting.identity.member, meeting.identity.members
        self.identity: str = host_identity()
        self._names, self._binds = rail_names(rails, host), not isinstance(rails, int)
        self._unix, self._silence_s, self._watched, self._spared = unix, silence_s, watched, spared
        self._report = report
        self._addresses: tuple[str, ...] = ()
        self._reported: set[str] = set()
        self._address = PeerAddress(host="", unix="", tcp=())
        self._peers: dict[int, PeerAddress] = {}

    @property
    def rail_count(self) -> int:
        """Number of connections to each other process."""
        return len(self._names)

    @property
    def replaces_rails(self) -> bool:
        """Whether dead connections are replaced, which needs another sign that their process lives."""
        return self.rail_count > 1 or self._watched

    def spans_hosts(self, members: Iterable[int]) -> bool:
        """Whether some joined processes live on different hosts, or on unknown ones."""
        hosts = {self.identity if i == self.member else self._peers[i].host for i in members}
        return len(hosts) > 1 or "" in hosts

    def may_part(self, member: int) -> bool:
        """Whether a single connection to a joined process may end before the process, see `PeerAddress.may_part`."""
        return self._address.may_part(self._peers[member])

    def has_cores_to_spare(self) -> bool:
        """Whether other joined processes live on this host, which has more cores than processes."""
        cores = [peer.cores for peer in self._peers.values() if self.identity and peer.host == self.identity]
        return 0 < len(cores) < len(self._address.cores.union(*cores))

    async def join(self, exchange: Exchange) -> dict[Place, ProvedSocket]:
        """Connect with every other process.

        Returns:
            The connections by (member, rail), which the caller owns.

        Raises:
            TransportError: A process did not join, or runs with other settings.
            ArgumentError: A rail has no address here.
        """
        addresses = {name: await resolve_address(name) for name in dict.fromkeys(self._names)}
        self._addresses = tuple(addresses[name] for name in self._names)
        pending = 2 * self._members * len(self._addresses)
        unix = self._unix and bool(self.identity)
        self.meeting.sockets = sockets = ListeningSockets(
            self._addresses, unix=unix, pending=pending, reopens=self.replaces_rails
        )
        listeners = sockets.listen()
        try:
            return await self._exchange_and_connect(exchange, listeners)
        except BaseException:
            sockets.close()
            for connection in self.meeting.results.values():
                await discard(connection)
            raise
        finally:
            for listener in listeners:
                listener.close()
            self.report_refused()

    def close(self) -> None:
        """Release the ports, and report refused connections."""
        self.meeting.sockets.close()
        self.report_refused()

    def report_refused(self) -> None:
        """Report the number of refused connections to the user, and the last reason."""
        refused = self.meeting.refused
        if refused:
            self._report(f"refused {len(refused)} connections; the last: {refused[-1]}")
        refused.clear()

    async def _exchange_and_connect(
        self, exchange: Exchange, listeners: list[socket.socket]
    ) -> dict[Place, ProvedSocket]:
        """Exchange addresses, and connect with every member but spared ones; return the connections by place."""
        sockets = self.meeting.sockets
        tcp = tuple(zip(self._addresses, sockets.ports, strict=True))
        self._address = PeerAddress(
            host=self.identity, unix=sockets.unix, tcp=tcp, lasting=self.lasting, cores=usable_cores()
        )
        addresses = await exchange("efa", self._address.pack())
        self._peers = {i: PeerAddress.unpack(address, i) for i, address in enumerate(addresses) if i != self.member}
        self._check_addresses(self._peers)
        members = set(self._peers).difference(self._spared())
        places = product(members, range(len(self._addresses)))
        missing = await self.meeting.gather(places, listeners, self._dial_patiently, self._welcome_peer)
        if missing:
            raise self._missing_connections_error(Counter(member for member, _ in missing))
        return self.meeting.results

    def _check_addresses(self, peers: dict[int, PeerAddress]) -> None:
        """Raise `TransportError` unless every process sent an address, with as many rails as this one."""
        if len(peers) != self._members - 1:
            raise TransportError(
                f"{len(peers) + 1} processes sent their addresses, {self._members} are expected; "
                "this is a bug in overlap, please report it"
            )
        for member, address in peers.items():
            if len(address.tcp) != len(self._addresses):
                raise TransportError(
                    f"process {member} has rails={len(address.tcp)}, process {self.member} has "
                    f"rails={len(self._addresses)}; start all with the same"
                )

    def _missing_connections_error(self, missing: Counter[int]) -> LinkLostError:
        """Return the error that names the unconnected processes, or the ones with too few connections."""
        rails = len(self._addresses)
        absent = [member for member, count in missing.items() if count == rails]
        connections = "no connection" if absent else f"fewer than {rails} connections"
        peers = ", ".join(map(str, sorted(absent or missing)))
        after = f"after {self.meeting.join_s:g} s"
        return LinkLostError(
            f"process {self.member} has {connections} with process {peers} {after}; see whether these still run"
        )

    # -- the side that dials ------------------------------------------------------------------------------------------

    async def _dial_patiently(self, member: int, index: int) -> ProvedSocket:
        """Connect; if the other side hung up at its deadline, as on lossy networks, try again up to 4 times."""
        for _ in range(_LOSSY_ATTEMPTS):
            start_s = trio.current_time()
            try:
                return await self.dial(member, index, str(index), deadline_s=self.meeting.join_s)
            except HandshakeError as error:
                if error.why != "left" or trio.current_time() - start_s < HANDSHAKE_S:
                    raise
        return await self.dial(member, index, str(index), deadline_s=self.meeting.join_s)

    async def dial(self, member: int, index: int, detail: str, *, deadline_s: float) -> ProvedSocket:
        """Connect with another process by one of the rails.

        Args:
            member: Index of the process, which listens.
            index: Index of the rail.
            detail: Detail of this side's hello, which names the connection.
            deadline_s: Limit of the handshake.

        Raises:
            HandshakeError: The process refused.
            LinkLostError: The process cannot be reached.
        """
        address = self._peers[member]
        uses_unix = bool(self.meeting.sockets.unix and address.unix and self.identity == address.host)
        connection = socket.socket(
            socket.AF_UNIX if uses_unix else address_family(address.tcp[index][0]), socket.SOCK_STREAM
        )
        target = "\0" + address.unix if uses_unix else address.tcp[index]
        try:
            set_options(connection, self._silence_s)
            if not uses_unix and self._binds:
                connection.bind((self._addresses[index], 0))  # leave by the rail's own interface
            stream, answer = await self.meeting.greet(connection, member, target, detail, deadline_s=deadline_s)
            return self._make_proved_socket(connection, stream, answer.detail)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                advice = advise_on_silence(connection, target)
                raise LinkLostError(f"process {member} cannot be reached: {error.strerror}; {advice}") from error
            raise

    # -- the side that listens ----------------------------------------------------------------------------------------

    async def _welcome_peer(self, connection: socket.socket) -> None:
        """Shake hands with a process that dials, and settle its place; a failure frees the place."""
        places: list[Place] = []
        welcomed = await self.welcome(connection, partial(self.meeting.admit, places))
        if welcomed is not None:
            self.meeting.record_result(places[0], welcomed)
        elif places:
            self.meeting.free_place(places[0])

    async def welcome(self, connection: socket.socket, admit: Callable[[Hello], Hello | str]) -> ProvedSocket | None:
        """Shake hands with a process that has dialled; None, with the socket closed, if the handshake fails."""
        welcomed: ProvedSocket | None = None
        try:
            set_options(connection, self._silence_s)
            stream = await self.meeting.welcome(connection, admit, deadline_s=HANDSHAKE_S)
            welcomed = self._make_proved_socket(connection, stream)
            return welcomed
        except (HandshakeError, OSError) as error:
            self.meeting.refused.append(str(error))
            return None
        finally:
            if welcomed is None:
                connection.close()

    def _make_proved_socket(self, connection: socket.socket, stream: Stream, detail: str = "") -> ProvedSocket:
        """Bound the queue of a socket after its handshake, and return it with its encryption."""
        bound_queue(connection, self._report_once)
        encrypted = stream if isinstance(stream, trio.SSLStream) else None
        return ProvedSocket(socket=connection, encrypted=encrypted, detail=detail, ends=describe_ends(connection))

    def _report_once(self, line: str) -> None:
        """Report a line to the user, unless the same line was reported before."""
        if line not in self._reported:
            self._reported.add(line)
            self._report(line)


async def discard(connection: ProvedSocket) -> None:
    """Close an unwanted connection and its encryption."""
    trio.lowlevel.notify_closing(connection.socket)
    connection.socket.close()
    if connection.encrypted is not None:
        await trio.aclose_forcefully(connection.encrypted)
