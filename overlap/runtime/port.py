"""Ports: one rank's ends of a group's collectives, where calls are checked, numbered and matched."""

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
from ..errors import GroupAbortedError, UsageError, in_one_line, shown
from ..flight.recorder import Known
from ..timeline.recording import RawGroup, RawSpan
from .arguments import check_options, check_pairs, check_root, prepare, take_output
from .communicator import Communicator
from .communicators import Communicators
from .context import STEP_OF_TASK, RankContext
from .derived import check_here
from .failure import Failure
from .future import Future
from .handover import ABOUT_TO_SLEEP_S, OperationRun
from .interceptor import Interceptor
from .match import Key, Match, Unfit
from .operation import NOWHERE, CallArguments, CollectiveFuture
from .outstanding import CallSite, check_timeout
from .plan import CallPlan
from .state import DONE, MATCHING
from .stream import OpenLane, Stream, Streams, activate
from .tree_operation import TreeOperation, check_tree, finish_part, tree_future
from .trees import is_tree

if TYPE_CHECKING:
    from transports.shared_memory.engine import Run

    from .group import GroupRank

# Plans kept at a port: training repeats a few calls, but blocks of different shapes make a new one each time.
_PLANS = 256

# A thread that waits for longer lets the event loop match its operation, so that reports of waits and deadlines see it.
_LONGEST_KNOWN_S = 0.05
# How the engine numbers a submission that is waited for, and the state of a run that has ended well.
_WAITED_FOR, _RUN_DONE = 2, 1

_FORMS = (list, tuple, dict)
Memory: TypeAlias = tuple[int, int, object, bool]
"""Memory of an operation in place of arrays; see `CollectiveFuture.memory`."""

_IN_PLACE = (ALL_REDUCE, BROADCAST)  # may have their result in the place of the input, on any rank


class Port:
    """One rank's end of the collectives of a group on a stream, in the order that all its ranks have.

    Args:
        member: The rank in its group.

    Attributes:
        context: Context of the rank.
        communicator: Communicator that matches its operations.
        stream: Stream of its operations, or lane of parts of trees.
        position: Group rank.
        place: Index of the rank among the members of the communicator; mostly the same.
        next_seq: Number of the next operation.
        group: Name and ranks of the group, for the timeline.
        known: Calls that the flight record has fields for.
        plans: Plans by call, and by the arguments of earlier calls; the only cache of a call.
        intercept: Decides when operations arrive, in simulations and checks; None: at once.
    """

    __slots__ = (
        "communicator", "context", "group", "intercept", "known", "next_seq", "place", "plans", "position", "stream",
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
        self.place: int = communicator.place(member.rank, context.rank)
        self.next_seq: int = 0
        self.group: RawGroup = member.label
        self.known: Known = Known()
        self.plans: dict[object, CallPlan] = {}

    def keep_plan(self, key: object, plan: CallPlan) -> None:
        """Keep a plan, by its call or by the arguments of a call."""
        if len(self.plans) >= _PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def enqueue(self, operation: CollectiveFuture[Any]) -> None:
        """Number an operation, and match it with the other ranks' operations as soon as its stream has room."""
        context, lane, seq = self.context, self.stream, self.next_seq
        if self.intercept is not None:
            self.intercept.issued(self, operation)
        operation.seq, operation.port, self.next_seq = seq, self, seq + 1  # the port last: other threads look at it
        operation.priority += lane.priority
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        try:
            call: Call | None = operation.call
        except AttributeError:  # its input does not exist yet
            call = None
        operation.record = context.flight.issued(operation, self.known, call, seq, now_ns)
        if operation.deadline_s is not None:
            context.deadlines.add(operation, operation.deadline_s)
        if lane.in_flight or lane.in_flight is None:
            if not lane.admit(operation):
                return
        else:  # inlined from `admit`: most streams are idle
            context.outstanding.operations[operation] = None
            lane.in_flight[operation] = lane.started
            lane.started += 1
        x = operation.input
        if type(x) is not ndarray and (isinstance(x, Future) or isinstance(operation, TreeOperation)):
            activate(operation)
            return
        operation.state = MATCHING  # inlined from `activate`, for a short latency
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
        """Match the arrived end of one rank; operations start with the last end, or at once if bytes must travel."""
        communicator, seq = self.communicator, operation.seq
        if communicator.spans:
            self._match_far(operation)
            return
        # find its match, by number
        matches, here = communicator._matches, communicator.here
        match = matches.get(seq)
        if match is None:
            match = matches[seq] = Match([None] * here)
            match.pattern, match.first = operation.call, operation
            if communicator._broken is not None or communicator._left:
                communicator.fail_if_broken(match, operation)
        match[self.place] = operation
        match.arrived += 1
        if match.pattern is not operation.call:
            communicator._compare(match, operation)
        complete = match.arrived == here
        if complete:
            del matches[seq]
        # start all ends together, or this one alone
        context = self.context
        if match.error is not None:
            operation.fail(Failure(match.error()))
        elif not communicator.direct:
            communicator.start_arrived(match, operation)
        elif complete:
            plan = operation.plan
            if plan is None or plan.call is not match.pattern:
                plan = communicator.plan(cast("Call", match.pattern), operation, match)
            if self.intercept is not None and not self.intercept.starts(match, operation):
                return
            if not plan.together:
                communicator.start_arrived(match, operation)
                return
            try:
                plan.start(match, operation)
            except Unfit as unfit:
                communicator.fail_one(match, unfit.operation, Failure(unfit.__cause__ or unfit))
            except Exception as error:
                communicator.fail_one(match, operation, Failure(error))
        elif type(operation.input) is not ndarray or operation.out is not None or operation.locked:
            operation.lock()
        elif not context.arrays.shapes_only:  # inlined from `lock`, for a short latency
            operation.locked = context.locks.lock((operation.input,), None)

    def _match_far(self, operation: CollectiveFuture[Any]) -> None:
        """Match an end with others in other processes: by its plan at once, while all is well."""
        communicator, plan, seq = self.communicator, operation.plan, operation.seq
        if plan is None:
            plan = self.plans.get(operation.call)
        if plan is None or not self.is_calm():
            communicator.arrive(operation)
            return
        # note its call, inlined from `record` for a short latency
        if plan.place != operation.place:
            plan.sign(operation.place)
        history, signature, rank = communicator.history, plan.signature, self.context.rank
        runs, history.issued[rank] = history.runs, seq + 1
        if runs and runs[-1][1] == seq and runs[-1][2] is signature:
            runs[-1][1] = seq + 1
        else:
            runs.append([seq, seq + 1, signature, rank])
        # start it, alone
        if not plan.finish_now(operation):
            communicator.start_arrived(communicator.make_lone_match(operation), operation, plan)

    def is_calm(self) -> bool:
        """Whether all other ends are in other processes, no operation fails, and no report waits for its arrival.

        An operation with a plan neither wakes nor starts a task then, if the plan takes threads.
        """
        communicator = self.communicator
        return (
            communicator.spans
            and communicator.here == 1
            and not communicator._left
            and communicator._broken is None
            and not communicator._shared.early
        )


class Ports:
    """The ports of one rank on one group, by stream, and the calls that it issues there.

    Any thread of the process may issue. A call from a thread other than the event loop's is checked at once and its
    arrays are locked at once; the loop numbers it later, in the order of the calls, or that thread does so itself, in
    the place of a loop that sleeps.

    Args:
        use: Reference that is held as long as the rank may issue on the group.
        context: What all operations of the rank share.
        communicators: The communicators of the world.
        streams: The streams of the rank.
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
        self._named: dict[Stream | str | None, Port] = {}  # ports in use, by the `stream` argument of a call
        self._opened: dict[Stream, Port] = {}
        self._parts: dict[tuple[Port, int], Port] = {}  # of parts of trees, by port of the whole and place

    def preferring(self, stream: Stream, group: GroupRank) -> Self:
        """Return the ports of the same group for another place object, with another default stream."""
        other = copy(self)
        other.group, other._streams, other._named = group, self._streams.preferring(stream), {}
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
        """Check, number and start a collective: at once if its stream has room, which short latencies need.

        The call site is the caller of the calling method, unless it is given. An error leaves no trace.
        """
        caller, context, plain = _getframe(2) if call_site is None else call_site, self.context, type(x) is ndarray
        future_class = CollectiveFuture if plain else self._future_class(kind, x, out)
        operation: CollectiveFuture[Any] = future_class(kind, x, out, caller, priority, name)
        if context.closed:
            raise context.ended()
        if type(priority) is not int and not isinstance(priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(priority)}")
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        rank, step = STEP_OF_TASK.get()
        operation.member, operation.context = self.group, context
        operation.step = step if rank is context else context.step
        # find the port, and the plan that an earlier call with these arguments has made, if they are the usual ones
        array: Any = x
        usual = (
            plain and (out is None or (out is x and kind in _IN_PLACE)) and counts is None and exact is False
            and shared is False and algorithm is None and not pairs and type(root) is int and array.flags.carray
        )  # fmt: skip
        key = (kind.text, op, array.dtype, array.shape, root) if usual else None
        try:
            port = self._named.get(stream)
            plan = None if port is None or key is None else port.plans.get(key)
        except TypeError:  # not hashable: the checks refuse it
            port = plan = None
        if plan is not None:
            operation.plan, operation.call, operation.source = plan, plan.call, array
        else:
            operation.arguments = CallArguments(op, root, counts, exact, shared, algorithm, pairs)  # type: ignore[arg-type]  # `_check` checks the pairs
            self._check(operation)
            if port is not None and key is not None and operation.call in port.plans:
                port.keep_plan(key, port.plans[operation.call])
        if get_ident() == context.thread:
            (self._open(stream) if port is None else port).enqueue(operation)
        else:
            self._enqueue_elsewhere(operation, stream)
        return operation

    def _future_class(self, kind: Collective, x: object, out: object) -> type[CollectiveFuture[Any]]:
        """Return the class of an operation whose input is no array: it may have parts."""
        rare = (isinstance(x, _FORMS) and is_tree(x)) or isinstance(x, Future)
        # a rooted call without an array: the root may have a tree
        return TreeOperation if rare or (x is None and out is None and kind.traits.rooted) else CollectiveFuture

    def _check(self, operation: CollectiveFuture[Any]) -> None:
        """Check the arguments of an operation; set its input, and its call if that exists already."""
        context, group, kind, given = self.context, self.group, operation.kind, operation.arguments
        if isinstance(operation, TreeOperation):
            operation.issue_part = self._issue_part
            if isinstance(operation.input, _FORMS):
                operation.input = tree_future(operation.input, context)
                check_tree(operation)
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
            take_output(operation)
        if isinstance(x, Future):
            check_here(x, context.thread)
        else:
            prepare(operation)

    def _open(self, stream: Stream | str | None) -> Port:
        """Return the port of a stream.

        Raises:
            UsageError: If there is no such stream.
        """
        named = self._streams.find(stream)
        port = self._opened.get(named)
        if port is None:
            port = self._opened[named] = self._make(named, -1)
        self._named[stream] = port
        return port

    def _make(self, stream: Stream | OpenLane, part: int) -> Port:
        """Make the port of a stream, or that of a part of trees on it."""
        communicators, (ranks, occurrence, *_) = self._communicators, self.group.key
        communicator = communicators.get_or_make(Key(ranks, occurrence, stream.name, tag=part), self.group.name)
        return Port(self.context, communicator, stream, self.group, communicators.intercept)

    def _issue_part(self, part: CollectiveFuture[Any], place: int, port_of_whole: Port, seq: int) -> None:
        """Issue a part of a tree, with the number of its operation."""
        port = self._parts.get((port_of_whole, place))
        if port is None:
            whole = port_of_whole.stream
            lane = OpenLane(whole.name, 0, whole.window, finish_part)
            port = self._parts[port_of_whole, place] = self._make(lane, place)
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
        """Issue a call from a thread as one before that has a key, if nothing needs the event loop; else return None.

        Args:
            key: Key of the call, as given to `keep`.
            memory: Memory of the arrays; see `CollectiveFuture.memory`.
            name: Name of the operation, if it has one of its own.
            timeout_s: Time within which it must end.
            caller: The program's line.
        """
        port, context = self._named.get(None), self.context
        plan = None if port is None else port.plans.get(key)
        if port is None or plan is None:
            return None
        handover, turn, submit = context.handover, context.handover.turn, plan.submit
        if submit is None or turn is None or type(caller) is not FrameType or not memory[3]:
            operation = self._make_known(plan, name, caller, memory, timeout_s)
            issued = handover.in_place(partial(self._enqueue_in_place, operation, None), False)
            return operation if issued else None
        end, plan.spare = plan.spare, None
        if end is None:
            end = plan.make_spare(self._make_known(plan, name, caller, memory, timeout_s))
        operation, lane, communicator = end.operation, port.stream, port.communicator
        leave, works = turn.release, False
        try:
            if (
                not (turn.acquire(blocking=False) or turn.acquire(timeout=ABOUT_TO_SLEEP_S))
                or handover.posted or handover.called or context.closed or port.intercept is not None
                or lane.in_flight or lane.queue or context.outstanding.draining
                or communicator._left or communicator._broken is not None or communicator._shared.early
            ):  # fmt: skip
                plan.spare = end
                return None
            works = True
            operation.port, operation.priority, operation.member = port, lane.priority, self.group
            operation.deadline_s, operation.place = timeout_s, (caller.f_code, caller.f_lasti)
            run = self._submit_known(port, plan, end, memory, submit)
            works = False
        except BaseException as error:  # see `Handover.in_place`
            if works:
                handover.break_off(error)
            raise
        finally:
            try:  # noqa: SIM105
                leave()
            except RuntimeError:
                pass
        if run is None:
            return None
        if operation.state is not DONE:
            self._wait_known(port, plan, end, run)
        return operation

    def _make_known(
        self,
        plan: CallPlan,
        name: str | None,
        caller: CallSite,
        memory: Memory,
        timeout_s: float,
    ) -> CollectiveFuture[Any]:
        """Return an operation with a known plan, on addresses in place of arrays."""
        call, context = plan.call, self.context
        operation: CollectiveFuture[Any] = CollectiveFuture(call.kind, None, None, caller, 0, name)
        operation.memory, operation.plan, operation.call = memory, plan, call
        operation.member, operation.context, operation.step = self.group, context, context.step
        operation.deadline_s = timeout_s
        return operation

    def _submit_known(
        self, port: Port, plan: CallPlan, end: OperationRun, memory: Memory, submit: Callable[..., Run | None]
    ) -> Run | None:
        """Submit the end of a thread that has the loop's place and waits, then number and record its operation.

        The other ranks need the end, and nothing of what follows. Return None if the engine has no memory for it.
        """
        operation, context, seq, now_ns = end.operation, self.context, port.next_seq, self.context.now_ns()
        lane = cast(Stream, port.stream)
        signature = plan.signature if plan.place == operation.place else plan.sign(operation.place)
        source, target, end.memory, _ = memory
        port.next_seq = seq + 1
        try:
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
        operation.record = context.flight.issued(operation, port.known, plan.call, seq, now_ns)
        if run.state == _RUN_DONE:
            self._end_known(port, plan, end)
        else:
            operation.state = MATCHING
            context.outstanding.operations[operation] = None
            lane.in_flight[operation] = lane.started
        lane.started += 1
        return run

    def _end_known(self, port: Port, plan: CallPlan, end: OperationRun) -> None:
        """End an operation that the engine has carried out, and keep its end for the next one."""
        operation, context, call, end_ns = end.operation, self.context, plan.call, self.context.now_ns()
        began_ns, (code, instruction) = operation.started_ns, operation.place
        meeting = call.kind.text, operation.algorithm, port.group, operation.seq, call.nbytes, call.dtype, began_ns
        info = meeting, began_ns, operation.priority, code, instruction, None, operation.step
        span: RawSpan = "comm", port.stream.name, operation.name, began_ns, end_ns, info
        context.flight.carried(operation.record, began_ns, end_ns, span)
        if plan.gives_only or plan.noted:
            plan.record_end(operation)
        operation.state = DONE
        operation.memory = end.memory = end.run = None
        plan.spare = end

    def _wait_known(self, port: Port, plan: CallPlan, end: OperationRun, run: Run) -> None:
        """Wait for an operation without the interpreter, and end it in the loop's place; a late one is the loop's."""
        ended = False
        try:
            limit_s = min(_LONGEST_KNOWN_S, end.operation.deadline_s or _LONGEST_KNOWN_S)
            if plan.engine.wait(run, limit_s) == _RUN_DONE:
                ended = self.context.handover.in_place(partial(self._end_waited, port, plan, end, run), False)
        finally:  # a signal handler may raise anywhere
            if not ended:
                self.context.handover.post_if_open(end.match_late)

    def _end_waited(self, port: Port, plan: CallPlan, end: OperationRun, run: Run) -> bool:
        """End an operation that a thread has waited for, unless its end starts another one; False: the loop must."""
        operation, lane, outstanding = end.operation, cast(Stream, port.stream), self.context.outstanding
        if operation.state is not MATCHING or lane.queue or outstanding.draining:
            return False
        if run.queued:
            plan.engine.forget(run)
        del outstanding.operations[operation], lane.in_flight[operation]
        self._end_known(port, plan, end)
        return True

    def keep(self, key: object, operation: CollectiveFuture[Any]) -> None:
        """Keep a call on the default stream for `reissue`, if its memory may be given by addresses."""
        port = self._named.get(None)
        plan = None if port is None else port.plans.get(operation.call)
        if port is not None and plan is not None and plan.takes_memory and type(operation) is CollectiveFuture:
            port.keep_plan(key, plan)

    def _enqueue_elsewhere(self, operation: CollectiveFuture[Any], stream: Stream | str | None) -> None:
        """Enqueue an operation that another thread issues."""
        if stream is not None:
            self._streams.find(stream)  # raises unless it exists
        late = isinstance(operation.input, Future) or (type(operation) is TreeOperation and operation.parts)
        in_place = None if late else partial(self._enqueue_in_place, operation, stream)
        operation.issue_elsewhere(in_place, lambda: self._open(stream).enqueue(operation))

    def _enqueue_in_place(self, operation: CollectiveFuture[Any], stream: Stream | str | None) -> bool:
        """Enqueue an operation in this thread, if nothing needs the event loop; False: it must."""
        context, port = self.context, self._named.get(stream)
        if port is None:
            return False
        operation.port = port  # which plans read
        lane, plan = port.stream, operation.plan
        in_place = (
            not context.closed
            and port.intercept is None
            and (not lane.in_flight or lane.has_room)
            and not lane.queue
            and not context.outstanding.draining
            and (operation.deadline_s is None or not context.deadlines.wakes(operation.deadline_s))
            and port.is_calm()
            # the event loop makes the first plan, because it opens the resources that ranks share
            and (plan is not None or (bool(port.plans) and operation.call.has_all_values))
            and (plan or port.communicator.plan(operation.call, operation)).takes_threads()
        )
        if in_place:
            port.enqueue(operation)
        else:
            operation.port = NOWHERE
        return in_place

    def abort(self, error: BaseException | str | None) -> None:
        """Abort the group, here and in other processes."""
        rank, name = self.context.rank, self.group.name
        why = "" if error is None else f": {error if isinstance(error, str) else in_one_line(error)}"
        cause = error if isinstance(error, BaseException) else None
        message = f"group '{name}' was aborted by rank {rank}{why}"

        def aborted() -> GroupAbortedError:
            aborted_error = GroupAbortedError(message, culprit=rank)
            aborted_error.__cause__ = cause
            return aborted_error

        abort = partial(self._communicators.abort, self.group.key, aborted)
        if get_ident() == self.context.thread:
            abort()
        else:
            self.context.from_thread(abort)
