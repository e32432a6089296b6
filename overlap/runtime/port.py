"""Ports: where one rank's calls of collectives on a group are checked, numbered and matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

from numpy import ndarray

from ..collectives.call import Call
from ..collectives.kinds import ALL_REDUCE, BROADCAST, PERMUTE, Collective, check_counts
from ..errors import GroupAbortedError, UsageError, argument_text, one_line_text
from ..flight.recorder import Known
from ..timeline.recording import RawGroup, RawSpan
from .arguments import check_options, check_pairs, check_root, prepare_input, set_output_array
from .communicator import Communicator
from .communicators import Communicators
from .context import STEP_OF_TASK, RankContext
from .derived import check_same_world
from .failure import Failure
from .future import Future
from .handover import ABOUT_TO_SLEEP_S, OperationRun
from .interceptor import Interceptor
from .match import Key, Match, Unfit
from .operation import NOWHERE, CallArguments, CollectiveFuture
from .outstanding import CallSite, check_timeout
from .plan import CallPlan
from .state import DONE, MATCHING
from .stream import OpenLane, Stream, Streams, start_operation
from .tree_operation import TreeOperation, check_tree_arguments, remove_ended_part, tree_future
from .trees import is_tree

if TYPE_CHECKING:
    from transports.shared_memory.engine import Run

    from .group import GroupRank

# Most plans that a port keeps: training repeats a few calls, but blocks of other shapes make a new plan each time.
_MOST_PLANS = 256

# A thread that waits for longer lets the event loop match its operation, so that reports of waits and deadlines see it.
_LONGEST_KNOWN_S = 0.05
# Numbers of the engine: a submission that a thread waits for, and the state of a run that has ended well.
_WAITED_FOR, _RUN_DONE = 2, 1

_FORMS = (list, tuple, dict)
Memory: TypeAlias = tuple[int, int, object, bool]
"""Addresses of the input and of the result, the object that owns the memory, and whether the caller waits at once."""

_IN_PLACE = (ALL_REDUCE, BROADCAST)  # may have their result in the place of the input, on any rank


class Port:
    """Numbers the collectives that one rank issues on a group and a stream, and passes them on to be matched.

    All ranks of the group issue them in the same order, so that equal numbers belong together.

    Args:
        context: Context of the rank.
        communicator: Matches the operations of this port with those of the other ranks.
        stream: Stream of the operations; for parts of trees, the lane of one part.
        member: The rank in its group.
        intercept: Decides when operations arrive, in simulations and checks; None: they arrive at once.

    Attributes:
        position: Group rank.
        match_index: Index of the rank in `communicator.members`: the group rank, unless some ranks represent others.
        next_seq: Number of the next operation.
        group: Name and ranks of the group, for the timeline.
        known_calls: Calls of this port that the flight record has a number for.
        plans: Plans of earlier operations. A key is a call, the usual arguments of a call (see `Ports.issue`), or a
            key that an adapter has given `Ports.keep_for_reissue`.
    """

    __slots__ = (
        "communicator", "context", "group", "intercept", "known_calls", "match_index", "next_seq", "plans", "position",
        "stream",
    )  # fmt: skip

    def __init__(
        self,
        context: RankContext,
        communicator: Communicator,
        stream: Stream | OpenLane,
        member: GroupRank,
        intercept: Interceptor | None,
    ) -> None:
        self.context: RankContext = context
        self.communicator: Communicator = communicator
        self.stream: Stream | OpenLane = stream
        self.intercept: Interceptor | None = intercept
        self.position: int = member.rank
        self.match_index: int = communicator.member_index(member.rank, context.rank)
        self.next_seq: int = 0
        self.group: RawGroup = member.label
        self.known_calls: Known = Known()
        self.plans: dict[object, CallPlan] = {}

    def keep_plan(self, key: object, plan: CallPlan) -> None:
        """Keep a plan under a key; see `plans`. If there are too many, all others are dropped."""
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def enqueue(self, operation: CollectiveFuture[Any]) -> None:
        """Number an operation, and match it with the other ranks' operations as soon as its stream has room.

        On the loop's thread, or on one in its place. An operation without room waits in the stream, which starts it.
        """
        context, lane, seq = self.context, self.stream, self.next_seq
        if self.intercept is not None:
            self.intercept.on_issued(self, operation)
        operation.seq, operation.port, self.next_seq = seq, self, seq + 1  # the port last: other threads look at it
        operation.priority += lane.priority
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        try:
            call: Call | None = operation.call
        except AttributeError:  # its input does not exist yet
            call = None
        operation.record = context.flight.record_issue(operation, self.known_calls, call, seq, now_ns)
        if operation.deadline_s is not None:
            context.deadlines.add(operation, operation.deadline_s)
        if lane.in_flight or lane.in_flight is None:  # not idle, or a lane that counts nothing in flight
            if not lane.admit_or_queue(operation):
                return
        else:  # inlined from `admit_or_queue`: most streams are idle
            context.outstanding.operations[operation] = None
            lane.in_flight[operation] = lane.started
            lane.started += 1
        x = operation.input
        if type(x) is not ndarray and (isinstance(x, Future) or isinstance(operation, TreeOperation)):
            start_operation(operation)
            return
        operation.state = MATCHING  # inlined from `start_operation`, for a short latency
        if self.intercept is None:
            self.match(operation)
        else:
            self.intercept.arrive(self, operation)

    def arrive(self, operation: CollectiveFuture[Any]) -> None:
        """Match an operation whose input exists now."""
        if self.intercept is None:
            self.match(operation)
        else:
            self.intercept.arrive(self, operation)

    def match(self, operation: CollectiveFuture[Any]) -> None:
        """Match an operation of this rank, whose input exists, with those of the other ranks.

        If all ranks share memory, the last one to arrive starts the operations of all; until then the arrays are
        locked. Otherwise each operation starts at once.
        """
        communicator, seq = self.communicator, operation.seq
        if communicator.spans:
            self._match_between_processes(operation)
            return
        # find its match, by number
        matches, here = communicator._matches, communicator.local_count
        match = matches.get(seq)
        if match is None:
            match = matches[seq] = Match([None] * here)
            match.pattern, match.first = operation.call, operation
            if communicator._broken is not None or communicator._finished_ranks:
                communicator.set_initial_error(match, operation)
        match[self.match_index] = operation
        match.arrived += 1
        if match.pattern is not operation.call:
            communicator._compare_with_pattern(match, operation)
        complete = match.arrived == here
        if complete:
            del matches[seq]
        # start all ends together, or this one alone
        context = self.context
        if match.error is not None:
            operation.fail(Failure(match.error()))
        elif not communicator.direct:
            communicator.start_arrived_end(match, operation)
        elif complete:
            plan = operation.plan
            if plan is None or plan.call is not match.pattern:  # the other ranks' call may have dtype and shape
                plan = communicator.get_or_make_plan(cast("Call", match.pattern), operation, match)
            if self.intercept is not None and not self.intercept.may_start(match, operation):
                return
            if not plan.runs_all_ranks:
                communicator.start_arrived_end(match, operation)
                return
            try:
                plan.start(match, operation)
            except Unfit as unfit:
                communicator.fail_end_and_peers(match, unfit.operation, Failure(unfit.__cause__ or unfit))
            except Exception as error:
                communicator.fail_end_and_peers(match, operation, Failure(error))
        elif type(operation.input) is not ndarray or operation.out is not None or operation.locked:
            operation.lock_arrays()
        elif not context.arrays.shapes_only:  # inlined from `lock_arrays`, for a short latency
            operation.locked = context.locks.lock((operation.input,), None)

    def _match_between_processes(self, operation: CollectiveFuture[Any]) -> None:
        """Start an operation as soon as its plan is known.

        It starts here if an earlier call has made the plan and nothing has failed. Else the communicator matches it.
        """
        communicator, plan, seq = self.communicator, operation.plan, operation.seq
        if plan is None:
            plan = self.plans.get(operation.call)
        if plan is None or not self.can_start_at_once():
            communicator.arrive(operation)
            return
        # record its call, inlined from `History.record` for a short latency
        if plan.place != operation.place:
            plan.signature_at(operation.place)
        history, signature, rank = communicator.history, plan.signature, self.context.rank
        runs, history.issued[rank] = history.runs, seq + 1
        # a run is [first number, number after the last, signature, rank]: extend the last one, or begin another
        if runs and runs[-1][1] == seq and runs[-1][2] is signature:
            runs[-1][1] = seq + 1
        else:
            runs.append([seq, seq + 1, signature, rank])
        # start it, alone
        if not plan.try_to_finish(operation):
            communicator.start_arrived_end(communicator.make_lone_match(operation), operation, plan)

    def can_start_at_once(self) -> bool:
        """Whether an operation with a plan can start at once, because the communicator has nothing else to handle.

        That is: all other ranks are in other processes, none has left or failed, and no report of another process waits
        until a rank here arrives.
        """
        communicator = self.communicator
        return (
            communicator.spans
            and communicator.local_count == 1
            and not communicator._finished_ranks
            and communicator._broken is None
            and not communicator._shared.early_reports
        )


class Ports:
    """The ports of one rank on one group, by stream, and the calls that it issues there.

    Any thread of the process may issue. A call from a thread other than the event loop's is checked at once and its
    arrays are locked at once; the loop numbers it later, in the order of the calls, or that thread does so itself, in
    the place of a loop that sleeps.

    Args:
        context: Context of the rank.
        communicators: The communicators of the world.
        streams: The streams of the rank.
        group: The rank in its group.
        use: Reference that is held as long as the rank may issue on the group.
    """

    context: RankContext
    group: GroupRank

    def __init__(
        self,
        context: RankContext,
        communicators: Communicators,
        streams: Streams,
        group: GroupRank,
        use: object,
    ) -> None:
        self.context, self.group, self._use = context, group, use
        self._communicators, self._streams = communicators, streams
        self._ports_by_argument: dict[
            Stream | str | None, Port
        ] = {}  # ports in use, by the `stream` argument of a call
        self._ports_by_stream: dict[Stream, Port] = {}
        self._parts: dict[tuple[Port, int], Port] = {}  # ports of parts of trees, by port of the tree and index of part

    def with_default_stream(self, stream: Stream, group: GroupRank) -> Self:
        """Return a copy for another `GroupRank` of the same rank and group, with another default stream.

        The copy shares the ports, because all calls on a stream are numbered together. Only the streams' names are
        looked up again, as None means another stream.
        """
        other = copy(self)
        other.group, other._streams, other._ports_by_argument = group, self._streams.with_default_stream(stream), {}
        return other

    def issue(
        self,
        kind: Collective,
        x: object,
        out: object,
        stream: Stream | str | None,
        priority: int,
        name: str | None,
        timeout_s: float | None,
        call_site: CallSite | None,
        algorithm: str | None = None,
        op: str | None = None,
        root: int = 0,
        exact: bool = False,
        *,
        counts: object = None,
        shared: bool = False,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> CollectiveFuture[Any]:
        """Check, number and start a collective; it waits in its stream if that has no room.

        After an error it is as if the call had not been made: it gets no number.

        Args:
            kind: Kind of the collective.
            x: The input; None on a rank without one.
            out: Where to put the result; None: in a new array.
            op: Operator of a reduction; None: the kind has none.
            root: Group rank of the root; 0 where the kind has none.
            counts: Rows of each block; None: equal numbers.
            pairs: Sources and destinations of a permute.
            call_site: Line that the errors name; None: that of the caller's caller.
            stream: This and the other options: see `GroupCalls`, and the methods of `CollectiveCalls`.

        Returns:
            The operation, which is issued. A call from another thread may get its number later.

        Raises:
            UsageError: If an argument is invalid.
            PeerFailedError: If the rank has ended.
        """
        caller, context, plain = _getframe(2) if call_site is None else call_site, self.context, type(x) is ndarray
        future_class = CollectiveFuture if plain else self._future_class(kind, x, out)
        operation: CollectiveFuture[Any] = future_class(kind, x, out, caller, priority, name)
        if context.closed:
            raise context.closed_rank_error()
        if type(priority) is not int and not isinstance(priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {argument_text(priority)}")
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        rank, step = STEP_OF_TASK.get()
        operation.member, operation.context = self.group, context
        operation.step = step if rank is context else context.step
        # find the port, and the plan that an earlier call with these arguments has made, if they are the usual ones
        array: Any = x
        is_usual = (
            plain and array.flags.carray and (out is None or (out is x and kind in _IN_PLACE))  # the arrays
            and counts is None and not pairs and type(root) is int  # the arguments of some kinds alone
            and exact is False and shared is False and algorithm is None  # the options
        )  # fmt: skip
        key = (kind.text, op, array.dtype, array.shape, root) if is_usual else None  # all that such calls differ in
        try:
            port = self._ports_by_argument.get(stream)
            plan = None if port is None or key is None else port.plans.get(key)
        except TypeError:  # not hashable: the checks refuse it
            port = plan = None
        if plan is not None:
            operation.plan, operation.call, operation.source = plan, plan.call, array
        else:
            operation.arguments = CallArguments(op, root, counts, exact, shared, algorithm, pairs)  # type: ignore[arg-type]  # `_check_arguments` checks the pairs
            self._check_arguments(operation)
            if port is not None and key is not None and operation.call in port.plans:
                port.keep_plan(key, port.plans[operation.call])
        if get_ident() == context.thread:
            (self._open_port(stream) if port is None else port).enqueue(operation)
        else:
            self._enqueue_from_thread(operation, stream)
        return operation

    def _future_class(self, kind: Collective, x: object, out: object) -> type[CollectiveFuture[Any]]:
        """Return `TreeOperation` if the input or the result may be a tree of arrays, else `CollectiveFuture`.

        The input is no array. A rank that passes None or a future may get a tree, but not with an `out`.
        """
        has_parts = isinstance(x, Future) or (isinstance(x, _FORMS) and is_tree(x))
        may_have_parts = x is None and out is None and kind.traits.rooted  # if the root has a tree
        return TreeOperation if has_parts or may_have_parts else CollectiveFuture

    def _check_arguments(self, operation: CollectiveFuture[Any]) -> None:
        """Raise `UsageError` if an argument is invalid; set the call if the input exists already."""
        context, group, kind, given = self.context, self.group, operation.kind, operation.arguments
        if isinstance(operation, TreeOperation):
            operation.issue_part = self._issue_part
            if isinstance(operation.input, _FORMS):
                operation.input = tree_future(operation.input, context)
                check_tree_arguments(operation)
        if kind.traits.rooted:
            check_root(group, operation)
        elif kind is PERMUTE:
            operation.arguments = given._replace(pairs=check_pairs(group, given.pairs))
        elif given.counts is not None:
            operation.arguments = given._replace(counts=check_counts(kind, given.counts, group.size))
        if given.exact is not False or given.shared is not False or given.algorithm is not None:
            check_options(group, operation)
        out, x = operation.out, operation.input
        if out is not None and not (type(out) is ndarray and out.flags.carray):
            set_output_array(operation)
        if isinstance(x, Future):
            check_same_world(x, context.thread)
        else:
            prepare_input(operation)

    def _open_port(self, stream: Stream | str | None) -> Port:
        """Return the port of a stream; raise `UsageError` if there is no such stream."""
        named = self._streams.find(stream)
        port = self._ports_by_stream.get(named)
        if port is None:
            port = self._ports_by_stream[named] = self._make_port(named, -1)
        self._ports_by_argument[stream] = port
        return port

    def _make_port(self, stream: Stream | OpenLane, part: int) -> Port:
        """Make the port of a stream, or of one part of the trees on it (see `tree_operation`); part -1: none."""
        communicators, (ranks, occurrence, *_) = self._communicators, self.group.key
        communicator = communicators.get_or_make(Key(ranks, occurrence, stream.name, tag=part), self.group.name)
        return Port(self.context, communicator, stream, self.group, communicators.intercept)

    def _issue_part(self, part: CollectiveFuture[Any], index: int, port_of_whole: Port, seq: int) -> None:
        """Issue one part of an operation on a tree, under the number `seq` of that operation.

        `index` is that of the part, the same on all ranks. Parts of one index have a communicator of their own.
        """
        port = self._parts.get((port_of_whole, index))
        if port is None:
            whole = port_of_whole.stream
            lane = OpenLane(whole.name, 0, whole.window, remove_ended_part)
            port = self._parts[port_of_whole, index] = self._make_port(lane, index)
        port.next_seq = seq
        port.enqueue(part)

    def reissue(
        self,
        key: object,
        memory: Memory,
        name: str | None,
        timeout_s: float,
        caller: CallSite,
    ) -> CollectiveFuture[Any] | None:
        """Issue again, from a thread, the call kept under `key` (`keep_for_reissue`), unless that needs the loop.

        Args:
            key: The key.
            memory: Addresses of the arrays; see `Memory`.
            name: Name of the operation; None: that of its kind.
            timeout_s: Time in seconds within which the operation must end.
            caller: The program's line.

        Returns:
            The operation, which may be done; None if nothing is kept, or the loop is needed: nothing has happened then.
        """
        port, context, waits_at_once = self._ports_by_argument.get(None), self.context, memory[3]
        plan = None if port is None else port.plans.get(key)
        if port is None or plan is None:
            return None
        handover, turn, submit = context.handover, context.handover.turn, plan.submit
        # The engine accepts no submission from this thread, or the thread does not wait at once, as it does below:
        # issue it like any operation, but in the loop's place.
        if submit is None or turn is None or type(caller) is not FrameType or not waits_at_once:
            operation = self._make_reissued(plan, name, caller, memory, timeout_s)
            issued = handover.run_in_place(partial(self._enqueue_in_thread, operation, None), False)
            return operation if issued else None
        end, plan.spare = plan.spare, None
        if end is None:
            end = plan.make_spare_run(self._make_reissued(plan, name, caller, memory, timeout_s))
        operation, lane, communicator = end.operation, port.stream, port.communicator
        leave, works = turn.release, False
        try:
            needs_loop = (  # inlined from `Handover.run_in_place` and `_enqueue_in_thread`, for a short latency
                # the loop does not sleep, or has other calls to handle first
                not (turn.acquire(blocking=False) or turn.acquire(timeout=ABOUT_TO_SLEEP_S))
                or handover.posted
                # the rank ends, or an interceptor decides when its operations arrive
                or context.closed or context.outstanding.draining or port.intercept is not None
                # the stream is not idle
                or lane.in_flight or lane.queue
                # another rank has left or failed, or has reported a call that waits
                or communicator._finished_ranks or communicator._broken is not None
                or communicator._shared.early_reports
            )  # fmt: skip
            if needs_loop:
                plan.spare = end
                return None
            works = True
            operation.port, operation.priority, operation.member = port, lane.priority, self.group
            operation.deadline_s, operation.place = timeout_s, (caller.f_code, caller.f_lasti)
            run = self._submit_reissued(port, plan, end, memory, submit)
            works = False
        except BaseException as error:  # see `Handover.run_in_place`
            if works:
                handover.report_interrupted_work(error)
            raise
        finally:
            try:  # noqa: SIM105 - see `Handover.run_in_place`
                leave()
            except RuntimeError:  # it does not hold the turn
                pass
        if run is None:
            return None
        if operation.state is not DONE:
            self._wait_for_reissued(port, plan, end, run)
        return operation

    def _make_reissued(
        self,
        plan: CallPlan,
        name: str | None,
        caller: CallSite,
        memory: Memory,
        timeout_s: float,
    ) -> CollectiveFuture[Any]:
        """Return a new operation for the call of a plan, with addresses in place of arrays; see `Memory`."""
        call, context = plan.call, self.context
        operation: CollectiveFuture[Any] = CollectiveFuture(call.kind, None, None, caller, 0, name)
        operation.memory, operation.plan, operation.call = memory, plan, call
        operation.member, operation.context, operation.step = self.group, context, context.step
        operation.deadline_s = timeout_s
        return operation

    def _submit_reissued(
        self, port: Port, plan: CallPlan, end: OperationRun, memory: Memory, submit: Callable[..., Run | None]
    ) -> Run | None:
        """Submit an operation to the engine, then number and record it, in a thread that holds the loop's place.

        The submission (by `submit`, see `Board.make_submitter`) comes first, because the other ranks wait for it alone.
        Return the run, which may have ended; None if the engine refuses it: nothing has happened then.
        """
        operation, context, seq, now_ns = end.operation, self.context, port.next_seq, self.context.now_ns()
        lane = cast(Stream, port.stream)
        signature = plan.signature if plan.place == operation.place else plan.signature_at(operation.place)
        source, target, end.memory, _ = memory
        port.next_seq = seq + 1
        try:
            # 0: this rank provides no memory for a shared result, which such a plan never has
            end.run = run = submit(
                end, seq, plan.tag_base + ((seq & 0xFFFF) << 8), source, target, operation.priority, 0, _WAITED_FOR,
                signature.fingerprint, signature.text,
            )  # fmt: skip
        except Exception:  # a fork, or no thread for the engine
            run = None
        if run is None:
            port.next_seq, end.memory, plan.spare = seq, None, end
            return None
        operation.seq, operation.memory, operation.step = seq, memory, context.step
        operation.issued_ns = operation.started_ns = now_ns
        history, rank = port.communicator.history, context.rank
        runs, history.issued[rank] = history.runs, seq + 1
        if runs and runs[-1][1] == seq and runs[-1][2] is signature:
            runs[-1][1] = seq + 1
        else:
            runs.append([seq, seq + 1, signature, rank])
        operation.record = context.flight.record_issue(operation, port.known_calls, plan.call, seq, now_ns)
        if run.state == _RUN_DONE:
            self._finish_reissued(port, plan, end)
        else:
            operation.state = MATCHING
            context.outstanding.operations[operation] = None
            lane.in_flight[operation] = lane.started
        lane.started += 1
        return run

    def _finish_reissued(self, port: Port, plan: CallPlan, end: OperationRun) -> None:
        """Record the span of an operation that the engine has carried out, and keep `end` for the next operation.

        This is `CollectiveFuture.finish` for an operation without arrays.
        """
        operation, context, call, end_ns = end.operation, self.context, plan.call, self.context.now_ns()
        began_ns, (code, instruction) = operation.started_ns, operation.place
        meeting = call.kind.text, operation.algorithm, port.group, operation.seq, call.nbytes, call.dtype, began_ns
        info = meeting, began_ns, operation.priority, code, instruction, None, operation.step
        span: RawSpan = "comm", port.stream.name, operation.name, began_ns, end_ns, info
        context.flight.record_success(operation.record, began_ns, end_ns, span)
        if plan.gives_only or plan.noted:
            plan.record_end(operation)
        operation.state = DONE
        operation.memory = end.memory = end.run = None
        plan.spare = end

    def _wait_for_reissued(self, port: Port, plan: CallPlan, end: OperationRun, run: Run) -> None:
        """Wait inside the engine, without the interpreter's lock, and finish the operation in this thread.

        It is left to the loop after 50 ms, after a shorter deadline, or if only the loop may finish it.
        """
        ended = False
        try:
            limit_s = min(_LONGEST_KNOWN_S, end.operation.deadline_s or _LONGEST_KNOWN_S)
            if plan.engine.wait(run, limit_s) == _RUN_DONE:
                ended = self.context.handover.run_in_place(
                    partial(self._finish_after_wait, port, plan, end, run), False
                )
        finally:  # a signal handler may raise anywhere
            if not ended:
                self.context.handover.post_if_open(end.match_late)

    def _finish_after_wait(self, port: Port, plan: CallPlan, end: OperationRun, run: Run) -> bool:
        """Return False if the end starts or wakes more, so that the loop must finish the operation."""
        operation, lane, outstanding = end.operation, cast(Stream, port.stream), self.context.outstanding
        if operation.state is not MATCHING or lane.queue or outstanding.draining:
            return False
        if run.queued:  # the engine is about to report its end to the loop
            plan.engine.forget(run)
        del outstanding.operations[operation], lane.in_flight[operation]
        self._finish_reissued(port, plan, end)
        return True

    def keep_for_reissue(self, key: object, operation: CollectiveFuture[Any]) -> None:
        """Keep the plan of a call on the default stream for `reissue`, if the plan accepts addresses for arrays.

        Args:
            key: A value for all that later calls must share with this one.
            operation: The operation of the call. Nothing is kept as long as the call has no plan.
        """
        port = self._ports_by_argument.get(None)
        plan = None if port is None else port.plans.get(operation.call)
        if port is not None and plan is not None and plan.takes_memory and type(operation) is CollectiveFuture:
            port.keep_plan(key, plan)

    def _enqueue_from_thread(self, operation: CollectiveFuture[Any], stream: Stream | str | None) -> None:
        """Enqueue an operation in this thread, which is not the loop's, or else soon on the loop.

        Raise `UsageError` if there is no such stream, `PeerFailedError` if the loop has ended.
        """
        if stream is not None:
            self._streams.find(stream)  # raises unless it exists
        late = isinstance(operation.input, Future) or (type(operation) is TreeOperation and operation.parts)
        in_place = None if late else partial(self._enqueue_in_thread, operation, stream)
        operation.issue_from_thread(in_place, lambda: self._open_port(stream).enqueue(operation))

    def _enqueue_in_thread(self, operation: CollectiveFuture[Any], stream: Stream | str | None) -> bool:
        """Enqueue in the place of the loop (`Handover.run_in_place`), unless that needs the loop; return whether."""
        context, port = self.context, self._ports_by_argument.get(stream)
        if port is None:
            return False
        # Plans read the port of an operation: it is set before they are asked, and taken back if the loop must enqueue.
        operation.port = port
        lane, plan = port.stream, operation.plan
        in_place = (
            # the rank goes on, and nobody decides when its operations arrive
            not context.closed
            and port.intercept is None
            # the operation is admitted at once: the stream has room, and no other waits in it
            and (not lane.in_flight or lane.has_room)
            and not lane.queue
            # no task of the loop waits for this: the end of the rank, or a deadline
            and not context.outstanding.draining
            and (operation.deadline_s is None or not context.deadlines.needs_earlier_wakeup(operation.deadline_s))
            and port.can_start_at_once()
            # the event loop makes the first plan, because it opens the resources that ranks share
            and (plan is not None or (bool(port.plans) and operation.call.has_all_values))
            and (plan or port.communicator.get_or_make_plan(operation.call, operation)).runs_in_any_thread()
        )
        if in_place:
            port.enqueue(operation)
        else:
            operation.port = NOWHERE
        return in_place

    def abort(self, error: BaseException | str | None) -> None:
        """Abort the group, here and in other processes; `error` is the reason for the message, see `Group.abort`."""
        rank, name = self.context.rank, self.group.name
        cause = error if isinstance(error, BaseException) else None
        reason = error if cause is None else one_line_text(cause)
        message = f"group '{name}' was aborted by rank {rank}{'' if reason is None else f': {reason}'}"
        make_error = partial(GroupAbortedError.caused_by, cause, message, culprit=rank)
        abort = partial(self._communicators.abort_group, self.group.key, make_error)
        if get_ident() == self.context.thread:
            abort()
        else:
            self.context.post_to_loop(abort)
