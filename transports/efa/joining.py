"""Joining of processes by sockets: every process listens, sends its addresses, and dials the higher members."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from ipaddress import ip_address
from itertools import product

import trio

from transports.address import RAILS_LIMIT, PeerAddress, host_identity
from transports.factory import Exchange
from transports.failures import REPORT_BUG, ArgumentError, TransportError
from transports.handshake import HandshakeError
from transports.identity import Identity
from transports.meeting import ListeningSockets, Meeting, Place, Stream, address_family
from transports.patience import usable_cores
from transports.tcp import prepare_socket, tune_connection

#: Longest duration of a handshake.
HANDSHAKE_S = 2.0
# Attempts that may fail because a lossy network drops packets. With 5 % losses about one handshake in a hundred takes
# longer than `HANDSHAKE_S`.
_LOSSY_ATTEMPTS = 4
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedSocket:
    """A socket on which both sides have proved the secret."""

    socket: socket.socket  # The bare socket
    encrypted: trio.SSLStream[trio.abc.Stream] | None  # The encrypted stream over the socket; None without TLS
    detail: str = ""  # `Hello.detail` of the other side if this side has dialled, otherwise empty
    ends: str = ""  # The two addresses, such as "10.0.0.1:5000 to 10.0.0.2:6000"; empty for Unix sockets


class SocketJoining:
    """Makes the connections of one process to all others: all of them at first, later single ones that were lost.

    Args:
        identity: Identity of this process.
        rails: Number of connections to each process; or the interfaces or local addresses to use, one for each.
        host: The local address to listen at if `rails` is a number.
        unix: Whether to use Unix sockets where both sides can.
        silence_s: How long TCP waits for an acknowledgement, or until the receiver reads; None: the system's default.
        join_s: How long to wait for all processes.
        watched: Whether the control plane detects lost processes.
        lasting: Whether a single TCP connection inside a host is replaced, too, when it ends.
        spared: Returns the processes that need not be joined; called once addresses are exchanged.
        report: Prints a line about refused connections.

    Attributes:
        identity: Identity of the host, see `host_identity`; "" if unknown.
        meeting: The meeting with the other processes.

    Raises:
        ArgumentError: No rails, or too many; no secret.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        rails: int | Sequence[str],
        host: str,
        unix: bool,
        silence_s: float | None,
        report: Callable[[str], None],
        join_s: float = 60.0,
        watched: bool = False,
        lasting: bool = False,
        spared: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.meeting: Meeting[ProvedSocket] = Meeting(
            identity,
            "rail",
            join_s=join_s,
            handshake_s=HANDSHAKE_S,
            prepare=partial(prepare_socket, silence_s=silence_s),
            finish=self._make_proved_socket,
            discard=close_proved_socket,
        )
        self.lasting = lasting
        self.member: int = identity.member
        self._members = identity.members
        self.identity: str = host_identity()
        self._names = (host,) * rails if isinstance(rails, int) else tuple(rails)
        if not 0 < len(self._names) <= RAILS_LIMIT:
            raise ArgumentError(f"rails: expected 1 to {RAILS_LIMIT}, or as many local addresses, got {rails!r}")
        # Rails that the user has named are bound to their addresses; otherwise the system chooses the interface.
        self._binds, self._unix, self._watched, self._spared = not isinstance(rails, int), unix, watched, spared
        self._report = report
        self._addresses: tuple[str, ...] = ()
        self._report_once = cache(report)  # the same line never again

    @property
    def rail_count(self) -> int:
        """Number of connections to each other process."""
        return len(self._names)

    @property
    def replaces_rails(self) -> bool:
        """Whether dead connections are replaced.

        False for a single rail without a control plane: nothing else would show that the other process lives.
        """
        return self.rail_count > 1 or self._watched

    def spans_hosts(self, members: Iterable[int]) -> bool:
        """Whether the given processes, which have joined, live on different hosts, or on hosts of unknown identity."""
        hosts = {self.identity if i == self.member else self.meeting.peers[i].host for i in members}
        return len(hosts) > 1 or "" in hosts

    def may_disconnect(self, member: int) -> bool:
        """Whether a single connection to a joined process may end before it, see `PeerAddress.may_disconnect`."""
        return self.meeting.address.may_disconnect(self.meeting.peers[member])

    def has_cores_to_spare(self) -> bool:
        """Whether several processes of the world live on this host, and have at least one core each."""
        peers = self.meeting.peers.values()
        cores = [peer.cores for peer in peers if self.identity and peer.host == self.identity]
        # `cores` has one entry for each other process of this host, so it is one shorter than the number of processes
        return 0 < len(cores) < len(self.meeting.address.cores.union(*cores))

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
        # twice as many handshakes as the others need, so that strangers do not crowd them out
        pending = 2 * self._members * len(self._addresses)
        unix = self._unix and bool(self.identity)
        sockets = ListeningSockets(self._addresses, unix=unix, pending=pending, reopens=self.replaces_rails)
        try:
            return await self.meeting.join(
                sockets, exchange, self._make_address, self._choose_places, self._dial_with_retries
            )
        finally:
            self.report_refused_connections()

    def close(self) -> None:
        """Release the ports, and report refused connections."""
        self.meeting.sockets.close()
        self.report_refused_connections()

    def report_refused_connections(self) -> None:
        """Report the number of refused connections to the user, and the last reason."""
        refused = self.meeting.refused
        if refused:
            self._report(f"refused {len(refused)} connections; the last: {refused[-1]}")
        refused.clear()

    def _make_address(self) -> PeerAddress:
        """Return the addresses of this process, which listens now."""
        sockets = self.meeting.sockets
        tcp = tuple(zip(self._addresses, sockets.ports, strict=True))
        return PeerAddress(host=self.identity, unix=sockets.unix, tcp=tcp, lasting=self.lasting, cores=usable_cores())

    def _choose_places(self) -> Iterable[Place]:
        """Return (member, rail) for each rail to each process, without spared processes.

        Raise `TransportError` if another process has another number of rails.
        """
        peers = self.meeting.peers
        if len(peers) != self._members - 1:
            reason = f"process {self.member} has the addresses of {len(peers) + 1} processes"
            raise TransportError(f"{reason}, and the world has {self._members}; {REPORT_BUG}")
        for member, address in peers.items():
            if len(address.tcp) != len(self._addresses):
                rails = f"rails={len(address.tcp)}, process {self.member} has rails={len(self._addresses)}"
                advice = "start all processes with the same number of rails"
                raise TransportError(f"process {member} has {rails}; {advice}")
        return product(set(peers).difference(self._spared()), range(len(self._addresses)))

    # -- the side that dials ------------------------------------------------------------------------------------------

    async def _dial_with_retries(self, member: int, index: int) -> ProvedSocket:
        """Dial; if the other side hung up at its deadline, as on lossy networks, try up to 5 times."""
        for _ in range(_LOSSY_ATTEMPTS):
            start_s = trio.current_time()
            try:
                return await self.dial(member, index, str(index), deadline_s=self.meeting.join_s)
            except HandshakeError as error:
                if error.why != "left" or trio.current_time() - start_s < HANDSHAKE_S:
                    raise
        return await self.dial(member, index, str(index), deadline_s=self.meeting.join_s)

    async def dial(self, member: int, index: int, detail: str, *, deadline_s: float) -> ProvedSocket:
        """Connect with another process by one of the rails, and prove membership.

        Args:
            member: Index of the process, which listens.
            index: Index of the rail.
            detail: Detail of this side's hello, which names the connection.
            deadline_s: Limit of the handshake.

        Raises:
            HandshakeError: The process refused.
            LinkLostError: The process cannot be reached.
        """
        address, own = self.meeting.peers[member], self.meeting.sockets.unix
        uses_unix = bool(own and address.unix and self.identity == address.host)
        family = socket.AF_UNIX if uses_unix else address_family(address.tcp[index][0])
        connection = socket.socket(family, socket.SOCK_STREAM)
        target = "\0" + address.unix if uses_unix else address.tcp[index]
        source = "" if uses_unix or not self._binds else self._addresses[index]  # leave by the rail's own interface
        return await self.meeting.greet(connection, member, target, detail, source=source, deadline_s=deadline_s)

    async def _make_proved_socket(
        self, connection: socket.socket, stream: Stream, member: int, detail: str
    ) -> ProvedSocket:
        """Tune a socket after its handshake, and return it with the addresses of its ends; the `finish` of `Meeting`.

        `detail` is that of the other side's hello, if this side has dialled; `member` is not used here.
        """
        await trio.lowlevel.checkpoint()
        tune_connection(connection, self._report_once)
        encrypted, ends = stream if isinstance(stream, trio.SSLStream) else None, ""
        if connection.family != socket.AF_UNIX:
            # an address of IPv6 has two more parts
            (here, port), (there, their_port) = connection.getsockname()[:2], connection.getpeername()[:2]
            ends = f"{here}:{port} to {there}:{their_port}"
        return ProvedSocket(socket=connection, encrypted=encrypted, detail=detail, ends=ends)


def close_proved_socket(connection: ProvedSocket) -> None:
    """Close an unwanted connection."""
    trio.lowlevel.notify_closing(connection.socket)
    connection.socket.close()


async def resolve_address(name: str) -> str:
    """Return the IP address of a network interface or a host; an IP address is returned unchanged.

    Args:
        name: Name of an interface such as "eth0", of a host, or an IP address.

    Raises:
        ArgumentError: No interface or host has this name.
    """
    await trio.lowlevel.checkpoint()
    with suppress(ValueError):
        return str(ip_address(name))
    interfaces = [interface for _, interface in socket.if_nameindex()]
    try:
        if name in interfaces:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            # `struct ifreq`: a name of 16 bytes, then a `sockaddr_in`, whose address begins at its byte 4
            return socket.inet_ntoa(reply[20:24])
        # the system's resolver may take seconds; it has a thread of its own
        return str((await trio.socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))[0][4][0])
    except OSError as error:
        reason = f"rails: {name!r} has no address ({error.strerror})"
        raise ArgumentError(f"{reason}; set rails to an address, or to one of {', '.join(interfaces)}") from error
