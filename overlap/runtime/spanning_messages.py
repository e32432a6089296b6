"""Communicators of a world of several processes, and of messages between processes, which are forgotten at rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from transports import Envelope, Request, Transport, TransportError

from ..collectives.call import Call
from ..collectives.kinds import P2P
from ..errors import CollectiveMismatchError, GroupAbortedError, UsageError
from ..timeline.recording import call_site
from .communicator import BaseEngine, Communicator
from .communicators import KEPT, Communicators
from .failure import Failure
from .match import CALL_BITS, Key, Match, RankCall
from .operation import Operation, OperationPort
from .receive import ReceiveFuture
from .spanning import Called, ControlNotices, SpanningCommunicator, SpanningMatch

# Tags at rest with a remembered number of messages, for an early error of a wait for a finished rank. Waits on older
# tags end with a stall report.
_COUNTED = 4096


class SpanningMessages(SpanningCommunicator):
    """One end of the messages of two ranks in different processes, which may be forgotten whenever it is at rest.

    Wires keep the messages of one tag in order, so tags need no numbers. Both ends number messages from the first one
    ever, to compare their calls when one waits for long. If a tag has rested for so long that an end has lost its
    number, nothing is compared.
    """

    _shared: SpanningCommunicators

    def __init__(self, *args: Any, first_seq: int, counted: bool) -> None:
        super().__init__(*args)
        self.first_seq, self._counted = first_seq, counted
        self._tags: dict[Call, int] = {}
        # A tag that was used twice will be used again; a program may use one tag for each message.
        self.lasts: bool = first_seq > 0
        self.sends: bool = self.key.ends[0] in self._local

    def tag(self, pattern: Call, seq: int) -> int:
        """Return a tag that only messages with the same call share."""
        tag = self._tags.get(pattern)
        if tag is None:
            if len(self._tags) >= 256:
                self._tags.clear()
            tag = self._tags[pattern] = self.key.message_tag(pattern.key)
        return tag

    def unreported_calls(self, before_ns: int) -> Iterator[tuple[int, RankCall]]:
        """Yield the unreported calls that have waited since `before_ns` or longer."""
        return super().unreported_calls(before_ns) if self._counted else iter(())

    def _assume_or_ask(self, match: SpanningMatch, operation: Operation) -> None:
        """Ask the sender of a message for dtype and shape; fail the receive if its number is not known there."""
        if self._counted:
            super()._assume_or_ask(match, operation)
        else:  # the sender does not know the number
            self.fail_one(match, operation, Failure(_forgotten_error(self.key, self.name, operation.seq)))

    def compare_call(self, seq: int, report: RankCall) -> bool:
        """Answer a receiver whose call differs or is open, or compare a receive here with the answer of its sender.

        The receiver decides: only it knows its withdrawn receives. It compares an answer with its present receive of
        this number.

        Returns:
            False if no rank here has arrived at the message yet.
        """
        if self.sends:
            if self._counted and seq >= self.count:
                return False
            self._shared.answer_call(self.id, seq, self.find_past_call(seq), report, known=self._counted)
            return True
        if report.call.dtype is not None:
            return not self._counted or super().compare_call(seq, report)
        self._fail_unknown(seq)
        return True

    def _left_without(self, seq: int) -> set[int]:
        """Return the other end if it has finished, and has sent no message `seq`."""
        there = [rank for rank in self._left.intersection(self.members) if rank not in self._local]
        return {rank for rank in there if self._notices.sent_no_more(rank, self.id, seq)}

    def ended(self, match: Match, operation: Operation) -> None:
        """Forget a match once its end here is over; let the communicator rest once no message is in flight."""
        super().ended(match, operation)
        self._rest_if_idle()

    def _fail_unknown(self, seq: int) -> None:
        """Fail a receive here that has asked for dtype and shape that its sender no longer knows."""
        match = self._matches.get(seq)
        if match is not None and match.first is not None:  # the sender has no end that would fail with it
            Communicator.fail_one(self, match, match.first, Failure(_forgotten_error(self.key, self.name, seq)))

    def _fail_dispute(self, match: Match, seq: int, error: Callable[[], CollectiveMismatchError]) -> None:
        """Fail the ends of a message.

        A receive from any source has chosen an arrived message. The next receive must not choose it, too: drop it.
        """
        receive = match.first
        if isinstance(receive, ReceiveFuture) and receive.request is not None and receive.request[1] is None:
            self._shared.drop_announced(self.key)
        super()._fail_dispute(match, seq, error)

    def remembered_calls(self) -> dict[tuple[int, int], Called]:
        """Return the calls of the last messages that a rank here has sent, by id and number."""
        return {(self.id, seq): called for seq, called in self._past.values()} if self.sends else {}

    @property
    def count(self) -> int:
        """Number of messages since the start of the world."""
        return max(self.issued.values(), default=self.first_seq)

    def has_message(self, port: OperationPort) -> bool:
        """Whether a receive would meet a message at once, if that is known."""
        return super().has_message(port) or self._shared.has_announced(self.key)

    def _rest_if_idle(self) -> None:
        """Offer messages to receives from any source, and rest if none is in flight."""
        self.offer_again()  # receives from any source leave messages to a waiting receive with a source
        if not self.resting and self.at_rest:
            self.resting = True
            self._shared.rest(self)


class SpanningCommunicators(Communicators):
    """Communicators of a world of several processes: some have local ranks only, others span processes.

    Attributes:
        spanning: Communicators that span processes, by id.
        lost_count: Whether the number of messages of some tag is no longer known.
    """

    def __init__(self, engine: BaseEngine, transport: Transport, notices: ControlNotices) -> None:
        super().__init__(engine, keeps=KEPT)
        self.spanning: dict[int, SpanningCommunicator] = {}
        self.lost_count: bool = False
        self._counts: OrderedDict[int, tuple[Key, int]] = OrderedDict()  # numbers of messages at rest, by id
        # Calls of sent messages whose communicator was closed, by id and number.
        self._sent: OrderedDict[tuple[int, int], Called] = OrderedDict()
        self._any_addresses: dict[Key, dict[int, tuple[int, int]]] = {}  # senders and tags of receives from any source
        self._ended_here: dict[int, Key] = {}  # groups that only ranks of other processes may still use
        # By group: number of its ranks that use it no more, and the ids of communicators that their processes have
        # reported.
        self._ended: dict[int, tuple[int, frozenset[int]]] = {}
        self._transport, self._local, self._notices = transport, frozenset(transport.ranks), notices

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator, of the kind for its members: all here, or in several processes."""
        if self._local.issuperset(members):
            return super().make(key, name, members)
        arguments = (self, key, name, members, self._local, self._notices)
        if key.messages:
            _, first_seq = self._counts.pop(key.id, (key, 0))
            counted = first_seq > 0 or not self.lost_count
            spanning: SpanningCommunicator = SpanningMessages(*arguments, first_seq=first_seq, counted=counted)
        else:
            spanning = SpanningCommunicator(*arguments)
        self.spanning[spanning.id] = spanning
        return spanning

    def answer_call(self, key_id: int, seq: int, sent: Called | None, report: RankCall, *, known: bool = True) -> None:
        """Send the call of a message to its receiver, if that has another call, or none.

        Args:
            key_id: Id of the communicator.
            seq: Number of the message.
            sent: Call of a rank here; None if its communicator does not remember it.
            report: Call of the receiver. It is the answer to a receiver without a call if no call is remembered.
            known: Whether the number is known to be that of the receiver.
        """
        sent = sent or self._sent.get((key_id, seq))
        if sent is None or not known:
            if report.call.dtype is None:
                self._notices.send_call(key_id, (seq,), report._replace(rank=min(self._local)))
        elif report.call.dtype is None or not sent[1].agrees(report.call):
            rank, call, place = sent
            self._notices.send_call(key_id, (seq,), RankCall(rank=rank, call=call, call_site=call_site(*place)))

    def abort(self, ranks: tuple[int, ...], occurrence: int, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all present and later operations of a group, here and in other processes."""
        super().abort(ranks, occurrence, error)
        first_error = error()
        self._notices.send_broken(Key(ranks, occurrence, "").id, first_error.culprit, first_error)

    def close(self, communicator: Communicator) -> None:
        """Close a communicator of messages at rest; remember their number, and their last calls."""
        super().close(communicator)
        if isinstance(communicator, SpanningMessages) and self.spanning.pop(communicator.id, None) is communicator:
            key = communicator.key
            self._counts[communicator.id] = key, communicator.count
            self._sent.update(communicator.remembered_calls())
            self._keys_by_group.setdefault(key[:2], {})[key] = None
            while len(self._sent) > _COUNTED:
                self._sent.popitem(last=False)
            if len(self._counts) > _COUNTED:
                _, (oldest, _) = self._counts.popitem(last=False)
                self._unlist(oldest)
                self.lost_count = True

    # -- ends of groups ------------------------------------------------------------------------------------------------

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key of a group, and the number of its ranks in this process."""
        return key, len(self._local.intersection(key.ranks))

    def _end_group_here(self, group: Key) -> None:
        """Report that no rank here uses a group any more, and close it if no other rank does.

        Until then other processes may still need the calls of ranks here, and read the memory of this process. All
        reports of a process on a group reach the others before the report that it does not use the group any more.
        """
        ids = [group.id, *(key.id for key in self._keys_by_group.get(group[:2], ()))]
        here, size = len(self._local.intersection(group.ranks)), len(group.ranks)
        self._ended_here[ids[0]] = group
        self._notices.send_unused(ids[0], here, size, ids)
        self.end_elsewhere(ids[0], here, size, ids)

    def end_elsewhere(self, group_id: int, ranks: int, size: int, ids: Sequence[int]) -> bool:
        """Count ranks of other processes that no longer use a group; with the last of them, forget the group.

        Args:
            group_id: Id of the group's key.
            ranks: Number of these ranks.
            size: Ranks of the group.
            ids: Ids of the group and of its communicators that the process of these ranks has reported.

        Returns:
            False if the group would have more ranks than its size.
        """
        count, reported = self._ended.pop(group_id, (0, frozenset[int]()))
        count, reported = count + ranks, reported.union(ids)
        if count < size:
            self._ended[group_id] = count, reported
            return True
        group = self._ended_here.pop(group_id, None)
        if group is not None:
            self.close_group(group)
        for key_id in reported if self._off else ():
            self._off.pop(key_id, None)
        self._notices.forget(reported)
        return count == size

    def close_group(self, group: Key) -> None:
        """Close a group and its communicators, and forget the numbers and calls of its messages."""
        keys = list(self._keys_by_group.get(group[:2], ()))
        super().close_group(group)
        ids = {key.id for key in keys}
        for key_id in ids:
            self.spanning.pop(key_id, None)
            self._counts.pop(key_id, None)
        if any(key.messages for key in keys):
            for entry in [entry for entry in self._sent if entry[0] in ids]:
                del self._sent[entry]
        for anyone in [key for key in self._any_addresses if key.group == group]:
            del self._any_addresses[anyone]

    def compare_call(self, communicator_id: int, seq: int, report: RankCall) -> bool:
        """Compare the call of another process with the one here; False if no rank here has arrived at it yet."""
        communicator = self.spanning.get(communicator_id)
        if communicator is not None:
            return communicator.compare_call(seq, report)
        _, count = self._counts.get(communicator_id, (None, 0))
        if report.call.kind is not P2P or (seq >= count and not self.lost_count):
            return False
        self.answer_call(communicator_id, seq, None, report)
        return True

    def is_sender_elsewhere(self, key: Key) -> bool:
        """Whether the sender of a key's messages is in another process."""
        return key.ends[0] not in self._local

    def oldest_announced(self, rank: int, keys: Sequence[Key]) -> Envelope | None:
        """Return the oldest message of some keys, with any call, that other processes have announced; or None."""
        try:
            return self._transport.wire(rank).announced(self._senders_and_tags(keys), free_bits=CALL_BITS)
        except TransportError:  # `wait_announced` raises the error
            return None

    async def wait_announced(self, rank: int, keys: Sequence[Key]) -> Envelope:
        """Wait until another process announces a message of some keys, with any call; return that message."""
        return await self._transport.wire(rank).wait_any(self._senders_and_tags(keys), free_bits=CALL_BITS)

    def _senders_and_tags(self, keys: Sequence[Key]) -> Sequence[tuple[int, int]]:
        """Return sender and tag of each key, from a cache: to find them takes a while for many ranks."""
        anyone = keys[0].with_any_source()
        cached = self._any_addresses.get(anyone)
        if cached is None:
            if len(self._any_addresses) >= KEPT:
                del self._any_addresses[next(iter(self._any_addresses))]
            cached = self._any_addresses[anyone] = {}
        for key in keys:
            if key.src not in cached:
                cached[key.src] = key.ends[0], key.tag_base()
        return [cached[key.src] for key in keys]

    def has_announced(self, key: Key) -> bool:
        """Whether another process has announced a message of a key, with any call."""
        return self.is_sender_elsewhere(key) and self.oldest_announced(key.ends[1], [key]) is not None

    def report_if_different(self, key: Key, receive: Operation, message: Envelope) -> None:
        """Report the call of a receive to the sender of the message that it chose, if the message has another call.

        A receive without a call has asked for one.
        """
        messages = self.spanning.get(key.id)
        if messages is None or receive.call.dtype is None:
            return
        if message.tag != messages.tag(receive.call, receive.seq):
            messages.report_call(receive)

    def drop_announced(self, key: Key) -> None:
        """Receive an announced message of a key for no operation, unless it has been withdrawn."""
        message = self.oldest_announced(key.ends[1], [key])
        if message is None:
            return
        with suppress(TransportError):
            wire = self._transport.wire(message.dst)
            wire.begin_recv(message.src, message.tag, None, message.nbytes, done=_release_received).withdraw()

    def has_sent_all(self, key: Key) -> bool:
        """Whether the sender of a key has finished its program, and no message of it is in flight."""
        if not super().has_sent_all(key) or not self.is_sender_elsewhere(key):
            return super().has_sent_all(key)
        messages = self.spanning.get(key.id)
        count = messages.count if isinstance(messages, SpanningMessages) else self._counts.get(key.id, (key, 0))[1]
        return self._notices.sent_no_more(key.ends[0], key.id, count)

    def issued_counts(self, rank: int) -> dict[int, int]:
        """Return the number of operations of a rank here on each communicator that spans processes."""
        past = {key_id: count for key_id, (key, count) in self._counts.items() if rank in key.ends}
        return past | {c.id: c.issued[rank] for c in self.spanning.values() if rank in c.issued}


def _release_received(received: Request) -> None:
    """Release a message that was received for no operation."""
    if received.error is None and not received.withdrawn:
        received.delivery().release()


def _forgotten_error(key: Key, name: str, seq: int) -> UsageError:
    """Return the error of a receive whose sender no longer knows the shape and dtype of the message."""
    src, dst = key.ends
    return UsageError(
        f"like: message {seq} from rank {src} to rank {dst} on group '{name}' is too long ago for its sender to know "
        "its shape and dtype; pass like= to recv"
    )
