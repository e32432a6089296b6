"""The mailroom of a process: matches what has come with what is wanted, and answers headers. It never waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transports.base import LengthMismatchError, LinkLostError, Statistics, TransportClosedError
from transports.mpi.header import HEADER_BYTES, Header, HeaderError, Kind, read
from transports.mpi.parcels import Inbound, Parcel
from transports.mpi.peer import Peer
from transports.mpi.waiting import Arrival, Key, Queues, Receive, Sending
from transports.mpi.wire import EAGER_BYTES, SLOTS, Wire

__all__ = ["Mailroom"]

#: What one process may have sent eagerly to another, and that has not been consumed, at most.
CREDIT_BYTES = 16 << 20

#: The same for all senders to one process together, as far as each keeps enough for a few messages.
TOTAL_CREDIT_BYTES = 256 << 20

#: What an eager message costs beside its payload: its header here and its place in the receiver's memory.
_OVERHEAD_BYTES = HEADER_BYTES + 208


class Mailroom:
    """All that waits in one process.

    Args:
        member: Index of this process.
        placement: Ranks of every process.
        wire: How headers and bytes travel.
    """

    def __init__(self, *, member: int, placement: Sequence[Sequence[int]], wire: Wire) -> None:
        self._wire = wire
        self._member = member
        self._credit_bytes = max(4 * EAGER_BYTES, min(CREDIT_BYTES, TOTAL_CREDIT_BYTES // len(placement)))
        self._peers = [Peer(other, ranks, wire, self._credit_bytes) for other, ranks in enumerate(placement)]
        self._home = {rank: peer for peer in self._peers for rank in peer.ranks}
        self._receives: Queues[Receive] = Queues()
        self._arrivals: Queues[Arrival] = Queues()
        self._asked: Queues[Sending] = Queues()
        self._closed = False
        self._answers: dict[Kind, Callable[[Peer, Header, memoryview], None]] = {
            Kind.EAGER: self._on_eager,
            Kind.ASK: self._on_ask,
            Kind.GRANT: self._on_grant,
            Kind.REFUSE: self._on_refuse,
            Kind.WITHDRAW: self._on_withdraw,
            Kind.RECALL: self._on_recall,
            Kind.RECALLED: self._on_recalled,
            Kind.CREDIT: lambda peer, header, payload: None,
            Kind.BYE: self._on_bye,
        }

    # what endpoints call

    def send(self, key: Key, view: memoryview, priority: int) -> Sending | None:
        """Send a message, or announce it and return the call that has to wait for its turn."""
        peer = self._open_peer(key, key[1])
        last = self._asked.last(key)
        if last is not None:
            last.followed = True
        if view.nbytes <= EAGER_BYTES and peer.credit_bytes >= view.nbytes + _OVERHEAD_BYTES:
            peer.credit_bytes -= view.nbytes + _OVERHEAD_BYTES
            self._tell(peer, Kind.EAGER, key, nbytes=view.nbytes, payload=view)
            return None
        sending = Sending(key, view, next(peer.numbers), priority)
        peer.asked[sending.number] = sending
        self._asked.add(key, sending)
        self._tell(peer, Kind.ASK, key, number=sending.number, nbytes=view.nbytes)
        return sending

    def withdraw_send(self, sending: Sending) -> bool:
        """Take an announcement back; False if its receiver has to be asked first."""
        peer = self._home[sending.key[1]]
        if sending.followed:
            self._tell(peer, Kind.RECALL, sending.key, number=sending.number)
            return False
        self._forget(peer, sending)
        self._tell(peer, Kind.WITHDRAW, sending.key, number=sending.number)
        return True

    def receive(self, key: Key, out: memoryview) -> Receive | None:
        """Receive a message that came along with its header, or return the call that has to wait."""
        arrival = self._arrivals.pop(key)
        if arrival is None:
            self._open_peer(key, key[0])
            receive = Receive(key, out)
            self._receives.add(key, receive)
            return receive
        peer = self._peers[arrival.member]
        if arrival.payload is not None:
            self._consumed(peer, arrival.nbytes)
            if arrival.nbytes != out.nbytes:
                raise _mismatch(key, arrival.nbytes, out.nbytes)
            out[:] = arrival.payload
            return None
        if arrival.nbytes != out.nbytes:
            self._tell(peer, Kind.REFUSE, key, number=arrival.number, nbytes=out.nbytes)
            raise _mismatch(key, arrival.nbytes, out.nbytes)
        receive = Receive(key, out)
        self._match(peer, receive, arrival)
        return receive

    def withdraw_receive(self, receive: Receive) -> bool:
        """Take back a receive that has not met its message."""
        self._receives.remove(receive.key, receive)
        return True

    def statistics(self) -> Statistics:
        """Return what waits for its other end."""
        arrived = [one for one in self._arrivals if one.payload is not None or one.member != self._member]
        return Statistics(
            unmatched_sends=(*(one.envelope for one in self._asked), *(one.envelope for one in arrived)),
            unmatched_receives=tuple(one.envelope for one in self._receives),
        )

    # what the transport calls

    @property
    def urgent(self) -> bool:
        """Whether a call here waits for its other end."""
        return bool(self._receives or self._asked)

    @property
    def moving(self) -> bool:
        """Whether headers or bytes are under way."""
        return self._wire.busy

    def poll(self) -> bool:
        """Take what has come, and say if anything has."""
        return self._wire.poll(self._handle)

    def close(self) -> None:
        """Fail all calls that have not met their other end, and tell everybody that no more will come."""
        self._closed = True
        for peer in self._peers:
            for sending in list(peer.asked.values()):
                self._forget(peer, sending)
                self._tell(peer, Kind.WITHDRAW, sending.key, number=sending.number)
                sending.fail(_closed(sending.key))
            while peer.line:
                receive, _ = peer.line.popleft()
                receive.fail(_closed(receive.key))
        for receive in self._receives:
            self._receives.remove(receive.key, receive)
            receive.fail(_closed(receive.key))
        for peer in self._peers:
            if peer.member != self._member and not peer.lost:
                self._tell(peer, Kind.BYE)

    @property
    def settled(self) -> bool:
        """Whether everybody has said goodbye and nothing is under way."""
        return not self._wire.busy and not self._others()

    @property
    def missing(self) -> str:
        """Name the processes that have not said goodbye."""
        return ", ".join(map(str, self._others()))

    def lose_all(self, reason: str) -> None:
        """Fail everything that waits: the wire is no more."""
        for peer in self._peers:
            self._end(peer, reason)
            self._drop(peer, reason)

    # what comes from other processes

    def _handle(self, member: int, message: memoryview) -> None:
        peer = self._peers[member]
        if peer.gone is not None:
            return
        try:
            header, payload = read(message)
            peer.credit_bytes += header.credit
            self._answers[header.kind](peer, header, payload)
        except HeaderError as error:
            reason = f"{peer} does not keep to the protocol: {error}"
            self._end(peer, reason)
            for _, inbound in peer.granted.values():
                inbound.take_back()
            self._drop(peer, reason)

    def _on_eager(self, peer: Peer, header: Header, payload: memoryview) -> None:
        key = self._key_of(peer, header)
        receive = self._receives.pop(key)
        if receive is None:
            self._arrivals.add(key, Arrival(key, header.nbytes, peer.member, 0, bytes(payload)))
            return
        self._consumed(peer, header.nbytes)
        if receive.view.nbytes != header.nbytes:
            receive.fail(_mismatch(key, header.nbytes, receive.view.nbytes))
            return
        receive.view[:] = payload
        receive.wake()

    def _on_ask(self, peer: Peer, header: Header, payload: memoryview) -> None:
        key = self._key_of(peer, header)
        arrival = Arrival(key, header.nbytes, peer.member, header.number, None)
        receive = self._receives.pop(key)
        if receive is None:
            self._arrivals.add(key, arrival)
        else:
            self._offer(peer, receive, arrival)

    def _offer(self, peer: Peer, receive: Receive, arrival: Arrival) -> None:
        if receive.view.nbytes == arrival.nbytes:
            self._match(peer, receive, arrival)
            return
        self._tell(peer, Kind.REFUSE, receive.key, number=arrival.number, nbytes=receive.view.nbytes)
        receive.fail(_mismatch(receive.key, arrival.nbytes, receive.view.nbytes))

    def _match(self, peer: Peer, receive: Receive, arrival: Arrival) -> None:
        receive.matched = True
        peer.line.append((receive, arrival))
        self._grant(peer)

    def _grant(self, peer: Peer) -> None:
        """Ask for what was announced, as far as there are slots."""
        while peer.line and peer.slots:
            receive, arrival = peer.line.popleft()
            done = partial(self._received, peer, arrival.number)
            inbound = Inbound(self._wire, peer.member, Parcel(receive.view, peer.slots.pop(), done))
            peer.granted[arrival.number] = receive, inbound
            self._tell(peer, Kind.GRANT, receive.key, number=arrival.number, slot=inbound.slot)

    def _received(self, peer: Peer, number: int) -> None:
        receive, inbound = peer.granted.pop(number)
        peer.slots.append(inbound.slot)
        receive.wake()
        self._grant(peer)

    def _on_grant(self, peer: Peer, header: Header, payload: memoryview) -> None:
        if header.slot >= SLOTS:
            raise HeaderError(f"GRANT names slot {header.slot} of {SLOTS}")
        sending = peer.asked.get(header.number)
        if sending is None:
            return  # withdrawn while the answer was on its way
        self._forget(peer, sending)
        sending.matched = True
        peer.leaving.add(sending)
        peer.outbox.add(Parcel(sending.view, header.slot, partial(self._sent, peer, sending)), sending.priority)

    def _sent(self, peer: Peer, sending: Sending) -> None:
        if sending in peer.leaving:
            peer.leaving.discard(sending)
            sending.wake()

    def _on_refuse(self, peer: Peer, header: Header, payload: memoryview) -> None:
        sending = peer.asked.get(header.number)
        if sending is not None:
            self._forget(peer, sending)
            sending.fail(_mismatch(sending.key, sending.view.nbytes, header.nbytes))

    def _on_withdraw(self, peer: Peer, header: Header, payload: memoryview) -> None:
        """Forget an announcement; nothing that followed it on its key had been sent by then."""
        if header.number in peer.granted:
            receive, inbound = peer.granted.pop(header.number)
            inbound.take_back()
            peer.slots.append(inbound.slot)
            self._unmatch(receive)
            self._grant(peer)
            return
        for entry in peer.line:
            if entry[1].number == header.number:
                peer.line.remove(entry)
                self._unmatch(entry[0])
                return
        self._take_back(peer, header)

    def _on_recall(self, peer: Peer, header: Header, payload: memoryview) -> None:
        """Forget an announcement unless a receive has met it, which then is going to ask for it."""
        if self._take_back(peer, header):
            self._tell(peer, Kind.RECALLED, number=header.number)

    def _on_recalled(self, peer: Peer, header: Header, payload: memoryview) -> None:
        sending = peer.asked.get(header.number)
        if sending is None or not sending.given_up:
            raise HeaderError(f"RECALLED names message {header.number}, which nobody took back")
        self._forget(peer, sending)
        sending.give_up()

    def _take_back(self, peer: Peer, header: Header) -> bool:
        """Forget an announcement that waits; False if it does not, because it was refused or has met a receive."""
        key = self._key_of(peer, header)
        for arrival in self._arrivals.of(key):
            if arrival.number == header.number and arrival.payload is None:
                self._arrivals.remove(key, arrival)
                return True
        return False

    def _unmatch(self, receive: Receive) -> None:
        """Let a receive wait again, first in line, after its message was taken back."""
        receive.matched = False
        if receive.given_up:
            receive.give_up()
        else:
            self._receives.put_back(receive.key, receive)

    def _on_bye(self, peer: Peer, header: Header, payload: memoryview) -> None:
        self._end(peer, f"{peer} has closed its end")

    # how it ends

    def _end(self, peer: Peer, reason: str) -> None:
        """Fail what waits for a process that sends nothing any more; what has come can still be received."""
        peer.gone = reason
        for receive in self._receives:
            if receive.key[0] in peer.ranks:
                self._receives.remove(receive.key, receive)
                receive.fail(_lost(receive.key, reason))
        for sending in list(peer.asked.values()):
            self._forget(peer, sending)
            sending.fail(_lost(sending.key, reason))
        for arrival in self._arrivals:
            if arrival.member == peer.member and arrival.payload is None:
                self._arrivals.remove(arrival.key, arrival)

    def _drop(self, peer: Peer, reason: str) -> None:
        """Fail also what is under way."""
        peer.lost = True
        for receive, _ in (*peer.line, *peer.granted.values()):
            receive.fail(_lost(receive.key, reason))
        for sending in peer.leaving:
            sending.fail(_lost(sending.key, reason))
        peer.line.clear()
        peer.granted.clear()
        peer.leaving.clear()

    # small things

    def _open_peer(self, key: Key, rank: int) -> Peer:
        if self._closed:
            raise _closed(key)
        peer = self._home[rank]
        if peer.gone is not None:
            raise _lost(key, peer.gone)
        return peer

    def _others(self) -> list[Peer]:
        """Return the other processes that have not gone."""
        return [peer for peer in self._peers if peer.member != self._member and peer.gone is None]

    def _forget(self, peer: Peer, sending: Sending) -> None:
        del peer.asked[sending.number]
        self._asked.remove(sending.key, sending)

    def _consumed(self, peer: Peer, nbytes: int) -> None:
        """Owe credit for an eager message; give it back at the latest when a quarter is owed."""
        peer.owed_bytes += nbytes + _OVERHEAD_BYTES
        if peer.owed_bytes >= self._credit_bytes // 4 and peer.gone is None and not self._closed:
            self._tell(peer, Kind.CREDIT)

    def _tell(
        self,
        peer: Peer,
        kind: Kind,
        key: Key = (0, 0, 0),
        *,
        number: int = 0,
        nbytes: int = 0,
        slot: int = 0,
        payload: memoryview | bytes = b"",
    ) -> None:
        src, dst, tag = key
        owed_bytes, peer.owed_bytes = peer.owed_bytes, 0
        self._wire.tell(peer.member, Header(kind, slot, src, dst, tag, number, nbytes, owed_bytes).pack(payload))

    def _key_of(self, peer: Peer, header: Header) -> Key:
        if header.src not in peer.ranks or header.dst not in self._peers[self._member].ranks:
            raise HeaderError(f"{header.kind.name} goes from rank {header.src} to rank {header.dst}")
        return header.src, header.dst, header.tag


def _mismatch(key: Key, sent_bytes: int, expected_bytes: int) -> LengthMismatchError:
    src, dst, tag = key
    return LengthMismatchError(sent_bytes=sent_bytes, expected_bytes=expected_bytes, src=src, dst=dst, tag=tag)


def _closed(key: Key) -> TransportClosedError:
    src, dst, tag = key
    return TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag)


def _lost(key: Key, reason: str) -> LinkLostError:
    src, dst, tag = key
    return LinkLostError(reason, src=src, dst=dst, tag=tag)
