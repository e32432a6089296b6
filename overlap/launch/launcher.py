"""Processes of one launch: their start, pipes and reports, and the actions of `jobs` on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import trio

from ..errors import UsageError
from ..kernel_facts import kernel_wait_function, process_state_letter, processor_wait_ns
from ..processes.identity import LOST_AFTER_S
from ..processes.members import PrintLine
from ..processes.place import member_variables
from ..processes.secret import write_to_nameless_file
from ..processes.status import LONGEST_BYTES, Record, Status, parse_record
from ..signals import STATE_SIGNAL
from ..survival.witness import has_alive_file, newest_decided_world
from .binding import bound_to_cores, share_own_cores
from .jobs import Action, Job, Jobs, KernelState, Kill, LaunchSpec
from .lifeline import tie_to_pipe
from .output import DRAIN_S, READ_BYTES, STDERR, STDOUT, Relay, Screen, line_prefix, open_log, write_log

# Text for each state of a process that stands still, by its letter in proc(5).
_STANDSTILL = {
    "T": "is stopped, as SIGSTOP does",
    "t": "is held by a debugger",
    "D": "waits in the kernel, for a disk or for memory",
}
# Longest wait for the folder of the witness, which may be on a file system that does not answer.
_WITNESS_S = LOST_AFTER_S
# Parts of names of kernel functions that wait only for memory, of a control group or of the system.
_FOR_MEMORY = ("mem_cgroup", "reclaim")
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of `ru_maxrss`, see getrusage(2)
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STATE_SIGNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """Outcome of a launch."""

    endings: Sequence[Job]  # All processes, in the order in which they ended
    first_signal: signal.Signals | None  # The first signal that the launcher got, if any


async def launch(spec: LaunchSpec) -> LaunchOutcome:
    """Start the processes of a launch, and wait until all have ended; the first failure, or a signal, ends all.

    No process is left behind, even after an error or a cancellation.

    Args:
        spec: Description of the launch.

    Raises:
        UsageError: The system refuses to start a process; the others are ended.
        OSError: The reader of the output has closed the pipe.
        OutputError: Output cannot be written.
    """
    handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*handled) as signals, ExitStack() as resources:
        launcher = _Launcher(spec)
        try:
            secret = write_to_nameless_file(spec.secret)
            resources.callback(os.close, secret)
            several = spec.bind and len(spec.here) > 1
            shares = share_own_cores(len(spec.here)) if several else [frozenset[int]()] * len(spec.here)
            for node, cores in zip(spec.here, shares, strict=True):
                log = resources.enter_context(open_log(spec.log_path(node))) if spec.log_dir else None
                try:
                    with bound_to_cores(cores):
                        launcher.children[node] = NodeChild(spec, node, secret=secret, screen=launcher.screen, log=log)
                except OSError as error:  # too many files or processes, too little memory
                    reason = f"process {node} cannot be started: {error.strerror or error}"
                    raise UsageError(f"{reason}; start fewer, or allow more (ulimit -u, -n)") from error
                launcher.jobs.add_process(node, launcher.children[node].pid)
            await launcher.run(signals)
        finally:
            for child in launcher.children.values():
                child.send_signal(signal.SIGKILL)
            with trio.CancelScope(shield=True):  # bounded: they have been killed
                for child in launcher.children.values():
                    await child.wait_and_reap()
                    child.close()
    jobs = launcher.jobs
    # processes that the others have survived count only if there are no others
    ended = [job for job in jobs.ended if job not in jobs.survived] or jobs.ended
    for job in ended:
        launcher.children[job.node].record_end(job)
    return LaunchOutcome(endings=ended, first_signal=jobs.first_signal)


class _Launcher:
    """Passes events to `Jobs`, and performs its actions."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.children: dict[int, NodeChild] = {}
        self.jobs = Jobs(spec, lambda node: read_child_state(self.children[node].pid), trio.current_time())
        self.screen = Screen()
        self._spec = spec
        self._pause = trio.CancelScope()  # around the sleep until the next tick

    async def run(self, signals: AsyncIterator[int]) -> None:
        """Wait until all processes have ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._handle_signals, signals)
            nursery.start_soon(self._perform_due_actions)
            async with trio.open_nursery() as lives:
                for child in self.children.values():
                    lives.start_soon(self._watch_child, child)
            nursery.cancel_scope.cancel()

    def _perform_actions(self, actions: Iterable[Action]) -> None:
        """Perform actions, and set the time of the next tick."""
        for action in actions:
            match action:
                case Kill(node, number):
                    self.children[node].send_signal(number)
                case PrintLine(line):
                    self._spec.report(line)
        self._pause.deadline = self.jobs.next_s

    async def _perform_due_actions(self) -> None:
        """Call `Jobs.on_tick` whenever it is due, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self.jobs.next_s) as self._pause:
                await trio.sleep_forever()
            self._perform_actions(self.jobs.on_tick(trio.current_time()))

    async def _handle_signals(self, signals: AsyncIterator[int]) -> None:
        """Pass on the signals that the launcher gets, until cancelled."""
        async for number in signals:
            if number == STATE_SIGNAL:
                for job in self.jobs.running:
                    self.children[job.node].ask_for_report()
            else:
                self._perform_actions(self.jobs.on_signal(trio.current_time(), signal.Signals(number)))

    async def _watch_child(self, child: NodeChild) -> None:
        """Copy the output of one process, handle its records, and act on its end."""
        async with trio.open_nursery() as nursery:
            for relay in child.relays:
                nursery.start_soon(relay.run)
            nursery.start_soon(self._read_records, child)
            returncode = await child.wait_and_reap()
            self._perform_actions(self.jobs.on_exit(trio.current_time(), child.node, returncode))
            with trio.move_on_after(DRAIN_S):  # a child of it may hold the pipe open
                await child.drained.wait()
            # now stop reading records; of the output, only the rest in the pipes is copied
            child.listening.cancel()
            for relay in child.relays:
                relay.limit_remaining_output()
            survived = bool(self.jobs.running) and await self._others_continue_without(self.jobs.jobs[child.node])
            drained = child.drained.is_set()
            self._perform_actions(self.jobs.on_end(trio.current_time(), child.node, drained=drained, survived=survived))

    async def _read_records(self, child: NodeChild) -> None:
        """Handle the records of a process until its pipe is closed; if it has a log, write its status into the log."""
        with child.listening:
            async for line in _read_lines(child.reports, LONGEST_BYTES):
                if (record := parse_record(line)) is not None:
                    child.log_status(record)
                    self._perform_actions(self.jobs.on_record(trio.current_time(), child.node, record))
            child.drained.set()

    async def _others_continue_without(self, job: Job) -> bool:
        """Return whether the others continue without an ended process; False if no witness answers."""
        if self._spec.witness is not None:
            with trio.move_on_after(_WITNESS_S):  # a folder that cannot be reached may block a call for ever
                return await trio.to_thread.run_sync(self._ask_witness, self._spec.witness, job, abandon_on_cancel=True)
        return False

    def _ask_witness(self, witness: str, job: Job) -> bool:
        """Return whether the others continue without an ended process, by the files of the witness. May block."""
        if job.status is None:
            # it ended without a status: the others continue if the run survives losses
            return job.entering is not None and has_alive_file(Path(witness), job.node)
        world = newest_decided_world(Path(witness), self._spec.attempt)
        # it failed: the others continue if they have already agreed on a world without it
        return world is not None and job.node not in world.members


class NodeChild:
    """The process of one node, and its pipes. The constructor starts the process.

    Args:
        spec: Description of the launch.
        node: Index of the node.
        secret: Descriptor of a file with the secret, which the process inherits.
        screen: Writer to the terminal that all processes share.
        log: File for the output of the process; None: the terminal gets it.

    Attributes:
        relays: Copy the output. The first one copies stderr, or all output if there is a log.
        reports: Descriptor from which the records of the process are read.
        listening: Scope to cancel so that no further record is read.
        drained: Set when all records have been read.
    """

    def __init__(self, spec: LaunchSpec, node: int, *, secret: int, screen: Screen, log: BinaryIO | None) -> None:
        self.node: int = node
        self.listening: trio.CancelScope = trio.CancelScope()
        self.drained: trio.Event = trio.Event()
        self._log, self._peak_bytes = log, 0
        self._returncode: int | None = None
        with ExitStack() as child_ends, ExitStack() as own_ends:
            lifeline, _ = _open_pipe(child_ends, own_ends)
            reports, status = _open_pipe(own_ends, child_ends)
            from_stderr, stderr = _open_pipe(own_ends, child_ends)
            # with a log, stdout and stderr share one pipe, which keeps their order
            from_stdout, stdout = _open_pipe(own_ends, child_ends) if log is None else (None, stderr)
            descriptors = {"secret": secret, "lifeline": lifeline, "status": status}
            if node == 0 and spec.listener is not None:
                descriptors["listener"] = spec.listener
            variables = member_variables(
                node=node, nodes=spec.nodes, ranks_per_node=spec.ranks_per_node or 1, endpoint=spec.endpoint,
                job=spec.job, descriptors=descriptors,
            )  # fmt: skip
            with _blocking_signal(STATE_SIGNAL):
                self._process = subprocess.Popen(
                    spec.command,
                    env={**spec.environ, **variables, "PYTHONUNBUFFERED": "1"},
                    pass_fds=[*descriptors.values()],
                    # A process group of its own, because only the launcher should get Ctrl-C, and passes it on. No
                    # session of its own: the scheduler may group processes by session, and processes of different
                    # groups cannot yield cores to each other.
                    process_group=0,
                    stdin=None if node == 0 and not os.isatty(0) else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            tie_to_pipe(lifeline, self.pid)
            self._ours = own_ends.pop_all()
        self.reports: int = reports
        os.set_blocking(reports, False)
        prefix = line_prefix(node, colour=spec.colour) if spec.prefix else b""
        self.relays: list[Relay] = [Relay(from_stderr, STDERR, screen=screen, prefix=prefix, log=log)]
        if from_stdout is not None:
            self.relays.append(Relay(from_stdout, STDOUT, screen=screen, prefix=prefix))

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def log_status(self, record: Record) -> None:
        """If a record is a status and there is a log, write its text into the log, after the output so far."""
        if isinstance(record, Status) and self._log is not None:
            self.relays[0].log_pending_output()
            text = record.text.encode(errors="backslashreplace")
            write_log(self._log, [line + b"\n" for line in text.splitlines()])

    async def wait_and_reap(self) -> int:
        """Wait for the end of the process, kill the rest of its group, reap the process, and return its code.

        The code is negative for signals, as in `subprocess`.
        """
        if self._returncode is None:
            await _wait_for_exit(self.pid)
            # before the process is reaped: until then no other group can get the id of its group
            self.send_signal(signal.SIGKILL)
            _, status, used = os.wait4(self.pid, 0)  # noqa: ASYNC222 - it has ended
            self._process.returncode = self._returncode = os.waitstatus_to_exitcode(status)
            self._peak_bytes = used.ru_maxrss * _RSS_UNIT_BYTES
        return self._returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, unless the process was reaped."""
        if self._returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # the group is empty
                os.killpg(self.pid, number)

    def ask_for_report(self) -> None:
        """Send the signal that requests a report to the process alone, because it could end child processes."""
        if self._returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, STATE_SIGNAL)

    def close(self) -> None:
        """Close this side's ends of the pipes, with the lifeline."""
        self._ours.close()

    def record_end(self, job: Job) -> None:
        """Record the peak memory, the log and the last lines of the process, which has ended, in its job."""
        job.peak_bytes, job.log = self._peak_bytes, self._log.name if self._log else None
        job.tail = [line.decode(errors="replace").rstrip("\n") for line in self.relays[0].tail]


def read_child_state(pid: int) -> KernelState:
    """Return the state of a process from the kernel. The process must not have been reaped."""
    letter, queued_s = process_state_letter(pid), processor_wait_ns(pid) / 1e9
    if letter not in _STANDSTILL:
        return KernelState(queued_s=queued_s)
    function = kernel_wait_function(pid) if letter == "D" else ""
    reason = "waits for memory" if any(part in function for part in _FOR_MEMORY) else _STANDSTILL[letter]
    return KernelState(letter=letter, reason=f"{reason} (in {function})" if function else reason, queued_s=queued_s)


@contextmanager
def _blocking_signal(number: signal.Signals) -> Iterator[None]:
    """Block a signal in processes that are started in the block, because it would kill them before they handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Open a pipe, and return its reading and its writing end; each stack closes one of them."""
    reads, writes = os.pipe()
    reader.callback(os.close, reads)
    writer.callback(os.close, writes)
    return reads, writes


async def _read_lines(descriptor: int, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield lines from a descriptor, without their newlines, until it is closed or a line exceeds `most_bytes`."""
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
