"""Process of one node, as its launcher sees it: its start, its pipes and reports, and the end of its group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import trio

from ..kernel_facts import queued_ns, state_letter, waits_in_kernel
from ..processes.messages import MemberLost
from ..processes.place import member_variables
from ..processes.status import LONGEST_BYTES, Entering, Leaving, Status, read_record
from ..signals import ASKING
from .lifeline import tie_to_pipe
from .output import DRAIN_S, READ_BYTES, STDERR, STDOUT, Log, Relay, Screen, line_prefix
from .verdict import Ending

# By the letter for the state of a process: proc(5).
_STANDSTILL = {
    "T": "is stopped, as SIGSTOP does",
    "t": "is held by a debugger",
    "D": "waits in the kernel, for a disk or for memory",
}
# Parts of the names of functions that wait for nothing but memory, of a control group or of the system.
_FOR_MEMORY = ("mem_cgroup", "reclaim")
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: getrusage(2) of either system


class NodeProcess:
    """The process of one node, its pipes, and its reports.

    Args:
        spec: Description of the launch.
        node: Its index.
        secret: Descriptor of the secret, which it inherits.
        screen: The terminal that all processes share.
        log: File for its output; None: the terminal.

    Attributes:
        process: The process itself.
        relays: Show its output; `err` is that of stderr, and with a log of all output.
        status: Its report on its end; None until it has sent one.
        entering: The last world that it has entered; None: none so far.
        left: The last world that it has left.
        stopped: Whether it got a signal of the launcher before it had sent a report.
        missed: Whether it ended well, without entering a world in which another process waits for it.
        peak_bytes: Peak memory of the process and of its children, once it has ended.
    """

    node: int

    def __init__(self, spec: LaunchSpec, node: int, *, secret: int, screen: Screen, log: Log | None) -> None:
        self.node, self._log = node, log
        self.ranks: range = _ranks_of_node(node, spec.ranks_per_node)
        self.status: Status | None = None
        self.entering: Entering | None = None
        self.left: int = 0
        self.stopped: bool = False
        self.missed: bool = False
        self.peak_bytes: int = 0
        self._drained = trio.Event()
        with ExitStack() as theirs, ExitStack() as ours:
            lifeline, _ = _pipe(theirs, ours)
            self._reports, status = _pipe(ours, theirs)
            from_stderr, stderr = _pipe(ours, theirs)
            # Output for one file goes through one pipe: two would lose its order.
            from_stdout, stdout = _pipe(ours, theirs) if log is None else (None, stderr)
            descriptors = {"secret": secret, "lifeline": lifeline, "status": status}
            if node == 0 and spec.listener is not None:
                descriptors["listener"] = spec.listener
            with _blocking_signal(ASKING):
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    spec.command,
                    env=_member_environment(spec, node, descriptors),
                    pass_fds=[*descriptors.values()],
                    # Ctrl-C is for the launcher alone, which passes it on. No session of its own: that may be a group
                    # of its own for the scheduler, so that processes which share cores could not let each other run.
                    process_group=0,
                    stdin=None if node == 0 and not _is_terminal() else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            tie_to_pipe(lifeline, self.process.pid)
            self._ours = ours.pop_all()
        prefix = line_prefix(node, colour=spec.colour) if spec.prefix else b""
        self.err: Relay = Relay(from_stderr, STDERR, screen=screen, prefix=prefix, log=log)
        self.relays: list[Relay] = [self.err]
        if from_stdout is not None:
            self.relays.append(Relay(from_stdout, STDOUT, screen=screen, prefix=prefix))

    async def read_records(self, news: Callable[[], object], lost: Callable[[int], object]) -> None:
        """Read the records; with a log, write the text of the last one into it.

        Args:
            news: Called when this process has entered a world.
            lost: Called with a node whose process the others call lost.
        """
        os.set_blocking(self._reports, False)
        with trio.CancelScope() as self._listening:
            async for line in _read_lines(self._reports, LONGEST_BYTES):
                match read_record(line):
                    case Status() as status:
                        self.status = status
                        self._log_status(status)
                    case Entering() as entering:
                        self.entering = entering
                        if entering.ranks_each:
                            self.ranks = _ranks_of_node(self.node, entering.ranks_each)
                        news()
                    case Leaving() as leaving:
                        self.left = leaving.world
                    case MemberLost() as record:
                        lost(record.member)
        self._drained.set()

    def _log_status(self, status: Status) -> None:
        """Write the report of the process into its log, behind the output so far."""
        if self._log is not None:
            self.err.catch_up()
            lines = status.text.encode(errors="backslashreplace").splitlines()
            self._log.write([line + b"\n" for line in lines])

    def has_missed(self, world: int) -> bool:
        """Whether the process has ended with code 0, and has not entered the world with that number."""
        return self.process.returncode == 0 and self._drained.is_set() and self.last_world() < world

    def last_world(self) -> int:
        """Return the number of the last world that the process has entered; 0: none."""
        return self.entering.world if self.entering else 0

    def has_vanished(self) -> bool:
        """Whether the process has ended with code 0 in the middle of a world; call it when its reports were read."""
        return self.process.returncode == 0 and self.entering is not None and self.left < self.entering.world

    def awaited_world(self) -> int | None:
        """Return the number of the world that the process waits for others to join; None: it does not wait."""
        if self.entering is None or self.entering.joined or self.process.returncode is not None:
            return None
        return self.entering.world

    def has_entered_no_world(self) -> bool:
        """Whether the process has entered no world so far: it imports, or its program is before `run`."""
        return self.entering is None

    def was_killed(self) -> bool:
        """Whether a signal that the launcher had not sent ended the process before it sent a report."""
        return (self.process.returncode or 0) < 0 and self.status is None and not self.stopped

    async def drain_reports(self) -> None:
        """Wait up to `DRAIN_S` for the last reports of a process, because a child of it may hold the pipe open."""
        with trio.move_on_after(DRAIN_S):
            await self._drained.wait()
        self._listening.cancel()

    async def wait_and_reap(self) -> int:
        """Wait for the end of the process, kill the rest of its group, and only then reap its pid."""
        if self.process.returncode is None:
            await _wait_for_exit(self.process.pid)
            self.send(signal.SIGKILL)
            self._reap()
        assert self.process.returncode is not None, "it has been reaped"
        return self.process.returncode

    def _reap(self) -> None:
        """Reap the pid of a process that has ended, and record its peak memory."""
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_bytes = used.ru_maxrss * _RSS_UNIT_BYTES

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started in its group."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # the group is empty
                os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether the process has ended, also before its pid is reaped."""
        return self.process.returncode is not None or self._state() == "Z"

    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP: then it does not act on SIGTERM."""
        return self._state() == "T"

    def standstill(self) -> tuple[str, str]:
        """Return why the process does not run, if the kernel has a reason that concerns the user.

        Returns:
            The letter of its state, and the reason, which may change while the state lasts; "" if there is none.
        """
        state = self._state()
        if state not in _STANDSTILL:
            return "", ""
        function = waits_in_kernel(self.process.pid) if state == "D" else ""
        reason = "waits for memory" if any(part in function for part in _FOR_MEMORY) else _STANDSTILL[state]
        return state, f"{reason} (in {function})" if function else reason

    def _state(self) -> str:
        return state_letter(self.process.pid) if self.process.returncode is None else ""

    def queued_s(self) -> float:
        """Return the seconds that the process was ready to run but waited for a processor; 0 if unknown."""
        return queued_ns(self.process.pid) / 1e9

    def ask(self) -> None:
        """Send the signal that asks for a report to the process only: it might end child processes."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, ASKING)

    def close(self) -> None:
        """Close the pipes, the lifeline among them."""
        self._ours.close()

    @property
    def name(self) -> str:
        """The process and its ranks, for messages."""
        return self.ending().name

    def ending(self) -> Ending:
        """Return the end of the process, with its reports and its last lines on stderr."""
        return Ending(
            node=self.node,
            ranks=self.ranks,
            pid=self.process.pid,
            returncode=self.process.returncode,
            status=self.status,
            stopped=self.stopped,
            missed=self.missed,
            vanished=self.has_vanished(),
            peak_bytes=self.peak_bytes,
            tail=[line.decode(errors="replace").rstrip("\n") for line in self.err.tail],
            log=self._log.path if self._log else None,
        )


def _ranks_of_node(node: int, each: int) -> range:
    return range(node * each, (node + 1) * each)


def _member_environment(spec: LaunchSpec, node: int, descriptors: Mapping[str, int]) -> dict[str, str]:
    """Return the environment of the process of a node: that of the launch, and its place in the world."""
    variables = member_variables(
        node=node,
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node or 1,
        endpoint=spec.endpoint,
        job=spec.job,
        descriptors=descriptors,
    )
    return {**spec.environ, **variables, "PYTHONUNBUFFERED": "1"}


@contextmanager
def _blocking_signal(number: signal.Signals) -> Iterator[None]:
    """Block a signal in processes started in the block until they handle it, because it would kill them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Open a pipe; each of the two stacks closes one end."""
    reads, writes = os.pipe()
    reader.callback(os.close, reads)
    writer.callback(os.close, writes)
    return reads, writes


def _is_terminal() -> bool:
    """Whether stdin of the launcher is a terminal."""
    try:
        return os.isatty(0)
    except OSError:
        return False


async def _read_lines(descriptor: int, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield lines as soon as they are complete, until one is too long."""
    data = bytearray()
    while len(data) <= most_bytes:
        await trio.lowlevel.wait_readable(descriptor)
        more = os.read(descriptor, READ_BYTES)
        if not more:
            break
        *whole, rest = more.split(b"\n")
        for line in whole:
            yield bytes(data + line)
            data.clear()
        data += rest


async def _wait_for_exit(pid: int) -> None:
    """Wait until a child has ended, without reaping it: until then no other process can get its pid."""
    if not hasattr(os, "pidfd_open"):
        await trio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT, abandon_on_cancel=True)
        return
    descriptor = os.pidfd_open(pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


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
