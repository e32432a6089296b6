"""Communicators with members in several processes.

Only the ranks of this process meet here; their programs start as soon as dtype and shape are known. The other processes
are checked without an extra message: the tags of an operation are made from its call, so ranks that disagree exchange
no byte. Both wait then, and the control plane reports operations that wait for long; a process that gets a report that
differs from its own call fails the operation everywhere, with both calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, MappingProxyType
from typing import Protocol, TypeAlias

from transports import LinkLostError, SignatureMismatchError
from transports.matching.protocol import ProtocolError

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..errors import CollectiveMismatchError, PeerFailedError, RemoteError
from ..timeline.recording import call_site
from .arguments import call_by_out
from .communicator import Communicator
from .communicators import Communicators
from .failure import Failure
from .match import Key, Match, RankCall, mismatch
from .operation import Operation
from .signature import parse

CodePlace: TypeAlias = tuple[CodeType, int]
Called: TypeAlias = tuple[int, Call, CodePlace]

# Finished operations that a communicator remembers, for a process that arrives late and with another call. A sender of
# small messages may be ahead by as many as its transport takes without a receiver.
REMEMBERED = 256

# The same, of calls in which a rank receives nothing: another process may report its own some 25 ms later, and a rank
# that waits for nobody has issued thousands of operations by then.
_REMEMBERED_SENDS = 4096

# Calls with cached tags, and places with cached calls: training repeats a few, but blocks of different sizes make a new
# one each time.
_CACHED_CALLS = 256

ANNOUNCED = (Collective.BROADCAST, Collective.SCATTER)
"""Operations in which ranks that only receive need no dtype and shape: the root's process reports them soon, or at
once if another process has asked."""


class ControlNotices(Protocol):
    """The interface of the control plane to communicators: reports to and from other processes."""

    def send_call(self, communicator_id: int, seqs: Sequence[int], report: RankCall) -> None:
        """Report the call of a rank here for some operations; a call without a dtype asks for the others'."""

    def announce_call(self, communicator_id: int, seq: int, report: RankCall) -> None:
        """Report the call of a rank here to ranks without one, as soon as one of them asks."""

    def send_mismatch(self, communicator_id: int, seq: int, error: CollectiveMismatchError) -> None:
        """Report that two ranks issued different operations."""

    def send_failed_end(self, communicator_id: int, seq: int, rank: int, error: BaseException) -> None:
        """Report that a rank here cannot take part in an operation."""

    def hold_broken_end(self, fail: Callable[[], None]) -> None:
        """Fail an end with a broken wire a moment later, unless a report of its cause arrives first."""

    @property
    def silent(self) -> bool:
        """Whether no report is kept for an operation that no rank here has arrived at."""

    def early_calls(self, communicator_id: int, seq: int) -> list[RankCall]:
        """Return, once, the reported calls of an operation, from before any rank here arrived at it."""

    @property
    def early_failures(self) -> Mapping[tuple[int, int], object]:
        """Failed ends of operations that no rank here has arrived at, by id and number."""

    def note_early_failures(self, communicator_id: int, seq: int) -> None:
        """Apply a report of a failed end that came before the operation here."""

    def issued_by(self, rank: int, communicator_id: int) -> int:
        """Return the number of operations that a finished rank of another process issued on a communicator."""

    def send_broken(self, communicator_id: int, culprit: int, error: BaseException) -> None:
        """Report that all present and later operations of a communicator or a group fail."""

    def sent_no_more(self, rank: int, communicator_id: int, count: int) -> bool:
        """Whether a finished rank of another process is known to have sent at most `count` messages."""

    def send_unused(self, group_id: int, ranks: int, size: int, communicator_ids: Sequence[int]) -> None:
        """Report that all ranks here, `ranks` of the group, no longer use the group; the last report about it."""

    def forget(self, ids: Collection[int]) -> None:
        """Forget the reports of a group that no rank uses any more, and of its communicators."""


class SpanningMatch(Match):
    """A match with only some ends in this process.

    Attributes:
        announced: Whether the other processes know that ranks wait here.
        assumed: Whether its pattern is only inferred from the array for the result.
        remote_calls: Known calls of ranks of other processes.
    """

    announced = assumed = False
    remote_calls: Mapping[int, RankCall] = MappingProxyType({})

    @property
    def started_ns(self) -> int:
        """Start time of the first end here."""
        return min((end.started_ns for end in self if end is not None), default=0)


class SpanningCommunicator(Communicator):
    """A communicator with only some members in this process.

    Attributes:
        id: Name in messages between processes.
        issued: Number of operations issued by each member here, by world rank.
    """

    spans = True
    _matches: dict[int, SpanningMatch]  # type: ignore[assignment]

    def __init__(
        self,
        shared: Communicators,
        key: Key,
        name: str,
        members: tuple[int, ...],
        local: frozenset[int],
        notices: ControlNotices,
    ) -> None:
        super().__init__(shared, key, name, members)
        self.direct = False
        self.here: int = sum(member in local for member in members)
        self.id: int = key.id
        self.issued: dict[int, int] = {}
        self._local, self._notices = local, notices
        self._reported = False  # whether an operation here has failed with `_broken`
        self._cached_calls: dict[tuple[int, int, int, Call], tuple[object, RankCall]] = {}
        self._withdrawn: dict[int, None] = {}  # numbers of the last operations without an input on a rank here
        self._past: dict[int, tuple[int, Called]] = {}  # by number modulo `REMEMBERED`: the number, and the call
        self._past_sends: dict[int, tuple[int, Called]] = {}  # the same, modulo `_REMEMBERED_SENDS`

    # -- our own ranks -------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation) -> None:
        """Match the arrived end of one rank; it starts as soon as dtype and shape are known."""
        self.record_call(operation)
        # a call with a plan, while all is well
        plan = operation.port.plans.get(operation.call)
        if plan is not None and self.calm:
            if not plan.finish_now(operation):
                self.start_arrived(self.make_lone_match(operation), operation, plan)
            return
        # find its match, by number
        seq = operation.seq
        match = self._matches.get(seq)
        if match is None:
            match = self._matches[seq] = SpanningMatch([None] * self.size)
            self.fail_if_broken(match, operation)
            if self._broken is not None:
                self._note_reported()
        match[operation.port.position] = operation
        match.arrived += 1
        # compare the known calls of the other processes
        if match.pattern is not operation.call:
            self._compare(match, operation)
        for report in self._notices.early_calls(self.id, seq):
            self.compare_call(seq, report)
        if operation.call.dtype is None and match.pattern is not None and not match.pattern.has_all_values:
            self._assume_or_ask(match, operation)
        # start it
        if match.error is None:
            self.start_arrived(match, operation)
        else:
            operation.fail(Failure(match.error()))
            self.ended(match, operation)

    def record_call(self, operation: Operation) -> None:
        """Record the call of a rank, and report it to ranks that may need it."""
        position, seq, call = operation.port.position, operation.seq, operation.call
        rank = self.members[position]
        if seq >= self.issued.get(rank, 0):
            self.issued[rank] = seq + 1
        self._past[seq % REMEMBERED] = past = seq, (rank, call, operation.place)
        if not call.receives_at(position):
            # A rank that receives nothing waits for nobody. Were all ranks such ranks, each by its own call, no wait
            # would show that the calls differ: if all agreed with the call of the first rank, one would receive.
            self._past_sends[seq % _REMEMBERED_SENDS] = past
            if position == 0 or call.kind in ANNOUNCED:
                self._notices.announce_call(self.id, seq, self._cached_rank_call(operation))

    def _assume_or_ask(self, match: SpanningMatch, operation: Operation) -> None:
        """Receive what fits the array for the result, which needs no report; without an array, ask the others.

        A root with another call uses other tags, and is going to report its call.
        """
        assumed = call_by_out(operation) if self.here == 1 and match.error is None else None
        if assumed is None:
            self._notices.send_call(self.id, (operation.seq,), self._make_rank_call(operation))
        else:
            match.pattern, match.assumed = assumed, True

    def needs_no_task(self, operation: Operation) -> bool:
        """Whether an arrival neither wakes nor starts a task: nothing has failed, and nothing is to be reported.

        The event loop makes the first plan, because it opens the resources that ranks share.
        """
        call, used = operation.call, bool(operation.port.plans)
        return used and call.has_all_values and self.calm and self.plan(call, operation).takes_threads()

    @property
    def calm(self) -> bool:
        """Whether a rank is alone in this process, no operation fails, and no report waits for its arrival."""
        return self.here == 1 and not self._left and self._broken is None and self._notices.silent

    def make_lone_match(self, operation: Operation) -> Match:
        """Return the match of an operation with a plan: all its other ends are in other processes."""
        match = self._matches[operation.seq] = SpanningMatch([None] * self.size)
        match[operation.port.position] = match.first = operation
        match.arrived, match.pattern = 1, operation.call
        return match

    def ended(self, match: Match, operation: Operation) -> None:
        """Forget a match once all ends here are over; its call is remembered."""
        match.ended += 1
        if match.ended == self.here:
            self._matches.pop(operation.seq, None)

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail the whole match, here and in other processes, because one rank has no input for it."""
        match = self._matches.setdefault(operation.seq, SpanningMatch([None] * self.size))
        match.arrived += 1
        rank, seq = self.members[operation.port.position], operation.seq
        self.issued[rank] = max(self.issued.get(rank, 0), seq + 1)
        self._withdrawn[seq] = None
        if len(self._withdrawn) > REMEMBERED:
            del self._withdrawn[next(iter(self._withdrawn))]
        self.fail_one(match, operation, failure)
        self.ended(match, operation)

    def fail_one(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and all other ends because of it.

        If a wire broke, a report of its cause is about to arrive and ends the world: that is the error to raise here.
        """
        if isinstance(failure.error, SignatureMismatchError):
            self._fail_where_met(match, operation, failure.error)
            return
        if isinstance(failure.error, LinkLostError) and not failure.error.evident:
            self._notices.hold_broken_end(partial(self._fail_held, match, operation, failure))
            return
        super().fail_one(match, operation, failure)
        assert match.error is not None
        self._notices.send_failed_end(self.id, operation.seq, self.members[operation.port.position], match.error())

    def _fail_where_met(self, match: Match, operation: Operation, error: SignatureMismatchError) -> None:
        """Fail a match here and in other processes, because a message has met a rank with another call."""
        assert isinstance(match, SpanningMatch)
        own, other = operation.context.rank, error.dst if error.src == operation.context.rank else error.src
        try:
            theirs = parse(error.theirs.text, error.theirs.fingerprint)
        except ProtocolError as invalid:
            lost = LinkLostError(f"rank {other} sent what is no message of overlap: {invalid}", src=other, dst=own)
            lost.evident = True
            self.fail_one(match, operation, Failure(lost))
            return
        if match.assumed and theirs.call is not None and operation.call.agrees(theirs.call):
            match.pattern, match.assumed = theirs.call, False
            self._check_results(match)  # the array for the result is of another shape or dtype
            return
        assert other is not None, "this is a bug in overlap: a message of no rank"
        differ = partial(
            CollectiveMismatchError,
            group=self.name,
            seq=operation.seq,
            ranks=(other, own),
            calls=(theirs.what, str(operation.call)),
            call_sites=(theirs.site, operation.call_site),
        )
        self._notices.send_mismatch(self.id, operation.seq, differ())
        self.fail_here(operation.seq, differ)

    def _fail_held(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail an end whose wire broke, because no report of the cause arrived in time."""
        if not operation.done and isinstance(failure.error, LinkLostError):
            failure.error.evident = True
            self.fail_one(match, operation, failure)

    def give_up(self, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end, and all present and later ones of the communicator, here and in other processes."""
        super().give_up(operation, failure)
        broken = self._shared.find_abort(self.key)
        assert broken is not None
        self._notices.send_broken(self.id, self.members[operation.port.position], broken())

    def missing(self, seq: int) -> list[int]:
        """Return the world ranks that are not known to have arrived at operation `seq`; empty if no rank has."""
        match = self._matches.get(seq)
        return [rank for rank in super().missing(seq) if match is None or rank not in match.remote_calls]

    def unreported_calls(self, before_ns: int) -> Iterator[tuple[int, RankCall]]:
        """Yield the unreported calls that have waited since `before_ns` or longer; they count as reported now."""
        for seq, match in self._matches.items():
            if not match.announced and match.first is not None and match.started_ns <= before_ns:
                match.announced = True
                for end in match:
                    if end is not None:
                        yield seq, self._make_rank_call(end)

    def report_call(self, operation: Operation) -> None:
        """Report the call of an unfinished operation."""
        if operation.seq in self._matches:
            self._notices.send_call(self.id, (operation.seq,), self._make_rank_call(operation))

    def _cached_rank_call(self, operation: Operation) -> RankCall:
        """Return the call of a rank, from a cache: to find a line takes longer than to send a small message."""
        position, (code, instruction) = operation.port.position, operation.place
        key = position, id(code), instruction, operation.call
        cached = self._cached_calls.get(key)
        if cached is None:
            if len(self._cached_calls) >= _CACHED_CALLS:
                self._cached_calls.clear()
            cached = self._cached_calls[key] = code, self._make_rank_call(operation)  # the cached code keeps its id
        return cached[1]

    def _make_rank_call(self, operation: Operation) -> RankCall:
        """Return the rank, call and line of an operation."""
        rank = self.members[operation.port.position]
        return RankCall(rank=rank, call=operation.call, call_site=operation.call_site)

    # -- reports of other processes ------------------------------------------------------------------------------------

    def compare_call(self, seq: int, report: RankCall) -> bool:
        """Compare the call of another process with the one here; False if no rank here has arrived at it yet."""
        match = self._matches.get(seq)
        if match is None or match.first is None:
            called = self.find_past_call(seq)
            if called is not None and not called[1].agrees(report.call):
                own = RankCall(rank=called[0], call=called[1], call_site=call_site(*called[2]))
                if not self._reported and self._waits_for_nobody(own) and self._waits_for_nobody(report):
                    self._shared.unraised.setdefault(self.id, mismatch(self.name, seq, report, own))
                self._fail_different_calls(seq, own, report)
            return called is not None or match is not None or seq < max(self.issued.values(), default=0) - REMEMBERED
        match.remote_calls = {**match.remote_calls, report.rank: report}
        assert match.pattern is not None
        if match.assumed and report.call.dtype is not None and match.first.call.agrees(report.call):
            match.pattern, match.assumed = report.call, False
            self._check_results(match)
        elif not match.pattern.agrees(report.call):
            self._dispute(match, match.first)
        elif match.pattern.dtype is None and report.call.dtype is not None:
            match.pattern = report.call
            self._check_results(match)
            self._start_settled_ends(match)
        return True

    def _note_reported(self) -> None:
        """Record that an operation here has failed with the error that later ones get."""
        self._reported = True
        self._shared.unraised.pop(self.id, None)

    def _waits_for_nobody(self, report: RankCall) -> bool:
        """Whether a rank receives nothing in its call: its end finishes whatever the others do."""
        return not report.call.receives_at(self.members.index(report.rank))

    def find_past_call(self, seq: int) -> Called | None:
        """Return the rank, call and place of one of the last operations; None if it is too old."""
        for past, length in ((self._past, REMEMBERED), (self._past_sends, _REMEMBERED_SENDS)):
            number, called = past.get(seq % length, (-1, None))
            if number == seq:
                return called
        return None

    def _rank_calls(self, match: Match) -> list[RankCall]:
        """Return the calls of all ranks that are known to have arrived, here or in other processes."""
        assert isinstance(match, SpanningMatch)
        remote = [RankCall(report.rank, report.call, report.call_site) for report in match.remote_calls.values()]
        return [*super()._rank_calls(match), *remote]

    def _fail_dispute(self, match: Match, seq: int, error: Callable[[], CollectiveMismatchError]) -> None:
        """Fail the ends here that differ from others, and report that to the other processes."""
        self._notices.send_mismatch(self.id, seq, error())
        super()._fail_dispute(match, seq, error)

    def _fail_different_calls(self, seq: int, own: RankCall, theirs: RankCall) -> None:
        """Fail operation `seq` here, and report two different calls to the other processes."""
        error = mismatch(self.name, seq, theirs, own)
        self._notices.send_mismatch(self.id, seq, error())
        self.fail_here(seq, error)

    def fail_here(self, seq: int, error: Callable[[], BaseException]) -> None:
        """Fail the ends of operation `seq` here; also of all later ones if that operation is over here."""
        match = self._matches.get(seq)
        if match is None:
            self._broken = error
            if self._matches:
                self._note_reported()
            for later in [match for number, match in self._matches.items() if number > seq and match.error is None]:
                self._fail(later, error)
        elif match.error is None:
            self._fail(match, error)

    def fail_remote_end(self, seq: int, culprit: int, message: str, cause: RemoteError) -> bool:
        """Fail the ends here because of a remote rank and its error; False if no rank here has arrived yet."""
        if seq not in self._matches:
            if seq in self._withdrawn:
                return True
            if seq >= max(self.issued.values(), default=0):
                return False
        self.fail_here(seq, lambda: PeerFailedError.caused_by(cause, message, culprit=culprit))
        return True

    # -- ranks that have finished --------------------------------------------------------------------------------

    def _is_missing(self, match: Match, rank: int, seq: int) -> bool:
        """Whether a rank has not arrived at an operation; one of another process counts once it has finished."""
        if rank in self._local:
            return match[self.members.index(rank)] is None
        return rank in self._left_without(seq)

    def _left_without(self, seq: int) -> set[int]:
        """Return the world ranks that have finished, and issued fewer operations than `seq` needs."""
        return {rank for rank in super()._left_without(seq) if seq >= self._issued_count(rank)}

    def _issued_count(self, rank: int) -> int:
        """Return the number of operations that a rank has issued here; for other processes, as they reported."""
        if rank in self._local:
            return self.issued.get(rank, 0)
        return self._notices.issued_by(rank, self.id)
