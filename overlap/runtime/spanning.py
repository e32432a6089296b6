"""Communicators whose members live in several processes.

Here only the ranks of this process meet; their programs start as soon as anybody has said what travels. That the
others mean the same is checked without a message on the way: the tags of an operation are made from what it is, so
ranks that disagree exchange no byte. Both wait then, and the control plane tells what waits for long; whoever hears of
an operation that differs from its own fails it everywhere, with both calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, MappingProxyType
from typing import Protocol, TypeAlias

from transports import LinkLostError

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..errors import CollectiveMismatchError, PeerFailedError, RemoteError
from ..timeline.recording import call_site
from .arguments import call_by_out
from .communicator import Communicator
from .communicators import Communicators
from .executor import Executor
from .failure import Failure
from .match import Key, Match, RankCall, mismatch
from .operation import Operation

CodePlace: TypeAlias = tuple[CodeType, int]
Called: TypeAlias = tuple[int, Call, CodePlace]

# How many finished operations a communicator remembers, for a process that comes to them late and with another call. A
# sender of small messages may be ahead by as many as its transport takes without a receiver.
REMEMBERED = 256

# Calls of which the tags are remembered, and places where they were made: training repeats a few, but blocks that
# differ make a new one each time.
_BASES = 256

ANNOUNCED = (Collective.BROADCAST, Collective.SCATTER)
"""Operations in which ranks that only receive need not say dtype and shape: the root's process tells the others, soon,
or at once where somebody has asked."""


class ControlNotices(Protocol):
    """The control plane as communicators see it: news to and from other processes."""

    def send_call(self, communicator_id: int, seqs: Sequence[int], said: RankCall) -> None:
        """Say what a rank here has called, in some operations; without a dtype, it asks for it."""

    def announce_call(self, communicator_id: int, seq: int, said: RankCall) -> None:
        """Say what a rank here has called to those who do not know it, as soon as one of them asks."""

    def send_mismatch(self, communicator_id: int, seq: int, error: CollectiveMismatchError) -> None:
        """Say that two ranks mean different operations."""

    def send_failed_end(self, communicator_id: int, seq: int, rank: int, error: BaseException) -> None:
        """Say that a rank here cannot take part in an operation."""

    def hold_broken_end(self, fail: Callable[[], None]) -> None:
        """Fail an end whose wire broke a moment later, unless somebody says meanwhile who broke it."""

    @property
    def silent(self) -> bool:
        """Whether nobody has said anything of an operation that no rank here has come to."""

    def early_calls(self, communicator_id: int, seq: int) -> list[RankCall]:
        """Return, once, what the others called in an operation before any rank here came to it."""

    def issued_by(self, rank: int, communicator_id: int) -> int:
        """Return how many operations a rank elsewhere, which has finished, issued on a communicator."""

    def send_broken(self, communicator_id: int, culprit: int, error: BaseException) -> None:
        """Say that nothing of a communicator, or of a group, goes on."""

    def sent_no_more(self, rank: int, communicator_id: int, count: int) -> bool:
        """Whether a rank elsewhere, which has finished, is known to have sent no more than so many messages."""

    def send_unused(self, group_id: int, ranks: int, size: int, communicator_ids: Sequence[int]) -> None:
        """Say that the ranks here, so many of the group, use it no more; nothing is said of it afterwards."""

    def forget(self, ids: Collection[int]) -> None:
        """Forget what was said of a group that no rank uses any more, and of its communicators."""


class SpanningMatch(Match):
    """A match of which only some ends are in this process.

    Attributes:
        announced: Whether the other processes know that ranks wait here.
        assumed: Whether its pattern is what the array for the result is good for, and no more is known.
        remote_calls: What ranks elsewhere are known to have called.
    """

    announced = assumed = False
    remote_calls: Mapping[int, RankCall] = MappingProxyType({})

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
        self,
        shared: Communicators,
        key: Key,
        name: str,
        members: tuple[int, ...],
        local: frozenset[int],
        told: ControlNotices,
    ) -> None:
        super().__init__(shared, key, name, members)
        self.direct = False
        self.here: int = sum(member in local for member in members)
        self.id: int = key.id
        self.issued: dict[int, int] = {}
        self._local, self._others = local, told
        self._reported = False  # whether an operation here has failed because nothing goes on
        self._bases: dict[Call, int] = {}
        self._voices_known: dict[tuple[int, int, int, Call], tuple[object, RankCall]] = {}
        self._withdrawn: dict[int, None] = {}  # numbers of the last operations for which a rank here had no input
        self._past: dict[int, tuple[int, Called]] = {}  # by number modulo `REMEMBERED`: the number, and what it was

    def tag(self, pattern: Call, seq: int) -> int:
        """Return a tag that no rank shares which means another operation."""
        base = self._bases.get(pattern)
        if base is None:
            if len(self._bases) >= _BASES:
                self._bases.clear()
            base = self._bases[pattern] = self._base(pattern)
        return base + ((seq & 0xFFFF) << 8)

    def _base(self, pattern: Call) -> int:
        return self.key.tag_base(*pattern.key)

    # -- our own ranks -------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation) -> None:
        """Take in one rank's end; it starts as soon as it is known what travels."""
        if operation.port.returned:  # a message that was put back comes first
            self._take_returned(operation)
            return
        self.note(operation)
        # a call that was made before, while nothing is wrong
        executor = self._executors.get((operation.call, operation.context.rank))
        if executor is not None and self.calm:
            if not executor.finish_now(operation):
                self._start_arrived(self.match_alone(operation), operation, executor)
            return
        # its match, by number
        seq = operation.seq
        match = self._matches.get(seq)
        if match is None:
            match = self._matches[seq] = SpanningMatch(self.size)
            match.error = self._broken
            if match.error is not None:
                self._note_reported()
            elif self._left:
                self._check_left(match, operation)
        match.arrived[operation.port.position] = operation
        match.count += 1
        # what the others have called, as far as that is known
        if match.pattern is not operation.call:
            self._compare(match, operation)
        for said in self._others.early_calls(self.id, seq):
            self.compare_call(seq, said)
        if operation.call.dtype is None and match.pattern is not None and not match.pattern.settled:
            self._assume_or_ask(match, operation)
        # what can start
        if match.error is None:
            self._start_arrived(match, operation)
        else:
            operation.fail(Failure(match.error()))
            self.ended(match, operation)

    def note(self, operation: Operation) -> None:
        """Keep in mind what a rank has called, and let those know who may have to be told."""
        rank, seq = self.members[operation.port.position], operation.seq
        if seq >= self.issued.get(rank, 0):
            self.issued[rank] = seq + 1
        self._past[seq % REMEMBERED] = seq, (rank, operation.call, operation.place)
        if operation.kind in ANNOUNCED and operation.port.position == operation.call.root:
            self._others.announce_call(self.id, seq, self._cached_call_of(operation))

    def _assume_or_ask(self, match: SpanningMatch, operation: Operation) -> None:
        """Begin to receive what the result's array is for, which waits for nobody; without one, ask what comes.

        A root that means something else uses other tags, and is going to say what it has called.
        """
        assumed = call_by_out(operation) if self.here == 1 and match.error is None else None
        if assumed is None:
            self._others.send_call(self.id, (operation.seq,), self._call_of(operation))
        else:
            match.pattern, match.assumed = assumed, True

    def at_once(self, operation: Operation) -> bool:
        """Whether taking in an operation neither wakes nor starts a task: nothing is wrong, and nothing to be told.

        The first executor is made by the event loop, for it opens what the ranks have in common.
        """
        call, known = operation.call, bool(self._executors)
        return known and call.settled and self.calm and self.executor(call, operation).takes_threads()

    @property
    def calm(self) -> bool:
        """Whether a rank is alone in this process, nothing is wrong, and nobody has said what it must hear first."""
        return self.here == 1 and not self._left and self._broken is None and self._others.silent

    def known_executor(self, operation: Operation) -> Executor | None:
        """Return the executor that was kept for operations like one."""
        return self._executors.get((operation.call, operation.context.rank))

    def match_alone(self, operation: Operation) -> Match:
        """Return the match of an operation that was made before: all its other ends are elsewhere."""
        match = self._matches[operation.seq] = SpanningMatch(self.size)
        match.arrived[operation.port.position] = match.first = operation
        match.count, match.pattern = 1, operation.call
        return match

    def ended(self, match: Match, operation: Operation) -> None:
        """Forget a match once all of our ends are over, but for what was called."""
        match.ended += 1
        if match.ended == self.here:
            self._matches.pop(operation.seq, None)

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail the whole match, here and elsewhere, because one rank has no input for it."""
        match = self._matches.setdefault(operation.seq, SpanningMatch(self.size))
        match.count += 1
        rank, seq = self.members[operation.port.position], operation.seq
        self.issued[rank] = max(self.issued.get(rank, 0), seq + 1)
        self._withdrawn[seq] = None
        if len(self._withdrawn) > REMEMBERED:
            del self._withdrawn[next(iter(self._withdrawn))]
        self.fail_one(match, operation, failure)
        self.ended(match, operation)

    def fail_one(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and all other ends because of it.

        If a wire broke, somebody is about to say who broke it, which ends the world: that is what is to be heard here.
        """
        if isinstance(failure.error, LinkLostError) and not failure.error.evident:
            self._others.hold_broken_end(partial(self._fail_held, match, operation, failure))
            return
        super().fail_one(match, operation, failure)
        assert match.error is not None
        self._others.send_failed_end(self.id, operation.seq, self.members[operation.port.position], match.error())

    def _fail_held(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end after all: nobody has said why its wire broke."""
        if not operation.done and isinstance(failure.error, LinkLostError):
            failure.error.evident = True
            self.fail_one(match, operation, failure)

    def forget_receive(self, operation: Operation) -> None:
        """Forget a receive that the transport has taken back, and its number, which the next receive gets.

        Both ends number messages, so the number of a receive is that of the message that it meets: a receive without a
        message has taken none. Another process may have been told of it. It cannot be told otherwise in time: see
        `SpanningMessages.compare_call`.
        """
        super().forget_receive(operation)
        self.issued[self.members[operation.port.position]] = operation.seq
        if self.past(operation.seq) is not None:
            del self._past[operation.seq % REMEMBERED]

    def give_up(self, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end, and with it whatever is or comes here or elsewhere."""
        super().give_up(operation, failure)
        broken = self._shared.broken(self.key)
        assert broken is not None
        self._others.send_broken(self.id, self.members[operation.port.position], broken())

    def missing(self, seq: int) -> list[int]:
        """World ranks that are not known to have come to operation `seq`, if some rank has."""
        match = self._matches.get(seq)
        return [rank for rank in super().missing(seq) if match is None or rank not in match.remote_calls]

    def waiting(self, before_ns: int) -> Iterator[tuple[int, RankCall]]:
        """Find what has been under way since `before_ns` or longer and has not been told; it counts as told now."""
        for seq, match in self._matches.items():
            if not match.announced and match.first is not None and match.started_ns <= before_ns:
                match.announced = True
                for end in match.arrived:
                    if end is not None:
                        yield seq, self._call_of(end)

    def send_now(self, operation: Operation) -> None:
        """Tell the others the call of an operation under way, which differs from theirs."""
        if operation.seq in self._matches:
            self._others.send_call(self.id, (operation.seq,), self._call_of(operation))

    def _cached_call_of(self, operation: Operation) -> RankCall:
        """Return the call of a rank, from a cache: finding a line takes longer than sending a small message."""
        position, (code, instruction) = operation.port.position, operation.place
        key = position, id(code), instruction, operation.call
        known = self._voices_known.get(key)
        if known is None:
            if len(self._voices_known) >= _BASES:
                self._voices_known.clear()
            known = self._voices_known[key] = code, self._call_of(operation)  # as long as it is kept, so is its id
        return known[1]

    def _call_of(self, operation: Operation) -> RankCall:
        rank = self.members[operation.port.position]
        return RankCall(rank=rank, call=operation.call, call_site=operation.call_site)

    # -- what the other processes say ---------------------------------------------------------------------------------

    def compare_call(self, seq: int, said: RankCall) -> bool:
        """Compare another process's call with ours; False if none of ours has come to it yet."""
        match = self._matches.get(seq)
        if match is None or match.first is None:
            mine = self.past(seq)
            if mine is not None and not mine[1].agrees(said.call):
                own = RankCall(rank=mine[0], call=mine[1], call_site=call_site(*mine[2]))
                if not self._reported and self._only_gave(own) and self._only_gave(said):
                    self._shared.unheard.setdefault(self.id, mismatch(self.name, seq, said, own))
                self._differ(seq, own, said)
            return mine is not None or match is not None or seq < max(self.issued.values(), default=0) - REMEMBERED
        match.remote_calls = {**match.remote_calls, said.rank: said}
        assert match.pattern is not None
        if match.assumed and said.call.dtype is not None and match.first.call.agrees(said.call):
            match.pattern, match.assumed = said.call, False
            self._check_results(match)
        elif not match.pattern.agrees(said.call):
            self._dispute(match, match.first)
        elif match.pattern.dtype is None and said.call.dtype is not None:
            match.pattern = said.call
            self._check_results(match)
            self._start(match)
        return True

    def _note_reported(self) -> None:
        """Note that an operation here fails with what makes all later ones fail."""
        self._reported = True
        self._shared.unheard.pop(self.id, None)

    def _only_gave(self, voice: RankCall) -> bool:
        """Whether a rank took itself for the root: its end waits for nobody."""
        return voice.call.kind in ANNOUNCED and self.members[voice.call.root] == voice.rank

    def past(self, seq: int) -> Called | None:
        """Return what was called in an operation, if it is not too long ago: a rank, its call, and where."""
        number, called = self._past.get(seq % REMEMBERED, (-1, None))
        return called if number == seq else None

    def _voices(self, match: Match) -> list[RankCall]:
        """Return what each rank has called that is known to have come, here or elsewhere."""
        assert isinstance(match, SpanningMatch)
        there = [RankCall(said.rank, said.call, said.call_site) for said in match.remote_calls.values()]
        return [*super()._voices(match), *there]

    def _fail_dispute(self, match: Match, seq: int, error: Callable[[], CollectiveMismatchError]) -> None:
        self._others.send_mismatch(self.id, seq, error())
        super()._fail_dispute(match, seq, error)

    def _differ(self, seq: int, mine: RankCall, theirs: RankCall) -> None:
        error = mismatch(self.name, seq, theirs, mine)
        self._others.send_mismatch(self.id, seq, error())
        self.fail_here(seq, error)

    def fail_here(self, seq: int, error: Callable[[], BaseException]) -> None:
        """Fail our ends of operation `seq`, and of all later ones if it is over here."""
        match = self._matches.get(seq)
        if match is None:
            self._broken = error
            if self._matches:
                self._note_reported()
            for later in [each for number, each in self._matches.items() if number > seq and each.error is None]:
                self._fail(later, error)
        elif match.error is None:
            self._fail(match, error)

    def fail_remote_end(self, seq: int, culprit: int, message: str, cause: RemoteError) -> bool:
        """Fail our ends because of a rank elsewhere, and of its error; False if no rank here has come to it yet."""
        if seq not in self._matches:
            if seq in self._withdrawn:
                return True
            if seq >= max(self.issued.values(), default=0):
                return False
        self.fail_here(seq, lambda: PeerFailedError.caused_by(cause, message, culprit=culprit))
        return True

    # -- ranks that have finished --------------------------------------------------------------------------------

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
