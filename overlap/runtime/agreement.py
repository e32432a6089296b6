"""Agreement: the ends of an operation are compared, in this process and with those in other processes.

Ends in one process meet in a `Match`. Between processes a message carries the signature of its call, so most ranks that
disagree notice it where a message meets a receive. Others wait, or wait for nobody: an operation that waits for long is
a question to the other processes, which compare it with their calls, and messages that no receive has met are compared
with past calls. Whoever finds a difference fails the operation, here and in all other processes of the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from transports import LinkLostError, SignatureMismatchError
from transports.matching.protocol import ProtocolError
from transports.signature import PlainSignature

from ..errors import CollectiveMismatchError, PeerFailedError, UsageError, in_one_line
from .arguments import call_by_out, check_result
from .failure import Failure
from .match import Key, Match, RankCall, minority_and_majority, mismatch
from .operation import Operation
from .signature import CallSignature, parse, signature_of

if TYPE_CHECKING:
    from ..processes.control import ControlPlane
    from .communicators import Communicators

# Time that two differing ranks wait for a third, to know the minority.
_DISPUTE_S = 0.05

# Runs of equal calls in a history: another process may arrive thousands of operations later, with another call.
REMEMBERED = 4096

# Last operations that have failed on a communicator, and that were answered.
_FAILED = _ANSWERED = 256


class History:
    """Calls of the ranks here on a communicator that spans processes.

    Attributes:
        id: Name of the communicator in messages between processes.
        group_id: That of its group.
        name: Name of the group in errors.
        members: World ranks of the communicator.
        issued: Number of operations issued by each member here, by world rank.
        runs: Runs of operations with one signature, as [number of the first, number after the last, signature, world
            rank]. A list, because one may be made for every operation.
    """

    __slots__ = ("answered", "group_id", "id", "issued", "members", "name", "runs")

    def __init__(self, key: Key, name: str, members: tuple[int, ...]) -> None:
        self.id: int = key.id
        self.group_id: int = key.group.id
        self.name, self.members = name, members
        self.issued: dict[int, int] = {}
        self.runs: deque[list[Any]] = deque(maxlen=REMEMBERED)
        self.answered: deque[int] = deque(maxlen=_ANSWERED)  # operations with dtype and shape sent to receivers

    def record(self, operation: Operation) -> None:
        """Record the call of a rank."""
        rank, seq, runs = operation.context.rank, operation.seq, self.runs
        signature = signature_of(operation.call, operation.place)
        self.issued[rank] = max(self.issued.get(rank, 0), seq + 1)
        if runs and runs[-1][1:] == [seq, signature, rank]:
            runs[-1][1] = seq + 1
        elif (own := self.call(seq)) is None or not own.call.has_all_values:
            runs.append([seq, seq + 1, signature, rank])

    @property
    def next_seq(self) -> int:
        """Number of the next operation of the rank here that is furthest ahead."""
        return max(self.issued.values(), default=0)

    def find(self, seq: int) -> tuple[CallSignature, int] | None:
        """Return the signature of an operation, and the rank here; None if it is too old, or to come."""
        for start, stop, signature, rank in reversed(self.runs):
            if start <= seq < stop:
                return signature, rank
        return None

    def call(self, seq: int) -> RankCall | None:
        """Return the call of an operation; None if it is too old, or to come."""
        found = self.find(seq)
        return None if found is None or found[0].call is None else RankCall(found[1], found[0].call, found[0].site)

    def compare(self, seq: int, theirs: RankCall, far: ControlPlane) -> Callable[[], BaseException] | None:
        """Compare the call of a rank elsewhere, which waits, with the one here, and answer it.

        Returns:
            The maker of the error if they differ, which is reported.
        """
        own = self.call(seq)
        if own is None:
            return None
        if not own.call.agrees(theirs.call):
            error = mismatch(self.name, seq, theirs, own)
            far.send_operation_failed(self, seq, error())
            return error
        self.answer(seq, (theirs,), far)
        return None

    def answer(self, seq: int, theirs: Iterable[RankCall], far: ControlPlane) -> None:
        """Send dtype and shape, once, if a rank here has them and another only receives, and has neither."""
        own = self.call(seq)
        asked = any(each.call.dtype is None for each in theirs)
        if asked and own is not None and own.call.dtype is not None and seq not in self.answered:
            self.answered.append(seq)
            far.send_wait(self, seq, own)

    def is_before(self, seq: int) -> bool:
        """Whether an operation is older than the history."""
        return bool(self.runs) and seq < self.runs[0][0]


class Agreement:
    """The part of a communicator that compares the ends of operations, and fails those that differ."""

    key: Key
    name: str
    members: tuple[int, ...]
    here: int
    direct: bool
    spans: bool
    history: History
    _shared: Communicators
    _far: ControlPlane  # if others are elsewhere, as `history`
    _matches: dict[int, Match]

    def __init__(self) -> None:
        self._broken: Callable[[], BaseException] | None = None  # error of all operations from a number on
        self._broken_from = 0
        self._failed: deque[int] = deque(maxlen=_FAILED)  # numbers of operations, if others are elsewhere

    def fail_one(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and all other ends because of it.

        If a wire broke, a report of its cause is about to arrive and ends the world: that is the error to raise here.
        """
        cause, rank = failure.error, self.members[operation.port.place]
        if self.spans and isinstance(cause, SignatureMismatchError):
            self._fail_where_met(match, operation, cause)
            return
        if self.spans and isinstance(cause, LinkLostError) and not cause.evident:
            self._far.hold_broken_end(operation, cause, partial(self.fail_one, match, operation, failure))
            return
        message = f"rank {rank} failed before {operation.label} ({operation.call_site}): {in_one_line(cause)}"
        error = partial(PeerFailedError.caused_by, cause, message, culprit=rank)
        self._fail_end(match, operation, failure)
        self._fail(match, error)
        self._report_failure(operation.seq, error)

    def _fail_end(self, match: Match, end: Operation, failure: Failure) -> None:
        """Fail one end; between processes it is over at once, unless its bytes move."""
        is_over = self.spans and end.scope is None and not end.done
        end.fail(failure)
        if self.spans:
            self._failed.append(end.seq)
        if is_over:
            self.ended(match, end)

    def ended(self, match: Match, operation: Operation) -> None:
        """Count one rank's end of a matched operation as over; forget the match with the last one."""
        raise NotImplementedError

    def _fail(self, match: Match, error: Callable[[], BaseException]) -> None:
        """Fail every end, each with an error of its own: one exception raised in two tasks would mix tracebacks."""
        match.error = error
        for end in match.ends:
            self._fail_end(match, end, Failure(error()))

    def _report_failure(self, seq: int, error: Callable[[], BaseException]) -> None:
        """Report a failed operation to the other processes of the group."""
        if self.spans:
            self._far.send_operation_failed(self.history, seq, error())

    # -- ends in this process ------------------------------------------------------------------------------------------

    def _compare(self, match: Match, operation: Operation) -> None:
        """Compare an operation with the pattern of its match; dispute it if the calls differ."""
        pattern, call = match.pattern, operation.call
        if match.disputed:
            self._dispute(match, operation)
        elif pattern is None:  # no other end arrived, and its own result was checked with its arguments
            match.pattern, match.first = call, operation
        elif pattern.dtype is None and pattern.agrees(call):
            match.pattern, match.first = call, operation
            self._check_results(match)
        elif match.error is None and call.dtype is None and pattern.agrees(call):
            self._check_results(match)
        elif match.error is None and not pattern.agrees(call):
            self._dispute(match, operation)

    def _check_results(self, match: Match) -> None:
        """Compare the `out` of ranks that only receive with the dtype and shape, which are known now."""
        assert match.pattern is not None
        for end in match:
            if end is not None and match.error is None:
                try:
                    check_result(end.out, match.pattern, end.member.rank)
                except UsageError as error:
                    self.fail_one(match, end, Failure(error))

    def _dispute(self, match: Match, operation: Operation, *, final: bool = False) -> None:
        """Fail a match with different ends, once the minority is known: for sides of equal size more ends may arrive.

        It waits for more ends only if the communicator is direct: no bytes move there until all have arrived. Otherwise
        some ends could succeed in the meantime.

        Args:
            operation: Any of its ends here.
            final: Whether to wait for no more ends.
        """
        if match.error is not None:
            return
        rank_calls = [RankCall(self.members[end.port.place], end.call, end.call_site) for end in match.ends]
        rank_calls += match.remote_calls.values()
        few, many = minority_and_majority(rank_calls)
        if final or not self.direct or len(few) < len(many) or len(rank_calls) == len(self.members):
            error = mismatch(self.name, operation.seq, few[0], many[0])
            self._report_failure(operation.seq, error)
            self._fail(match, error)
        elif not match.disputed:
            match.disputed, match.pattern = True, None  # so that each later end is compared
            operation.context.spawn(self._dispute_later, match, operation)

    async def _dispute_later(self, match: Match, operation: Operation) -> None:
        """Fail a match after a time in which further ranks may show which side is the minority."""
        await trio.sleep(_DISPUTE_S)
        self._dispute(match, operation, final=True)

    # -- ends in other processes ---------------------------------------------------------------------------------------

    def _fail_where_met(self, match: Match, operation: Operation, error: SignatureMismatchError) -> None:
        """Fail a match here and in other processes, because a message has met a rank with another call."""
        own, other = operation.context.rank, error.dst if error.src == operation.context.rank else error.src
        assert other is not None, "this is a bug in overlap: a message of no rank"
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
        if match.error is None:
            call = RankCall(own, operation.call, operation.call_site)
            differ = mismatch(self.name, operation.seq, (other, theirs.what, theirs.site), call)
            self._report_failure(operation.seq, differ)
            self._fail(match, differ)

    def _assume_or_ask(self, match: Match, operation: Operation) -> None:
        """Receive what fits the array for the result, which needs no answer; without an array, ask the others."""
        assumed = call_by_out(operation) if self.here == 1 and match.error is None else None
        if assumed is not None:
            match.pattern, match.assumed = assumed, True
        elif match.error is None:
            call = RankCall(operation.context.rank, operation.call, operation.call_site)
            self._far.send_wait(self.history, operation.seq, call)

    def ask(self, before_ns: int) -> None:
        """Report the operations that wait since an instant."""
        for seq, match in self._matches.items():
            if not match.asked and match.first is not None and match.started_ns <= before_ns:
                match.asked = True
                for end in match.ends:
                    call = RankCall(end.context.rank, end.call, signature_of(end.call, end.place).site)
                    self._far.send_wait(self.history, seq, call)

    def compare_wait(self, seq: int, theirs: RankCall) -> bool:
        """Compare the call of a rank elsewhere that waits with the one here; False if no rank here has arrived yet."""
        match = self._matches.get(seq)
        if match is None or match.first is None:
            if (error := self.history.compare(seq, theirs, self._far)) is not None:
                self.fail_at(seq, error)
            return match is not None or self.history.is_before(seq) or self.history.find(seq) is not None
        match.remote_calls = {**match.remote_calls, theirs.rank: theirs}
        assert match.pattern is not None
        if match.assumed and theirs.call.dtype is not None and match.first.call.agrees(theirs.call):
            match.pattern, match.assumed = theirs.call, False
            self._check_results(match)
        elif not match.pattern.agrees(theirs.call):
            self._dispute(match, match.first)
        elif match.pattern.dtype is None and theirs.call.dtype is not None:
            match.pattern = theirs.call
            self._check_results(match)
            self._start_settled_ends(match)
        elif match.error is None:
            self.history.compare(seq, theirs, self._far)
        return True

    def _start_settled_ends(self, match: Match) -> None:
        """Start all ends here that are not running, once any rank has given dtype and shape."""
        raise NotImplementedError

    def compare_unmet(self, number: int, src: int, theirs: PlainSignature) -> None:
        """Compare a message, or a row of a board, that no rank here has met with the call here.

        If that is over here, the sender finds the difference itself, or asks, unless it receives nothing.

        Args:
            number: Low 16 bits of the number of its operation.
            src: World rank of the sender.
            theirs: Signature of its call.
        """
        last = self.history.next_seq - 1
        behind = (last - number) & 0xFFFF
        seq = last - behind
        found = self.history.find(seq) if behind < 0x8000 and seq not in self._failed else None
        if found is None or found[0].agrees(theirs.fingerprint):
            return
        own = self.history.call(seq)
        try:
            call = parse(theirs.text, theirs.fingerprint)
        except ProtocolError:  # the link's own checks name it
            return
        waits = call.call is not None and call.call.receives_at(self.members.index(src))
        if own is not None and (seq in self._matches or not waits):
            self._differ(seq, (src, call.what, call.site), own)

    def _differ(self, seq: int, first: tuple[int, object, str], second: tuple[int, object, str]) -> None:
        """Fail operation `seq` on all ranks, because the calls of two of them differ."""
        error = mismatch(self.name, seq, first, second)
        self._report_failure(seq, error)
        self.fail_at(seq, error)

    def fail_at(self, seq: int, error: Callable[[], BaseException]) -> bool:
        """Fail operation `seq` here; False if no rank here has issued it yet.

        If it is over here, all later ones fail, on all ranks: a rank that has failed at it may wait for none here.
        """
        match = self._matches.get(seq)
        if match is not None:
            if match.error is None:
                self._fail(match, error)
        elif seq >= self.history.next_seq:
            return False
        elif seq not in self._failed and not self._is_broken(seq):
            self._failed.append(seq)
            if isinstance(error(), CollectiveMismatchError):
                self._shared.unraised.setdefault(self.history.id, error)
            self.break_off(error, seq + 1, seen=False)
            self._far.send_operation_failed(self.history, seq + 1, error(), onwards=True)
        return True

    def _is_broken(self, seq: int) -> bool:
        """Whether no operation from this one, or from one before it, goes on."""
        return self._broken is not None and seq >= self._broken_from

    def break_off(self, error: Callable[[], BaseException], first: int = 0, *, seen: bool = True) -> None:
        """Fail all operations from number `first` on, on the ranks of this process."""
        raise NotImplementedError
