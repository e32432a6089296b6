"""The world: all ranks of this process, from their start to their common end."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import LinkLostError, Transport, TransportError

from ..diagnostics import error_place, find_origin, is_interrupt, make_presentable, split_stops, unwrap_single_error
from ..errors import PeerError, RemoteError, error_text, one_line_text, type_name
from ..flight.recorder import SpansOnly, Writer
from ..hints import find_hint
from ..timeline.recording import KeptSteps, Recorder
from ..timeline.spans import ENDED, STARVED, Timeline
from .backend import Backend, RealBackend
from .blame.loop import program_line_in
from .blame.reports import LocalRank, Reports, call_program, make_world_watch
from .blame.stall import StallLimits
from .checking import install_input_checks
from .communicators import Communicators
from .compute import STARVED_SHARE, ComputeStreams
from .context import RankContext
from .daemons import DaemonWatch
from .ending import WorldEnding, WorldPhase
from .epoch import Epoch
from .event_loop import RANK, SerialCaller
from .failure import Failure
from .forks import ending_forks, registered_for_forks, stop_forked_loop
from .future import has_waiting_thread
from .group import GroupRules
from .handover import Handover
from .interceptor import Interceptor
from .interpreter import tuned_interpreter
from .interrupts import calls_program, deferring_interrupts
from .memory.buffer_locks import UNFINISHED, BufferLocks, explain_write_error
from .message import pending_sends
from .outstanding import Outstanding
from .rank import Rank
from .task import TaskFuture

if TYPE_CHECKING:
    import topology

    from ..processes.control import ControlPlane

T = TypeVar("T")

# Periods of the checks whether messages have been received, and, once a world ends, whether threads wait.
_RECEIVED_S, _THREADS_S = 1e-3, 0.1
# Ends in the metadata of a timeline.
_ENDED = {WorldPhase.STOPPED: "was stopped", WorldPhase.FAILED: "failed"}
# Errors that end a program from outside; other errors are its own failures.
_STOPS = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)


class World:
    """The ranks of this process with all that they share: communicators, engine, and end.

    Args:
        size: Ranks in the world.
        cluster: Where the ranks run.
        transport: Carries bytes between ranks.
        algorithm: Algorithm of all collectives; None: chosen for each.
        others: The other processes; None if there are none.
        backend: Clock, compute threads and engine of the world; None: those of real time.
        ranks: World ranks that run here; None: those of the transport.
        check: `nan` to check sent data for NaN and infinities; None: nothing is checked.
        flight: Writes the flight record; None: there is no flight record.
        restart: Number of restarts before this attempt.
        state_dir: Folder of saved states.
        limits: Times after which a waiting rank is reported, and after which it ends the world.
        steps: Steps whose spans are recorded.
        epochs: Epoch of each rank here under `--survive`, in ascending order of the ranks; else empty.

    Attributes:
        size: Ranks in the world.
        local: World ranks of this process.
        backend: Clock, compute threads and engine of the world.
        ending: Phase of the world, and its verdict.
    """

    def __init__(
        self,
        size: int,
        cluster: topology.Cluster,
        transport: Transport,
        *,
        algorithm: str | None,
        others: ControlPlane | None = None,
        backend: Backend | None = None,
        ranks: Sequence[int] | None = None,
        check: str | None = None,
        flight: Writer | None = None,
        restart: int = 0,
        state_dir: str | None = None,
        limits: StallLimits | None = None,
        steps: KeptSteps | None = None,
        epochs: Sequence[Epoch] = (),
    ) -> None:
        self.size = size
        self.backend: Backend = backend or RealBackend()
        self.ending: WorldEnding = WorldEnding()
        self._daemon_watch = DaemonWatch(self._world_error)
        local = transport.ranks if ranks is None else ranks
        self.local: frozenset[int] = frozenset(local)
        self._token = trio.lowlevel.current_trio_token()
        self._handover = Handover(self._token)
        self._engine = self.backend.make_engine(transport, cluster, self._token, algorithm=algorithm)
        self.communicators: Communicators = (
            others.communicators(self._engine, transport) if others else self.backend.make_communicators(self._engine)
        )
        self.communicators.call_later = self.backend.make_call_later(self._handover)
        if check is not None:
            self.communicators.use_interceptor(install_input_checks(self.communicators.intercept or Interceptor()))
        self._cluster, self._processes, self._flight = cluster, others, flight
        self._restart, self._state_dir, self._steps = restart, state_dir, steps
        self._epochs = dict(zip(sorted(local), epochs, strict=bool(epochs)))
        self._rules, self._in_turn = GroupRules(cluster), SerialCaller()
        self._scope, self._all_closed = trio.CancelScope(), trio.Event()
        self._open_ranks = set(local)  # ranks that are not closed
        self.described: dict[str, str] = {}  # further entries in the metadata of its timeline
        self._limits = limits or StallLimits()
        self._locks = BufferLocks()
        everybody = tuple(range(size))  # one object: thousands of ranks would have one of thousands each
        self._members: list[LocalRank] = []  # which each of them has
        # added to that list, and not in a new one: each member keeps a reference to it
        self._members += [self._make_member(rank, everybody) for rank in local]
        self.reports: Reports = Reports(self._members, self.backend, others)

    def _make_member(self, rank: int, everybody: tuple[int, ...]) -> LocalRank:
        """Return a rank with its context, its streams and its reports; `everybody` has all world ranks."""
        recorder = Recorder(rank, steps=self._steps)
        context = RankContext(
            rank=rank,
            now_ns=self.backend.now_ns,
            call_in_turn=self._in_turn.call,
            record=recorder.append,
            arrays=self.backend,
            locks=self._locks,
            outstanding=Outstanding(),
            ending=self.ending,
            handover=self._handover,
            thread=get_ident(),
            pause=self.backend.pause,
            flight=self._flight.begin_rank(rank, recorder) if self._flight is not None else SpansOnly(recorder.append),
        )
        node, local_rank = divmod(rank, self._cluster.ranks_per_node or self.size)
        compute = ComputeStreams(partial(self.backend.make_compute_stream, context))
        rank_object = Rank(
            context, self.backend, compute, self, everybody=everybody, node=node, local_rank=local_rank,
            recorder=recorder, restart=self._restart, state_dir=self._state_dir, epoch=self._epochs.get(rank),
        )  # fmt: skip
        return LocalRank(rank_object, context, compute, self._members, self.communicators.finished_ranks)

    # -- life --------------------------------------------------------------------------------------------------

    async def run_to_end(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on every rank until all have ended, and return the results in the order of the ranks.

        Args:
            main: The program; it gets its rank and `args`.
            args: Further arguments.
            timeout_s: Time after which the world is stopped; None for no limit.

        Raises:
            RankFailedError: A rank has failed, here or in another process.
            StallError: The world was stopped, because it got no further or the time was over.
        """
        results: dict[int, T] = {}
        async with self._processes.exchange_reports(self) if self._processes else nullcontext():
            try:
                await self._run_ranks(main, args, timeout_s, results)
            except BaseException as error:
                if is_interrupt(error):
                    await self.reports.add_note_to(error)
                raise
            finally:
                went_on = len(results) == len(self._members) and not self._scope.cancelled_caught
                if went_on and self.backend.detects_stalls:  # a program may wait until all tasks are blocked
                    self.ending.withdraw_stop()
                self.ending.finish()
            if (
                self.ending.phase is WorldPhase.STOPPED
            ):  # other processes, still attached, report where their ranks wait
                await self.reports.gather_views()
        if self.ending.failure is not None:  # of a rank here or elsewhere, perhaps reported while views were gathered
            raise self.ending.rank_error(self.size, self.communicators.finished_ranks) from self.ending.failure[1]
        if self.ending.phase is WorldPhase.STOPPED:
            lines, sentence = self.reports.view_lines(self.reports.stopped_views), self.reports.culprit_sentence()
            raise self.ending.stall_error(lines, sentence) from self.ending.raised_after_stop
        return [results[member.context.rank] for member in self._members]

    async def _run_ranks(
        self,
        main: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        timeout_s: float | None,
        results: dict[int, T],
    ) -> None:
        """Run all ranks to their common end. `results` gets the result of each that finishes, by world rank."""
        watch = (
            nullcontext() if self.backend.detects_stalls
            else make_world_watch(self._members, self._token, self._limits, self._processes, self.give_up)
        )  # fmt: skip
        with deferring_interrupts(), registered_for_forks(self), tuned_interpreter(), self._scope, watch:
            try:
                async with self._time_limit(timeout_s):
                    async with trio.open_nursery() as nursery:
                        for member in self._members:
                            nursery.start_soon(self._run_rank, member, main, args, results)
                        if self.backend.cleanup_s:
                            await self._wait_until_all_closed(nursery)
                    if self._processes:
                        await self._processes.wait_all_finished()
                        # ranks differed, and none has raised the error
                        for error in self.communicators.unraised_errors.values():
                            self.fail(min(self.local), error())
            finally:
                await self._join_threads()

    @asynccontextmanager
    async def _time_limit(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Stop the world after that many seconds of its clock, unless the block has ended by then."""
        if timeout_s is None:
            yield
            return
        async with trio.open_nursery() as nursery:
            stop = partial(self.stop, f"did not finish within timeout_s={timeout_s:g}", timeout_s)
            self.backend.start_time_limit(timeout_s, stop, nursery)
            yield
            nursery.cancel_scope.cancel()

    @calls_program
    async def _run_rank(
        self, member: LocalRank, main: Callable[..., Awaitable[T]], args: tuple[object, ...], results: dict[int, T]
    ) -> None:
        """Run the program of one rank, wait for its operations and daemons, and report its end to the world.

        All is in this one coroutine: each wait of the program would resume a further one. An error of the rank is
        reported, not raised. What ends a program from outside, such as a cancellation, is raised.
        """
        context, intercept = member.context, self.communicators.intercept
        RANK.set((context.rank, self.size))
        try:
            async with trio.open_nursery() as context.nursery:
                try:
                    with ending_forks(self.ending):
                        when_cancelled = None  # error of the program when it was cancelled
                        try:
                            with trio.CancelScope() as context.program:
                                program = partial(call_program, main, member.rank, args)
                                results[context.rank] = await (
                                    program() if intercept is None else intercept.run_program(program, context)
                                )
                        except BaseException as raised:
                            # its own error; else it was cancelled because of that failure, which is raised below
                            if context.failure is None or raised is context.failure.error:
                                raise
                            when_cancelled, stopped = split_stops(raised, stops=_STOPS)
                            if stopped is not None:  # the world ends with a known cause
                                raise
                        finally:
                            context.program = None
                            context.end_open_steps()
                        _raise_unawaited_error(context, when_cancelled)
                    # the tasks of the program end before the daemons
                    await context.outstanding.drain(lambda each: isinstance(each, TaskFuture) and not each.daemon)
                    await self._daemon_watch.end_daemons(context.outstanding)
                    await context.outstanding.drain()
                except BaseException as raised:  # in the open nursery: unfinished operations may need a task
                    error = await self._end_failed_rank(member, raised)
                    if error is raised:
                        raise
                    raise error from None
                self._abandon_rank(member)
        except BaseException as raised:
            failed, stopped = split_stops(raised, stops=_STOPS)
            if failed is None:
                raise
            cause = unwrap_single_error(failed)
            if self._processes and self._is_consequence(context.rank, cause):  # a report may name another culprit
                await self._processes.wait_for_culprit()
            self.fail(context.rank, cause)
            if stopped is not None:
                raise stopped from None
        else:
            if self._processes:
                self._processes.send_finished(context.rank)
            self.communicators.on_rank_left(context.rank)
            context.flight.record_finished()

    async def _end_failed_rank(self, member: LocalRank, raised: BaseException) -> BaseException:
        """End the operations and daemons of a rank that has failed or is stopped.

        Return `raised`, what its program or the wait for its operations has raised, with notes; another error if it
        cannot be shown.
        """
        context, error = member.context, make_presentable(raised)
        if hint := find_hint(error):
            error.add_note(hint)
        explain_write_error(unwrap_single_error(error), list(context.outstanding.operations), UNFINISHED)
        own, _ = split_stops(error, stops=_STOPS)
        if own is None:  # the rank has not failed by itself
            self._record_views({context.rank: program_line_in(error)})
        if is_interrupt(error):
            self.ending.interrupt(context.rank)
        if own is not None and context.failure is None:
            context.failure = Failure(unwrap_single_error(own), seen=True)
        self._abandon_rank(member)
        assert context.nursery is not None
        context.nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await self._daemon_watch.end_daemons(
                context.outstanding, on_late=partial(self._fail_unless_consequence, context)
            )
        return error

    def _world_error(self) -> BaseException | None:
        """Return None if no rank has failed."""
        is_failed = self.ending.phase is WorldPhase.FAILED
        return self.ending.rank_error(self.size, self.communicators.finished_ranks) if is_failed else None

    def _fail_unless_consequence(self, context: RankContext) -> None:
        """Fail the world with the failure of a rank, if it has one that is no consequence of another rank's."""
        error = context.failure.error if context.failure else None
        if error is not None and not (self._processes and self._is_consequence(context.rank, error)):
            self.fail(context.rank, error)

    async def wait_until_sends_received(self) -> None:
        """Wait until messages of the ranks here are received, or their receivers have issued no receives for them."""
        announced, shared = -1, self.communicators
        shared.closing_ranks.update(member.context.rank for member in self._members)
        while sends := [send for member in self._members for send in pending_sends(member.context.outstanding)]:
            # Ranks that wait here issue nothing more. Other processes learn it once, or two that send to each other
            # would wait for ever. A receive from any source counts for all senders; they learn it when it has chosen.
            undecided = sum(len(queue.receives) for queue in shared.inbox.queues.values())
            if self._processes and announced != undecided:
                self._processes.send_closing(min(self.local))
                announced = undecided
            for send in sends:
                if shared.inbox.is_unwanted(send):
                    send.end_unreceived()
            await trio.sleep(_RECEIVED_S)

    def _abandon_rank(self, member: LocalRank) -> None:
        """Fail all its unfinished operations, and let it start no others."""
        member.context.closed = True
        member.context.deadlines.stop()
        member.context.outstanding.abandon_all(member.context.closed_rank_error)
        member.compute.stop()  # afterwards: a function that its thread is about to call must have failed then
        self._open_ranks.discard(member.context.rank)
        if not self._open_ranks:
            self._all_closed.set()

    def _abandon_all_ranks(self) -> None:
        """No rank may start an operation while those of another one fail, so all are closed first."""
        for member in self._members:
            member.context.closed = True
        for member in self._members:
            self._abandon_rank(member)

    async def _join_threads(self) -> None:
        """Fail unfinished operations, wait for running computations, and end all threads."""
        with trio.CancelScope(shield=True):
            self._abandon_all_ranks()
            try:
                for member in self._members:
                    await member.wait_for_computes()
            finally:  # an interrupt may end the wait
                await self._engine.aclose()
                self.backend.close()

    # -- failure -----------------------------------------------------------------------------------------------

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the error of a rank here; the first culprit ends the world.

        The culprit may be another rank, if the error names one. Later errors are recorded if they are no consequences.
        What a stop of the world has caused is no failure: `run_to_end` raises the stop itself.
        """
        culprit, cause = find_origin(rank, error)
        if self.ending.accepts_as_consequence(cause):
            return
        doing = self.reports.unfinished_lines(culprit)
        if self.end_by_culprit(culprit, cause, doing):
            if self._processes:  # after it is recorded: the report may fail as well
                self._processes.send_failure(culprit, cause, doing)
        elif self.ending.phase is WorldPhase.FAILED and not isinstance(error, (PeerError, TransportError)):
            # broken wires after it are the first signs of a process's end, and no failures of their own
            self.ending.add_failure(culprit, cause, doing, self.backend.now_ns())

    def end_by_culprit(self, culprit: int, cause: BaseException, doing: list[str]) -> bool:
        """End the world because of a rank's error: abandon all operations here, and cancel all ranks.

        Args:
            culprit: World rank that failed, here or in another process, or that was lost.
            cause: Its error.
            doing: Unfinished operations of the rank, as text.

        Returns:
            False if the world has a culprit already, or is over; then nothing happens.
        """
        if not self.ending.fail(culprit, cause, doing, self.backend.now_ns()):
            return False
        if self._flight is not None:
            here = culprit in self.local and not isinstance(cause, (PeerError, RemoteError, TransportError))
            self._flight.record_world_end(
                "failed", rank=culprit, line=f"{one_line_text(cause)}{error_place(cause)}", began_here=here
            )
        self._abandon_all_ranks()
        self._scope.cancel(reason=f"rank {culprit} failed: {one_line_text(cause)}")
        return True

    def _is_consequence(self, rank: int, error: BaseException) -> bool:
        """Whether an error looks like the consequence of one in another process, whose report is on its way."""
        culprit, cause = find_origin(rank, error)
        evident = isinstance(cause, LinkLostError) and cause.evident
        return culprit not in self.local or (isinstance(cause, TransportError) and not evident)

    def on_fork(self) -> None:
        """Fail the waits of threads in a fork of this process, where no task runs any more."""
        self.ending.fork(min(self.local))
        for member in self._members:
            member.context.closed = True
            member.context.outstanding.settle_all(self.ending.peer_error)
        if any(member.context.thread == get_ident() for member in self._members):
            stop_forked_loop(self.ending.peer_error)

    def let_threads_issue(self) -> None:
        """Let threads issue and end small operations without waking the sleeping loop.

        Only the loop's thread may call this.
        """
        self._handover.allow_work_in_place(self._fail_by_interrupt)

    def _fail_by_interrupt(self, error: BaseException) -> None:
        """End the world because Ctrl-C interrupted a thread in the loop's place."""
        text = error_text(error) or "it came in the midst of an operation"
        self.fail(min(self.local), RemoteError(type_name(error), text))

    def locate_programs_by(self, place: Callable[[], str]) -> None:
        """Let `place` find the line of the programs of the ranks here, because they run in another thread.

        That thread may issue an operation at any time: the world is not given up as hopeless before it closes.

        Args:
            place: Returns the place of the programs, as "file:line".
        """
        for member in self._members:
            member.context.program_line = place

    def end_deadlocked(self) -> None:
        """End the world because every rank is blocked and nothing is due. That is known in virtual time."""
        self.stop("cannot finish: every rank is blocked, and nothing is due")

    def give_up(self, quiet_s: float) -> None:
        """End the world because nothing has moved for `quiet_s`."""
        self.stop(f"made no progress for {quiet_s:g} s, and is given up")

    def stop(self, reason: str, timeout_s: float | None = None) -> None:
        """End the world for a reason that is no rank's error, such as a stall, here or in another process.

        Args:
            reason: The reason, after the words "the world".
            timeout_s: The time limit in seconds if it is the reason.
        """
        if not self.ending.can_stop or self._fail_with_unseen_error():
            return
        self.ending.stop(reason, timeout_s)
        self.reports.record_views()
        if self._flight is not None:  # before the ranks are stopped: what ends later was unfinished
            self._flight.record_world_end("stalled", rank=None, line=f"StallError: the world {reason}", began_here=True)
        if self._processes:
            self._processes.send_views(self.reports.stopped_views, reason)
        self._scope.cancel(reason=f"the world {reason}")
        if not self.backend.cleanup_s:
            self._abandon_all_ranks()

    async def _wait_until_all_closed(self, nursery: trio.Nursery) -> None:
        """Wait until all ranks here are closed, also those that a stop, Ctrl-C or the caller ends.

        Their programs may use the world to clean up: after a stop for `Backend.cleanup_s`, then they are abandoned. An
        operation for which a thread waits fails at once, for no cancellation ends that wait.
        """
        try:
            await self._all_closed.wait()
        except (trio.Cancelled, KeyboardInterrupt):
            self._record_views({})
            self.ending.interrupt(-1)
            nursery.cancel_scope.cancel()
            over_s = inf
            try:
                while self._open_ranks:
                    now_s = trio.current_time()
                    if self.ending.phase is WorldPhase.STOPPED:
                        over_s = min(over_s, now_s + self.backend.cleanup_s)
                    if now_s >= over_s:
                        self._abandon_all_ranks()
                    for context in (member.context for member in self._members):
                        for operation in reversed(list(context.outstanding.operations)):
                            if has_waiting_thread(operation):
                                operation.abandon(context.closed_rank_error())
                    with trio.move_on_after(_THREADS_S, shield=True):
                        await self._all_closed.wait()
            finally:  # at a second Ctrl-C
                self._abandon_all_ranks()
            raise

    def _fail_with_unseen_error(self) -> bool:
        """End the world with an error that no task has received. Return whether that has ended it."""
        for context in (member.context for member in self._members):
            if (unseen := context.outstanding.unseen) is not None:
                unseen.mark_seen()
                self.fail(context.rank, unseen.error)
                if self.ending.phase is WorldPhase.FAILED:
                    return True
        return False

    def _record_views(self, places: Mapping[int, str]) -> None:
        """Record what each rank does when the first one stops, unless a culprit is known; report it before any wait.

        `places` has lines of programs that are being unwound, by rank.
        """
        if not self.reports.stopped_views and self.ending.failure is None:
            self.reports.stopped_views = self.reports.present_views(places)
            if self._processes:
                self._processes.send_views(self.reports.stopped_views, "")

    def report_signal(self, signal_name: str) -> None:
        """Report to the other processes that a signal ends this one."""
        if self._processes and self.ending.failure is None:
            rank = min(self.local)
            self._processes.send_failure(
                rank, RemoteError(signal_name, "a signal ended its process"), self.reports.unfinished_lines(rank)
            )

    def record_wire_event(self, line: str) -> None:
        """Add an event of the connections, described by `line`, to the timeline of the first rank here, as of now."""
        now_ns = self.backend.now_ns()
        self._members[0].context.record(("wires", "wires", line, now_ns, now_ns, None))

    # -- for groups of its ranks ---------------------------------------------------------------------------------

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` if the cluster does not allow such a group; the first member checks."""
        self._rules.check_group(ranks)

    def recorders(self) -> list[Recorder]:
        """Return the recorders of the ranks here."""
        return [member.rank.recorder for member in self._members]

    def run_facts(self) -> dict[str, str]:
        """Return facts about the run for its timeline."""
        cluster = self._cluster  # named as `topology.cluster` makes it again
        lnc = f" lnc={cluster.lnc}" if len(cluster.machine.chip.lnc) > 1 else ""
        meta = {
            "script": sys.argv[0],
            "cluster": f"{cluster.name}{lnc}",
            **self.backend.timeline_metadata(),
            **self.described,
        }
        if ended := _ENDED.get(self.ending.phase):
            meta[ENDED] = ended
        starved = {member.rank.rank: member.compute.starved_share for member in self._members}
        if shares := " ".join(f"{rank}:{share:.2f}" for rank, share in starved.items() if share >= STARVED_SHARE):
            meta[STARVED] = shares
        return meta

    def timeline(self) -> Timeline:
        """Return the timeline that the ranks here have recorded until now."""
        meta = self.run_facts()
        return Timeline.collect(self.recorders(), world_size=self.size, clock=self.backend.name, meta=meta)


def _raise_unawaited_error(context: RankContext, raised: BaseException | None) -> None:
    """Raise the error that has cancelled a rank's program, if one has: an error of its own code that nobody awaited.

    If the program `raised` another one when it was cancelled, both are raised in a group, as by a nursery.
    """
    if context.failure is None:
        return
    if raised is not None:
        message = "an error that nobody awaited, and the error of the program that it cancelled"
        raise BaseExceptionGroup(message, [context.failure.error, raised]) from None
    raise context.failure.error
