"""Decisions about the processes of one launch: when to report, and when to end all after a failure or a signal.

A state machine without clock, processes or waiting. Each method of `Jobs` handles one event, and returns the actions
that follow, in their order; `launcher` performs them. `Jobs.on_tick` must be called at `next_s`, which each event may
change.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TypeAlias

from ..processes.members import PrintLine
from ..processes.sockets import format_endpoint
from ..processes.status import Entering, Leaving, Record, Status
from ..processes.wire import MemberLost
from ..ranklist import named_ranks

# After a failure, the time until the other processes get SIGTERM. They notice the failure within half a second, and
# then write their traces.
PEACE_S = 2.0
# The same while no process at fault has ended: that process may still be writing its trace.
SEARCH_S = 5.0
# Time from a signal to the launcher until it prints that it waits for processes.
PATIENCE_S = 1.0
# How long a process may stand still while others wait for it to join, before a line reports it.
SUSPECT_S = 5.0
# The grace period is extended by the time that a process waits for a processor, at most by this many grace periods: at
# load 30 on two cores a process runs for a fifteenth of the time.
_MOST_QUEUED = 14
# How long a process may be stopped while others wait for it, before it is killed; and the time between two looks at it.
STOPPED_S, LOOK_S = 15.0, 1.0

_STAYED_STOPPED = (
    f"has been stopped for {STOPPED_S:g} s, as SIGSTOP does, and is killed: other processes wait for it; SIGCONT lets "
    "a process go on in time, and a debugger holds one for longer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Description of a launch."""

    command: Sequence[str]  # The program and its arguments, the same on each node
    environ: Mapping[str, str]  # Environment of all processes
    nodes: int  # Number of nodes of the world; a node is one process here
    here: Sequence[int]  # The nodes to start on this machine
    ranks_per_node: int  # Ranks of each node; 0: there is one node, and its program sets the number
    endpoint: tuple[str, int]  # Host and port where node 0 listens
    listener: int | None  # Descriptor of the socket that listens there; node 0 inherits it
    job: str  # Name of the job
    secret: bytes  # Proof of membership
    prefix: bool  # Whether each line of output begins with the node
    colour: bool  # Whether that prefix is coloured
    log_dir: str | None  # Folder for the output of the nodes; None: the terminal
    grace_s: float  # Time from the request to end until the kill
    report: Callable[[str], None]  # Prints a line for the user while the processes run
    attempt: int = 0  # Number of earlier starts of the job
    witness: str | None = None  # Folder of the witness, if the others may continue when a process is lost
    bind: bool = False  # Whether to bind each of several processes to a share of the cores

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

    letter: str = ""  # State of a process that stands still: T stopped, t held by a debugger, D waits; "" for others
    reason: str = ""  # Text about that state, as the verb of a sentence
    queued_s: float = 0.0  # Seconds since its start in which it was ready to run, but waited for a processor


@dataclass(frozen=True, slots=True)
class Kill:
    """Send a signal to the process of a node, and to all processes that it has started in its group."""

    node: int
    signal: signal.Signals


Action: TypeAlias = Kill | PrintLine


@dataclass(slots=True, kw_only=True)
class Job:
    """The process of one node."""

    node: int
    pid: int
    ranks: range  # Its world ranks; empty: its program sets their number, and has not reported it
    returncode: int | None = None  # Code as in `subprocess`: negative for signals; None: the process runs
    status: Status | None = None  # Its report on its end
    entering: Entering | None = None  # Its last report that it enters a world
    left: int = 0  # Number of the last world that it has left, from 1; 0: none
    drained: bool = False  # Whether all its reports have been read
    stopped: bool = False  # Whether the launcher has sent it a signal before it had sent a status
    losses: set[int] = field(default_factory=set)  # Nodes whose loss it has reported before its status
    missed: bool = False  # Whether it ended with code 0 without entering a world in which others wait for it
    letter: str = ""  # `KernelState.letter` at the last look
    looks: int = 0  # Number of successive looks with this letter
    queued_s: float = 0.0  # `KernelState.queued_s` at the begin of the grace period
    # known only after its end
    peak_bytes: int = 0  # The most memory that it had at once; 0: unknown
    tail: Sequence[str] = ()  # The last lines that it wrote to stderr, or to its log if there is one
    log: str | None = None  # Path of its log; None: it has none
    # If this process hung, and was stopped without a status: the process that has ended because of it.
    accuser: Job | None = None

    @property
    def name(self) -> str:
        """Name of the process with its ranks and its pid, for messages."""
        if not self.ranks:
            return f"the process (pid {self.pid})"
        return f"process {self.node} ({named_ranks(self.ranks)}, pid {self.pid})"

    @property
    def was_killed(self) -> bool:
        """Whether a signal that the launcher had not sent has ended the process before it sent a status."""
        return (self.returncode or 0) < 0 and self.status is None and not self.stopped

    @property
    def last_world(self) -> int:
        """Number of the last world that the process has entered; 0 before its first `run`."""
        return self.entering.world if self.entering else 0

    @property
    def awaited_world(self) -> int:
        """Number of the world that the process waits for others to join; 0 if it does not wait."""
        waits = self.returncode is None and self.entering is not None and not self.entering.joined
        return self.last_world if waits else 0

    @property
    def vanished(self) -> bool:
        """Whether the process has ended with code 0 before its last world ended."""
        return self.returncode == 0 and self.left < self.last_world


class Jobs:
    """The processes that one launcher has started.

    After the first failure it ends the others, in the phases of `JobPhase`:

    * SEARCH: for up to `SEARCH_S`, the process at fault may still end and report its error.
    * PEACE: for up to `PEACE_S`, the others may notice the failure and end by themselves.
    * GRACE: all have got a signal to end. Processes that still run after `LaunchSpec.grace_s` are killed.

    Attributes:
        jobs: The processes, by node.
        ended: The processes that have ended, in the order of their ends.
        survived: Ended processes without which the others continue.
        first_signal: The first signal that the launcher got; None: it got none.

    Args:
        spec: Description of the launch.
        look: Called with a node whose process runs; returns the state of the process from the kernel.
        now_s: The present time, on the clock that all methods use.
    """

    def __init__(self, spec: LaunchSpec, look: Callable[[int], KernelState], now_s: float) -> None:
        self.jobs: dict[int, Job] = {}
        self.ended: list[Job] = []
        self.survived: list[Job] = []
        self.first_signal: signal.Signals | None = None
        self._spec, self._look = spec, look
        self._phase = JobPhase.RUNS
        self._phase_ends_s = self._patience_ends_s = inf
        self._look_s = now_s + LOOK_S
        self._has_fault = False  # whether a process at fault has ended
        # the last reported `Entering.joined` of the first process in its first world; None: nothing was reported
        self._has_joined: bool | None = None

    @property
    def next_s(self) -> float:
        """Time at which `on_tick` must be called."""
        return min(self._phase_ends_s, self._patience_ends_s, self._look_s)

    @property
    def running(self) -> list[Job]:
        """The processes that have not ended."""
        return [job for job in self.jobs.values() if job.returncode is None]

    # -- events --------------------------------------------------------------------------------------------------------

    def add_process(self, node: int, pid: int) -> None:
        """Add the process of a node, which was started."""
        each = self._spec.ranks_per_node
        self.jobs[node] = Job(node=node, pid=pid, ranks=range(node * each, (node + 1) * each))

    def on_record(self, now_s: float, node: int, record: Record) -> list[Action]:
        """Act on a record of a process.

        Args:
            now_s: The time.
            node: Node of the process.
            record: The record.
        """
        job = self.jobs[node]
        match record:
            case Status():
                job.status = record
            case Leaving():
                job.left = record.world
            case MemberLost():
                if job.status is None:
                    job.losses.add(record.member)
                return self._kill_stopped_processes([record.member])
            case Entering():
                job.entering = record
                if each := record.ranks_each:
                    job.ranks = range(node * each, (node + 1) * each)
                self._shorten_peace(now_s)
                return [*self._report_joining(), *self._end_if_awaited_is_missing(now_s)]
        return []

    def on_exit(self, now_s: float, node: int, returncode: int) -> list[Action]:
        """Record that a process has ended; its last reports may follow, and `on_end` acts on its end.

        Args:
            now_s: The time.
            node: Node of the process.
            returncode: Code as in `subprocess`: negative for signals.
        """
        self.jobs[node].returncode = returncode
        self.ended.append(self.jobs[node])
        self._shorten_peace(now_s)
        return []

    def on_end(self, now_s: float, node: int, *, drained: bool, survived: bool) -> list[Action]:
        """Act on the end of a process; called after `on_exit`, once its reports have been read as far as possible.

        After a failure the job goes on if the others survive it, else it begins to end. Returns what the launcher has
        to do.

        Args:
            now_s: The time.
            node: Node of the process.
            drained: Whether all its reports have been read. False: a child of it holds their pipe open.
            survived: Whether other processes ran when it ended, and continue without it.
        """
        job = self.jobs[node]
        job.drained = drained
        actions: list[Action] = []
        if job.returncode != 0 or job.vanished:
            if survived and self._phase is JobPhase.RUNS:
                self.survived.append(job)
                actions.append(PrintLine(f"{job.name} is lost; the others go on"))
            else:
                actions += self._end_after_failure(now_s, job)
        return [*actions, *self._end_if_awaited_is_missing(now_s)]

    def on_signal(self, now_s: float, number: signal.Signals) -> list[Action]:
        """Pass a signal of the launcher on to all processes; a repeated signal becomes SIGKILL.

        Args:
            now_s: The time.
            number: The signal.
        """
        if self.first_signal is not None:
            return self._signal_actions(signal.SIGKILL, self.running)
        self.first_signal = number
        self._patience_ends_s = now_s + PATIENCE_S
        return self._request_end(now_s, number)

    def on_tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due now, because a time limit is over or processes stand still."""
        actions: list[Action] = []
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            actions += self._judge_standstills()
        if now_s >= self._patience_ends_s:
            self._patience_ends_s = inf
            if names := ", ".join(f"process {job.node}" for job in self.running):
                limit = f"up to {self._spec.grace_s:g} s"
                actions.append(PrintLine(f"waiting {limit} for {names} to end; once more, and they are killed at once"))
        if self._phase is JobPhase.SEARCH and now_s >= self._phase_ends_s:
            self._phase, self._phase_ends_s = JobPhase.PEACE, now_s + PEACE_S
            self._shorten_peace(now_s)
        if self._phase is JobPhase.PEACE and now_s >= self._phase_ends_s:
            # processes that wait for all to join have not noticed the failure, nor have stopped ones
            actions += self._request_end(now_s, signal.SIGTERM)
            actions += self._kill_stopped_processes(self.jobs)
        elif self._phase is JobPhase.GRACE and now_s >= self._phase_ends_s:
            actions += self._kill_late_processes(now_s)
        return actions

    # -- parts of the events -------------------------------------------------------------------------------------------

    def _report_joining(self) -> list[Action]:
        """Report that this host's first process waits for the others to join, and later that it has joined.

        On the first host, node 0 prints that itself. On other hosts the launcher prints it, because the last lines of a
        process that ends without a status are shown as its error.
        """
        spec = self._spec
        entering = self.jobs[spec.here[0]].entering
        # node 0 reports by itself; later worlds are not reported, nor is the same state again
        if not spec.here[0] or entering is None or entering.world > 1 or entering.joined is self._has_joined:
            return []
        self._has_joined = entering.joined
        state = "has joined" if entering.joined else f"waits for the other nodes, at {format_endpoint(spec.endpoint)}"
        return [PrintLine(f"node {spec.here[0] // len(spec.here)} {state}")]

    @property
    def _awaited_world(self) -> int:
        """Number of the last world that any process waits for others to join; 0 if none waits."""
        return max((job.awaited_world for job in self.jobs.values()), default=0)

    def _end_if_awaited_is_missing(self, now_s: float) -> list[Action]:
        """End all processes if one of them waits for a process that has ended with code 0 without joining."""
        awaited = self._awaited_world
        # only processes whose reports have all been read, because the last one may be that it enters the world
        missing = [job for job in self.ended if job.returncode == 0 and job.drained and job.last_world < awaited]
        if not missing or self._phase is not JobPhase.RUNS:
            return []
        missing[0].missed = True
        return self._request_end(now_s, signal.SIGTERM)

    def _end_after_failure(self, now_s: float, job: Job) -> list[Action]:
        """Begin to end the other processes after a failure; before, the process at fault may report its error.

        If the failed process was killed, it is at fault itself. Then processes that have entered no world, and so
        cannot notice the failure, get SIGTERM at once.
        """
        # without a report, a process counts as the cause
        self._has_fault = self._has_fault or job.status is None or job.status.cause
        actions: list[Action] = []
        if self._phase is JobPhase.RUNS:
            self._phase, self._phase_ends_s = JobPhase.SEARCH, now_s + SEARCH_S
            outside = [each for each in self.running if not each.last_world] if job.was_killed else []
            actions = self._signal_actions(signal.SIGTERM, outside)
        if self._phase is JobPhase.SEARCH and self._has_fault:
            self._phase_ends_s = now_s
        return actions

    def _shorten_peace(self, now_s: float) -> None:
        """Let the next tick end PEACE if all running processes wait to join, and would not notice the failure."""
        if self._phase is JobPhase.PEACE and all(job.awaited_world for job in self.running):
            self._phase_ends_s = now_s

    def _request_end(self, now_s: float, number: signal.Signals) -> list[Action]:
        """Send all processes a signal to end, after which they have the grace period."""
        if self._phase is not JobPhase.GRACE:
            self._phase, self._grace_ends_s = JobPhase.GRACE, now_s + self._spec.grace_s
            self._phase_ends_s = self._grace_ends_s
            # the time that a process waits for a processor from here on extends its grace period
            for job in self.running:
                job.queued_s = self._look(job.node).queued_s
        return self._signal_actions(number, self.running)

    def _judge_standstills(self) -> list[Action]:
        """Report processes that stand still while others wait for them to join, and kill those that stay stopped.

        Processes of a world on one machine watch each other. But they cannot see a process that has not joined, and of
        a process on another machine they see only its silence.
        """
        elsewhere, actions = len(self._spec.here) < self._spec.nodes, list[Action]()
        for job in self.running:
            look = self._look(job.node)
            job.looks = job.looks + 1 if look.letter and look.letter == job.letter else 1
            job.letter = look.letter
            is_awaited = self._awaited_world > job.last_world
            if not look.letter or self._phase is not JobPhase.RUNS or not (is_awaited or elsewhere):
                continue
            # `==`, so that the process is reported only once
            if is_awaited and job.looks * LOOK_S == SUSPECT_S:
                text = f"{job.name} {look.reason}, for {SUSPECT_S:g} s now; others wait for it to join"
                actions.append(PrintLine(text))
            if job.looks * LOOK_S >= STOPPED_S and look.letter == "T":
                actions += [PrintLine(f"{job.name} {_STAYED_STOPPED}"), *self._kill_stopped_processes([job.node])]
        return actions

    def _kill_stopped_processes(self, nodes: Collection[int]) -> list[Action]:
        """Kill those processes of some nodes that are stopped, because they would not act on SIGTERM."""
        stopped = [job for job in self.running if job.node in nodes and self._look(job.node).letter == "T"]
        return self._signal_actions(signal.SIGKILL, stopped)

    def _kill_late_processes(self, now_s: float) -> list[Action]:
        """Kill processes that run after the grace period, extended by the time that they waited for a processor."""
        grace_s, over_s = self._spec.grace_s, now_s - self._grace_ends_s
        late = self.running
        owed_s = {job.node: self._look(job.node).queued_s - job.queued_s for job in late}
        due = [job for job in late if min(owed_s[job.node], _MOST_QUEUED * grace_s) <= over_s]
        # if all are killed, nothing is left to do; otherwise look at the rest again later
        self._phase_ends_s = inf if len(due) == len(late) else now_s + LOOK_S
        lines = [PrintLine(f"process {job.node} did not end within {grace_s:g} s and is killed") for job in due]
        return [*lines, *self._signal_actions(signal.SIGKILL, due)]

    def _signal_actions(self, number: signal.Signals, jobs: Iterable[Job]) -> list[Action]:
        """Return the actions that send a signal to processes, and record which of them had sent no status before."""
        actions: list[Action] = []
        for job in jobs:
            job.stopped = job.stopped or job.status is None
            actions.append(Kill(job.node, number))
        return actions
