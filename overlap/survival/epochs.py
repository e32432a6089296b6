"""World that goes on after losses: its processes join again, in the next epoch, and call `main` again."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from typing import TypeVar

import trio

from transports import TransportError

from ..config import RunConfig
from ..errors import OverlapError, PeerError, PeerLostError, RankFailedError, RemoteError, UsageError, in_one_line
from ..flight.folder import restart_count
from ..notice import notify
from ..processes.connect import join_launched_world, join_world, make_rendezvous_config
from ..processes.identity import name_processes
from ..processes.members import MemberLostError
from ..processes.place import ProcessPlace, set_place_variables
from ..processes.real_time import WorldSetup, run_ranks, single_process_setup
from ..processes.shared_folder import HOSTS
from ..processes.sockets import listen, local_address
from ..processes.status import report_to_launcher
from ..processes.trace_writer import TraceWriter
from ..processes.wire import MemberLost
from ..runtime.epoch import Epoch
from ..runtime.rank import Rank
from ..runtime.world import World
from ..tasks import open_background_nursery
from .agreement import (
    AgreementState,
    EpochWorld,
    cut_off_members,
    is_minority,
    lost_members,
    member_state,
    propose_world,
)
from .witness import Witness, WitnessReport, witness_folder

T = TypeVar("T")

#: Time limit for the processes of a world after the first to join; all are ready, so a late one is stopped.
JOIN_S = 15.0
#: Time limit for the report of a process that a survivor calls lost, and that lives.
SUSPECT_S = 1.0
#: Wait of less than half of a world, which cannot know whether the others have ended: they decide first.
MINORITY_S = 10.0
#: Time limit for the report of a process that lives: a compute in it cannot be interrupted.
REPORT_S = 60.0
#: Numbers of worlds from one epoch to the next: more than one program runs.
_EPOCH = 1 << 10

_runs = count()
_last: list[EpochWorld] = []  # the newest world of the last run of this program
_member: list[int] = []  # number of this process in its first world


class EpochClosedError(OverlapError):
    """The others went on without this process, which was stopped or cut off for too long."""


class NotMetError(OverlapError):
    """A process was lost before all processes of a world had met.

    Attributes:
        late: Whether a live process did not join; it is not known which.
    """

    def __init__(self, *, late: bool) -> None:
        super().__init__("a process has not come in time" if late else "a process was lost before all had met")
        self.late = late


async def live_epochs(
    own_place: ProcessPlace,
    main: Callable[..., Awaitable[T]],
    args: tuple[object, ...],
    run_config: RunConfig,
    writer: TraceWriter,
    on_start: Callable[[World], None],
    *,
    has_signal: Callable[[], bool],
) -> list[T]:
    """Run `main(rank, *args)` on the ranks of this process, again in each epoch, until one ends well.

    Args:
        own_place: Place of this process in the first world.
        main: The program of each rank.
        args: Further arguments of the program.
        run_config: Settings of the run.
        writer: Writes the trace.
        on_start: Called with the world of each epoch before its ranks start.
        has_signal: Whether a signal has asked this process to end.

    Raises:
        EpochClosedError: The others went on without this process.
        RankFailedError: A rank raised an error of its own: that is no loss.
    """
    run = SurvivingRun(own_place, run_config)
    writer.member, writer.goes_on = run.member, run.is_loss
    try:
        while True:
            try:
                results = await run.epoch(main, args, writer, on_start, has_signal)
            except Exception as error:
                if not run.is_loss(error):
                    raise
                loss = error
            else:
                await run.witness.access(lambda: run.witness.finish(run.world.epoch))
                return results
            if (results_before := await run.follow(loss)) is not None:
                return results_before  # type: ignore[return-value]
    finally:
        run.close()


class SurvivingRun:
    """One run of a program in this process: its worlds, one after the other.

    Attributes:
        member: Number of this process in the first world.
        world: The present world.
        witness: Decides on the next worlds.
        place: Place of this process in the present world.
        epochs: Memory of each rank of this process.
        state: JOINS until the processes of the present world have met, then TRAINS.
    """

    member: int
    world: EpochWorld
    witness: Witness
    place: ProcessPlace
    epochs: list[Epoch]
    state: AgreementState

    def __init__(self, own_place: ProcessPlace, run_config: RunConfig) -> None:
        if not _member:
            _member.append(own_place.process)
        self.member = _member[0]
        self._number = next(_runs)
        members = _last[-1].members if _last else tuple(range(own_place.processes))
        self.world = EpochWorld(epoch=0, members=members, step=0)
        folder = witness_folder()
        assert own_place.endpoint is not None, "overlap run sets the endpoint"
        several = int(os.environ.get(HOSTS) or 1) > 1
        self._address = local_address(own_place.endpoint) if several else own_place.endpoint[0]
        self.witness = Witness(
            folder, restart_count(), self._number, self.member, self.world,
            address=self._address if several else None, limit_s=run_config.lost_after_s,
        )  # fmt: skip
        self.place, self._listener, self._size = own_place, listen((self._address, 0)), own_place.processes
        self._processes_per_host = own_place.processes // own_place.nodes
        state_dir = run_config.state_dir or str(folder / "state")
        self._run_config = run_config.changed(own_place.source, ranks=own_place.world_size, state_dir=state_dir)
        self.epochs = [Epoch(survives=True, members=members) for _ in own_place.ranks]
        self.state = AgreementState.JOINS
        self._finished: dict[int, object] = {}
        self._last_change = ""  # Members that were lost, for the timeline
        self._old_listeners: list[socket.socket] = []  # listened in earlier worlds

    def close(self) -> None:
        """End this run: release the witness and the listeners, so that this process counts as ended."""
        _last[:] = [self.world]
        self.witness.close()
        for listener in (self._listener, *self._old_listeners):
            listener.close()

    # -- one epoch -----------------------------------------------------------------------------------------------------

    async def epoch(
        self,
        main: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        writer: TraceWriter,
        on_start: Callable[[World], None],
        has_signal: Callable[[], bool],
    ) -> list[T]:
        """Run the world of one epoch, to its end or the first loss."""

        async def run_rank(rank: Rank, *rest: object) -> T:
            """Run a rank, and store its result: an epoch may end after some ranks have finished."""
            result = await main(rank, *rest)
            self._finished[rank.rank] = result
            return result

        def enter_training(world: World) -> None:
            """Note that all processes have met."""
            self.state = AgreementState.TRAINS
            if self.world.epoch:
                world.record_wire_event(f"epoch {self.world.epoch}: {self._last_change}")
            on_start(world)

        self._finished = {}
        own_place, run_config = self.place, self._run_config
        each = own_place.ranks_per_process
        writer.numbers = [member * each + rank for member in self.world.members for rank in range(each)]
        writer.world_size = self._size * each
        async with open_background_nursery() as nursery:
            joining = trio.CancelScope()
            nursery.start_soon(self._watch_joining, joining)
            with joining:
                opened = await self._open_world()
                return await run_ranks(
                    opened, own_place, run_rank, args, run_config, writer, enter_training,
                    has_signal=has_signal, epochs=self.epochs,
                )  # fmt: skip
        raise NotMetError(late=not self._has_fallen_apart())

    async def _open_world(self) -> AbstractAsyncContextManager[WorldSetup]:
        """Return the setup of the present world: by the launcher in the first epoch, then among the survivors."""
        own_place = self.place
        if not self.world.epoch:
            return join_launched_world(own_place, self._run_config)
        if own_place.processes == 1:
            return single_process_setup(self._run_config)
        world = self._number + _EPOCH * self.world.epoch
        meeting = await make_rendezvous_config(own_place, world, "survivors", self._run_config)
        meeting = replace(meeting, fresh=False)  # the witness belongs to one attempt

        def report_lost(lost: MemberLost) -> None:
            """Report a lost process to the launcher, by its number in the first world."""
            report_to_launcher(MemberLost(member=self.world.members[lost.member], reason=lost.reason))

        return join_world(own_place, self._run_config, meeting, on_lost=report_lost)

    async def _watch_joining(self, joining: trio.CancelScope) -> None:
        """Give up joining when a process that is missing has ended, has given up itself, or is late."""
        with trio.move_on_after(JOIN_S if self.world.epoch else inf):
            async with self.witness.watching(self.world.members):
                while self.state is AgreementState.JOINS and not await self.witness.access(self._has_fallen_apart):  # noqa: ASYNC110
                    await trio.sleep(self.witness.look_s)
                while self.witness.dials():  # noqa: ASYNC110  the report needs what comes of it
                    await trio.sleep(self.witness.look_s)
        if self.state is AgreementState.JOINS:
            joining.cancel()

    def _has_fallen_apart(self) -> bool:
        """Whether a process of the present world has ended, or has left it with a report."""
        return bool(self._dead_members() or self.witness.reports(self.world.epoch, self.world.members))

    def _dead_members(self) -> set[int]:
        """Return the members of the present world whose processes have ended."""
        return {member for member in self.world.members if self.witness.is_dead(member)}

    # -- between two epochs --------------------------------------------------------------------------------------------

    def is_loss(self, error: Exception) -> bool:
        """Whether the others can go on after an error: a process or a wire was lost, and no rank failed by itself."""
        if isinstance(error, UsageError):
            return False
        if self.state is AgreementState.JOINS:  # it did not come together
            newer = self.witness.record().epoch > self.world.epoch
            return newer or isinstance(error, NotMetError) or self._has_fallen_apart()
        return is_end(error)

    async def follow(self, loss: Exception) -> list[object] | None:
        """Agree with the survivors on the next world after a loss, and enter it.

        Returns:
            The results of the ranks here, if the loss came when all ranks of the world had finished; else None.

        Raises:
            EpochClosedError: The others went on without this process.
        """
        suspects, previous = self._suspected_members(loss), self.world
        self.state = AgreementState.REPORTS
        step = max((epoch.survivor.report() for epoch in self.epochs if epoch.survivor), default=previous.step)
        if self.place.listener is not None and previous.epoch:  # processes of this world may still dial the old one
            self._old_listeners.append(self._listener)
            self._listener = listen((self._address, 0))
        host, port = self._listener.getsockname()[:2]
        report = WitnessReport(step=step, endpoint=(host, port), unreached=self.witness.unreached())
        await self.witness.access(lambda: self.witness.report(previous.epoch, report))
        async with self.witness.watching(previous.members):
            record = await self._wait_for_next_world(suspects)
        if record is None:
            return [self._finished[rank] for rank in self.place.ranks]
        if isinstance(loss, NotMetError) and loss.late and record.members == previous.members:
            raise loss  # all live, and cannot meet: another epoch would not help
        reports = await self.witness.access(lambda: self.witness.reports(previous.epoch, record.members))
        self._enter_world(record, member_state(self.member, previous, record, reported=True), reports)
        self._last_change = describe_new_epoch(previous, record)
        if record.members[0] == self.member:
            notify(describe_new_epoch(previous, record, in_one_line(loss)))
        return None

    def _suspected_members(self, loss: Exception) -> set[int]:
        """Return the members that this process calls lost after an error, though they may live."""
        cause = loss.cause if isinstance(loss, RankFailedError) else loss
        if isinstance(cause, NotMetError) and cause.late:
            return set(self.world.members) - {self.member}
        if isinstance(cause, PeerError) and cause.culprit >= 0:
            return {self.world.members[cause.culprit // self.place.ranks_per_process]}
        return set()

    async def _wait_for_next_world(self, suspects: set[int]) -> EpochWorld | None:
        """Return the next world, once the witness has recorded it; None: the present one has ended well."""
        start_s = trio.current_time()
        while (record := await self.witness.access(self.witness.record)).epoch == self.world.epoch:
            waited_s = trio.current_time() - start_s
            if await self.witness.access(partial(self._propose_if_reported, suspects, waited_s)):
                return None
            await trio.sleep(self.witness.look_s)
        return record

    def _propose_if_reported(self, suspects: set[int], waited_s: float) -> bool:
        """Propose the next world once all live members have reported; return whether the present one ended well."""
        if self.witness.has_finished(self.world.epoch) and len(self._finished) == len(self.epochs):
            return True
        reports = self.witness.reports(self.world.epoch, self.world.members)
        lost = lost_members(
            self.world, dead=self._dead_members(), suspects=suspects, reports=reports.keys(), waited_s=waited_s,
            suspect_s=SUSPECT_S, report_s=REPORT_S,
        )  # fmt: skip
        lost |= cut_off_members(self.world, {m: set(report.unreached) for m, report in reports.items()}, lost=lost)
        ended = {member for member in lost if self.witness.has_ended(member)}
        if waited_s < MINORITY_S and is_minority(self.world, lost=lost, ended=ended):
            return False
        steps = {member: report.step for member, report in reports.items()}
        if (proposal := propose_world(self.world, steps, lost)) is not None:
            self.witness.propose(proposal)
        return False

    def _enter_world(self, record: EpochWorld, state: AgreementState, reports: Mapping[int, WitnessReport]) -> None:
        """Set the place, the settings and the epochs of this process for the next world.

        Raises:
            EpochClosedError: This process is no member of it.
        """
        self.state = state
        if state is AgreementState.OUT:
            raise EpochClosedError(
                f"process {self.member} was stopped or cut off: processes {list(record.members)} went on without it "
                f"from step {record.step}, in epoch {record.epoch}; look for what held it up (SIGSTOP, a debugger, the "
                "network), or give it more time with --lost-after"
            )
        processes, process = len(record.members), record.members.index(self.member)
        hosts = [member // self._processes_per_host for member in record.members]
        nodes = (
            len(set(hosts)) if {hosts.count(host) for host in hosts} == {processes // len(set(hosts))} else processes
        )
        self.place = replace(
            self.place,
            process=process,
            processes=processes,
            node=process * nodes // processes,
            nodes=nodes,
            endpoint=reports[record.members[0]].endpoint,
            listener=self._listener.fileno() if process == 0 else None,
        )
        set_place_variables(self.place)
        self._run_config = self._run_config.changed(ranks=self.place.world_size)
        self.world = record
        for epoch in self.epochs:
            epoch.number, epoch.step, epoch.members = record.epoch, record.step, record.members
            if epoch.survivor is not None:
                epoch.survivor.advance(record.step)


_ENDS = (PeerLostError, MemberLostError, TransportError)
_NAMES = {kind.__name__ for kind in (*_ENDS, *TransportError.__subclasses__())}


def is_end(error: Exception) -> bool:
    """Whether an error ends an epoch only: a process or a wire was lost, and no rank has failed."""
    cause = error.cause if isinstance(error, RankFailedError) else error
    return cause.type_name in _NAMES if isinstance(cause, RemoteError) else isinstance(cause, _ENDS)


def describe_new_epoch(before: EpochWorld, after: EpochWorld, reason: str = "") -> str:
    """Return the line for the user on a new epoch.

    Args:
        before: The world that has ended.
        after: The next one.
        reason: Reason of the end; empty where a line must be short.
    """
    lost = [member for member in before.members if member not in after.members]
    ended = f"lost {name_processes(lost) if lost else 'no process'}" + (f": {reason}" if reason else "")
    going = f"going on with {len(after.members)} of {len(before.members)} processes"
    return f"{ended}; {going}" + (f" after step {after.step}" if after.step else "")
