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
from dataclasses import dataclass, field

import torch.distributed as dist
import trio

from ..config import RunConfig
from ..embedded.connection import Connection
from ..errors import UsageError
from ..processes.place import DEFAULT_JOB, ProcessPlace, find_place
from ..processes.status import Entering, Leaving, report_to_launcher
from ..survival.agreement import AgreementState
from ..survival.epochs import SurvivingRun

_END_S = 2.0  # within which a world that has lost a process ends here

_connection: list[Connection] = []  # of the present world
_run: list[SurvivingRun] = []  # of this program, once its first group has been initialised under --survive


@dataclass(frozen=True, slots=True, kw_only=True)
class NextWorld:
    """The world in which the processes that live go on."""

    epoch: int  # Number of losses so far that have ended a world
    members: tuple[int, ...]  # Its processes in their order, by their numbers in the first world
    step: int  # Greatest step that one of them has reported
    source: int  # Rank, in this world, of a process that has done that step: its state is the newest


@dataclass(slots=True)
class _Steps:
    """Steps of a program that keeps its state itself."""

    done: int = field(default=0)

    def report(self) -> int:
        """Return the number of finished steps."""
        return self.done

    def advance(self, step: int) -> None:
        """Set the number of finished steps."""
        self.done = step


def next_world(error: BaseException, *, step: int) -> NextWorld:
    """Leave the world that has failed, and agree with the other survivors on the next one.

    All survivors must call it, each with its own error. Afterwards `init_process_group("overlap",
    init_method="overlap://")` joins the next world, whose ranks are numbered anew; groups and models of the old one
    (`DistributedDataParallel`) must be made again.

    Args:
        error: The error that an operation has raised.
        step: Number of steps that this process has done. Survivors may differ by one: the program gives all of them the
            state of rank `source`.

    Returns:
        The next world.

    Raises:
        BaseException: `error` itself, if no process was lost: a rank has failed by itself, or the ranks disagree.
        EpochClosedError: The others went on without this process, which was stopped or cut off.
        UsageError: The program was not started by `overlap run --survive`.
    """
    if not _run:
        raise UsageError("next_world: this program has no witness of survivors; start it by `overlap run --survive`")
    run, connection = _run[0], _connection[0]
    loss = connection.failure(_END_S)
    if not isinstance(loss, Exception) or not run.is_loss(loss):
        raise error from loss  # which names the rank at fault; in a backward, `error` has no cause
    with suppress(Exception):
        dist.destroy_process_group()
    run.epochs[0].survivor = _Steps(step)
    trio.run(run.follow, loss)
    world = run.world
    reports = run.witness.reports(world.epoch - 1, world.members)
    source = next(rank for rank, member in enumerate(world.members) if reports[member].step == world.step)
    return NextWorld(epoch=world.epoch, members=world.members, step=world.step, source=source)


def is_started_to_survive() -> bool:
    """Whether this program was started by `overlap run --survive`."""
    return bool(RunConfig.from_environment(os.environ).survive)


def report_joined(connection: Connection) -> None:
    """Report to the witness and the launcher of a job that this process has joined a world."""
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
    """Report to the launcher of a job that this process has left its world in order."""
    if _run:
        report_to_launcher(Leaving(world=_run[0].world.epoch + 1))


def world_job() -> str:
    """Return the name of the present world's rendezvous."""
    epoch = _run[0].world.epoch if _run else 0
    return f"{DEFAULT_JOB}-epoch-{epoch}" if epoch else DEFAULT_JOB


def next_place() -> ProcessPlace | None:
    """Return this process's place in a world after the first, or None in the first."""
    return _run[0].place if _run and _run[0].world.epoch else None
