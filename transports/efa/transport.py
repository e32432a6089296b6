"""Efa: one process's end of the fabric between processes, and the endpoints of its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import cast

import trio

from transports.efa.departures import single_rail_limits
from transports.efa.efa_link import EfaLink
from transports.efa.joining import ProvedSocket, SocketJoining
from transports.efa.rail import Rail, StreamRail
from transports.efa.reconnection import Reconnection
from transports.factory import Bootstrap, Exchange, spare_none
from transports.failures import ArgumentError
from transports.frame import EAGER_BYTES
from transports.identity import Identity
from transports.matched import MatchedTransport
from transports.patience import Crowding, Patience
from transports.tcp import LOST_S
from transports.tls import Tls

# Longest interval between requests for a sign of life on each rail.
_TICK_S = 1.0
_TICKS_OF_SILENCE = 8

# Another process of this host takes 100 to 200 us to end its work, and to begin and send the awaited message.
# Broadcasts of 64 and 256 KiB between two of them take 0.10 and 0.15 ms with such polls, 0.20 and 0.28 without.
_LOOK_S = 200e-6


class Efa(MatchedTransport):
    """Joins the ranks of this process to those of other processes, over sockets.

    Messages of up to `frame.EAGER_BYTES` leave at once. If the receive is late, they wait at the receiver, up to
    `Limits.budget_bytes` for each pair of processes. Longer messages travel in chunks, from the sender's memory into
    the receiver's, over all rails. Those of up to `frame.PUSH_BYTES` follow their announcement at once, within the same
    budget; others wait for their receive.

    A send of a long message returns when the whole message has arrived. Over a single rail it returns when the system
    has taken the message, unless the message may have to be repeated. A cancelled send asks the receiver whether the
    cancellation is in time, so the send ends a round trip later.

    A dead rail is dialled again until the connection is back. The living rails send the missing frames once more. See
    `watched` for the loss of the last rail.

    Ranks of one process do not reach each other over sockets; see `NeuronLink` and `Router`.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        secret: Proves membership to the other processes; at least one byte.
        exchange: All-gather among the processes: called with a name and bytes, it returns the bytes of all by index.
        job: Name of the world; connections of other worlds are refused.
        epoch: Number of the world among the job's successive worlds.
        rails: Number of connections to each other process, or the interfaces or local addresses of the connections.
        host: Local address to listen at, if `rails` is a number.
        unix: Use Unix sockets between processes of one host, if both processes set this. Unix sockets are twice as fast
            as TCP.
        peer_direct: Send from and receive into the callers' memory; otherwise stage payloads through a host buffer.
        checksums: Whether payloads carry a checksum, as headers always do; None: only between hosts. (Inside a host, an
            all_reduce of 64 MiB over TCP takes 41 ms with checksums, 33 without.) Never under TLS.
        tls: Encrypts every connection, at a fraction of the speed.
        silence_s: Seconds without a byte, even in answer to a question, after which a process is lost.
        watched: Whether the control plane detects lost processes. Then silence proves nothing here, and a connection is
            lost when the other kernel stops answering. A process without connections is waited for until `lose` is
            called for it, it was unreachable for `silence_s`, or it has not returned for 300 s although its host
            answers. Inside a host, a process with a single connection is lost with that connection.
        lasting: Whether a cut TCP connection inside a host is replaced even if it is the only one. One of the two
            processes has to set this. Then long messages are confirmed, as they are between hosts.
        spared: Returns the processes that need not be joined, called when the transport is opened. Both processes of a
            pair must return the same about their pair.
        join_s: How long to wait for all processes at the opening.
        report: Prints a line about lost rails and processes, replaced rails, and refused connections.
        note: Records an event for the timeline at the moment at which the event happens.

    Attributes:
        exchange: The all-gather of the arguments.
        links: The links to the other processes, by index.

    Raises:
        ArgumentError: A placement without this process, or with ranks that are negative or named twice.
    """

    patience: Patience

    at_once_bytes = EAGER_BYTES

    def __init__(
        self,
        *,
        member: int,
        placement: Sequence[Sequence[int]],
        secret: bytes,
        exchange: Exchange,
        job: str = "",
        epoch: int = 0,
        rails: int | Sequence[str] = 1,
        host: str = "127.0.0.1",
        unix: bool = True,
        peer_direct: bool = True,
        checksums: bool | None = None,
        tls: Tls | None = None,
        silence_s: float = 15.0,
        watched: bool = False,
        lasting: bool = False,
        spared: Callable[[], Collection[int]] = spare_none,
        join_s: float = 60.0,
        report: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(member, placement)
        if not 0 < silence_s < math.inf:
            raise ArgumentError(f"silence_s is {silence_s}; it must be above 0, and finite")
        self.exchange = exchange
        self._peer_direct = peer_direct
        self._checksums = checksums
        self._tick_s = min(_TICK_S, silence_s / _TICKS_OF_SILENCE)
        self._silence_s, self._watched = silence_s, watched
        report = report or (lambda _: None)
        identity = Identity(job=job, epoch=epoch, member=member, members=len(placement), secret=secret, tls=tls)
        self._joining = SocketJoining(
            identity,
            rails=rails,
            host=host,
            unix=unix,
            silence_s=None if watched else silence_s,
            join_s=join_s,
            watched=watched,
            lasting=lasting,
            spared=spared,
            report=report,
        )
        self._spared = spared
        self.links: dict[int, EfaLink] = self.make_links(
            lambda other, ranks: EfaLink(other, ranks, self.ranks, self.memory, report)
        )
        for link in self.links.values():
            link.note = note or (lambda _: None)
        self._reconnection = Reconnection(self._joining, self.links, self._make_rail, report, unreachable_s=silence_s)

    async def join(self) -> None:
        """Connect with all other processes.

        Raises:
            TransportError: A process did not join, was refused, or runs with other settings.
        """
        connections = await self._joining.join(self.exchange)
        self._drop_spared_links()
        for (member, index), connection in sorted(connections.items(), key=lambda item: item[0]):
            link = self.links[member]
            # the limits must be agreed before the link's first rail is made
            if index == 0:
                self._set_agreed_limits(link)
            self._set_checksums(link, connection)
            link.add_rail(self._make_rail(link, index, connection))
        # with spare cores, a waiting thread polls up to `_LOOK_S` before it sleeps
        if self._joining.has_cores_to_spare():
            self.patience = Patience(_LOOK_S, Crowding())

    def release(self) -> None:
        """Stop listening, and report refused connections."""
        self._joining.close()

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether some of the ranks live in processes of different hosts, or of hosts of unknown identity."""
        members = {member for member, placed in enumerate(self.placement) if not set(ranks).isdisjoint(placed)}
        return len(members) > 1 and self._joining.spans_hosts(members)

    @property
    def ranks_joined_by_sockets(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process; empty if another transport may join some of them, because `spared` was given."""
        return self.placement if self._spared is spare_none else ()

    async def run(self) -> None:
        """Run rails, replace dead ones, and detect lost processes, until cancelled; then give up all processes."""
        try:
            async with trio.open_nursery() as nursery:
                if self._joining.replaces_rails:
                    nursery.start_soon(self._reconnection.run)
                for link in self.links.values():
                    for rail in tuple(link.rails):
                        nursery.start_soon(rail.run)
                nursery.start_soon(self._watch_for_silence)
        finally:  # after an error rails are not replaced, and no call may wait for them
            for link in self.links.values():
                link.give_up("this side can no longer reach it")

    def _drop_spared_links(self) -> None:
        """Remove the links to processes that were not joined, because other transports reach them."""
        for member in self.links.keys() & set(self._spared()):
            del self.links[member]
        self.restrict_to(self.links)

    def _set_checksums(self, link: EfaLink, connection: ProvedSocket) -> None:
        """Let payloads carry checksums as the user has set, by default between hosts only.

        Never under TLS, which has its own.
        """
        far = self._joining.spans_hosts((self.member, link.member))
        checked = far if self._checksums is None else self._checksums
        link.departures.checksums = checked and connection.encrypted is None

    def _set_agreed_limits(self, link: EfaLink) -> None:
        """Set the limits of a link, and whether its process may live without a connection.

        Both sides get the same result, because it follows from the addresses that they have exchanged.
        """
        alone = self._joining.rail_count == 1
        link.watched = self._watched and (not alone or self._joining.may_disconnect(link.member))
        if alone:
            inside = not self._joining.spans_hosts((self.member, link.member))
            link.set_limits(single_rail_limits(inside=inside, confirmed=link.watched))

    def _make_rail(self, link: EfaLink, index: int, connection: ProvedSocket) -> Rail:
        """The frames of the rail are kept if another rail could repeat them."""
        keep, staged = self._joining.rail_count > 1 or link.watched, not self._peer_direct
        kind = Rail if connection.encrypted is None else StreamRail
        return kind(link, index, connection, keep=keep, staged=staged)

    async def _watch_for_silence(self) -> None:
        """Request signs of life on every rail at regular intervals, and give up processes that send none.

        Silence is counted in intervals, not in seconds: while the event loop was blocked, this side did not read.
        """
        limit_ticks = math.inf if self._watched else math.ceil(self._silence_s / self._tick_s)
        while True:
            await trio.sleep(self._tick_s)
            for link in self.links.values():
                if self._watched:
                    link.close_silent_rails()
                link.check_liveness(limit_ticks, self._silence_s)

    def lose(self, ranks: Sequence[int], reason: str) -> None:
        """End all calls with the processes of lost ranks; see `Transport.lose`."""
        for member, link in self.links.items():
            if not set(ranks).isdisjoint(self.placement[member]):
                self._joining.meeting.lose(member, reason)
                link.give_up(reason)


def factory(bootstrap: Bootstrap) -> Efa:
    """Make the transport of a process, with the user's options of `Bootstrap.options`.

    The options are ``rails``, ``unix``, ``peer_direct``, ``checksums``, and ``outage_s``, the longest outage in
    seconds: above `LOST_S`, even connections inside a host are replaced.

    Raises:
        ArgumentError: An option has an impossible value.
    """
    options = bootstrap.options
    return Efa(
        **bootstrap.constructor_arguments,
        rails=cast("int | Sequence[str]", options.get("rails", 1)),
        host=bootstrap.host,
        # an option that is absent or None means the default, which is True
        unix=options.get("unix") is not False,
        peer_direct=options.get("peer_direct") is not False,
        checksums=cast("bool | None", options.get("checksums")),
        tls=bootstrap.tls,
        note=bootstrap.note,
        watched=bootstrap.watched,
        lasting=cast("float", options.get("outage_s", 0)) > LOST_S,
        spared=bootstrap.spared,
    )
