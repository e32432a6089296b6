"""Processes of one launch: start, watch, and the end of all after the first failure or a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import trio

from ..errors import UsageError
from ..processes.secret import hand_over
from ..processes.sockets import format_endpoint
from ..signals import ASKING
from ..survival.witness import has_survivor, newest_world
from .binding import bound_to_cores, share_own_cores
from .nodeprocess import LaunchSpec, NodeProcess
from .output import Log, Screen
from .verdict import Ending

# After a failure the other processes notice it within half a second, and write their traces; then they get SIGTERM.
PEACE_S = 2.0
# The same while no process at fault has ended: it may still be writing its trace.
SEARCH_S = 5.0
# Delay of the line that the launcher waits.
PATIENCE_S = 1.0
# How long a process may be stopped while others wait for it to join, before a line reports it.
SUSPECT_S = 5.0
# Most further grace periods of a process that waits for a processor: at load 30 on two cores it runs for a fifteenth of
# the time, and the wait stays within minutes.
_MOST_QUEUED = 14

# How long a process may be stopped while others wait for it, counted in looks.
STOPPED_S, LOOK_S = 15.0, 1.0

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ASKING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """Outcome of a launch."""

    endings: Sequence[Ending]  # Endings of all processes, in order
    asked: signal.Signals | None  # The first signal that the launcher got, if any


async def launch(spec: LaunchSpec, *, process: Callable[..., NodeProcess] = NodeProcess) -> LaunchOutcome:
    """Start the processes and wait until all have ended; the first failure, or a signal, ends all.

    No process is left behind, also after an error or a cancellation.

    Args:
        spec: Description of the launch.
        process: Starts the process of one node, with the arguments of `NodeProcess`.

    Raises:
        UsageError: If the system refuses to start a process; the others are ended.
        OSError: If the reader of the output has closed it.
        OutputError: If output cannot be written.
    """
    handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*handled) as signals, ExitStack() as resources:
        watch = _Watch(spec)
        try:
            secret = hand_over(spec.secret)
            resources.callback(os.close, secret)
            for node, cores in zip(spec.here, _cores_of_processes(spec), strict=True):
                log = resources.enter_context(Log(spec.log_path(node))) if spec.log_dir else None
                try:
                    with bound_to_cores(cores):
                        watch.members.append(process(spec, node, secret=secret, screen=watch.screen, log=log))
                except OSError as error:  # too many files or processes, too little memory
                    raise UsageError(
                        f"process {node} cannot be started: {error.strerror or error}; "
                        "start fewer, or allow more (ulimit -u, -n)"
                    ) from error
            await watch.run(signals)
        finally:
            for member in watch.members:
                member.send(signal.SIGKILL)
            with trio.CancelScope(shield=True):  # bounded: they have been killed
                for member in watch.members:
                    await member.wait_and_reap()
                    member.close()
    ended = [member for member in watch.ended if member not in watch.survived] or watch.ended
    return LaunchOutcome(endings=[member.ending() for member in ended], asked=watch.asked)


def _cores_of_processes(spec: LaunchSpec) -> Sequence[frozenset[int]]:
    """Return the cores to which each process is bound; none: unbound."""
    several = len(spec.here) > 1
    return share_own_cores(len(spec.here)) if spec.bind and several else [frozenset()] * len(spec.here)


class _Watch:
    """Watch over the processes while they run."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.members: list[NodeProcess] = []
        self.ended: list[NodeProcess] = []  # in the order in which they did
        self.survived: list[NodeProcess] = []  # ended, and the others go on
        self.asked: signal.Signals | None = None
        self.screen = Screen()
        self._spec = spec
        self._fault = trio.Event()  # the first process at fault has ended
        self._news = trio.Event()  # a process has entered a world, or ended
        self._ending = False
        self._has_joined: bool | None = None  # Whether the first process has joined its first world; None: not there

    async def run(self, signals: AsyncIterator[int]) -> None:
        """Wait until all processes have ended."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._handle_signals, signals)
            self._nursery.start_soon(self._watch_stopped)
            async with trio.open_nursery() as lives:
                for member in self.members:
                    lives.start_soon(self._watch_member, member)
            self._nursery.cancel_scope.cancel()

    async def _watch_member(self, member: NodeProcess) -> None:
        """Show the output of one process, handle its records, and act on its end."""
        async with trio.open_nursery() as nursery:
            for relay in member.relays:
                nursery.start_soon(relay.run)
            nursery.start_soon(member.read_records, self._on_entering, self._end_if_stopped)
            returncode = await member.wait_and_reap()
            self.ended.append(member)
            self._news.set()
            await member.drain_reports()
            for relay in member.relays:
                relay.hurry()
            if returncode != 0 or member.has_vanished():
                if self._is_survived(member):
                    self._spec.report(f"{member.name} is lost; the others go on")
                    self.survived.append(member)
                else:
                    self._handle_failure(member)
            self._check_missing()

    def _on_entering(self) -> None:
        """Handle the report that a process has entered a world."""
        self._news.set()
        self._report_joining()
        self._check_missing()

    def _report_joining(self) -> None:
        """Report on each host but that of node 0 that its first process waits for the others, and that it has joined.

        Not in the process: the last lines of a process that ends without a report count as its error.
        """
        spec, entering = self._spec, self.members[0].entering
        if not spec.here[0] or entering is None or entering.world > 1 or entering.joined is self._has_joined:
            return
        self._has_joined = entering.joined
        state = "has joined" if entering.joined else f"waits for the other nodes, at {format_endpoint(spec.endpoint)}"
        spec.report(f"node {spec.here[0] // len(spec.here)} {state}")

    def _check_missing(self) -> None:
        """End the others if one of them waits for a process that has ended without joining."""
        missing = [member for member in self.ended if member.has_missed(self._awaited_world)]
        if missing and not self._ending and self.asked is None:
            self._ending = missing[0].missed = True
            self._stop(signal.SIGTERM)
            self._nursery.start_soon(self._kill_late)

    def _end_if_stopped(self, node: int) -> None:
        """Kill the process of a node that others report as lost, if it is stopped."""
        for member in self._running():
            if member.node == node and member.is_stopped():
                self._end_stopped(member)

    def _end_stopped(self, member: NodeProcess) -> None:
        """Kill a process that is stopped: it would not act on SIGTERM."""
        member.stopped = member.status is None
        member.send(signal.SIGKILL)

    async def _watch_stopped(self) -> None:
        """Report a process that does not run while others wait for it to join; kill one that stays stopped.

        The others cannot see a process that has not joined, and see only the silence of one on another machine. Members
        of a world on this machine watch each other.
        """
        elsewhere = len(self._spec.here) < self._spec.nodes
        looks_by_node: dict[int, tuple[str, int]] = {}
        while True:
            await trio.sleep(LOOK_S)
            for member in self._running():
                state, reason = member.standstill()
                before, looks = looks_by_node.get(member.node, ("", 0))
                looks = looks + 1 if state and state == before else 1
                looks_by_node[member.node] = state, looks
                awaited = self._awaited_world > member.last_world()
                if not state or self._ending or self.asked is not None or not (awaited or elsewhere):
                    continue
                if awaited and looks * LOOK_S == SUSPECT_S:
                    self._spec.report(f"{member.name} {reason}, for {SUSPECT_S:g} s now; others wait for it to join")
                if looks * LOOK_S >= STOPPED_S and member.is_stopped():
                    self._spec.report(f"{member.name} {_STAYED_STOPPED}")
                    self._end_stopped(member)

    @property
    def _awaited_world(self) -> int:
        """Number of the last world that a process waits for others to join; 0: none."""
        return max((member.awaited_world() or 0 for member in self.members), default=0)

    def _is_survived(self, member: NodeProcess) -> bool:
        """Whether the others go on after the end of a process: it reported no error, or a newer world lacks it."""
        if self._spec.witness is None or self._ending or self.asked is not None or not self._running():
            return False
        folder = Path(self._spec.witness)
        if member.status is None:
            return has_survivor(folder, member.node) and not member.has_entered_no_world()
        world = newest_world(folder, self._spec.attempt)
        return world is not None and member.node not in world.members

    def _handle_failure(self, member: NodeProcess) -> None:
        """Begin to end the other processes after the first failure."""
        if member.status is None or member.status.cause:
            self._fault.set()
        if not self._ending and self.asked is None:
            self._ending = True
            self._nursery.start_soon(self._end_the_others, member)

    async def _end_the_others(self, first: NodeProcess) -> None:
        """End the other processes; one that is at fault gets time to report its error before."""
        killed = first.was_killed()  # no report of the others can make it another's fault
        late = [member for member in self._running() if member.has_entered_no_world()]
        self._stop(signal.SIGTERM, late if killed else [])
        with trio.move_on_after(SEARCH_S):
            await self._fault.wait()
        with trio.move_on_after(PEACE_S):
            while not all(member.awaited_world() for member in self._running()):
                self._news = trio.Event()
                await self._news.wait()
        self._stop(signal.SIGTERM)  # members that wait for all to join would not notice that one never will
        for member in self._running():
            if member.is_stopped():  # and would not notice either
                self._end_stopped(member)
        await self._kill_late()

    async def _handle_signals(self, signals: AsyncIterator[int]) -> None:
        """Pass on the signals of the launcher: the first one that ends the job as it is, a repeated one as SIGKILL."""
        async for number in signals:
            if number == ASKING:
                for member in self._running():
                    member.ask()
            elif self.asked is None:
                self.asked = signal.Signals(number)
                self._stop(self.asked)
                self._nursery.start_soon(self._kill_late)
                self._nursery.start_soon(self._report_grace)
            else:
                self._stop(signal.SIGKILL)

    async def _report_grace(self) -> None:
        """Print after `PATIENCE_S` which processes have not ended yet."""
        await trio.sleep(PATIENCE_S)
        if running := self._running():
            names = ", ".join(f"process {member.node}" for member in running)
            limit = f"up to {self._spec.grace_s:g} s"
            self._spec.report(f"waiting {limit} for {names} to end; once more, and they are killed at once")

    async def _kill_late(self) -> None:
        """Kill the processes after the grace period, to which the time in the queue for a processor is added."""
        grace_s, began_s = self._spec.grace_s, trio.current_time()
        queued_s = {member: member.queued_s() for member in self._running()}
        await trio.sleep(grace_s)
        while late := self._running():
            over_s = trio.current_time() - began_s - grace_s
            owed_s = {
                member: min(member.queued_s() - queued_s.get(member, 0.0), _MOST_QUEUED * grace_s) for member in late
            }
            due = [member for member in late if owed_s[member] <= over_s]
            for member in due:
                self._spec.report(f"process {member.node} did not end within {grace_s:g} s and is killed")
            self._stop(signal.SIGKILL, due)
            if len(due) == len(late):
                return
            await trio.sleep(LOOK_S)

    def _running(self) -> list[NodeProcess]:
        return [member for member in self.members if member.process.returncode is None]

    def _stop(self, number: signal.Signals, members: Sequence[NodeProcess] | None = None) -> None:
        """Send a signal to processes, by default to all that run."""
        for member in self._running() if members is None else members:
            member.stopped = member.stopped or member.status is None
            member.send(number)


_STAYED_STOPPED = (
    f"has been stopped for {STOPPED_S:g} s, as SIGSTOP does, and is killed: other processes wait for it; SIGCONT lets "
    "a process go on in time, and a debugger holds one for longer"
)
