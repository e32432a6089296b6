"""Communicators with members in several processes.

Only the ranks of this process meet here; their programs start as soon as dtype and shape are known. The messages of an
operation carry its signature, so most ranks that disagree notice it where a message meets a receive. Others wait, or
wait for nobody. The control plane reports operations that wait for long, and those in which a rank only gives; where a
report differs from the call here, the operation fails everywhere, with both calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transports import LinkLostError, SignatureMismatchError
from transports.matching.protocol import ProtocolError

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..errors import CollectiveMismatchError, PeerFailedError, RemoteError
from .arguments import call_by_out
from .communicator import Communicator
from .communicators import Communicators
from .failure import Failure
from .match import Key, Match, RankCall, mismatch
from .operation import Operation
from .plan import CallPlan
from .signature import parse, signature_of

if TYPE_CHECKING:
    from ..processes.control_plane import ControlPlane

# Runs of equal calls that a communicator remembers, for a process that arrives late and with another call: another one
# may report its own some 25 ms later, and a rank that waits for nobody has issued thousands of operations by then.
REMEMBERED = 4096

# Last operations of a communicator without an input on a rank here.
_WITHDRAWN = 256

ANNOUNCED = (Collective.BROADCAST, Collective.SCATTER)
"""Operations in which ranks that only receive need no dtype and shape: the root's process reports them soon, or at
once if another process has asked."""


def _is_reported(call: Call, position: int) -> bool:
    """Whether the rank at a position reports a call to the other processes before it has waited.

    A rank that receives nothing waits for nobody. Were all ranks such ranks, each by its own call, no wait would show
    that the calls differ: if all agreed with the call of the first rank, one would receive.
    """
    return (position == 0 or call.kind in ANNOUNCED) and not call.receives_at(position)


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
        notices: ControlPlane,
    ) -> None:
        super().__init__(shared, key, name, members)
        self.direct = False
        self.here: int = sum(member in local for member in members)
        self.id: int = key.id
        self.issued: dict[int, int] = {}
        self._local, self._notices = local, notices
        self._reported = False  # whether an operation here has failed with `_broken`
        self._withdrawn: dict[int, None] = {}  # numbers of the last operations without an input on a rank here
        self.early: Mapping[tuple[int, int], object] = notices.early
        # Operations of ranks here: runs with one signature, as [number of the first, number after the last, signature,
        # world rank]. A list, because one may be made for every operation.
        self.history: deque[list[Any]] = deque(maxlen=REMEMBERED)

    # -- our own ranks -------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation) -> None:
        """Match the arrived end of one rank; it starts as soon as dtype and shape are known."""
        self.record(operation)
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
        for report in self._notices.take_early(self.id, seq) if self.early else ():
            self.compare_call(seq, report)
        if operation.call.dtype is None and match.pattern is not None and not match.pattern.has_all_values:
            self._assume_or_ask(match, operation)
        # start it
        if match.error is None:
            self.start_arrived(match, operation)
        else:
            operation.fail(Failure(match.error()))
            self.ended(match, operation)

    def record(self, operation: Operation) -> None:
        """Record the call of a rank, and report it to ranks that may need it."""
        position, seq, history = operation.port.position, operation.seq, self.history
        rank, signature = self.members[position], signature_of(operation.call, operation.place)
        if seq >= self.issued.get(rank, 0):
            self.issued[rank] = seq + 1
        if history and history[-1][1:] == [seq, signature, rank]:
            history[-1][1] = seq + 1
        elif self.find_past(seq) is None:
            history.append([seq, seq + 1, signature, rank])
        if _is_reported(operation.call, position):
            self.report_early(operation)

    def report_early(self, operation: Operation) -> None:
        """Report the call of a rank that only gives, soon, to ranks that may need it."""
        self._notices.announce_call(self.id, operation.seq, self._make_rank_call(operation))

    def _assume_or_ask(self, match: SpanningMatch, operation: Operation) -> None:
        """Receive what fits the array for the result, which needs no report; without an array, ask the others.

        A root with another call uses other tags, and is going to report its call.
        """
        assumed = call_by_out(operation) if self.here == 1 and match.error is None else None
        if assumed is None:
            self._notices.send_call(self.id, (operation.seq,), self._make_rank_call(operation))
        else:
            match.pattern, match.assumed = assumed, True

    def plan(self, call: Call, operation: Operation, match: Match | None = None) -> CallPlan:
        """Return the plan of one rank's end of an operation, with the call that all ranks agree on."""
        plan = super().plan(call, operation, match)
        plan.reports = _is_reported(call, operation.port.position)
        return plan

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
        if len(self._withdrawn) > _WITHDRAWN:
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

    def _make_rank_call(self, operation: Operation) -> RankCall:
        """Return the rank, call and line of an operation."""
        rank = self.members[operation.port.position]
        site = signature_of(operation.call, operation.place).site  # to find a line takes longer than a small message
        return RankCall(rank=rank, call=operation.call, call_site=site)

    # -- reports of other processes ------------------------------------------------------------------------------------

    def compare_call(self, seq: int, report: RankCall) -> bool:
        """Compare the call of another process with the one here; False if no rank here has arrived at it yet."""
        match = self._matches.get(seq)
        if match is None or match.first is None:
            past = self.find_past(seq)
            if past is not None and not past.call.agrees(report.call):
                own = past
                if not self._reported and self._waits_for_nobody(own) and self._waits_for_nobody(report):
                    self._shared.unraised.setdefault(self.id, mismatch(self.name, seq, report, own))
                self._fail_different_calls(seq, own, report)
            return past is not None or match is not None or (bool(self.history) and seq < self.history[0][0])
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

    def find_past(self, seq: int) -> RankCall | None:
        """Return the call of a rank here in one of the last operations; None if it is too old, or to come."""
        for start, stop, signature, rank in reversed(self.history):
            if start <= seq < stop:
                return RankCall(rank, signature.call, signature.site)
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
