"""The world: all ranks of this process, from their start to their common end."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, TypeVar

import trio

from transports import LinkLostError, Transport, TransportError

from ..diagnostics import find_origin, is_interrupt, make_presentable, split_stops, unwrap_single_error, where
from ..errors import PeerError, RemoteError, StallError, in_one_line, text_of, type_name
from ..flight.recorder import SpansOnly, Writer
from ..hints import find_hint
from ..timeline.recording import KeptSteps, Recorder
from ..timeline.spans import ENDED, STARVED, Timeline
from .backend import Backend, RealBackend
from .blame.loop import place_in
from .blame.reports import LocalRank, Reports, call_program, world_watch
from .blame.stall import StallLimits
from .checking import check_inputs
from .communicators import Communicators
from .compute import STARVED_SHARE, ComputeStreams
from .context import RankContext
from .daemons import DaemonWatch
from .ending import RANK, WorldEnding, ending_forks, registered_for_forks, stop_loop
from .epoch import Epoch
from .event_loop import InTurn
from .failure import Failure
from .group import GroupRules
from .handover import Handover
from .interceptor import Interceptor
from .interpreter import tuned_interpreter
from .interrupts import calls_program, deferring_interrupts
from .memory.buffer_locks import UNFINISHED, BufferLocks, explain
from .message import pending_sends
from .outstanding import IssuedFuture, Outstanding
from .rank import Rank
from .task import TaskFuture

if TYPE_CHECKING:
    import topology

    from ..processes.control import ControlPlane

T = TypeVar("T")

# Period of the checks whether messages have been received.
_RECEIVED_S = 1e-3
# Errors that end a program from outside; other errors are its own failures.
_STOPS = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)


class World:
    """The ranks of this process with all that they share: communicators, engine, and end.

    They are the ranks of the transport, or `ranks` of them.

    Args:
        cluster: Where the ranks run.
        algorithm: Algorithm of all collectives; None: chosen for each.
        others: The other processes; None if there are none.
        check: `nan` to check what is sent.
        flight: Writes the flight record; None: there is none.
        restart: Number of restarts before this attempt.
        state_dir: Folder of saved states.
        limits: When a rank that waits is reported, and when it ends the world.
        steps: Steps whose spans are recorded.
        epochs: Epoch of each rank under `--survive`.

    Attributes:
        size: Ranks in the world.
        local: World ranks of this process.
        backend: Its clock, compute threads and engine.
        ending: The first failure, and what follows from it.
    """

    size: int
    backend: Backend
    ending: WorldEnding

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
        self.size, self.backend, self.ending = size, backend or RealBackend(), WorldEnding()
        self._daemon_watch = DaemonWatch(self._failure)
        local = transport.ranks if ranks is None else ranks
        self.local: frozenset[int] = frozenset(local)
        self._token = trio.lowlevel.current_trio_token()
        self._handover = Handover(self._token)
        self._engine = self.backend.engine(transport, cluster, self._token, algorithm=algorithm)
        self.communicators: Communicators = (
            others.communicators(self._engine, transport) if others else self.backend.communicators(self._engine)
        )
        self.communicators.later = self.backend.later(self._handover)
        if check is not None:
            self.communicators.use(check_inputs(self.communicators.intercept or Interceptor()))
        self._cluster, self._processes, self._flight = cluster, others, flight
        self._survival, self._steps = (restart, state_dir, dict(zip(sorted(local), epochs, strict=bool(epochs)))), steps
        self._rules, self._in_turn = GroupRules(cluster), InTurn()
        self._scope = trio.CancelScope()
        self.described: dict[str, str] = {}  # further entries in the metadata of its timeline
        self._reason = ""  # reason of the stop
        self._timed_out: float | None = None  # the time limit, if it stopped the world
        self._limits = limits or StallLimits()
        self._locks = BufferLocks()
        everybody = tuple(range(size))  # one object: thousands of ranks would have one of thousands each
        self._members: list[LocalRank] = []
        self._members += [self._make_member(rank, everybody) for rank in local]
        self.reports: Reports = Reports(self._members, self.backend, others)

    def _make_member(self, rank: int, everybody: tuple[int, ...]) -> LocalRank:
        """Return a rank with its context, its streams and its reports."""
        recorder = Recorder(rank, steps=self._steps)
        context = RankContext(
            rank=rank,
            now_ns=self.backend.now_ns,
            soon=self._in_turn.call,
            record=recorder.append,
            arrays=self.backend,
            locks=self._locks,
            outstanding=Outstanding(),
            ending=self.ending,
            handover=self._handover,
            thread=get_ident(),
            pause=self.backend.pause,
            flight=self._flight.rank(rank, recorder) if self._flight is not None else SpansOnly(recorder.append),
        )
        place = divmod(rank, self._cluster.ranks_per_node or self.size)
        compute = ComputeStreams(partial(self.backend.compute_stream, context))
        restart, state_dir, epochs = self._survival
        rank_object = Rank(
            context, self.backend, compute, self, everybody=everybody, place=place, recorder=recorder, restart=restart,
            state_dir=state_dir, epoch=epochs.get(rank),
        )  # fmt: skip
        return LocalRank(rank_object, context, compute, self._members, self.communicators.left)

    def name_state_folder(self, folder: str | None) -> None:
        """Name the folder of `rank.state`, before the world lives."""
        for member in self._members:
            member.rank._state_dir = folder

    # -- life --------------------------------------------------------------------------------------------------

    async def live(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on every rank to the common end."""
        results: dict[int, T] = {}
        async with self._processes.attach(self) if self._processes else nullcontext():
            try:
                await self._run_ranks(main, args, timeout_s, results)
            except BaseException as error:
                if is_interrupt(error):
                    await self.reports.add_note_to(error)
                raise
            finally:
                self.communicators.over = True
            if self._scope.cancelled_caught and self.ending.failure is None:
                await self.reports.gather()
        if self.ending.failure is not None:
            raise self.ending.rank_failed(self.size, self.communicators.left) from self.ending.failure[1]
        if self._scope.cancelled_caught:
            lines, sentence = self.reports.lines(), self.reports.sentence()
            raise StallError(self._timed_out, lines, reason=self._reason, sentence=sentence)
        return [results[member.context.rank] for member in self._members]

    async def _run_ranks(
        self,
        main: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        timeout_s: float | None,
        results: dict[int, T],
    ) -> None:
        """Run all ranks to their common end, within the time limit; results go to `results`."""
        with (
            deferring_interrupts(),
            registered_for_forks(self),
            tuned_interpreter(),
            self._scope,
            self._watch_for_stalls(),
        ):
            try:
                async with self._time_limit(timeout_s):
                    async with trio.open_nursery() as nursery:
                        for member in self._members:
                            nursery.start_soon(self._run_rank, member, main, args, results)
                    if self._processes:
                        await self._processes.wait_all_finished()
                        for error in self.communicators.unraised.values():
                            self.fail(min(self.local), error())
            finally:
                await self._join_threads()

    @asynccontextmanager
    async def _time_limit(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Stop the world after a timeout, unless the block has ended by then."""
        if timeout_s is None:
            yield
            return
        async with trio.open_nursery() as nursery:
            self.backend.limit(timeout_s, partial(self._time_out, timeout_s), nursery)
            yield
            nursery.cancel_scope.cancel()

    def _time_out(self, timeout_s: float) -> None:
        """Stop the world because the time limit is over."""
        self._timed_out = None if self._scope.cancel_called else timeout_s
        self._stop(f"did not finish within timeout_s={timeout_s:g}")

    @calls_program
    async def _run_rank(
        self, member: LocalRank, main: Callable[..., Awaitable[T]], args: tuple[object, ...], results: dict[int, T]
    ) -> None:
        """Run the program of one rank, then wait for its operations and daemons."""
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
                                    program() if intercept is None else intercept.live(program, context)
                                )
                        except BaseException as raised:
                            if context.failure is None or raised is context.failure.error:
                                raise
                            when_cancelled, stopped = split_stops(raised, stops=_STOPS)
                            if stopped is not None:  # the world ends with a known cause
                                raise
                        finally:
                            context.program = None
                            context.end_steps()
                        _raise_unawaited(context, when_cancelled)
                    await context.outstanding.drain(_is_program_task)
                    await self._daemon_watch.end_daemons(context.outstanding)
                    await context.outstanding.drain()
                except BaseException as raised:  # in the open nursery: unfinished operations may need a task
                    error = await self._end_failed(member, raised)
                    if error is raised:
                        raise
                    raise error from None
                self._abandon(member)
        except BaseException as raised:
            failed, stopped = split_stops(raised, stops=_STOPS)
            if failed is None:
                raise
            cause = unwrap_single_error(failed)
            if self._processes and self._is_consequence(context.rank, cause):
                await self._processes.wait_for_culprit()
            self.fail(context.rank, cause)
            if stopped is not None:
                raise stopped from None
        else:
            if self._processes:
                self._processes.send_left(context.rank)
            self.communicators.rank_left(context.rank)
            context.flight.left()

    async def _end_failed(self, member: LocalRank, raised: BaseException) -> BaseException:
        """End the operations and daemons of a rank that has failed or is stopped; return its error to show."""
        context, error = member.context, make_presentable(raised)
        if hint := find_hint(error):
            error.add_note(hint)
        explain(unwrap_single_error(error), list(context.outstanding.operations), UNFINISHED)
        self._record_views(member, error)
        own, _ = split_stops(error, stops=_STOPS)
        if own is not None and context.failure is None:
            context.failure = Failure(unwrap_single_error(own), seen=True)
        self._abandon(member)
        assert context.nursery is not None
        context.nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await self._daemon_watch.end_daemons(context.outstanding, on_late=partial(self._report_failure, context))
        return error

    def _failure(self) -> BaseException | None:
        """Return the error of this world; None if no rank has failed."""
        return self.ending.rank_failed(self.size, self.communicators.left) if self.ending.failure else None

    def _report_failure(self, context: RankContext) -> None:
        """Report the failure of a rank that still waits for its daemons, unless another rank is at fault."""
        error = context.failure.error if context.failure else None
        if error is not None and not (self._processes and self._is_consequence(context.rank, error)):
            self.fail(context.rank, error)

    async def wait_until_received(self) -> None:
        """Wait until messages of the ranks here are received, or their receivers receive no more."""
        announced, shared = False, self.communicators
        shared.closing.update(member.context.rank for member in self._members)
        while sends := [send for member in self._members for send in pending_sends(member.context.outstanding)]:
            if self._processes and not announced:  # perhaps to a rank that does the same
                self._processes.send_closing(min(self.local))
                announced = True
            for send in sends:
                if send.members[1] in shared.left | shared.closing:
                    send.drop()
            await trio.sleep(_RECEIVED_S)

    def _abandon(self, member: LocalRank) -> None:
        """Fail all unfinished operations of a rank, and let it start no others."""
        member.context.closed = True
        member.context.deadlines.stop()
        member.compute.stop()
        member.context.outstanding.abandon(member.context.ended)

    async def _join_threads(self) -> None:
        """Fail unfinished operations, wait for running computations, and end all threads."""
        with trio.CancelScope(shield=True):
            for member in self._members:
                self._abandon(member)
            try:
                for member in self._members:
                    await member.computes_ended()
            finally:  # an interrupt may end the wait
                await self._engine.aclose()
                self.backend.close()

    # -- failure -----------------------------------------------------------------------------------------------

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the error of a rank; the first culprit ends the world."""
        culprit, cause = find_origin(rank, error)
        doing = self.reports.doing(culprit)
        if self.ending.failure is None:
            self._end_by_culprit(culprit, cause, doing, spared=rank)
            if self._processes:  # after it is recorded: the report may fail as well
                self._processes.send_failure(culprit, cause, doing)
        elif not isinstance(error, (PeerError, TransportError)) and culprit != self.ending.failure[0]:
            # broken wires after it are the first signs of a process's end, and no failures of their own
            self.ending.add(culprit, cause, doing, self.backend.now_ns() if self.backend.name == "virtual" else None)

    def fail_elsewhere(self, culprit: int, cause: BaseException, doing: list[str]) -> None:
        """End the world because of a rank of another process, which failed or was lost."""
        if self.ending.failure is None:
            self._end_by_culprit(culprit, cause, doing)

    def _end_by_culprit(
        self, culprit: int, cause: BaseException, doing: list[str], *, spared: int | None = None
    ) -> None:
        """End the world because of one rank's error: abandon its operations, and cancel all ranks."""
        self.ending.begin(culprit, cause, doing, self.backend.now_ns())
        if self._flight is not None:
            here = culprit in self.local and not isinstance(cause, (PeerError, RemoteError, TransportError))
            self._flight.end("failed", rank=culprit, line=f"{in_one_line(cause)}{where(cause)}", began_here=here)
        for member in self._members:
            member.context.closed = True
            if member.context.rank != spared:
                self._abandon(member)
        self._scope.cancel(reason=f"rank {culprit} failed: {in_one_line(cause)}")

    def _is_consequence(self, rank: int, error: BaseException) -> bool:
        """Whether an error looks like the consequence of an error in another process, whose report is on its way."""
        culprit, cause = find_origin(rank, error)
        evident = isinstance(cause, LinkLostError) and cause.evident
        return culprit not in self.local or (isinstance(cause, TransportError) and not evident)

    def forked(self) -> None:
        """Fail the waits of threads in a fork of this process, where no task runs any more."""
        self.ending.fork(min(self.local))
        for member in self._members:
            member.context.closed = True
            member.context.outstanding.forsake(self.ending.peer_failed)
        if any(member.context.thread == get_ident() for member in self._members):
            stop_loop(self.ending.peer_failed)

    def let_threads_in(self) -> None:
        """Let threads issue and end small operations without waking the sleeping loop; on the loop's thread."""
        self._handover.let_threads_in(self._fail_interrupted)

    def _fail_interrupted(self, error: BaseException) -> None:
        """End the world because Ctrl-C interrupted a thread in the loop's place."""
        member = self._members[0]
        text = text_of(error) or "it came in the midst of an operation"
        self.fail(member.context.rank, RemoteError(type_name(error), text))
        self._abandon(member)

    def runs_elsewhere(self, place: Callable[[], str]) -> None:
        """Record that the programs of the ranks here run in another thread.

        That thread may issue an operation at any time: the world is not given up as hopeless before it closes.

        Args:
            place: Returns the place of the programs, as "file:line".
        """
        for member in self._members:
            member.context.elsewhere = place

    def deadlock(self) -> None:
        """End the world because every rank is blocked and nothing is due; only in virtual time."""
        self._stop("cannot finish: every rank is blocked, and nothing is due")

    def give_up(self, quiet_s: float) -> None:
        """End the world because nothing has moved for `quiet_s`."""
        self._stop(f"made no progress for {quiet_s:g} s, and is given up")

    def stopped_elsewhere(self, reason: str) -> None:
        """End the world for the reason that another process has reported."""
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        """End the world for a reason that is no rank's error, such as a stall."""
        if self._scope.cancel_called or self._fail_with_unseen_error():
            return
        self._reason = reason
        self.reports.take_stock()
        if self._flight is not None:  # before the ranks are stopped: what ends later was unfinished
            self._flight.end("stalled", rank=None, line=f"StallError: the world {reason}", began_here=True)
        if self._processes:
            self._processes.send_views(self.reports.stood, reason)
        self._scope.cancel(reason=f"the world {reason}")

    def _fail_with_unseen_error(self) -> bool:
        """End the world with an error that no task has received, the cause of the stop; False if there is none."""
        for context in (member.context for member in self._members):
            unseen = context.outstanding.unseen
            if unseen is not None and self.ending.failure is None:
                unseen.mark_seen()
                self.fail(context.rank, unseen.error)
                return True
        return False

    def _record_views(self, member: LocalRank, error: BaseException) -> None:
        """Record what each rank does when the first rank stops, and report that before any wait."""
        if self.reports.stood or self.ending.failure is not None or split_stops(error, stops=_STOPS)[0] is not None:
            return
        self.reports.stood = self.reports.views({member.context.rank: place_in(error)})
        if self._processes:
            self._processes.send_views(self.reports.stood, "")

    def end_by_signal(self, signal_name: str) -> None:
        """Report to the other processes that a signal ends this one."""
        if self._processes and self.ending.failure is None:
            rank = min(self.local)
            self._processes.send_failure(
                rank, RemoteError(signal_name, "a signal ended its process"), self.reports.doing(rank)
            )

    def _watch_for_stalls(self) -> AbstractContextManager[object]:
        """Watch for stalls for the length of a ``with``; in virtual time the kernel sees them at once."""
        if self.backend.name == "virtual":
            return nullcontext()
        return world_watch(self._members, self._token, self._limits, self._processes, self.give_up)

    def record_wire_event(self, line: str) -> None:
        """Add an event of the connections to the timeline of the first rank here."""
        now_ns = self.backend.now_ns()
        self._members[0].context.record(("wires", "wires", line, now_ns, now_ns, None))

    # -- for groups of its ranks ---------------------------------------------------------------------------------

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` if the cluster does not allow such a group; the first member checks."""
        self._rules.check(ranks)

    def recorders(self) -> list[Recorder]:
        """Return the recorders of the ranks here."""
        return [member.rank.recorder for member in self._members]

    def facts(self) -> dict[str, str]:
        """Return facts about the run for its timeline."""
        meta = {"script": sys.argv[0], "cluster": _machine_name(self._cluster)} | self.backend.meta()
        meta |= self.described
        if self.ending.failure is not None or self._scope.cancel_called:
            meta[ENDED] = "failed" if self.ending.failure is not None else "was stopped"
        starved = {member.rank.rank: member.compute.starved_share for member in self._members}
        if shares := " ".join(f"{rank}:{share:.2f}" for rank, share in starved.items() if share >= STARVED_SHARE):
            meta[STARVED] = shares
        return meta

    def timeline(self) -> Timeline:
        """Return the timeline that the ranks here have recorded until now."""
        meta = self.facts()
        return Timeline.collect(self.recorders(), world_size=self.size, clock=self.backend.name, meta=meta)


def _raise_unawaited(context: RankContext, raised: BaseException | None) -> None:
    """Raise the unawaited error of a rank's own code that has ended its program, if there is one.

    Args:
        raised: Error of the program when it was cancelled because of that: both go in a group, as from a nursery.
    """
    if context.failure is None:
        return
    if raised is not None:
        message = "an error that nobody awaited, and the error of the program that it cancelled"
        raise BaseExceptionGroup(message, [context.failure.error, raised]) from None
    raise context.failure.error


def _is_program_task(operation: IssuedFuture[object]) -> bool:
    """Whether an operation is a task of the program, which must end before the daemons do."""
    return isinstance(operation, TaskFuture) and not operation.daemon


def _machine_name(machine: topology.Cluster) -> str:
    """Return the name with which `topology.cluster` makes the machine again."""
    return f"{machine.name} lnc={machine.lnc}" if len(machine.machine.chip.lnc) > 1 else machine.name
