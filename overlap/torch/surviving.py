"""Programs that go on after a loss: the surviving processes leave their world, and agree on the next one.

A program that was started by `overlap run --survive` catches the error of an operation, and joins the next world::

    while True:
        dist.init_process_group("overlap", init_method="overlap://")
        try:
            train()
            break
        except RuntimeError as error:  # in the backward of DistributedDataParallel it is no DistBackendError
            world = overlap.torch.next_world(error, step=steps_done)

One of N processes may be lost at any time, the first one too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
import trio

from ..config import RunConfig
from ..embedded.connection import Connection
from ..errors import UsageError
from ..processes.place import DEFAULT_JOB, ProcessPlace, find_place
from ..processes.status import Entering, Leaving, report_to_launcher
from ..survival.agreement import AgreementState
from ..survival.epochs import SurvivingRun

_END_S = 2.0  # longest wait for the end of a world that has lost a process

_connection: list[Connection] = []  # of the present world
_run: list[SurvivingRun] = []  # of this program, once its first group has been initialised under --survive


@dataclass(frozen=True, slots=True, kw_only=True)
class NextWorld:
    """The world in which the surviving processes continue."""

    epoch: int  # Number of worlds of this job that have ended by a loss
    members: tuple[int, ...]  # For each rank of this world, the number of its process in the first world
    step: int  # Largest number of finished steps that a survivor has reported
    source: int  # Rank, in this world, of a process that has finished that many steps: its state is the newest


@dataclass(slots=True)
class _FinishedSteps:
    """Number of finished steps of a program that keeps its state itself, for `SurvivingRun`."""

    done: int

    def report(self) -> int:
        """Return the number of finished steps."""
        return self.done

    def advance(self, step: int) -> None:
        """Set the number of finished steps."""
        self.done = step


def next_world(error: BaseException, *, step: int) -> NextWorld:
    """Leave the world that has failed, and agree with the other survivors on the next one.

    All survivors must call this function, each with its own error. Afterwards `init_process_group("overlap",
    init_method="overlap://")` joins the next world. Its ranks have new numbers. Groups and models of the old world
    (`DistributedDataParallel`) must be made again.

    Args:
        error: The error that an operation has raised.
        step: Number of steps that this process has finished. Survivors may differ by one: the program then copies the
            state of rank `NextWorld.source` to all ranks.

    Returns:
        The next world.

    Raises:
        BaseException: `error` itself, if no process was lost: a rank has failed by itself, or the ranks disagree.
        EpochClosedError: The others have continued without this process, which was stopped or cut off.
        UsageError: The program was not started by `overlap run --survive`.
    """
    if not _run:
        reason = "this program was not started with --survive, so there is no next world"
        raise UsageError(f"next_world: {reason}; start it by `overlap run --survive`")
    [run], [connection] = _run, _connection
    loss = connection.failure(_END_S)
    if not isinstance(loss, Exception) or not run.is_loss(loss):
        raise error from loss  # `loss` names the rank at fault; in a backward, `error` has no cause
    # the group belongs to a world that has failed, so its end may fail as well
    with suppress(Exception):
        dist.destroy_process_group()
    run.epochs[0].survivor = _FinishedSteps(step)
    trio.run(run.enter_next_world, loss)
    world = run.world
    reports = run.witness.read_reports(world.epoch - 1, world.members)
    # the first of the members that have finished the most steps
    source = next(rank for rank, member in enumerate(world.members) if reports[member].step == world.step)
    return NextWorld(epoch=world.epoch, members=world.members, step=world.step, source=source)


def is_started_to_survive() -> bool:
    """Whether this program was started by `overlap run --survive`."""
    return bool(RunConfig.from_environment(os.environ).survive)


def report_joined(connection: Connection) -> None:
    """Record that this process has joined a world, and report it to the launcher; nothing without a launcher."""
    _connection[:] = [connection]
    own_place = find_place(os.environ)
    if own_place is None:
        return
    if not _run:
        _run.append(SurvivingRun(own_place, RunConfig.from_environment(os.environ)))
    _run[0].state = AgreementState.TRAINS
    number = _run[0].world.epoch + 1
    report_to_launcher(Entering(world=number, joined=True, ranks_each=own_place.ranks_per_process))


def report_left() -> None:
    """Report to the launcher that this process has left its world without an error."""
    if _run:
        report_to_launcher(Leaving(world=_run[0].world.epoch + 1))


def world_job_name() -> str:
    """Return the name under which the processes of the present world meet; it differs for each world of the job."""
    epoch = _run[0].world.epoch if _run else 0
    return f"{DEFAULT_JOB}-epoch-{epoch}" if epoch else DEFAULT_JOB


def place_in_next_world() -> ProcessPlace | None:
    """Return this process's place in a world after the first, or None in the first."""
    return _run[0].place if _run and _run[0].world.epoch else None
