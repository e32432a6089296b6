"""Communicators whose members live in several processes.

Here only the ranks of this process meet; their programs start as soon as anybody has said what travels. That the
others mean the same is checked without a message on the way: the tags of an operation are made from what it is, so
ranks that disagree exchange no byte. Both wait then, and the control plane tells what waits for long; whoever hears of
an operation that differs from its own fails it everywhere, with both calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, Protocol, TypeAlias

from transports import Transport

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..errors import CollectiveMismatchError, PeerFailedError
from ..runtime.communicator import BaseEngine, Communicator, Communicators
from ..runtime.future import Failure
from ..runtime.match import Key, Match
from ..runtime.operation import Operation
from ..timeline.spans import call_site

CodePlace: TypeAlias = tuple[CodeType, int]

__all__ = ["Said", "SpanningCommunicator", "SpanningCommunicators", "Telling"]

# How many finished operations a communicator remembers, for a process that comes to them late and with another call. A
# sender of small messages may be ahead by as many as its transport takes without a receiver.
_REMEMBERED = 256

# Of how many tags at rest the number of messages is remembered, so that who waits for a rank that has finished can be
# told at once; of tags that are older, a stall report tells.
_COUNTED = 4096

# Calls of which the tags are remembered: training repeats a few, but blocks that differ make a new one each time.
_BASES = 256

_ANNOUNCED = (Collective.BROADCAST, Collective.SCATTER)
"""Operations in which ranks that only receive need not say dtype and shape: the root's process tells the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One rank's call of one operation, as a neighbour tells it.

    Attributes:
        rank: World rank that made it.
        call: What it asked for.
        call_site: Where.
    """

    rank: int
    call: Call
    call_site: str


class Telling(Protocol):
    """What communicators tell other processes, and know from them: the control plane, as they see it."""

    def tell_call(self, communicator_id: int, seq: int, said: Said) -> None:
        """Say what a rank here has called."""

    def tell_difference(self, communicator_id: int, seq: int, error: CollectiveMismatchError) -> None:
        """Say that two ranks mean different operations."""

    def tell_failed_end(self, communicator_id: int, seq: int, rank: int, error: BaseException) -> None:
        """Say that a rank here cannot take part in an operation."""

    def said_before(self, communicator_id: int, seq: int) -> list[Said]:
        """Return, once, what the others called in an operation before any rank here came to it."""

    def issued_by(self, rank: int, communicator_id: int) -> int:
        """Return how many operations a rank elsewhere, which has finished, issued on a communicator."""

    def sent_no_more(self, rank: int, communicator_id: int, count: int) -> bool:
        """Whether a rank elsewhere, which has finished, is known to have sent no more than so many messages."""


class SpanningMatch(Match):
    """A match of which only some ends are in this process."""

    __slots__ = ("ended", "heard_of", "told")

    def __init__(self, members: int) -> None:
        super().__init__(members)
        self.ended = 0
        self.told = False  # whether the other processes know that ranks wait here
        self.heard_of: set[int] = set()  # ranks elsewhere that are known to be in it

    @property
    def started_ns(self) -> int:
        """When the first of ours came."""
        return min((end.started_ns for end in self.arrived if end is not None), default=0)


class SpanningCommunicator(Communicator):
    """A communicator of which only some members are in this process.

    Attributes:
        id: Names it in what processes tell each other.
        issued: Of the members here, by world rank: how many operations they have issued.
    """

    _matches: dict[int, SpanningMatch]  # type: ignore[assignment]

    def __init__(
        self, shared: Communicators, key: Key, name: str, members: tuple[int, ...], local: frozenset[int], told: Telling
    ) -> None:
        super().__init__(shared, key, name, members)
        self.direct = False
        self.here = sum(member in local for member in members)
        self.id = key.tag_base() >> 24
        self.issued: dict[int, int] = {}
        self._local, self._others = local, told
        self._bases: dict[Call, int] = {}
        self._past: OrderedDict[int, tuple[int, Call, CodePlace]] = OrderedDict()
        self._broken: Callable[[], BaseException] | None = None

    def tag(self, pattern: Call, seq: int) -> int:
        """Return a tag that no rank shares which means another operation."""
        base = self._bases.get(pattern)
        if base is None:
            if len(self._bases) >= _BASES:
                self._bases.clear()
            base = self._bases[pattern] = self.key.tag_base(*pattern.key)
        return base + ((seq & 0xFFFF) << 8)

    # -- our own ranks -------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation) -> None:
        """Take in one rank's end; its program starts as soon as it is known what travels."""
        seq, position = operation.seq, operation.port.position
        match = self._matches.get(seq)
        if match is None:
            match = self._open(operation)
        match.arrived[position] = operation
        match.count += 1
        self.issued[self.members[position]] = max(seq + 1, self.issued.get(self.members[position], 0))
        if match.pattern is not operation.call:
            self._compare(match, operation)
        if operation.kind in _ANNOUNCED and operation.call.dtype is not None:
            self._others.tell_call(self.id, seq, self._said(operation))
        for said in self._others.said_before(self.id, seq):
            self.hear(seq, said)
        failed = match.error is not None
        self._proceed(match, operation)
        if failed:
            self.ended(match, operation)

    def _open(self, operation: Operation) -> SpanningMatch:
        match = self._matches[operation.seq] = SpanningMatch(self.size)
        match.error = self._broken
        if self._left and match.error is None:
            self._check_left(match, operation)
        return match

    def ended(self, match: Match, operation: Operation) -> None:
        """Forget a match once all of our ends are over, but for what was called."""
        assert isinstance(match, SpanningMatch)
        match.ended += 1
        if match.ended == self.here and self._matches.pop(operation.seq, None) is not None:
            self._past[operation.seq] = (self.members[operation.port.position], operation.call, operation.place)
            if len(self._past) > _REMEMBERED:
                self._past.popitem(last=False)

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail the whole match, here and elsewhere, because one rank has no input for it."""
        match = self._matches.setdefault(operation.seq, SpanningMatch(self.size))
        match.count += 1
        self.fail_one(match, operation, failure)

    def fail_one(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and all other ends because of it."""
        super().fail_one(match, operation, failure)
        assert match.error is not None
        self._others.tell_failed_end(self.id, operation.seq, self.members[operation.port.position], match.error())

    def missing(self, seq: int) -> list[int]:
        """World ranks that are not known to have come to operation `seq`, if some rank has."""
        match = self._matches.get(seq)
        return [rank for rank in super().missing(seq) if match is None or rank not in match.heard_of]

    def waiting(self, before_ns: int) -> Iterator[tuple[int, Said]]:
        """Find what has been under way since `before_ns` or longer and has not been told; it counts as told now."""
        for seq, match in self._matches.items():
            if not match.told and match.first is not None and match.started_ns <= before_ns:
                match.told = True
                for end in match.arrived:
                    if end is not None:
                        yield seq, self._said(end)

    def _said(self, operation: Operation) -> Said:
        rank = self.members[operation.port.position]
        return Said(rank=rank, call=operation.call, call_site=operation.call_site)

    # -- what the other processes say ---------------------------------------------------------------------------------

    def hear(self, seq: int, said: Said) -> bool:
        """Compare another process's call with ours; False if none of ours has come to it yet."""
        match = self._matches.get(seq)
        if match is None or match.first is None:
            mine = self._past.get(seq)
            if mine is not None and not mine[1].agrees(said.call):
                self._differ(seq, Said(rank=mine[0], call=mine[1], call_site=call_site(*mine[2])), said)
            return mine is not None or match is not None or seq < max(self.issued.values(), default=0) - _REMEMBERED
        match.heard_of.add(said.rank)
        assert match.pattern is not None
        if not match.pattern.agrees(said.call):
            self._differ(seq, self._said(match.first), said)
        elif match.pattern.dtype is None and said.call.dtype is not None:
            match.pattern = said.call
            self._check_results(match)
            self._engine.start(self, match)
        return True

    def _differ(self, seq: int, mine: Said, theirs: Said) -> None:
        error = _difference(self.name, seq, mine, theirs)
        self._others.tell_difference(self.id, seq, error())
        self.fail_here(seq, error)

    def fail_here(self, seq: int, error: Callable[[], BaseException]) -> None:
        """Fail our ends of operation `seq`, and of all to come if it is over or nobody has come to it."""
        match = self._matches.get(seq)
        if match is None:
            self._broken = error
        elif match.error is None:
            self._fail(match, error)

    def hear_failed_end(self, seq: int, culprit: int, message: str) -> None:
        """Fail our ends because of a rank elsewhere."""
        self.fail_here(seq, lambda: PeerFailedError(message, culprit=culprit))

    # -- ranks that have finished --------------------------------------------------------------------------------

    def rank_left(self, rank: int) -> None:
        """Fail the matchs that wait for `rank`, which has finished its program."""
        for seq, match in list(self._matches.items()):
            if self._lacks(match, rank, seq) and match.pattern is not None and match.error is None:
                self._fail(match, self._left_error(rank, match))

    def _lacks(self, match: Match, rank: int, seq: int) -> bool:
        if rank in self._local:
            return match.arrived[self.members.index(rank)] is None
        return rank in self._gone(seq)

    def _gone(self, seq: int) -> set[int]:
        return {rank for rank in super()._gone(seq) if seq >= self._issued_by(rank)}

    def _issued_by(self, rank: int) -> int:
        if rank in self._local:
            return self.issued.get(rank, 0)
        return self._others.issued_by(rank, self.id)


class SpanningMessages(SpanningCommunicator):
    """One end of the messages of two ranks in different processes, forgotten whenever it is at rest.

    As wires keep the messages of one tag in order, their tags need not be counted. Both ends number them from the first
    one ever, so that they can be compared when one waits for long; of tags that have rested for so long that an end has
    lost its count, nothing is compared.
    """

    def __init__(self, *args: Any, first_seq: int, counted: bool) -> None:
        super().__init__(*args)
        self.first_seq, self._counted = first_seq, counted

    @property
    def last(self) -> tuple[int, Call, CodePlace] | None:
        """The last message that was over: its rank, its call, and where."""
        return self._past[next(reversed(self._past))] if self._past else None

    def tag(self, pattern: Call, seq: int) -> int:
        """Return a tag that only messages share which mean the same."""
        return super().tag(pattern, 0)

    def waiting(self, before_ns: int) -> Iterator[tuple[int, Said]]:
        """Find what has been under way since `before_ns` or longer and has not been told."""
        return super().waiting(before_ns) if self._counted else iter(())

    def hear(self, seq: int, said: Said) -> bool:
        """Compare another process's call with ours; False if ours has not come to it yet."""
        return super().hear(seq, said) if self._counted else True

    def _gone(self, seq: int) -> set[int]:
        there = [rank for rank in self._left.intersection(self.members) if rank not in self._local]
        return {rank for rank in there if self._others.sent_no_more(rank, self.id, seq)}

    def ended(self, match: Match, operation: Operation) -> None:
        """Forget a match once its end is over, and everything once nothing is under way."""
        super().ended(match, operation)
        self._rest()

    def _rest(self) -> None:
        if not self._matches and all(port.stream.idle for port in self.ports.values()):
            self._shared.close(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtRest:
    """What is remembered of messages at rest."""

    key: Key
    name: str
    members: tuple[int, ...]
    count: int
    last: tuple[int, Call, CodePlace] | None


class SpanningCommunicators(Communicators):
    """The communicators of a world of several processes: those of local ranks only, and those that reach out.

    Attributes:
        spanning: Those that reach out, by id.
        lost_count: Whether it is no longer known of all messages how many there were.
    """

    def __init__(self, engine: BaseEngine, transport: Transport, others: Telling) -> None:
        super().__init__(engine)
        self.spanning: dict[int, SpanningCommunicator] = {}
        self.lost_count = False
        self._at_rest: OrderedDict[int, _AtRest] = OrderedDict()
        self._transport, self._local, self._others = transport, frozenset(transport.ranks), others

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator."""
        if self._local.issuperset(members):
            return super().make(key, name, members)
        made = self._reaching_out(key, name, members)
        self.spanning[made.id] = made
        return made

    def _reaching_out(self, key: Key, name: str, members: tuple[int, ...]) -> SpanningCommunicator:
        told = (self, key, name, members, self._local, self._others)
        if not key.messages:
            return SpanningCommunicator(*told)
        rested = self._at_rest.pop(key.tag_base() >> 24, None)
        counted = rested is not None or not self.lost_count
        return SpanningMessages(*told, first_seq=rested.count if rested is not None else 0, counted=counted)

    def close(self, communicator: Communicator) -> None:
        """Forget one of messages that has come to rest, but for their number and the last of them."""
        super().close(communicator)
        if isinstance(communicator, SpanningMessages) and self.spanning.pop(communicator.id, None) is communicator:
            self._at_rest[communicator.id] = _AtRest(
                key=communicator.key,
                name=communicator.name,
                members=communicator.members,
                count=max(communicator.issued.values(), default=communicator.first_seq),
                last=communicator.last,
            )
            if len(self._at_rest) > _COUNTED:
                self._at_rest.popitem(last=False)
                self.lost_count = True

    def hear(self, communicator_id: int, seq: int, said: Said) -> bool:
        """Compare another process's call with ours; False if none of ours has come to it yet."""
        known = self.spanning.get(communicator_id)
        if known is not None:
            return known.hear(seq, said)
        rested = self._at_rest.get(communicator_id)
        if rested is None or rested.last is None or seq != rested.count - 1:
            return rested is not None and seq < rested.count
        rank, call, place = rested.last
        if not call.agrees(said.call):
            mine = Said(rank=rank, call=call, call_site=call_site(*place))
            self._others.tell_difference(communicator_id, seq, _difference(rested.name, seq, mine, said)())
        return True

    def elsewhere(self, key: Key) -> bool:
        """Whether the messages come from another process."""
        return key.ends[0] not in self._local

    async def announced(self, rank: int, keys: Sequence[Key], call: Call) -> int:
        """Wait until another process has announced one of some messages; return the index of its key."""
        choices = [(key.ends[0], key.tag_base(*call.key)) for key in keys]
        return await self._transport.endpoint(rank).wait_any(choices)

    def sends_no_more(self, key: Key) -> bool:
        """Whether the sender has finished, and there is no message of it under way."""
        communicator_id = key.tag_base() >> 24
        rested = self._at_rest.get(communicator_id)
        count = rested.count if rested is not None else 0
        if not super().sends_no_more(key) or not self.elsewhere(key):
            return super().sends_no_more(key)
        return self._others.sent_no_more(key.ends[0], communicator_id, count)

    def issued(self, rank: int) -> dict[int, int]:
        """Return how many operations a rank here has issued on each communicator that reaches out."""
        past = {each: rested.count for each, rested in self._at_rest.items() if rank in rested.members}
        return past | {c.id: c.issued[rank] for c in self.spanning.values() if rank in c.issued}


def _difference(name: str, seq: int, mine: Said, theirs: Said) -> Callable[[], CollectiveMismatchError]:
    return partial(
        CollectiveMismatchError,
        group=name,
        seq=seq,
        ranks=(theirs.rank, mine.rank),
        calls=(str(theirs.call), str(mine.call)),
        call_sites=(theirs.call_site, mine.call_site),
    )
