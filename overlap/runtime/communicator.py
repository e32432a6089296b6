"""Communicators: bring the ends of an operation together, and notice that ranks disagree.

A `Communicator` is shared by the ranks of this process that are in one group, for one stream. The ends of one operation
meet in a `Match`, by sequence number; matched operations go to the engine. A `Port` is one rank's end of it. If other
processes have members, too, only the ranks of this process meet here; their ends start as soon as dtype and shape are
known.

A message carries the signature of its call, so most ranks that disagree notice it where a message meets a receive.
Others wait, or wait for nobody: an operation that waits for long is a question to the other processes, which compare it
with their calls, and messages that no receive has met are compared with past calls. Whoever finds a difference fails
the operation, here and in all other processes of the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from threading import get_ident
from typing import TYPE_CHECKING, cast

import trio

from transports import LinkLostError, SignatureMismatchError, TransportError
from transports.matching.protocol import ProtocolError

from ..collectives.call import Call
from ..errors import CollectiveMismatchError, RankLeftError, UsageError
from .arguments import call_by_out, check_result
from .context import RankContext
from .failure import Failure
from .match import History, Key, Match, RankCall, failed_before, gave_up, minority_and_majority, mismatch
from .operation import Operation
from .plan import CallPlan
from .signature import CallSignature, parse, signature_of

if TYPE_CHECKING:
    from transports import Envelope, PlainSignature, Wire

    from .communicators import Communicators
    from .lane import Lane
    from .message import Message

# Time that two differing ranks wait for a third, to know the minority.
_DISPUTE_S = 0.05

# Last operations that have failed on a communicator.
_FAILED = 256


class BaseEngine(ABC):
    """Engine that runs the operations of one process's ranks once they have matched."""

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that other processes of this host map, and the function that returns it; None without any."""
        return None

    @abstractmethod
    def direct(self, members: tuple[int, ...]) -> bool:
        """Whether the ranks are all in this process, and no bytes move before all of them have arrived."""

    @abstractmethod
    def plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Make the plan of a rank's operations with a call.

        Args:
            communicator: Communicator of the operations.
            call: The call that all ranks agree on; it has all its values.
            operation: The first of them. Its own call may leave dtype and shape open. For a thread that checks whether
                it may run it, it has no port yet, but such a check is never the first for a communicator.
        """

    def look(self, communicator: Communicator, match: Match, operation: Operation) -> bool:
        """Let an operation without an array wait for the call of another rank; whether it does.

        The engine calls `Communicator.learn` with a row, or `Communicator.compare_unmet` with a message.
        """
        return False

    @abstractmethod
    def carry(self, lane: Lane, send: Message[object], receive: Message[object], pattern: Call) -> None:
        """Move the data of a message inside this process, and end both of its ends."""

    def wire(self, context: RankContext, peer: int) -> Wire | None:
        """Return the wire of the messages with a world rank; None: they match inside this process."""
        return None

    def oldest_announced(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        """Return the oldest message of some senders and tags that other processes have announced; or None."""
        return None

    async def wait_announced(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope:
        """Wait until another process announces a message of some senders and tags; return that message."""
        raise AssertionError("this is a bug in overlap: an engine without wires waits for one")

    def choose_soon(self, context: RankContext, look: Callable[[], None]) -> None:
        """Call `look` when a receive from any source should choose among messages; any thread."""
        if get_ident() == context.thread:
            context.soon(look)
        else:  # `look` may start or cancel a task
            context.from_thread(look)

    def unmet(
        self, ranks: Iterable[int], communicators: Iterable[Communicator]
    ) -> list[tuple[int, int, PlainSignature]]:
        """Return the messages of other processes that no rank here has met, and rows that none reads.

        Args:
            ranks: World ranks here.
            communicators: Communicators that span processes.

        Returns:
            Transport tag, world rank of the sender, and signature of each.
        """
        return []

    def close(self, communicator: Communicator) -> None:  # noqa: B027 - an engine may own nothing of it
        """Free the resources of a communicator that no rank of this process uses any more."""

    @abstractmethod
    async def aclose(self) -> None:
        """Wait for the work at hand and end all threads."""


class Communicator:
    """The operations that the members of one group issue on one stream, in their common order.

    Args:
        shared: The communicators of the world.

    Attributes:
        key: Name of the communicator, the same on every rank.
        name: Name of the group in messages.
        members: World ranks that match, in group order.
        size: Number of ranks of the group: all of these, unless some represent others.
        here: Number of members in this process; all of them, unless it spans processes.
        spans: Whether only some members are in this process.
        direct: Whether no bytes move before all ranks have arrived, which are all in this process.
        history: Calls of the ranks here; only if it spans processes.
    """

    def __init__(self, shared: Communicators, key: Key, name: str, members: tuple[int, ...]) -> None:
        self.key: Key = key
        self.name: str = name
        self.members: tuple[int, ...] = members
        self.size: int = len(members)
        local = shared.local
        self.here: int = self.size if local is None else sum(member in local for member in members)
        self.spans: bool = self.here < self.size
        # a rank with itself needs no wire
        self.direct: bool = not self.spans and (shared.engine.direct(members) or len(set(members)) == 1)
        if self.spans:
            self.history: History = History(key, name, members)
            self._far = shared.far
        self._shared, self._engine, self._left = shared, shared.engine, shared.left
        self._matches: dict[int, Match] = {}
        self._moving: dict[int, Match] = {}  # matches with all ends here, until they are over
        self._broken: Callable[[], BaseException] | None = None  # error of all operations from a number on
        self._broken_from = 0
        self._failed: deque[int] = deque(maxlen=_FAILED)  # numbers of operations, if others are elsewhere

    def place(self, position: int, rank: int) -> int:
        """Return the index in `members` of a world rank at a position of the group."""
        return position

    # -- matching ----------------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation, plan: CallPlan | None = None) -> None:
        """Match the arrived end of one rank with those in other processes; see `Port.match` for others.

        Its plan starts it, if that is known.
        """
        self.history.record(operation)
        # find its match, by number
        seq, call = operation.seq, operation.call
        match = self._matches.get(seq)
        if match is None:
            match = self._matches[seq] = Match([None] * self.size)
            self.fail_if_broken(match, operation)
        match[operation.port.position] = operation
        match.arrived += 1
        # compare the known calls of the other processes
        if match.pattern is not call:
            self._compare(match, operation)
        for report in self._shared.take_early(self.history, seq) if self._shared.early else ():
            if isinstance(report, RankCall):
                self.compare_wait(seq, report)
            else:
                self.fail_at(seq, report)
        if match.remote_calls:
            self.history.answer(seq, match.remote_calls.values(), self._far)
        if call.dtype is None and match.pattern is not None and not match.pattern.has_all_values:
            self._assume(match, operation)
        # start it
        if match.error is None:
            self.start_arrived(match, operation, plan)
            if match.pattern is not None and not match.pattern.has_all_values:
                self._look_or_ask(match, operation)
        elif not operation.done:
            self._fail_end(match, operation, Failure(match.error()))

    def make_lone_match(self, operation: Operation) -> Match:
        """Return the match of an operation with a plan: all its other ends are in other processes."""
        match = self._matches[operation.seq] = Match([None] * self.size)
        match[operation.port.position] = match.first = operation
        match.arrived, match.pattern = 1, operation.call
        return match

    def plan(self, call: Call, operation: Operation, match: Match | None = None) -> CallPlan:
        """Return the plan of one rank's end of an operation, with the call that all ranks agree on.

        A plan that runs the ends of all ranks of a `match` is that of all their ports.
        """
        plan = operation.port.plans.get(call)
        if plan is None:
            plan = self._engine.plan(self, call, operation)
            if plan.lasts:
                for end in match.ends if match is not None and plan.together else (operation,):
                    end.port.keep_plan(call, plan)
        return plan

    def start_arrived(self, match: Match, operation: Operation, plan: CallPlan | None = None) -> None:
        """Start the end that has arrived, if it can start, and lock its arrays unless it ends at once."""
        if not (lock_later := operation.may_leave_at_once):
            operation.lock()
        if plan is None:
            self._start_settled_ends(match)
        else:
            self.start_end(match, operation, plan)
        if lock_later and not operation.done:
            operation.lock()
        if not self.spans and match.arrived == self.here and match.ended < self.here:
            self._moving[operation.seq] = match

    def _start_settled_ends(self, match: Match) -> None:
        """Start all ends here that are not running, once any rank has given dtype and shape."""
        if match.pattern is not None and match.pattern.has_all_values:
            for operation in match.ends:
                if operation.can_start:
                    self.start_end(match, operation)

    def start_end(self, match: Match, operation: Operation, plan: CallPlan | None = None) -> None:
        """Start one rank's end, by its plan unless another one is given; an error ends it."""
        try:
            (plan or self.plan(cast("Call", match.pattern), operation)).start(match, operation)
        except Exception as error:  # no memory, no wire between the ranks, no schedule that fits
            operation.stopped()
            self.settle(match, operation, error)

    @property
    def identity(self) -> str:
        """Name in few characters, the same on every rank."""
        return f"{self._tag_base:x}"

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail the whole match, here and in other processes, because one rank has no input for it."""
        seq = operation.seq
        match = self._matches.setdefault(seq, Match([None] * len(self.members)))
        match.arrived += 1
        if self.spans:
            issued, rank = self.history.issued, operation.context.rank
            issued[rank] = max(issued.get(rank, 0), seq + 1)
            self._shared.take_early(self.history, seq)
        elif match.arrived == self.here:
            del self._matches[seq]
        self.fail_one(match, operation, failure)

    def give_up(self, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end, and all present and later ones, here and elsewhere: the state of others is unknown."""
        error = gave_up(operation, failure.error)
        operation.fail(failure)
        self._shared.break_off(self.key.id, error)
        if self.spans:
            self._far.send_operation_failed(self.history, 0, error(), onwards=True)

    def break_off(self, error: Callable[[], BaseException], first: int = 0, *, seen: bool = True) -> None:
        """Fail all operations from number `first` on, on the ranks of this process, without waiting for them.

        Args:
            error: Makes the errors.
            first: Number of the first operation to fail.
            seen: Whether the errors that nobody awaits fail no rank.
        """
        if self._broken is None or first < self._broken_from:
            self._broken, self._broken_from = error, first
        for matches in (self._matches, self._moving):
            for seq, match in list(matches.items()):
                if seq >= first:
                    del matches[seq]
                    match.error = match.error or error
                    for end in match.ends:
                        self._shared.unraised.pop(self.key.id, None)
                        end.fail(Failure(error(), seen=seen))

    def rank_left(self, rank: int) -> None:
        """Fail the matches that wait for `rank`, which has finished its program."""
        for seq, match in list(self._matches.items()):
            missing = rank in (self._left_without(seq) if self.spans else self.missing(seq))
            if match.pattern is not None and match.error is None and missing:
                self._fail(match, self._left_error(rank, match))

    def missing(self, seq: int) -> list[int]:
        """Return the world ranks that are not known to have arrived at operation `seq`; empty if no rank here has."""
        match = self._matches.get(seq)
        if match is None:
            return []
        arrived = match.remote_calls
        return [rank for rank, end in zip(self.members, match, strict=False) if end is None and rank not in arrived]

    def forget(self, seq: int) -> None:
        """Drop a match that will not take place."""
        self._matches.pop(seq, None)

    def tag(self, seq: int) -> int:
        """Return the first transport tag of operation `seq`; its channels have the tags after it."""
        return self._tag_base + ((seq & 0xFFFF) << 8)

    @cached_property
    def _tag_base(self) -> int:
        return self.key.tag_base()

    def settle(self, match: Match, operation: Operation, error: BaseException | None) -> None:
        """End an operation whose bytes have stopped moving: with its result, or with an error for all its ends."""
        if error is not None:
            if get_ident() != operation.context.thread:  # the loop fails the others
                operation.context.from_thread(self.settle, match, operation, error)
                return
            if isinstance(error, TransportError):
                error.operation = f"{operation.label} ({operation.call_site})"
            if not operation.done:
                self.fail_one(match, operation, Failure(error))
                if self.spans:
                    return
        else:
            met_ns = operation.started_ns if self.here == 1 else max(end.started_ns for end in match.ends)
            pattern: Call = match.pattern  # type: ignore[assignment]  # an ended operation has a pattern
            operation.finish(operation.context.now_ns(), operation.describe(pattern, met_ns))
        self.ended(match, operation)

    def ended(self, match: Match, operation: Operation) -> None:
        """Count one rank's end of a matched operation as over; forget the match with the last one."""
        match.ended += 1
        if match.ended == self.here:
            (self._matches if self.spans else self._moving).pop(operation.seq, None)

    # -- errors --------------------------------------------------------------------------------------------------------

    def _left_without(self, seq: int) -> set[int]:
        """Return the world ranks that have finished without operation `seq`, which no rank here has issued before."""
        left = self._left.intersection(self.members)
        if not self.spans:
            return left
        counts = {rank: self._shared.issued_by(rank, self.history) for rank in left}
        return {rank for rank, count in counts.items() if count is not None and seq >= count}

    def fail_if_broken(self, match: Match, operation: Operation) -> None:
        """Give a new match an error if nothing more is matched, or a rank that it needs has finished its program."""
        if self._broken is not None and self._is_broken(operation.seq):
            match.error = self._broken
            self._shared.unraised.pop(self.key.id, None)
            return
        left = self._left_without(operation.seq) if self._left else set()
        if left:
            match[operation.port.place] = operation
            match.error = self._left_error(min(left), match)

    def _left_error(self, rank: int, match: Match) -> Callable[[], RankLeftError]:
        """Return the maker of the error of a match that waits for a rank that has finished its program."""
        ends = match.ends
        arrived = ", ".join(str(end.context.rank) for end in ends)  # some of them may still compute
        subject = f"rank {arrived} needs" if len(ends) == 1 else f"ranks {arrived} need"
        message = f"rank {rank} finished its program while {subject} it in {ends[0].label} ({ends[0].call_site})"
        return lambda: RankLeftError(message, culprit=rank)

    def fail_one(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and all other ends because of it.

        If a wire broke, a report of its cause is about to arrive and ends the world: that is the error to raise here.
        """
        cause = failure.error
        if self.spans and isinstance(cause, SignatureMismatchError):
            self._fail_where_met(match, operation, cause)
            return
        if self.spans and isinstance(cause, LinkLostError) and not cause.evident:
            self._far.hold_broken_end(operation, cause, partial(self.fail_one, match, operation, failure))
            return
        error = failed_before(operation, cause)
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
        own, other = operation.context.rank, _other_end(error, operation)
        theirs = self._parse_met(match, operation, error)
        if theirs is None:
            return
        if match.assumed and theirs.call is not None and operation.call.agrees(theirs.call):
            match.pattern, match.assumed = theirs.call, False
            self._check_results(match)  # the array for the result is of another shape or dtype
        if match.error is None:
            call = RankCall(own, operation.call, operation.call_site)
            differ = mismatch(self.name, operation.seq, (other, theirs.what, theirs.site), call)
            self._report_failure(operation.seq, differ)
            self._fail(match, differ)

    def _parse_met(self, match: Match, operation: Operation, error: SignatureMismatchError) -> CallSignature | None:
        """Return the signature that an operation has met; None if it is invalid, which fails the operation."""
        try:
            return parse(error.theirs.text, error.theirs.fingerprint)
        except ProtocolError as invalid:
            own, other = operation.context.rank, _other_end(error, operation)
            lost = LinkLostError(f"rank {other} sent what is no message of overlap: {invalid}", src=other, dst=own)
            lost.evident = True
            self.fail_one(match, operation, Failure(lost))
            return None

    def _assume(self, match: Match, operation: Operation) -> None:
        """Receive what fits the array for the result, if there is one."""
        assumed = call_by_out(operation) if self.here == 1 and match.error is None else None
        if assumed is not None:
            match.pattern, match.assumed = assumed, True

    def _look_or_ask(self, match: Match, operation: Operation) -> None:
        """Look for dtype and shape where the others post their calls, or ask the other processes."""
        if not self._engine.look(self, match, operation):
            self._ask(operation.seq, match)

    def learn(self, match: Match, operation: Operation, met: SignatureMismatchError) -> None:
        """Start an operation without an array, now that a row shows the call of another rank, unless they differ."""
        if operation.done:
            self.ended(match, operation)
            return
        theirs = self._parse_met(match, operation, met)
        if theirs is None:
            return
        assert match.pattern is not None
        if not signature_of(operation.call, operation.place).agrees(theirs.fingerprint):
            self._fail_where_met(match, operation, met)
        elif match.pattern.has_all_values:  # an answer came before
            self._start_settled_ends(match)
        elif theirs.call is None:  # it is too long for a row
            self._ask(operation.seq, match)
        else:
            self._adopt(match, theirs.call)

    def _adopt(self, match: Match, call: Call) -> None:
        """Start the ends here that wait for dtype and shape, now that a call of another rank has both."""
        match.pattern = call
        self._check_results(match)
        self._start_settled_ends(match)

    def ask(self, before_ns: int) -> None:
        """Report the operations that wait since an instant."""
        for seq, match in self._matches.items():
            if match.first is not None and match.started_ns <= before_ns:
                self._ask(seq, match)

    def _ask(self, seq: int, match: Match) -> None:
        """Report the calls of an operation here, once; others answer a call without dtype and shape."""
        if not match.asked:
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
            self._adopt(match, theirs.call)
        elif match.error is None:
            self.history.compare(seq, theirs, self._far)
        return True

    def compare_unmet(self, number: int, src: int, theirs: PlainSignature) -> None:
        """Compare a message, or a row of a board, that no rank here has met with the call here.

        An operation without an array starts if they agree. If the call is over here, the sender finds the difference
        itself, or asks, unless it receives nothing.

        Args:
            number: Low 16 bits of the number of its operation.
            src: World rank of the sender.
            theirs: CallSignature of its call.
        """
        last = self.history.next_seq - 1
        behind = (last - number) & 0xFFFF
        seq = last - behind
        found = self.history.find(seq) if behind < 0x8000 and seq not in self._failed else None
        match = self._matches.get(seq)
        is_open = match is not None and match.pattern is not None and not match.pattern.has_all_values
        if found is None or (not is_open and found[0].agrees(theirs.fingerprint)):
            return
        own = self.history.call(seq)
        try:
            call = parse(theirs.text, theirs.fingerprint)
        except ProtocolError:  # the link's own checks name it
            return
        if match is not None and is_open and found[0].agrees(theirs.fingerprint):
            if call.call is None:
                self._ask(seq, match)
            else:
                self._adopt(match, call.call)
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


def _other_end(error: SignatureMismatchError, operation: Operation) -> int:
    """Return the world rank whose message an operation has met."""
    other = error.dst if error.src == operation.context.rank else error.src
    assert other is not None, "this is a bug in overlap: a message of no rank"
    return other
