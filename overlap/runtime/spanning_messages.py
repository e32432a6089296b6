"""Communicators of a world of several processes, and those of messages between processes, which come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transports import Call as Receiving
from transports import Envelope, Transport, TransportError

from ..collectives.call import Call
from ..errors import GroupAbortedError, UsageError
from ..timeline.recording import call_site
from .communicator import BaseEngine, Communicator
from .communicators import KEPT, Communicators
from .failure import Failure
from .match import CALL_BITS, CHANNEL_BITS, Key, Match, RankCall, mismatch
from .operation import Operation, OperationPort
from .spanning import REMEMBERED, Called, ControlNotices, SpanningCommunicator, SpanningMatch

# Of how many tags at rest the number of messages is remembered, so that who waits for a rank that has finished can be
# told at once; of tags that are older, a stall report tells.
_COUNTED = 4096


class SpanningMessages(SpanningCommunicator):
    """One end of the messages of two ranks in different processes, which may be forgotten whenever it is at rest.

    As wires keep the messages of one tag in order, their tags need not be counted. Both ends number them from the first
    one ever, so that they can be compared when one waits for long; of tags that have rested for so long that an end has
    lost its count, nothing is compared.
    """

    _shared: SpanningCommunicators
    first_seq: int

    def __init__(self, *args: Any, first_seq: int, counted: bool, last: Called | None) -> None:
        super().__init__(*args)
        if last is not None:
            self._past[(first_seq - 1) % REMEMBERED] = first_seq - 1, last
        self.first_seq, self._counted = first_seq, counted
        # A tag that was used again will be; a program may use one tag for each message.
        self.lasts: bool = first_seq > 0

    @property
    def last(self) -> Called | None:
        """The last message: its rank, its call, and where."""
        return self.past(self.count - 1)

    def tag(self, pattern: Call, seq: int) -> int:
        """Return a tag that only messages share which mean the same."""
        return super().tag(pattern, 0)

    def _base(self, pattern: Call) -> int:
        return self.key.message_tag(pattern.key)

    def waiting(self, before_ns: int) -> Iterator[tuple[int, RankCall]]:
        """Find operations under way since `before_ns` or longer that other processes have not been told."""
        return super().waiting(before_ns) if self._counted else iter(())

    def _assume_or_ask(self, match: SpanningMatch, operation: Operation) -> None:
        """Ask the sender what it sends."""
        if self._counted:
            super()._assume_or_ask(match, operation)
        else:  # it would not know which of them is meant
            self.fail_one(match, operation, Failure(_forgotten(self.key, self.name, operation.seq)))

    def compare_call(self, seq: int, said: RankCall) -> bool:
        """Compare another process's call with ours, or answer a receiver; False if ours has not come to it yet.

        The receiver judges: only it knows which of its receives are withdrawn. A sender that hears of another call
        answers with its own, which the receiver compares with the receive that has this number now.
        """
        if said.call.dtype is not None:
            if not self._counted:
                return True
            mine = self.past(seq)
            if self.key.ends[0] in self._local and mine is not None and not mine[1].agrees(said.call):
                rank, call, place = mine
                self._others.send_call(self.id, (seq,), RankCall(rank=rank, call=call, call_site=call_site(*place)))
                return True
            return super().compare_call(seq, said)
        if self.key.ends[0] not in self._local:
            self._learn_nothing(seq)
            return True
        if self._counted and seq >= self.count:
            return False
        self._shared.answer(self.key, seq, self.past(seq) if self._counted else None, said)
        return True

    def _gone(self, seq: int) -> set[int]:
        there = [rank for rank in self._left.intersection(self.members) if rank not in self._local]
        return {rank for rank in there if self._others.sent_no_more(rank, self.id, seq)}

    def ended(self, match: Match, operation: Operation) -> None:
        """Forget a match once its end is over, and everything once nothing is under way."""
        super().ended(match, operation)
        self._rest()

    def _learn_nothing(self, seq: int) -> None:
        """Fail a receive here that has asked what comes, for its sender does not know any more."""
        match = self._matches.get(seq)
        if match is not None and match.first is not None:  # the sender has nothing under way that would fail too
            Communicator.fail_one(self, match, match.first, Failure(_forgotten(self.key, self.name, seq)))

    def earlier(self) -> Iterator[tuple[int, Called]]:
        """Find the numbers and calls that it remembers, but for the last one."""
        return ((seq, called) for seq, called in sorted(self._past.values()) if seq != self.count - 1)

    @property
    def count(self) -> int:
        """The number of messages, ever."""
        return max(self.issued.values(), default=self.first_seq)

    def has_message(self, port: OperationPort) -> bool:
        """Whether a receive would meet a message at once, as far as that is known."""
        return super().has_message(port) or self._shared.has_announced(self.key)

    def _rest(self) -> None:
        self.offer_again()  # for as long as a receive waits that names the source, the others leave messages to it
        if not self.resting and self.at_rest:
            self.resting = True
            self._shared.rest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtRest:
    """The memory of messages at rest."""

    key: Key
    name: str
    members: tuple[int, ...]
    count: int
    last: Called | None


class SpanningCommunicators(Communicators):
    """The communicators of a world of several processes: those of local ranks only, and those that reach out.

    Attributes:
        spanning: The communicators that reach out, by id.
        lost_count: Whether it is no longer known of all messages how many there were.
    """

    def __init__(self, engine: BaseEngine, transport: Transport, others: ControlNotices) -> None:
        super().__init__(engine, keeps=KEPT)
        self.spanning: dict[int, SpanningCommunicator] = {}
        self.lost_count: bool = False
        self._at_rest: OrderedDict[int, _AtRest] = OrderedDict()
        self._earlier: OrderedDict[tuple[int, int], Called] = (
            OrderedDict()
        )  # of messages at rest: those before the last
        self._any_call: dict[Key, dict[int, tuple[int, int]]] = {}  # of receives from any source: senders and tags
        self._ended_here: dict[int, Key] = {}  # groups that no rank here uses any more, but ranks elsewhere may
        # By group: how many of its ranks use it no more, and the communicators of which their processes have spoken.
        self._ended: dict[int, tuple[int, frozenset[int]]] = {}
        self._transport, self._local, self._others = transport, frozenset(transport.ranks), others

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator."""
        if self._local.issuperset(members):
            return super().make(key, name, members)
        told = (self, key, name, members, self._local, self._others)
        if key.messages:
            rested = self._at_rest.pop(key.id, None)
            counted = rested is not None or not self.lost_count
            first_seq, last = (rested.count, rested.last) if rested is not None else (0, None)
            made: SpanningCommunicator = SpanningMessages(*told, first_seq=first_seq, counted=counted, last=last)
        else:
            made = SpanningCommunicator(*told)
        self.spanning[made.id] = made
        return made

    def check_any_source(self, ranks: tuple[int, ...], *, told: bool) -> None:
        """Raise `UsageError` if a receive says neither source nor `like`, and some rank is in another process."""
        if not told and not self._local.issuperset(ranks):
            raise UsageError(
                "like: a receive from any rank (src=None) of several processes must say what it takes; pass "
                "(shape, dtype) for a new array, an array that it may overwrite or a tree of either; or name the source"
            )

    def answer(self, key: Key, seq: int, sent: Called | None, asked: RankCall) -> None:
        """Tell a receiver that has `asked` what a rank here has sent, or its own question: nobody knows any more."""
        sent = sent or self._earlier.get((key.id, seq))
        if sent is not None:
            rank, call, place = sent
            self._others.send_call(key.id, (seq,), RankCall(rank=rank, call=call, call_site=call_site(*place)))
        else:
            self._others.send_call(key.id, (seq,), asked._replace(rank=key.ends[0]))

    def abort(self, ranks: tuple[int, ...], occurrence: int, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all that is under way in a group and all that is to come, here and elsewhere."""
        super().abort(ranks, occurrence, error)
        made = error()
        self._others.send_broken(Key(ranks, occurrence, "").id, made.culprit, made)

    def close(self, communicator: Communicator) -> None:
        """Forget one of messages that has come to rest, but for their number and the last of them."""
        super().close(communicator)
        if isinstance(communicator, SpanningMessages) and self.spanning.pop(communicator.id, None) is communicator:
            self._at_rest[communicator.id] = _AtRest(
                key=communicator.key,
                name=communicator.name,
                members=communicator.members,
                count=communicator.count,
                last=communicator.last,
            )
            self._earlier.update(((communicator.id, seq), called) for seq, called in communicator.earlier())
            self._of_group.setdefault(communicator.key[:2], {})[communicator.key] = None
            while len(self._earlier) > _COUNTED:
                self._earlier.popitem(last=False)
            if len(self._at_rest) > _COUNTED:
                _, oldest = self._at_rest.popitem(last=False)
                self._unlist(oldest.key)
                self.lost_count = True

    # -- groups that come to their end ---------------------------------------------------------------------------------

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        return key, len(self._local.intersection(key.ranks))

    def _end_here(self, group: Key) -> None:
        """Tell the other processes that no rank here uses a group any more, and close it if none elsewhere does.

        Until then others may still need to know what ranks here have called, and read the memory of this process. All
        that a process says of a group reaches everybody before the word that it does not use the group any more.
        """
        ids = [group.id, *(key.id for key in self._of_group.get(group[:2], ()))]
        here, size = len(self._local.intersection(group.ranks)), len(group.ranks)
        self._ended_here[ids[0]] = group
        self._others.send_unused(ids[0], here, size, ids)
        self.end_elsewhere(ids[0], here, size, ids)

    def end_elsewhere(self, group_id: int, ranks: int, size: int, ids: Sequence[int]) -> bool:
        """Note that so many more ranks of a group use it no more; with the last of them, forget it.

        Args:
            group_id: Of the group's key.
            ranks: How many.
            size: Ranks of the group.
            ids: Of the group and its communicators, as far as the process of these ranks has spoken of them.

        Returns:
            Whether that can be: False if the group would have more ranks than its size.
        """
        count, known = self._ended.pop(group_id, (0, frozenset[int]()))
        count, known = count + ranks, known.union(ids)
        if count < size:
            self._ended[group_id] = count, known
            return True
        group = self._ended_here.pop(group_id, None)
        if group is not None:
            self.close_group(group)
        for each in known if self._off else ():
            self._off.pop(each, None)
        self._others.forget(known)
        return count == size

    def close_group(self, group: Key) -> None:
        """Forget a group, its communicators, and what is known of its messages at rest."""
        keys = list(self._of_group.get(group[:2], ()))
        super().close_group(group)
        ids = {key.id for key in keys}
        for each in ids:
            self.spanning.pop(each, None)
            self._at_rest.pop(each, None)
        if any(key.messages for key in keys):
            for earlier in [each for each in self._earlier if each[0] in ids]:
                del self._earlier[earlier]
        for anyone in [each for each in self._any_call if each.group == group]:
            del self._any_call[anyone]

    def compare_call(self, communicator_id: int, seq: int, said: RankCall) -> bool:
        """Compare another process's call with ours; False if none of ours has come to it yet."""
        known = self.spanning.get(communicator_id)
        if known is not None:
            return known.compare_call(seq, said)
        rested = self._at_rest.get(communicator_id)
        asked = said.call.dtype is None
        if asked and rested is None and self.lost_count:
            self._others.send_call(communicator_id, (seq,), said._replace(rank=min(self._local)))
            return True
        if rested is None or rested.last is None or seq != rested.count - 1:
            if asked and rested is not None and seq < rested.count:
                self.answer(rested.key, seq, None, said)
            return rested is not None and seq < rested.count
        if asked:
            self.answer(rested.key, seq, rested.last, said)
            return True
        rank, call, place = rested.last
        if not call.agrees(said.call):
            mine = RankCall(rank=rank, call=call, call_site=call_site(*place))
            self._others.send_mismatch(communicator_id, seq, mismatch(rested.name, seq, said, mine)())
        return True

    def elsewhere(self, key: Key) -> bool:
        """Whether the messages come from another process."""
        return key.ends[0] not in self._local

    def announced(self, rank: int, keys: Sequence[Key]) -> Envelope | None:
        """Return the message of some keys, whatever its call, that another process has announced first."""
        try:
            return self._transport.endpoint(rank).announced(self._of_any_call(keys), free_bits=CALL_BITS)
        except TransportError:  # `next_announced` tells
            return None

    async def next_announced(self, rank: int, keys: Sequence[Key]) -> Envelope:
        """Wait for a message of some keys, whatever its call, that another process announces."""
        return await self._transport.endpoint(rank).wait_any(self._of_any_call(keys), free_bits=CALL_BITS)

    def _of_any_call(self, keys: Sequence[Key]) -> Sequence[tuple[int, int]]:
        """Return sender and tag of each key; to find them takes a while for many ranks."""
        anyone = keys[0].from_any()
        known = self._any_call.get(anyone)
        if known is None:
            if len(self._any_call) >= KEPT:
                del self._any_call[next(iter(self._any_call))]
            known = self._any_call[anyone] = {}
        for key in keys:
            if key.src not in known:
                known[key.src] = key.ends[0], key.tag_base()
        return [known[key.src] for key in keys]

    def has_announced(self, key: Key) -> bool:
        """Whether another process has announced a message of a key, whatever its call."""
        return self.elsewhere(key) and self.announced(key.ends[1], [key]) is not None

    def suits(self, receive: Operation, key: Key, message: Envelope) -> bool:
        """Whether the call of a receive is that of a message of a key."""
        return key.message_tag(receive.call.key) >> CHANNEL_BITS == message.tag >> CHANNEL_BITS

    def dispute(self, receive: Operation, key: Key) -> None:
        """Tell the sender of a key's messages at once what the receive expects, which is something else."""
        known = self.spanning.get(key.id)
        if known is not None:
            known.send_now(receive)

    def drop(self, message: Envelope) -> None:
        """Receive a message that no operation wants, unless it has been withdrawn."""
        with suppress(TransportError):
            starter = self._transport.endpoint(message.dst).starter(message.src)
            if starter is not None:
                starter.begin_recv(message.src, message.tag, None, message.nbytes, done=_let_go).withdraw()

    def sends_no_more(self, key: Key) -> bool:
        """Whether the sender has finished, and there is no message of it under way."""
        communicator_id = key.tag_base() >> 24
        known = self.spanning.get(communicator_id) or self._at_rest.get(communicator_id)
        count = known.count if isinstance(known, SpanningMessages | _AtRest) else 0
        if not super().sends_no_more(key) or not self.elsewhere(key):
            return super().sends_no_more(key)
        return self._others.sent_no_more(key.ends[0], communicator_id, count)

    def issued(self, rank: int) -> dict[int, int]:
        """Return how many operations a rank here has issued on each communicator that reaches out."""
        past = {each: rested.count for each, rested in self._at_rest.items() if rank in rested.members}
        return past | {c.id: c.issued[rank] for c in self.spanning.values() if rank in c.issued}


def _let_go(received: Receiving) -> None:
    if received.error is None and not received.withdrawn:
        received.delivery().release()


def _forgotten(key: Key, name: str, seq: int) -> UsageError:
    src, dst = key.ends
    return UsageError(
        f"like: message {seq} from rank {src} to rank {dst} on group '{name}' is too long ago for its sender to know "
        "its shape and dtype; pass like= to recv"
    )
