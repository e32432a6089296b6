"""Communicators: bring the ends of an operation together, and find ranks that issue different calls.

An "end" is one rank's part of an operation. The ranks of this process ("here") that are in one group share one
`Communicator` for each stream; each rank issues through its `Port`. The ends of one operation meet in a `Match`, by
sequence number, and then go to the engine. If the group spans processes, only the ends here meet here; each starts as
soon as dtype and shape are known.

Each message between processes carries the signature of its call, so that most differences are found where a message
meets a receive. Other ranks that differ wait for ever, or wait for nobody. So a process asks the others about
operations that wait for long, and they compare the call with theirs; and messages that no receive has met are compared
with past calls. The process that finds a difference fails the operation on all ranks of the group.
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
from .arguments import check_out_fits, infer_call_from_out
from .context import RankContext
from .failure import Failure
from .match import (
    History,
    Key,
    Match,
    RankCall,
    gave_up_error_maker,
    minority_and_majority,
    mismatch_error_maker,
    peer_error_maker,
)
from .operation import Operation
from .plan import CallPlan
from .signature import CallSignature, parse_signature, signature_of

if TYPE_CHECKING:
    from transports import Envelope, PlainSignature, Wire

    from .communicators import Communicators
    from .lane import Lane
    from .message import Message

# If two ranks differ, time in which a third one may arrive and show which of them is in the minority.
_DISPUTE_S = 0.05

# Most failed operations that a communicator remembers.
_MOST_FAILED = 256


class BaseEngine(ABC):
    """Engine that runs the operations of one process's ranks once they have matched."""

    def loan_shared_memory(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that other processes of this host can read, and a function that releases it.

        Return None if there is no such memory, or less than `nbytes` of it is free.
        """
        return None

    @abstractmethod
    def is_direct(self, members: tuple[int, ...]) -> bool:
        """Whether all of these world ranks are in this process, and no bytes move before all of them have arrived."""

    @abstractmethod
    def make_plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Make the plan by which a rank carries out operations with one call.

        Args:
            communicator: Communicator of the operations.
            call: The call that all ranks agree on; it has all its values.
            operation: The first of these operations. The rank's own call, `operation.call`, may lack dtype and shape.
        """

    def watch_remote_call(self, communicator: Communicator, match: Match, operation: Operation) -> bool:
        """Watch for the call of another rank, which tells an operation without an array its dtype and shape.

        The engine then calls `Communicator.start_with_board_row` (the call stood in a row of the board), or
        `Communicator.compare_unmet_call` (a message had it).

        Args:
            communicator: Communicator of the operation.
            match: Its match; the pattern lacks dtype and shape.
            operation: The end that has arrived here.

        Returns:
            Whether the engine watches; False if it cannot see calls of other ranks, so that they must be asked.
        """
        return False

    @abstractmethod
    def carry_message(self, lane: Lane, send: Message[object], receive: Message[object], pattern: Call) -> None:
        """Move the data of a message inside this process, and end the send and the receive.

        Args:
            lane: Lane of the message.
            send: The sender's end.
            receive: The receiver's end, whose call agrees.
            pattern: Call of the sender, which has dtype and shape.
        """

    def wire(self, context: RankContext, peer: int) -> Wire | None:
        """Return the wire of the messages with a world rank, or None if they match inside this process."""
        return None

    def oldest_announced_message(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        """Return the oldest message that other processes have announced to a rank here, or None.

        Args:
            rank: World rank of the receiver.
            choices: Messages that count, as (world rank of the sender, tag on the wire).
        """
        return None

    async def wait_for_announced_message(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope:
        """Wait until another process announces a message, and return it. Arguments: see `oldest_announced_message`.

        This default is for engines without wires, which never call it.

        Raises:
            TransportError: If the wire to a sender is lost.
        """
        raise AssertionError("this is a bug in overlap, please report it: an engine without wires waits for one")

    def choose_message_soon(self, context: RankContext, look: Callable[[], None]) -> None:
        """Call `look` on the loop's thread, when a receive from any source should choose a message.

        Any thread may call this. In a simulation that is late enough that all messages of the same instant are present.
        """
        if get_ident() == context.thread:
            context.call_in_turn(look)
        else:  # `look` may start or cancel a task
            context.post_to_loop(look)

    def unmet_signatures(
        self, ranks: Iterable[int], communicators: Iterable[Communicator]
    ) -> list[tuple[int, int, PlainSignature]]:
        """Return messages of other processes that no rank here has met, and rows of boards that no rank here reads.

        Args:
            ranks: World ranks here.
            communicators: Communicators that span processes.

        Returns:
            For each message or row: (transport tag, world rank of the sender, signature of the call).
        """
        return []

    def close(self, communicator: Communicator) -> None:  # noqa: B027 - an engine may own nothing of it
        """Free the resources of a communicator that no rank of this process uses any more."""

    @abstractmethod
    async def aclose(self) -> None:
        """Wait until the engine's present work is done, and end its threads."""


class Communicator:
    """Matches the operations that the ranks of one group issue on one stream, by number; see the module.

    Args:
        shared: The communicators of the world.

    Attributes:
        key: Key of the communicator, the same on every rank.
        name: Name of the group in messages.
        members: World ranks that match, in group order.
        size: Number of these ranks. In a simulation of representatives it is the number of ranks of the group.
        local_count: Number of members in this process.
        spans: Whether some members are in other processes.
        direct: Whether all members are in this process, and no bytes move before all of them have arrived.
        history: Past calls of the ranks here; missing unless `spans`.
    """

    def __init__(self, shared: Communicators, key: Key, name: str, members: tuple[int, ...]) -> None:
        self.key: Key = key
        self.name: str = name
        self.members: tuple[int, ...] = members
        self.size: int = len(members)
        local = shared.local
        self.local_count: int = self.size if local is None else sum(member in local for member in members)
        self.spans: bool = self.local_count < self.size
        # also direct: a group whose members are all the same rank needs no wire
        self.direct: bool = not self.spans and (shared.engine.is_direct(members) or len(set(members)) == 1)
        if self.spans:
            self.history: History = History(key, name, members)
            self._control = shared.control
        self._shared, self._engine, self._finished_ranks = shared, shared.engine, shared.finished_ranks
        self._matches: dict[int, Match] = {}
        self._moving: dict[int, Match] = {}  # matches whose ends are all here and under way, by number
        self._broken: Callable[[], BaseException] | None = None  # error of all operations from a number on
        self._broken_from = 0
        self._failed: deque[int] = deque(maxlen=_MOST_FAILED)  # numbers of operations, if others are elsewhere

    def member_index(self, position: int, rank: int) -> int:
        """Return the index in `members` of a rank: its group rank (`position`), unless some ranks represent others.

        Args:
            position: Group rank.
            rank: World rank.
        """
        return position

    # -- matching ----------------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation, plan: CallPlan | None = None) -> None:
        """Match the end of a rank that has arrived, if the communicator spans processes; otherwise see `Port.match`.

        Args:
            operation: The end, which has its call.
            plan: Plan that starts the end; None: the plan is found or made once dtype and shape are known.
        """
        self.history.record(operation)
        # find its match, by number
        seq, call = operation.seq, operation.call
        match = self._matches.get(seq)
        if match is None:
            match = self._matches[seq] = Match([None] * self.size)
            self.set_initial_error(match, operation)
        match[operation.port.position] = operation
        match.arrived += 1
        # compare it with the other ends here, and with reports of other processes
        if match.pattern is not call:
            self._compare_with_pattern(match, operation)
        for report in self._shared.take_early_reports(self.history, seq) if self._shared.early_reports else ():
            if isinstance(report, RankCall):
                self.compare_remote_call(seq, report)
            else:
                self.fail_operation(seq, report)
        if match.remote_calls:
            self.history.answer_with_shape(seq, match.remote_calls.values(), self._control)
        if call.dtype is None and match.pattern is not None and not match.pattern.has_all_values:
            self._assume_call_from_out(match, operation)
        # start it
        if match.error is None:
            self.start_arrived_end(match, operation, plan)
            lacks_shape = match.pattern is not None and not match.pattern.has_all_values
            # the engine may see the call of a rank that has an array; else the other processes are asked for it
            if lacks_shape and not self._engine.watch_remote_call(self, match, operation):
                self._send_calls_once(seq, match)
        elif not operation.done:
            self._fail_end(match, operation, Failure(match.error()))

    def make_lone_match(self, operation: Operation) -> Match:
        """Make and return the match of an operation whose other ends are all in other processes.

        The match is kept until the operation is over. No other match may have its number.
        """
        match = self._matches[operation.seq] = Match([None] * self.size)
        match[operation.port.position] = match.first = operation
        match.arrived, match.pattern = 1, operation.call
        return match

    def get_or_make_plan(self, call: Call, operation: Operation, match: Match | None = None) -> CallPlan:
        """Return the plan that a rank's port keeps for a call, or make and keep a new one.

        Args:
            call: The call that all ranks agree on.
            operation: The end of the rank.
            match: The match, if the ends of all ranks are here: a new plan that runs them together is kept at all their
                ports. None: a new plan is kept at the port of `operation` alone.
        """
        plan = operation.port.plans.get(call)
        if plan is None:
            plan = self._engine.make_plan(self, call, operation)
            if plan.lasts:
                for end in match.ends if match is not None and plan.runs_all_ranks else (operation,):
                    end.port.keep_plan(call, plan)
        return plan

    def start_arrived_end(self, match: Match, operation: Operation, plan: CallPlan | None = None) -> None:
        """Start an end that has arrived, if dtype and shape are known, and lock its arrays unless it ends at once.

        Args:
            match: The match of the operation.
            operation: The end that has arrived.
            plan: Plan of the end, which starts it. None: all ends here that are not running are started, if dtype and
                shape are known.
        """
        lock_later = operation.may_leave_at_once  # a small input is copied: it needs no lock if the end ends at once
        if not lock_later:
            operation.lock_arrays()
        if plan is None:
            self._start_waiting_ends(match)
        else:
            self.start_end(match, operation, plan)
        if lock_later and not operation.done:
            operation.lock_arrays()
        if not self.spans and match.arrived == self.local_count and match.ended < self.local_count:
            self._moving[operation.seq] = match

    def _start_waiting_ends(self, match: Match) -> None:
        """Start all ends here that are not running, once any rank has given dtype and shape."""
        if match.pattern is not None and match.pattern.has_all_values:
            for operation in match.ends:
                if operation.is_unstarted:
                    self.start_end(match, operation)

    def start_end(self, match: Match, operation: Operation, plan: CallPlan | None = None) -> None:
        """Start one rank's end. An error fails it, and the ends of all other ranks.

        Args:
            match: The match of the operation.
            operation: The end.
            plan: Plan of the end; None: the one that its port keeps for the call of the match, or a new one.
        """
        try:
            (plan or self.get_or_make_plan(cast("Call", match.pattern), operation)).start(match, operation)
        except Exception as error:  # no memory, no wire between the ranks, no schedule that fits
            operation.on_bytes_stopped()  # the plan may have set it moving
            self.settle(match, operation, error)

    @property
    def identity(self) -> str:
        """Short name, the same on every rank, for messages to people."""
        return f"{self._tag_base:x}"

    @property
    def variant(self) -> str:
        """Text that tells it from others of the same ranks, in reports on both."""
        return f"number {self.key.occurrence + 1}, stream {self.key.stream}"

    def fail_and_report(self, operation: Operation, failure: Failure) -> None:
        """Fail an operation on all ranks, because one rank has no input for it.

        Args:
            operation: The end of the rank without an input; it has a number and has not arrived.
            failure: The reason. The other ends get a `PeerFailedError` that names this rank.
        """
        seq = operation.seq
        match = self._matches.setdefault(seq, Match([None] * len(self.members)))
        match.arrived += 1
        if self.spans:
            issued, rank = self.history.issued, operation.context.rank
            issued[rank] = max(issued.get(rank, 0), seq + 1)
            self._shared.take_early_reports(self.history, seq)  # dropped: the failure answers them
        elif match.arrived == self.local_count:
            del self._matches[seq]
        self.fail_end_and_peers(match, operation, failure)

    def give_up_waiting(self, operation: Operation, failure: Failure) -> None:
        """Fail an operation that its rank waits for no longer, and all present and later ones of the communicator.

        All of them fail, in this process and in others, because nobody knows how far the other ranks are.

        Args:
            operation: The end of the rank that gives up.
            failure: Failure of that end. All others get a `PeerFailedError` that says that this rank gave up.
        """
        error = gave_up_error_maker(operation, failure.error)
        operation.fail(failure)
        self._shared.fail_operations_of(self.key.id, error)
        if self.spans:
            # from number 0 onwards: all operations, whatever other processes have reached
            self._control.send_operation_failed(self.history, 0, error(), onwards=True)

    def fail_operations_from(self, error: Callable[[], BaseException], first: int = 0, *, seen: bool = True) -> None:
        """Fail all operations from number `first` on, on the ranks of this process, without waiting for them.

        Args:
            error: Makes a new error for each end.
            first: Number of the first operation to fail.
            seen: Whether the errors count as seen; an error that nobody sees fails its rank at the end.
        """
        if self._broken is None or first < self._broken_from:
            self._broken, self._broken_from = error, first
        for matches in (self._matches, self._moving):
            for seq, match in list(matches.items()):
                if seq >= first:
                    del matches[seq]
                    match.error = match.error or error
                    for end in match.ends:
                        # this end raises an error of the communicator
                        self._shared.unraised_errors.pop(self.key.id, None)
                        end.fail(Failure(error(), seen=seen))

    def on_rank_left(self, rank: int) -> None:
        """Fail the matches that wait for `rank`, which has finished its program."""
        for seq, match in list(self._matches.items()):
            missing = rank in (self._ranks_left_before(seq) if self.spans else self.missing_ranks(seq))
            if match.pattern is not None and match.error is None and missing:
                self._fail_all_ends(match, self._left_error_maker(rank, match))

    def missing_ranks(self, seq: int) -> list[int]:
        """Return the world ranks that are not known to have arrived at operation `seq`; [] if no rank here waits."""
        match = self._matches.get(seq)
        if match is None:
            return []
        arrived = match.remote_calls
        return [rank for rank, end in zip(self.members, match, strict=False) if end is None and rank not in arrived]

    def forget_operation(self, seq: int) -> None:
        """Drop the match of operation `seq`, if there is one: the operation is abandoned."""
        self._matches.pop(seq, None)

    def first_transport_tag(self, seq: int) -> int:
        """Return the first of the 256 transport tags of operation `seq`, one for each channel.

        The tag contains only the low 16 bits of the number: fewer than 65,536 operations are in flight at once.
        """
        return self._tag_base + ((seq & 0xFFFF) << 8)

    @cached_property
    def _tag_base(self) -> int:
        return self.key.tag_base()

    def settle(self, match: Match, operation: Operation, error: BaseException | None) -> None:
        """End one rank's end, whose bytes have stopped moving: with the result, or with an error, which fails all ends.

        Any thread may call this with an error; without one, only the loop's thread or a thread in its place.

        Args:
            match: The match of the operation.
            operation: The end of a rank here.
            error: Error of the transfer; None: it went well.
        """
        if error is not None:
            if get_ident() != operation.context.thread:  # only the loop may fail the other ends
                operation.context.post_to_loop(self.settle, match, operation, error)
                return
            if isinstance(error, TransportError):
                error.operation = f"{operation.label} ({operation.call_site})"
            if not operation.done:
                self.fail_end_and_peers(match, operation, Failure(error))
                if self.spans:  # `_fail_end` has counted it as over
                    return
        else:
            # the last arrival in this process: those in other processes are not known
            met_ns = operation.started_ns if self.local_count == 1 else max(end.started_ns for end in match.ends)
            pattern: Call = match.pattern  # type: ignore[assignment]  # an ended operation has a pattern
            operation.finish(operation.context.now_ns(), operation.describe_meeting(pattern, met_ns))
        self.count_ended(match, operation)

    def count_ended(self, match: Match, operation: Operation) -> None:
        """Count one rank's end of a matched operation as over, and forget the match with the last one."""
        match.ended += 1
        if match.ended == self.local_count:
            (self._matches if self.spans else self._moving).pop(operation.seq, None)

    # -- errors --------------------------------------------------------------------------------------------------------

    def _ranks_left_before(self, seq: int) -> set[int]:
        """Return the world ranks that have finished their program without issuing operation `seq`."""
        left = self._finished_ranks.intersection(self.members)
        if not self.spans:
            return left
        counts = {rank: self._shared.issued_count(rank, self.history) for rank in left}
        return {rank for rank, count in counts.items() if count is not None and seq >= count}

    def set_initial_error(self, match: Match, operation: Operation) -> None:
        """Set the error of a new match if the communicator is broken off, or a member has finished its program.

        The caller then fails `operation`, the first end of the match, with that error.
        """
        if self._broken is not None and self._is_broken(operation.seq):
            match.error = self._broken
            self._shared.unraised_errors.pop(self.key.id, None)
            return
        left = self._ranks_left_before(operation.seq) if self._finished_ranks else set()
        if left:
            match[operation.port.match_index] = operation  # the error names the ends that have arrived
            match.error = self._left_error_maker(min(left), match)

    def _left_error_maker(self, rank: int, match: Match) -> Callable[[], RankLeftError]:
        """Return a function that makes the error for a match that needs `rank`, which has finished its program."""
        ends = match.ends
        arrived = ", ".join(str(end.context.rank) for end in ends)  # some of them may still compute
        subject = f"rank {arrived} needs" if len(ends) == 1 else f"ranks {arrived} need"
        message = f"rank {rank} finished its program while {subject} it in {ends[0].label} ({ends[0].call_site})"
        return lambda: RankLeftError(message, culprit=rank)

    def fail_end_and_peers(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with an error, and because of it the ends of all other ranks, in all processes.

        Two errors are handled differently. If a wire broke, all wait a moment for a report of the cause, which may end
        the world with a better error. If a message has met another call, all ends fail with a mismatch error.

        Args:
            match: The match of the operation.
            operation: The end with the error.
            failure: Failure of that end; the other ends get a `PeerFailedError` that names this rank.
        """
        cause = failure.error
        if self.spans and isinstance(cause, SignatureMismatchError):
            self._fail_met_mismatch(match, operation, cause)
            return
        if self.spans and isinstance(cause, LinkLostError) and not cause.evident:
            self._control.delay_wire_failure(
                operation, cause, partial(self.fail_end_and_peers, match, operation, failure)
            )
            return
        error = peer_error_maker(operation, cause)
        self._fail_end(match, operation, failure)
        self._fail_all_ends(match, error)
        self._report_failure(operation.seq, error)

    def _fail_end(self, match: Match, end: Operation, failure: Failure) -> None:
        """Fail one end; if the communicator spans processes, count it as over unless its bytes move.

        Inside a process the match is removed as the last end arrives, and `settle` counts ends whose bytes have moved.
        """
        is_over = self.spans and end.scope is None and not end.done
        end.fail(failure)
        if self.spans:
            self._failed.append(end.seq)
        if is_over:
            self.count_ended(match, end)

    def _fail_all_ends(self, match: Match, error: Callable[[], BaseException]) -> None:
        """Fail every end, each with an error of its own: one exception raised in two tasks would mix tracebacks."""
        match.error = error
        for end in match.ends:
            self._fail_end(match, end, Failure(error()))

    def _report_failure(self, seq: int, error: Callable[[], BaseException]) -> None:
        """Report a failed operation to the other processes of the group, if there are any."""
        if self.spans:
            self._control.send_operation_failed(self.history, seq, error())

    # -- ends in this process ------------------------------------------------------------------------------------------

    def _compare_with_pattern(self, match: Match, operation: Operation) -> None:
        """Fail the match if the call of an arrived end differs from the pattern.

        If the pattern lacks dtype and shape and the call agrees, the call becomes the pattern.
        """
        pattern, call = match.pattern, operation.call
        if match.disputed:
            self._fail_mismatch(match, operation)
        elif pattern is None:  # the first end; its `out` was checked with its arguments
            match.pattern, match.first = call, operation
        elif pattern.dtype is None and pattern.agrees(call):  # perhaps the first end with dtype and shape
            match.pattern, match.first = call, operation
            self._check_outs_fit(match)
        elif match.error is None and call.dtype is None and pattern.agrees(call):  # it only receives
            self._check_outs_fit(match)
        elif match.error is None and not pattern.agrees(call):
            self._fail_mismatch(match, operation)

    def _check_outs_fit(self, match: Match) -> None:
        """Fail the operation if the `out` of an end here differs from the pattern in dtype or shape."""
        assert match.pattern is not None
        for end in match:
            if end is not None and match.error is None:
                try:
                    check_out_fits(end.out, match.pattern, end.member.rank)
                except UsageError as error:
                    self.fail_end_and_peers(match, end, Failure(error))

    def _fail_mismatch(self, match: Match, operation: Operation, *, final: bool = False) -> None:
        """Fail a match whose ends differ, with an error that names the minority.

        If both sides are of equal size, a direct communicator waits for more ends first, unless `final`: no bytes move
        there until all have arrived. On others some ends could succeed in the meantime, so that they fail at once.
        """
        if match.error is not None:
            return
        rank_calls = [RankCall(self.members[end.port.match_index], end.call, end.call_site) for end in match.ends]
        rank_calls += match.remote_calls.values()
        few, many = minority_and_majority(rank_calls)
        if final or not self.direct or len(few) < len(many) or len(rank_calls) == len(self.members):
            error = mismatch_error_maker(self.name, operation.seq, few[0], many[0])
            self._report_failure(operation.seq, error)
            self._fail_all_ends(match, error)
        elif not match.disputed:
            match.disputed, match.pattern = True, None  # without a pattern, each later end comes to this dispute
            operation.context.spawn(self._fail_mismatch_later, match, operation)

    async def _fail_mismatch_later(self, match: Match, operation: Operation) -> None:
        """Fail a match after a time in which further ranks may show which side is the minority."""
        await trio.sleep(_DISPUTE_S)
        self._fail_mismatch(match, operation, final=True)

    # -- ends in other processes ---------------------------------------------------------------------------------------

    def _fail_met_mismatch(self, match: Match, operation: Operation, error: SignatureMismatchError) -> None:
        """Fail an operation on all ranks, because a message of the end `operation` has met a rank with another call.

        If this rank's call was only inferred from its `out`, and all else agrees, the error blames `out`.
        """
        own, other = operation.context.rank, _other_rank(error, operation)
        theirs = self._parse_met_signature(match, operation, error)
        if theirs is None:
            return
        if match.assumed and theirs.call is not None and operation.call.agrees(theirs.call):
            match.pattern, match.assumed = theirs.call, False
            self._check_outs_fit(match)  # the array for the result is of another shape or dtype
        if match.error is None:
            call = RankCall(own, operation.call, operation.call_site)
            differ = mismatch_error_maker(self.name, operation.seq, (other, theirs.what, theirs.site), call)
            self._report_failure(operation.seq, differ)
            self._fail_all_ends(match, differ)

    def _parse_met_signature(
        self, match: Match, operation: Operation, error: SignatureMismatchError
    ) -> CallSignature | None:
        """Return the signature of the other rank; if it is invalid, fail the operation and return None."""
        try:
            return parse_signature(error.theirs.text, error.theirs.fingerprint)
        except ProtocolError as invalid:
            own, other = operation.context.rank, _other_rank(error, operation)
            lost = LinkLostError(f"rank {other} sent what is no message of overlap: {invalid}", src=other, dst=own)
            lost.evident = True  # this is the cause: no report of another one will follow
            self.fail_end_and_peers(match, operation, Failure(lost))
            return None

    def _assume_call_from_out(self, match: Match, operation: Operation) -> None:
        """Infer dtype and shape of an operation that only receives from its `out`, so that it need not wait for them.

        If another rank's call differs, a message or a report will show it.
        """
        assumed = infer_call_from_out(operation) if self.local_count == 1 and match.error is None else None
        if assumed is not None:
            match.pattern, match.assumed = assumed, True

    def start_with_board_row(self, match: Match, operation: Operation, met: SignatureMismatchError) -> None:
        """Start an operation without an array, now that a row of a board shows the call of another rank.

        If the calls differ, the operation fails. If the call was too long for the row, the other processes are asked.

        Args:
            match: The match of the operation.
            operation: The end that waits; if it is done by now, it is only counted as over.
            met: Exception with the signature of the row. Here it is no failure: the engine reports each row whose
                fingerprint differs by it, and the fingerprint of an operation without an array always differs.
        """
        if operation.done:
            self.count_ended(match, operation)
            return
        theirs = self._parse_met_signature(match, operation, met)
        if theirs is None:
            return
        assert match.pattern is not None
        if not signature_of(operation.call, operation.place).agrees(theirs.fingerprint):
            self._fail_met_mismatch(match, operation, met)
        elif match.pattern.has_all_values:  # an answer came before
            self._start_waiting_ends(match)
        elif theirs.call is None:  # it was too long for a row
            self._send_calls_once(operation.seq, match)
        else:
            self._start_with_call(match, theirs.call)

    def _start_with_call(self, match: Match, call: Call) -> None:
        """Start the ends here that wait for dtype and shape, which `call`, of another rank, has."""
        match.pattern = call
        self._check_outs_fit(match)
        self._start_waiting_ends(match)

    def ask_others_soon(self) -> None:
        """Let the control plane ask the other ranks soon about operations that wait."""
        self._control.look_soon()

    def ask_about_waits(self, before_ns: int) -> bool:
        """Report the operations that began to wait here before an instant to the other processes, which compare them.

        Return whether there are any.
        """
        waiting = [
            (seq, match)
            for seq, match in self._matches.items()
            if match.first is not None and match.started_ns <= before_ns
        ]
        for seq, match in waiting:
            self._send_calls_once(seq, match)
        return bool(waiting)

    def _send_calls_once(self, seq: int, match: Match) -> None:
        """Let the other processes compare the calls here with theirs; they answer a call without dtype and shape."""
        if not match.asked:
            match.asked = True
            for end in match.ends:
                call = RankCall(end.context.rank, end.call, signature_of(end.call, end.place).site)
                self._control.send_waiting_call(self.history, seq, call)

    def compare_remote_call(self, seq: int, theirs: RankCall) -> bool:
        """Compare the call of a waiting rank of another process with the call of the ranks here.

        * The calls differ: the operation fails in all processes.
        * The call here lacks dtype and shape, and the other one has them: the ends here start.
        * The other call lacks them, and the one here has them: they are sent to the other process.

        Args:
            seq: Number of the operation.
            theirs: The waiting rank, its call and its line.

        Returns:
            Whether the report is settled; False: no rank here has arrived at the operation, and the caller keeps it.
        """
        match = self._matches.get(seq)
        if match is None or match.first is None:
            return self._compare_with_history(seq, theirs) or match is not None
        match.remote_calls = {**match.remote_calls, theirs.rank: theirs}
        assert match.pattern is not None
        has_shape = theirs.call.dtype is not None
        if match.assumed and has_shape and match.first.call.agrees(theirs.call):
            # Dtype and shape were only inferred from `out`; the other rank's are right, and `out` must fit them.
            match.pattern, match.assumed = theirs.call, False
            self._check_outs_fit(match)
        elif not match.pattern.agrees(theirs.call):
            self._fail_mismatch(match, match.first)
        elif match.pattern.dtype is None and has_shape:
            self._start_with_call(match, theirs.call)
        elif match.error is None:
            self.history.compare_and_answer(seq, theirs, self._control)
        return True

    def _compare_with_history(self, seq: int, theirs: RankCall) -> bool:
        """Fail the operation if a remote call differs from the past one here. Return whether one was issued here."""
        if (error := self.history.compare_and_answer(seq, theirs, self._control)) is not None:
            self.fail_operation(seq, error)
        return self.history.has_forgotten(seq) or self.history.find_signature(seq) is not None

    def compare_unmet_call(self, number: int, src: int, theirs: PlainSignature) -> None:
        """Compare the call in a message, or in a row of a board, that no rank here has met with the call here.

        If they agree, an operation here that waits for dtype and shape starts. If they differ, the operation fails on
        all ranks. But if it is over here and the sender also receives, nothing happens: the sender waits, and asks.

        Args:
            number: Low 16 bits of the number of the operation.
            src: World rank of the sender.
            theirs: Signature of the sender's call.
        """
        # The full number: that of the last operation issued here with these low 16 bits. If operation 69,999 was the
        # last, 4,463 stands for it. If the number lies more than 32,767 back, the operation is still to come.
        last = self.history.next_seq - 1
        behind = (last - number) & 0xFFFF
        seq = last - behind
        found = self.history.find_signature(seq) if behind < 0x8000 and seq not in self._failed else None
        if found is None:
            return
        own, own_rank = found
        agree = own.agrees(theirs.fingerprint)
        match = self._matches.get(seq)
        lacks_shape = match is not None and match.pattern is not None and not match.pattern.has_all_values
        if agree and not lacks_shape:
            return
        try:
            met = parse_signature(theirs.text, theirs.fingerprint)
        except ProtocolError:  # the checks of the link report it
            return
        if match is not None and agree:
            if met.call is None:
                self._send_calls_once(seq, match)
            else:
                self._start_with_call(match, met.call)
            return
        waits = met.call is not None and met.call.receives_at(self.members.index(src))
        if match is not None or not waits:
            error = mismatch_error_maker(self.name, seq, (src, met.what, met.site), (own_rank, own.what, own.site))
            self._report_failure(seq, error)
            self.fail_operation(seq, error)

    def fail_operation(self, seq: int, error: Callable[[], BaseException]) -> bool:
        """Fail operation `seq` here. Return False if no rank here has issued it.

        If it is over here, all later operations fail on all ranks instead: a rank that has failed at `seq` may not take
        part in them.

        Args:
            seq: Number of the operation.
            error: Makes a new error for each end.
        """
        match = self._matches.get(seq)
        if match is not None:
            if match.error is None:
                self._fail_all_ends(match, error)
        elif seq >= self.history.next_seq:
            return False
        elif seq not in self._failed and not self._is_broken(seq):
            self._failed.append(seq)
            if isinstance(error(), CollectiveMismatchError):  # the world raises it, if no later operation does
                self._shared.unraised_errors.setdefault(self.history.id, error)
            self.fail_operations_from(error, seq + 1, seen=False)
            self._control.send_operation_failed(self.history, seq + 1, error(), onwards=True)
        return True

    def _is_broken(self, seq: int) -> bool:
        """Whether `fail_operations_from` has failed operation `seq`, which may not have been issued yet."""
        return self._broken is not None and seq >= self._broken_from


def _other_rank(error: SignatureMismatchError, operation: Operation) -> int:
    """Return the world rank at the other end of the message that has met another call."""
    other = error.dst if error.src == operation.context.rank else error.src
    assert other is not None, "this is a bug in overlap: a message of no rank"
    return other
