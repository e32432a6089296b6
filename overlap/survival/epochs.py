"""Runs that go on after losses: the surviving processes join a new world, the next epoch, and call `main` again."""

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
from ..errors import OverlapError, PeerError, PeerLostError, RankFailedError, RemoteError, UsageError, one_line_text
from ..flight.folder import restart_count
from ..notice import notify
from ..processes.connect import join_launched_world, join_world, make_rendezvous_config
from ..processes.identity import format_processes
from ..processes.members import MemberLostError
from ..processes.place import ProcessPlace, count_even_nodes, set_place_variables
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

#: Time limit for all processes of a world after the first to join. They are all running, so a late one must be stopped.
JOIN_S = 15.0
#: Time limit for the report of a process that a survivor has lost its connection to, but that may be alive.
SUSPECT_S = 1.0
#: Wait of less than half of a world before it decides: the others may be alive, and decide first.
MINORITY_S = 10.0
#: Time limit for the report of any other live process: a compute in it cannot be interrupted.
REPORT_S = 60.0
#: Numbers of worlds that each epoch has: more than a program has runs.
_EPOCH = 1 << 10

_runs = count()
# Lists of at most one item, as variables of this module:
_last: list[EpochWorld] = []  # the last world of the previous run of this program
_member: list[int] = []  # number of this process in the first world


class EpochClosedError(OverlapError):
    """The other processes went on without this one, which was stopped or disconnected for too long."""


class NotMetError(OverlapError):
    """A process was lost before all processes of a world had met.

    Args:
        late: Whether a live process did not join in time; it is not known which one.

    Attributes:
        late: See the argument.
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
        on_start: Function that is called with the world of each epoch before its ranks start.
        has_signal: Function that returns whether a signal has asked this process to end.

    Returns:
        The results of the ranks of this process.

    Raises:
        EpochClosedError: The other processes went on without this one.
        RankFailedError: A rank raised an error; that is no loss.
    """
    run = SurvivingRun(own_place, run_config)
    writer.member, writer.goes_on = run.member, run.is_loss
    try:
        while True:
            try:
                results = await run.run_epoch(main, args, writer, on_start, has_signal)
            except Exception as error:
                if not run.is_loss(error):
                    raise
                loss = error
            else:
                await run.witness.access_folder(lambda: run.witness.record_finished_epoch(run.world.epoch))
                return results
            if (results_before := await run.enter_next_world(loss)) is not None:
                return results_before  # type: ignore[return-value]
    finally:
        run.close()


class SurvivingRun:
    """One run of a program in this process: its worlds, one after the other.

    Args:
        own_place: Place of this process in the first world.
        run_config: Settings of the run.

    Attributes:
        member: Number of this process in the first world.
        world: The present world.
        witness: Decides on the next worlds.
        place: Place of this process in the present world.
        epochs: The `Epoch` of each rank of this process, which has the state that survives a loss.
        state: State of this process: JOINS until the processes of the present world have met, then TRAINS.
    """

    def __init__(self, own_place: ProcessPlace, run_config: RunConfig) -> None:
        if not _member:
            _member.append(own_place.process)
        self.member: int = _member[0]
        self._number = next(_runs)
        members = _last[-1].members if _last else tuple(range(own_place.processes))
        self.world: EpochWorld = EpochWorld(epoch=0, members=members, step=0)
        folder = witness_folder()
        assert own_place.endpoint is not None, "overlap run sets the endpoint"
        several = int(os.environ.get(HOSTS) or 1) > 1
        self._address = local_address(own_place.endpoint) if several else own_place.endpoint[0]
        self.witness: Witness = Witness(
            folder, restart_count(), self._number, self.member, self.world,
            address=self._address if several else None, limit_s=run_config.lost_after_s,
        )  # fmt: skip
        self.place: ProcessPlace = own_place
        self._listener, self._size = listen((self._address, 0)), own_place.processes
        self._processes_per_host = own_place.processes // own_place.nodes
        state_dir = run_config.state_dir or str(folder / "state")
        self._run_config = run_config.with_changes(own_place.source, ranks=own_place.world_size, state_dir=state_dir)
        self.epochs: list[Epoch] = [Epoch(survives=True, members=members) for _ in own_place.ranks]
        self.state: AgreementState = AgreementState.JOINS
        self._finished: dict[int, object] = {}
        self._last_change = ""  # sentence on the lost members, for the timeline
        self._old_listeners: list[socket.socket] = []  # of earlier worlds

    def close(self) -> None:
        """End this run: release the witness and the listeners, so that this process counts as ended."""
        _last[:] = [self.world]
        self.witness.close()
        for listener in (self._listener, *self._old_listeners):
            listener.close()

    # -- one epoch -----------------------------------------------------------------------------------------------------

    async def run_epoch(
        self,
        main: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        writer: TraceWriter,
        on_start: Callable[[World], None],
        has_signal: Callable[[], bool],
    ) -> list[T]:
        """Run the world of one epoch, to its end or the first loss. Arguments: see `live_epochs`.

        Returns:
            The results of the ranks of this process.

        Raises:
            NotMetError: The processes of the world have not met.
            Exception: The error of the world; `is_loss` says whether other processes can go on after it.
        """

        async def run_rank(rank: Rank, *rest: object) -> T:
            """Run a rank, and store the result in `_finished`: a loss may come after some ranks have finished."""
            result = await main(rank, *rest)
            self._finished[rank.rank] = result
            return result

        def enter_training(world: World) -> None:
            """Enter TRAINS, as all processes have met; record the epoch in the timeline, and call `on_start`."""
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
        """Return a context that joins the present world: as the launcher says, in later epochs at the first member."""
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
        """Cancel `joining` when a process of the present world has ended, has left it with a report, or is late."""
        with trio.move_on_after(JOIN_S if self.world.epoch else inf):
            async with self.witness.watching_members(self.world.members):
                while self.state is AgreementState.JOINS and not await self.witness.access_folder(  # noqa: ASYNC110
                    self._has_fallen_apart
                ):
                    await trio.sleep(self.witness.look_s)
                while self.witness.is_awaiting_answers():  # noqa: ASYNC110  the report needs what comes of it
                    await trio.sleep(self.witness.look_s)
        if self.state is AgreementState.JOINS:
            joining.cancel()

    def _has_fallen_apart(self) -> bool:
        """Whether a process of the present world has ended, or has reported, and so has left it."""
        return bool(self._dead_members() or self.witness.read_reports(self.world.epoch, self.world.members))

    def _dead_members(self) -> set[int]:
        """Return the members of the present world whose processes have ended."""
        return {member for member in self.world.members if self.witness.is_dead(member)}

    # -- between two epochs --------------------------------------------------------------------------------------------

    def is_loss(self, error: Exception) -> bool:
        """Whether the others can go on after an error: a process or a wire was lost, and no rank failed by itself."""
        if isinstance(error, UsageError):
            return False
        if self.state is AgreementState.JOINS:  # the processes have not met
            newer = self.witness.read_newest_world().epoch > self.world.epoch
            return newer or isinstance(error, NotMetError) or self._has_fallen_apart()
        return ends_epoch(error)

    async def enter_next_world(self, loss: Exception) -> list[object] | None:
        """Report to the witness after a loss, wait for its decision on the next world, and enter that.

        Returns:
            None; or the results of the ranks of this process, if all ranks of the world had finished before the loss.

        Raises:
            EpochClosedError: The other processes went on without this one.
        """
        suspects, previous = self._suspected_members(loss), self.world
        self.state = AgreementState.REPORTS
        step = max((epoch.survivor.report() for epoch in self.epochs if epoch.survivor), default=previous.step)
        if self.place.listener is not None and previous.epoch:  # processes of this world may still dial the old one
            self._old_listeners.append(self._listener)
            self._listener = listen((self._address, 0))
        host, port = self._listener.getsockname()[:2]
        report = WitnessReport(step=step, endpoint=(host, port), unreached=self.witness.unreached_members())
        await self.witness.access_folder(lambda: self.witness.write_report(previous.epoch, report))
        async with self.witness.watching_members(previous.members):
            record = await self._wait_for_next_world(suspects)
        if record is None:
            return [self._finished[rank] for rank in self.place.ranks]
        if isinstance(loss, NotMetError) and loss.late and record.members == previous.members:
            raise loss  # all live, and cannot meet: another epoch would not help
        reports = await self.witness.access_folder(lambda: self.witness.read_reports(previous.epoch, record.members))
        self._enter_world(record, member_state(self.member, previous, record), reports)
        self._last_change = describe_new_epoch(previous, record)
        if record.members[0] == self.member:
            notify(describe_new_epoch(previous, record, one_line_text(loss)))
        return None

    def _suspected_members(self, loss: Exception) -> set[int]:
        """Return the members that this process takes for lost because of an error; they may be alive."""
        cause = loss.cause if isinstance(loss, RankFailedError) else loss
        if isinstance(cause, NotMetError) and cause.late:
            return set(self.world.members) - {self.member}
        if isinstance(cause, PeerError) and cause.culprit >= 0:
            return {self.world.members[cause.culprit // self.place.ranks_per_process]}
        return set()

    async def _wait_for_next_world(self, suspects: set[int]) -> EpochWorld | None:
        """Return the next world once the witness has recorded it; None if the present world has ended well."""
        start_s = trio.current_time()
        while (record := await self.witness.access_folder(self.witness.read_newest_world)).epoch == self.world.epoch:
            waited_s = trio.current_time() - start_s
            if await self.witness.access_folder(partial(self._propose_if_reported, suspects, waited_s)):
                return None
            await trio.sleep(self.witness.look_s)
        return record

    def _propose_if_reported(self, suspects: set[int], waited_s: float) -> bool:
        """Propose the next world if all live members have reported; return whether this one has ended well.

        It uses the witness's folder, so it must be called by `Witness.access_folder`, in any thread. Suspects may be
        alive; `waited_s` counts from the own report.
        """
        if self.witness.has_finished(self.world.epoch) and len(self._finished) == len(self.epochs):
            return True
        reports = self.witness.read_reports(self.world.epoch, self.world.members)
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
            self.witness.record_proposal(proposal)
        return False

    def _enter_world(self, record: EpochWorld, state: AgreementState, reports: Mapping[int, WitnessReport]) -> None:
        """Set the place, the settings and the epochs for the next world; its first member's report has the address.

        Raises EpochClosedError if this process is no member of it.
        """
        self.state = state
        if state is AgreementState.OUT:
            raise EpochClosedError(
                f"process {self.member} was stopped or cut off: processes {list(record.members)} went on without it "
                f"from step {record.step}, in epoch {record.epoch}; look for what held it up (SIGSTOP, a debugger, the "
                "network), or give it more time with --lost-after"
            )
        processes, process = len(record.members), record.members.index(self.member)
        nodes = count_even_nodes([member // self._processes_per_host for member in record.members])
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
        self._run_config = self._run_config.with_changes(ranks=self.place.world_size)
        self.world = record
        for epoch in self.epochs:
            epoch.enter(record.epoch, record.step, record.members)


_ENDS = (PeerLostError, MemberLostError, TransportError)
_NAMES = {kind.__name__ for kind in (*_ENDS, *TransportError.__subclasses__())}


def ends_epoch(error: Exception) -> bool:
    """Whether an error ends an epoch only: a process or a wire was lost, and no rank has failed."""
    cause = error.cause if isinstance(error, RankFailedError) else error
    return cause.type_name in _NAMES if isinstance(cause, RemoteError) else isinstance(cause, _ENDS)


def describe_new_epoch(before: EpochWorld, after: EpochWorld, reason: str = "") -> str:
    """Return a sentence on a new epoch, for users.

    Args:
        before: The world that has ended.
        after: The next world.
        reason: Reason of the end; "" leaves it out.
    """
    lost = [member for member in before.members if member not in after.members]
    ended = f"lost {format_processes(lost) if lost else 'no process'}" + (f": {reason}" if reason else "")
    going = f"going on with {len(after.members)} of {len(before.members)} processes"
    return f"{ended}; {going}" + (f" after step {after.step}" if after.step else "")
