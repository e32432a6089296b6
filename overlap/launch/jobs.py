"""Processes of one launch, from their reports to the end of all after the first failure or a signal.

A state machine without clock, processes or waiting: a method of `Jobs` is a stimulus, and returns the actions that
follow from it in their order; `launcher` performs them. A tick is due at `next_s`, which each stimulus may change.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TypeAlias

from ..processes.sockets import format_endpoint
from ..processes.status import Entering, Leaving, Record, Status
from ..processes.wire import MemberLost

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

_STAYED_STOPPED = (
    f"has been stopped for {STOPPED_S:g} s, as SIGSTOP does, and is killed: other processes wait for it; SIGCONT lets "
    "a process go on in time, and a debugger holds one for longer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Description of a launch."""

    command: Sequence[str]  # The program and its arguments, the same on each node
    environ: Mapping[str, str]  # Environment of all
    nodes: int  # How many nodes the world has
    here: Sequence[int]  # The nodes to start on this machine
    ranks_per_node: int  # Ranks of each node; 0: there is one node, and its program sets it
    endpoint: tuple[str, int]  # Host and port where node 0 listens
    listener: int | None  # Descriptor of the socket that listens there; node 0 inherits it
    job: str  # Name of the job
    secret: bytes  # Proof of membership
    prefix: bool  # Whether to put the node before each line
    colour: bool  # Whether to colour that
    log_dir: str | None  # Folder for the output of the nodes; None: the terminal
    grace_s: float  # Time from the request to end until the kill
    report: Callable[[str], None]  # Prints lines for the user while the processes run
    attempt: int = 0  # How often they have been started before
    witness: str | None = None  # Folder of the witness, if the others go on when a process is lost
    bind: bool = False  # Whether each of several processes keeps to its share of the cores, if this machine lets them

    def log_path(self, node: int) -> str:
        """Return the path of the file with the output of a node; each attempt has its own file."""
        again = f".restart-{self.attempt}" if self.attempt else ""
        return f"{self.log_dir}/process-{node}{again}.log"

    def __repr__(self) -> str:
        return f"<LaunchSpec of nodes {list(self.here)} of {self.nodes}, job {self.job!r}>"


class JobPhase(Enum):
    """Phase of a launch."""

    RUNS = "no process has failed"
    SEARCH = "one has failed, and the one at fault may still report"
    PEACE = "the others may notice it by themselves"
    GRACE = "all have a signal to end, and may take their time"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelState:
    """State of a process, as the kernel reports it."""

    letter: str = ""  # Its state if it does not run for a reason that concerns the user: T stopped, t traced, D waits
    reason: str = ""  # That reason, which may change while the state lasts
    queued_s: float = 0.0  # Time in which it was ready to run but waited for a processor


@dataclass(frozen=True, slots=True)
class Kill:
    """Send a signal to a process and all that it has started in its group."""

    node: int
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Line:
    """Print a line for the user."""

    text: str


Action: TypeAlias = Kill | Line


@dataclass(slots=True, kw_only=True)
class Job:
    """The process of one node."""

    node: int
    pid: int
    ranks: range  # Its world ranks; none if it is alone, and sets their number itself
    returncode: int | None = None  # Code as in `subprocess`: negative for signals; None: it runs
    status: Status | None = None  # Its report on its end
    entering: Entering | None = None  # The last world that it has entered
    left: int = 0  # The last world that it has left
    drained: bool = False  # Whether all its reports have been read
    stopped: bool = False  # Whether it got a signal of the launcher before it had sent a report
    missed: bool = False  # Whether it ended well, without entering a world in which another process waits for it
    standstill: tuple[str, int] = ("", 0)  # State at the last looks, and their number
    queued_s: float = 0.0  # As in `KernelState`, at the beginning of the grace
    # known at its end
    peak_bytes: int = 0  # The most memory that it had at once; 0: not known
    tail: Sequence[str] = ()  # The last lines that it wrote to stderr; to its log, if there is one
    log: str | None = None  # Where its output is
    # The process that ended because of this one, if this one hung and was stopped without a report.
    accuser: Job | None = None

    @property
    def name(self) -> str:
        """The process and its ranks, for messages."""
        if not self.ranks:
            return f"the process (pid {self.pid})"
        first, last = self.ranks[0], self.ranks[-1]
        return f"process {self.node} ({f'rank {first}' if first == last else f'ranks {first}-{last}'}, pid {self.pid})"

    @property
    def last_world(self) -> int:
        """Number of the last world that the process has entered; 0: none, as it imports or is before `run`."""
        return self.entering.world if self.entering else 0

    @property
    def awaited_world(self) -> int:
        """Number of the world that the process waits for others to join; 0: it does not wait."""
        waits = self.returncode is None and self.entering is not None and not self.entering.joined
        return self.last_world if waits else 0

    @property
    def vanished(self) -> bool:
        """Whether the process has ended with code 0 in the middle of a world."""
        return self.returncode == 0 and self.left < self.last_world


class Jobs:
    """The processes that one launcher has started.

    Attributes:
        jobs: The processes, by node.
        ended: Those that have ended, in that order.
        survived: Those of them without which the others go on.
        asked: The first signal that the launcher got, if any.

    Args:
        spec: Description of the launch.
        look: Returns what the kernel reports of the process of a node, which runs.
        now_s: The time, on the clock of all stimuli.
    """

    def __init__(self, spec: LaunchSpec, look: Callable[[int], KernelState], now_s: float) -> None:
        self.jobs: dict[int, Job] = {}
        self.ended: list[Job] = []
        self.survived: list[Job] = []
        self.asked: signal.Signals | None = None
        self._spec, self._look = spec, look
        self._phase = JobPhase.RUNS
        self._phase_ends_s = self._patience_ends_s = inf
        self._look_s = now_s + LOOK_S
        self._has_fault = False  # whether a process at fault has ended
        self._has_joined: bool | None = None  # whether the first process has joined its first world; None: not there

    @property
    def next_s(self) -> float:
        """When the next tick is due."""
        return min(self._phase_ends_s, self._patience_ends_s, self._look_s)

    @property
    def running(self) -> list[Job]:
        """The processes that have not ended."""
        return [job for job in self.jobs.values() if job.returncode is None]

    # -- stimuli -------------------------------------------------------------------------------------------------------

    def add(self, node: int, pid: int) -> None:
        """Add a process that was started."""
        each = self._spec.ranks_per_node
        self.jobs[node] = Job(node=node, pid=pid, ranks=range(node * each, (node + 1) * each))

    def report(self, now_s: float, node: int, record: Record) -> list[Action]:
        """Act on a record of a process."""
        job = self.jobs[node]
        match record:
            case Status():
                job.status = record
            case Leaving():
                job.left = record.world
            case MemberLost():
                return self._end_stopped([record.member])
            case Entering():
                job.entering = record
                if each := record.ranks_each:
                    job.ranks = range(node * each, (node + 1) * each)
                self._end_peace_early(now_s)
                return [*self._report_joining(), *self._end_if_awaited_is_missing(now_s)]
        return []

    def exit(self, now_s: float, node: int, returncode: int) -> list[Action]:
        """Note that a process has ended; its last reports may follow."""
        self.jobs[node].returncode = returncode
        self.ended.append(self.jobs[node])
        self._end_peace_early(now_s)
        return []

    def close(self, now_s: float, node: int, *, drained: bool, survived: bool) -> list[Action]:
        """Act on the end of a process.

        Args:
            now_s: The time.
            node: Its node.
            drained: Whether all its reports have been read; a child of it may hold their pipe.
            survived: Whether others ran when it ended, and would go on without it.
        """
        job = self.jobs[node]
        job.drained = drained
        actions: list[Action] = []
        if job.returncode != 0 or job.vanished:
            if survived and self._phase is JobPhase.RUNS:
                self.survived.append(job)
                actions.append(Line(f"{job.name} is lost; the others go on"))
            else:
                actions += self._end_after_failure(now_s, job)
        return [*actions, *self._end_if_awaited_is_missing(now_s)]

    def interrupt(self, now_s: float, number: signal.Signals) -> list[Action]:
        """Pass a signal of the launcher on to all processes; a repeated signal becomes SIGKILL."""
        if self.asked is not None:
            return self._send_signal(signal.SIGKILL, self.running)
        self.asked = number
        self._patience_ends_s = now_s + PATIENCE_S
        return self._request_end(now_s, number)

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due now: time limits, silent processes, progress of joining."""
        actions: list[Action] = []
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            actions += self._judge_standstills()
        if now_s >= self._patience_ends_s:
            self._patience_ends_s = inf
            if names := ", ".join(f"process {job.node}" for job in self.running):
                limit = f"up to {self._spec.grace_s:g} s"
                actions.append(Line(f"waiting {limit} for {names} to end; once more, and they are killed at once"))
        if self._phase is JobPhase.SEARCH and now_s >= self._phase_ends_s:
            self._phase, self._phase_ends_s = JobPhase.PEACE, now_s + PEACE_S
            self._end_peace_early(now_s)
        if self._phase is JobPhase.PEACE and now_s >= self._phase_ends_s:
            # members that wait for all to join would not notice that one never will; stopped ones notice nothing
            actions += self._request_end(now_s, signal.SIGTERM)
            actions += self._end_stopped(self.jobs)
        elif self._phase is JobPhase.GRACE and now_s >= self._phase_ends_s:
            actions += self._kill_late(now_s)
        return actions

    # -- parts of them -------------------------------------------------------------------------------------------------

    def _report_joining(self) -> list[Action]:
        """Report that this host's first process waits for the others to join, and later that it has joined.

        Node 0 reports this by itself. On other nodes the launcher does, not the process: the last lines of a process
        that ends without a report count as its error.
        """
        spec = self._spec
        entering = self.jobs[spec.here[0]].entering
        if not spec.here[0] or entering is None or entering.world > 1 or entering.joined is self._has_joined:
            return []
        self._has_joined = entering.joined
        state = "has joined" if entering.joined else f"waits for the other nodes, at {format_endpoint(spec.endpoint)}"
        return [Line(f"node {spec.here[0] // len(spec.here)} {state}")]

    @property
    def _awaited_world(self) -> int:
        """Number of the last world that a process waits for others to join; 0: none."""
        return max((job.awaited_world for job in self.jobs.values()), default=0)

    def _end_if_awaited_is_missing(self, now_s: float) -> list[Action]:
        """End the others if one of them waits for a process that has ended with code 0 without joining."""
        awaited = self._awaited_world
        missing = [job for job in self.ended if job.returncode == 0 and job.drained and job.last_world < awaited]
        if not missing or self._phase is not JobPhase.RUNS:
            return []
        missing[0].missed = True
        return self._request_end(now_s, signal.SIGTERM)

    def _end_after_failure(self, now_s: float, job: Job) -> list[Action]:
        """Begin to end the other processes after the first failure; one that is at fault may report its error before.

        After a kill, which no report can make another process's fault, processes that have entered no world end at
        once.
        """
        self._has_fault = self._has_fault or job.status is None or job.status.cause
        actions: list[Action] = []
        if self._phase is JobPhase.RUNS:
            self._phase, self._phase_ends_s = JobPhase.SEARCH, now_s + SEARCH_S
            was_killed = (job.returncode or 0) < 0 and job.status is None and not job.stopped
            outside = [each for each in self.running if not each.last_world] if was_killed else []
            actions = self._send_signal(signal.SIGTERM, outside)
        if self._phase is JobPhase.SEARCH and self._has_fault:
            self._phase_ends_s = now_s
        return actions

    def _end_peace_early(self, now_s: float) -> None:
        """Let the tick end the peace if all running processes wait for others to join, and would notice nothing."""
        if self._phase is JobPhase.PEACE and all(job.awaited_world for job in self.running):
            self._phase_ends_s = now_s

    def _request_end(self, now_s: float, number: signal.Signals) -> list[Action]:
        """Send all processes a signal to end, after which they have the grace period."""
        if self._phase is not JobPhase.GRACE:
            self._phase, self._grace_ends_s = JobPhase.GRACE, now_s + self._spec.grace_s
            self._phase_ends_s = self._grace_ends_s
            for job in self.running:
                job.queued_s = self._look(job.node).queued_s
        return self._send_signal(number, self.running)

    def _judge_standstills(self) -> list[Action]:
        """Report a process that does not run while others wait for it to join; kill one that stays stopped.

        The others cannot see a process that has not joined, and see only the silence of one on another machine. Members
        of a world on this machine watch each other.
        """
        elsewhere, actions = len(self._spec.here) < self._spec.nodes, list[Action]()
        for job in self.running:
            look, (letter, number) = self._look(job.node), job.standstill
            number = number + 1 if look.letter and look.letter == letter else 1
            job.standstill = look.letter, number
            is_awaited = self._awaited_world > job.last_world
            if not look.letter or self._phase is not JobPhase.RUNS or not (is_awaited or elsewhere):
                continue
            if is_awaited and number * LOOK_S == SUSPECT_S:
                text = f"{job.name} {look.reason}, for {SUSPECT_S:g} s now; others wait for it to join"
                actions.append(Line(text))
            if number * LOOK_S >= STOPPED_S and look.letter == "T":
                actions += [Line(f"{job.name} {_STAYED_STOPPED}"), *self._end_stopped([job.node])]
        return actions

    def _end_stopped(self, nodes: Collection[int]) -> list[Action]:
        """Kill processes that are stopped: they would not act on SIGTERM."""
        running = [job for job in self.running if job.node in nodes]
        return self._send_signal(signal.SIGKILL, [job for job in running if self._look(job.node).letter == "T"])

    def _kill_late(self, now_s: float) -> list[Action]:
        """Kill the processes after the grace period, which is longer by their time in the queue for a processor."""
        grace_s, over_s = self._spec.grace_s, now_s - self._grace_ends_s
        late = self.running
        owed_s = {job.node: self._look(job.node).queued_s - job.queued_s for job in late}
        due = [job for job in late if min(owed_s[job.node], _MOST_QUEUED * grace_s) <= over_s]
        self._phase_ends_s = inf if len(due) == len(late) else now_s + LOOK_S
        lines = [Line(f"process {job.node} did not end within {grace_s:g} s and is killed") for job in due]
        return [*lines, *self._send_signal(signal.SIGKILL, due)]

    def _send_signal(self, number: signal.Signals, jobs: Iterable[Job]) -> list[Action]:
        actions: list[Action] = []
        for job in jobs:
            job.stopped = job.stopped or job.status is None
            actions.append(Kill(job.node, number))
        return actions
