"""Processes of one launch: started, watched, and ended together, by the first failure or by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import trio

from ..errors import OverlapError, UsageError
from ..processes.secret import hand_over
from ..signals import ASKING
from ..survival.witness import has_survivor, newest_world
from .binding import kept_to, shares_here
from .mpi import LOOK_S, STOPPED_S, Seat, seats
from .nodeprocess import LaunchSpec, NodeProcess
from .output import Log, Screen
from .verdict import Ending

# After a failure the others learn of it themselves within half a second, and write their traces; then they are told.
PEACE_S = 2.0
# The same while only processes have ended that were not at fault: the one that was may still be writing its trace.
SEARCH_S = 5.0
# Before the user is told that the launcher waits.
PATIENCE_S = 1.0
# How long a process may stand still while others wait for it to join, before the user is told.
SUSPECT_S = 5.0
# How many graces more a process may get that is kept from running by others: at load 30 on two cores it runs for a
# fifteenth of the time, and nobody waits for longer than some minutes.
_MOST_QUEUED = 14

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ASKING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """Outcome of a launch."""

    endings: Sequence[Ending]  # Endings of all processes, in order
    asked: signal.Signals | None  # The first signal that the launcher got, if any


async def launch(what: LaunchSpec, *, process: Callable[..., NodeProcess] = NodeProcess) -> LaunchOutcome:
    """Start the processes and stay until all have ended; the first failure, or a signal, ends them all.

    However this ends, by an error or by cancellation too, no process of it is left.

    Args:
        what: What to start.
        process: Starts the process of one node; takes what `NodeProcess` takes.

    Raises:
        UsageError: If the system lets no more processes be started; those that were are ended.
        OSError: If the reader of the output has left.
        OutputError: If output cannot be written.
        OverlapError: If a helper of MPI has ended or stays stopped.
    """
    if what.mpiexec is None:
        return await _launched(what, {}, process)
    async with seats(what.mpiexec, what.nodes, what.environ) as taken:
        return await _launched(what, dict(enumerate(taken)), process)


async def _launched(what: LaunchSpec, taken: Mapping[int, Seat], process: Callable[..., NodeProcess]) -> LaunchOutcome:
    """Launch with seats in an MPI job, by node."""
    handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*handled) as signals, ExitStack() as kept:
        watch = _Watch(what, taken)
        try:
            secret = hand_over(what.secret)
            kept.callback(os.close, secret)
            nodes = [*what.here, *range(what.nodes, what.nodes + what.spares)]
            for node, cores in zip(nodes, _cores(what), strict=True):
                log = kept.enter_context(Log(what.log_path(node))) if what.log_dir else None
                seat = taken.get(node)
                try:
                    with kept_to(cores):
                        watch.members.append(
                            process(what, node, secret=secret, screen=watch.screen, log=log, seat=seat)
                        )
                except OSError as error:  # too many files or processes, too little memory
                    raise UsageError(f"process {node} cannot be started: {error.strerror or error}") from error
            await watch.run(signals)
        finally:
            for member in watch.members:
                member.send(signal.SIGKILL)
            with trio.CancelScope(shield=True):  # bounded: they have been killed
                for member in watch.members:
                    await member.reaped()
                    member.close()
    if watch.lost is not None:
        raise OverlapError(f"--transport mpi: {watch.lost}, so MPI cannot go on; the job was ended")
    ended = [member for member in watch.ended if member not in watch.survived] or watch.ended
    return LaunchOutcome(endings=[member.ending() for member in ended], asked=watch.asked)


def _cores(what: LaunchSpec) -> Sequence[frozenset[int]]:
    """Return the cores to which each process is bound; none: unbound."""
    several = len(what.here) > 1
    members = shares_here(len(what.here)) if what.bind and several else [frozenset()] * len(what.here)
    return [*members, *[frozenset()] * what.spares]  # no core is kept for a process that waits


class _Watch:
    """Watch over the processes while they run."""

    def __init__(self, what: LaunchSpec, taken: Mapping[int, Seat]) -> None:
        self.lost: str | None = None  # the helper of MPI whose loss ended the job
        self._taken = taken
        self.members: list[NodeProcess] = []
        self.ended: list[NodeProcess] = []  # in the order in which they did
        self.survived: list[NodeProcess] = []  # ended, and the others go on
        self.asked: signal.Signals | None = None
        self.screen = Screen()
        self._what = what
        self._found = trio.Event()  # the first process that was at fault
        self._news = trio.Event()  # a process has entered a world, or ended
        self._ending = False

    async def run(self, signals: AsyncIterator[int]) -> None:
        """Stay until all have ended."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._obey, signals)
            self._nursery.start_soon(self._watch_for_standstill)
            for node, seat in self._taken.items():
                self._nursery.start_soon(self._watch_helper, node, seat)
            async with trio.open_nursery() as lives:
                for member in self.members:
                    lives.start_soon(self._live, member)
            self._nursery.cancel_scope.cancel()

    async def _live(self, member: NodeProcess) -> None:
        async with trio.open_nursery() as nursery:
            for relay in member.relays:
                nursery.start_soon(relay.run)
            nursery.start_soon(member.listen, self._on_entering, self._end_if_stopped)
            returncode = await member.reaped()
            self.ended.append(member)
            self._news.set()
            await member.drain_reports()
            for relay in member.relays:
                relay.hurry()
            if member.waits_as_spare():
                self.survived.append(member)
                if returncode != 0 and not member.stopped:
                    reason = member.status.line if member.status else f"exit code {returncode}"
                    self._what.report(f"{member.name} is lost, the others go on: {reason}")
            elif returncode != 0 or member.vanished():
                if self._is_survived(member):
                    self._what.report(f"{member.name} is lost; the others go on")
                    self.survived.append(member)
                else:
                    self._failed(member)
            if not self._members_run():
                self._end_spares()
            self._look_for_the_missing()

    async def _watch_helper(self, node: int, seat: Seat) -> None:
        """End the job if a helper of MPI is lost while all processes run: it would seem to be the fault of one of them.

        MPI ends the helpers itself once a process has ended.
        """
        lost = await seat.lost()
        if not self._ending and self.asked is None and not any(member.has_ended() for member in self.members):
            self._ending, self.lost = True, f"process {node}: {lost}"
            self._stop(signal.SIGTERM)
            await self._kill_late()

    def _on_entering(self) -> None:
        """Handle the report that a process has entered a world."""
        self._news.set()
        self._look_for_the_missing()

    def _look_for_the_missing(self) -> None:
        """End the others if one waits for a process that is not coming; they would wait until they lose patience."""
        missing = [member for member in self.ended if member.lacks(self._awaited)]
        if missing and not self._ending and self.asked is None:
            self._ending = missing[0].missed = True
            self._stop(signal.SIGTERM)
            self._nursery.start_soon(self._kill_late)

    def _end_if_stopped(self, node: int) -> None:
        """End a process that the others have given up, if nothing but SIGKILL can."""
        for member in self._running():
            if member.node == node and member.is_stopped():
                self._end_stopped(member)

    def _end_stopped(self, member: NodeProcess) -> None:
        member.stopped = member.status is None
        member.send(signal.SIGKILL)

    async def _watch_for_standstill(self) -> None:
        """Tell of a process that stands still while others wait for it to join; end one that stays stopped.

        The others see nothing of a process that has not joined them, nor of one on another machine but its silence.
        Members of a world on this machine watch each other.
        """
        elsewhere = len(self._what.here) < self._what.nodes
        still: dict[int, tuple[str, int]] = {}
        while True:
            await trio.sleep(LOOK_S)
            for member in self._running():
                state, reason = member.standstill()
                before, looks = still.get(member.node, ("", 0))
                looks = looks + 1 if state and state == before else 1
                still[member.node] = state, looks
                awaited = self._awaited > member.reached()
                if not state or self._ending or self.asked is not None or not (awaited or elsewhere):
                    continue
                if awaited and looks * LOOK_S == SUSPECT_S:
                    self._what.report(f"{member.name} {reason}, for {SUSPECT_S:g} s now; others wait for it to join")
                if looks * LOOK_S >= STOPPED_S and member.is_stopped():
                    self._what.report(f"{member.name} {_STAYED_STOPPED}")
                    self._end_stopped(member)

    @property
    def _awaited(self) -> int:
        """The last world in which a process waits for others to come; 0: none."""
        return max((member.waits_in() or 0 for member in self.members), default=0)

    def _is_survived(self, member: NodeProcess) -> bool:
        """Whether the others go on after the end of a process: it said nothing, or they have gone on without it."""
        if self._what.witness is None or self._ending or self.asked is not None or not self._members_run():
            return False
        folder = Path(self._what.witness)
        if member.status is None:
            return has_survivor(folder, member.node) and not member.has_yet_to_come()
        world = newest_world(folder, self._what.attempt)
        return world is not None and member.node not in world.members

    def _failed(self, member: NodeProcess) -> None:
        if member.status is None or member.status.cause:
            self._found.set()
        if not self._ending and self.asked is None:
            self._ending = True
            self._nursery.start_soon(self._end_the_others, member)

    async def _end_the_others(self, first: NodeProcess) -> None:
        killed = first.was_killed()  # nothing that the others will say can make it another's fault
        late = [member for member in self._running() if member.has_yet_to_come()]
        self._stop(signal.SIGTERM, [member for member in late if killed or member.waits_as_spare()])
        with trio.move_on_after(SEARCH_S):
            await self._found.wait()
        with trio.move_on_after(PEACE_S):
            while not all(member.waits_in() for member in self._running()):
                self._news = trio.Event()
                await self._news.wait()
        self._stop(signal.SIGTERM)  # members that wait for all to come would hear nothing: one does not come
        for member in self._running():
            if member.is_stopped():  # and would hear nothing either
                self._end_stopped(member)
        await self._kill_late()

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == ASKING:
                for member in self._running():
                    member.ask()
            elif self.asked is None:
                self.asked = signal.Signals(number)
                self._stop(self.asked)
                self._nursery.start_soon(self._kill_late)
                self._nursery.start_soon(self._explain)
            else:
                self._stop(signal.SIGKILL)

    async def _explain(self) -> None:
        await trio.sleep(PATIENCE_S)
        if running := self._running():
            names = ", ".join(f"process {member.node}" for member in running)
            limit = f"up to {self._what.grace_s:g} s"
            self._what.report(f"waiting {limit} for {names} to end; once more, and they are killed at once")

    async def _kill_late(self) -> None:
        """Kill the processes that have had the grace, of which time in the queue for a processor is no part."""
        grace_s, began_s = self._what.grace_s, trio.current_time()
        queued_s = {member: member.queued_s() for member in self._running()}
        await trio.sleep(grace_s)
        while late := self._running():
            over_s = trio.current_time() - began_s - grace_s
            owed_s = {
                member: min(member.queued_s() - queued_s.get(member, 0.0), _MOST_QUEUED * grace_s) for member in late
            }
            due = [member for member in late if owed_s[member] <= over_s]
            for member in due:
                self._what.report(f"process {member.node} did not end within {grace_s:g} s and is killed")
            self._stop(signal.SIGKILL, due)
            if len(due) == len(late):
                return
            await trio.sleep(LOOK_S)

    def _end_spares(self) -> None:
        """End the spares of a job whose members have all ended."""
        self._stop(signal.SIGTERM)
        for spare in self._running():
            if spare.is_stopped():
                self._end_stopped(spare)
        self._nursery.start_soon(self._kill_late)

    def _members_run(self) -> bool:
        return any(not member.waits_as_spare() for member in self._running())

    def _running(self) -> list[NodeProcess]:
        return [member for member in self.members if member.process.returncode is None]

    def _stop(self, number: signal.Signals, some: Sequence[NodeProcess] | None = None) -> None:
        """Send a signal to all that run, or to some of them."""
        for member in self._running() if some is None else some:
            member.stopped = member.stopped or member.status is None
            member.send(number)


_STAYED_STOPPED = (
    f"has been stopped for {STOPPED_S:g} s, as SIGSTOP does, and is killed: other processes wait for it; SIGCONT lets "
    "a process go on in time, and a debugger holds one for longer"
)
