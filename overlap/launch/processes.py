"""The processes of one launch: started in their own sessions, watched, ended together, each reaped by its own pid."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import trio

from .environment import member_variables
from .lifeline import tie
from .output import DRAIN_S, STDERR, STDOUT, Log, Relay, Screen, prefix_of
from .secret import hand_over
from .status import LONGEST_BYTES, Status, read_status
from .verdict import Ending

__all__ = ["Launch", "Outcome", "launch"]

# After a failure the others learn of it themselves within half a second, and write their traces; then they are told.
PEACE_S = 2.0
# The same while only processes have ended that were not at fault: the one that was may still be writing its trace.
SEARCH_S = 5.0
# Before the user is told that the launcher waits.
PATIENCE_S = 1.0

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start.

    Attributes:
        command: The program and its arguments, the same on each node.
        environ: Environment of all.
        nodes: How many nodes the world has.
        here: The nodes to start on this machine.
        ranks_per_node: Ranks of each node.
        endpoint: Host and port where node 0 listens.
        listener: Descriptor of the socket that listens there; node 0 inherits it.
        job: Name of the job.
        secret: What proves membership.
        prefix: Whether to put the node before each line.
        colour: Whether to colour that.
        log_dir: Folder for what the nodes print; None: the terminal.
        grace_s: Between being asked to end and being killed.
        report: Takes lines for the user while the processes run.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    nodes: int
    here: Sequence[int]
    ranks_per_node: int
    endpoint: tuple[str, int]
    listener: int | None
    job: str
    secret: bytes
    prefix: bool
    colour: bool
    log_dir: str | None
    grace_s: float
    report: Callable[[str], None]

    def __repr__(self) -> str:
        return f"<Launch of nodes {list(self.here)} of {self.nodes}, job {self.job!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it went.

    Attributes:
        endings: Of all processes, in the order in which they ended.
        asked: The first signal that the launcher got, if any.
    """

    endings: Sequence[Ending]
    asked: signal.Signals | None


async def launch(what: Launch) -> Outcome:
    """Start the processes and stay until all have ended; the first failure, or a signal, ends them all.

    However this ends, by an error or by cancellation too, no process of it is left.

    Raises:
        OSError: If a process cannot be started, or what one prints cannot be written.
    """
    handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*handled) as signals, ExitStack() as kept:
        watch = _Watch(what)
        try:
            secret = hand_over(what.secret)
            kept.callback(os.close, secret)
            for node in what.here:
                log = kept.enter_context(Log(f"{what.log_dir}/node-{node}.log")) if what.log_dir else None
                watch.members.append(_Member(what, node, secret=secret, screen=watch.screen, log=log))
            await watch.run(signals)
        finally:
            for member in watch.members:
                member.send(signal.SIGKILL)
            with trio.CancelScope(shield=True):  # bounded: they have been killed
                for member in watch.members:
                    await member.reaped()
                    member.close()
    return Outcome(endings=[member.ending() for member in watch.ended], asked=watch.asked)


class _Watch:
    """The processes while they run, and what is done about them."""

    def __init__(self, what: Launch) -> None:
        self.members: list[_Member] = []
        self.ended: list[_Member] = []  # in the order in which they did
        self.asked: signal.Signals | None = None
        self.screen = Screen()
        self._what = what
        self._found = trio.Event()  # the first process that was at fault
        self._ending = False

    async def run(self, signals: AsyncIterator[int]) -> None:
        """Stay until all have ended."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._obey, signals)
            async with trio.open_nursery() as lives:
                for member in self.members:
                    lives.start_soon(self._live, member)
            self._nursery.cancel_scope.cancel()

    async def _live(self, member: _Member) -> None:
        async with trio.open_nursery() as nursery:
            for task in (member.out.run, member.err.run, member.listen):
                nursery.start_soon(task)
            returncode = await member.reaped()
            self.ended.append(member)
            await member.said_all()
            member.out.hurry()
            member.err.hurry()
            if returncode != 0:
                self._failed(member)

    def _failed(self, member: _Member) -> None:
        if member.status is None or member.status.cause:
            self._found.set()
        if not self._ending and self.asked is None:
            self._nursery.start_soon(self._end_the_others)

    async def _end_the_others(self) -> None:
        self._ending = True
        with trio.move_on_after(SEARCH_S):
            await self._found.wait()
        await trio.sleep(PEACE_S)
        self._stop(signal.SIGTERM)
        await self._kill_late()

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if self.asked is None:
                self.asked = signal.Signals(number)
                self._stop(self.asked)
                self._nursery.start_soon(self._kill_late)
                self._nursery.start_soon(self._explain)
            else:
                self._stop(signal.SIGKILL)

    async def _explain(self) -> None:
        await trio.sleep(PATIENCE_S)
        if running := self._running():
            names = ", ".join(f"node {member.node}" for member in running)
            limit = f"up to {self._what.grace_s:g} s"
            self._what.report(f"waiting {limit} for {names} to end; once more, and they are killed at once")

    async def _kill_late(self) -> None:
        await trio.sleep(self._what.grace_s)
        for member in self._running():
            self._what.report(f"node {member.node} did not end within {self._what.grace_s:g} s and is killed")
        self._stop(signal.SIGKILL)

    def _running(self) -> list[_Member]:
        return [member for member in self.members if member.process.returncode is None]

    def _stop(self, number: signal.Signals) -> None:
        for member in self._running():
            member.stopped = member.stopped or member.status is None
            member.send(number)


class _Member:
    """The process of one node, its pipes, and what it has said."""

    def __init__(self, what: Launch, node: int, *, secret: int, screen: Screen, log: Log | None) -> None:
        self.node, self._log = node, log
        self.ranks = range(node * what.ranks_per_node, (node + 1) * what.ranks_per_node)
        self.status: Status | None = None
        self.stopped = False
        self._heard = trio.Event()
        with ExitStack() as theirs, ExitStack() as ours:
            lifeline, _ = _pipe(theirs, ours)
            self._said, says = _pipe(ours, theirs)
            from_stdout, stdout = _pipe(ours, theirs)
            from_stderr, stderr = _pipe(ours, theirs)
            descriptors = {"secret": secret, "lifeline": lifeline, "status": says}
            if node == 0 and what.listener is not None:
                descriptors["listener"] = what.listener
            self.process = subprocess.Popen(
                what.command,
                env=_environment(what, node, descriptors),
                pass_fds=list(descriptors.values()),
                start_new_session=True,  # Ctrl-C is for the launcher alone, which passes it on
                stdin=None if node == 0 and not _is_terminal() else subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
            tie(lifeline, self.process.pid)
            self._ours = ours.pop_all()
        prefix = prefix_of(node, colour=what.colour) if what.prefix else b""
        self.out = Relay(from_stdout, STDOUT, screen=screen, prefix=prefix, log=log)
        self.err = Relay(from_stderr, STDERR, screen=screen, prefix=prefix, log=log)

    async def listen(self) -> None:
        """Read the status record, and put its text where the rest of the output is if that is a file."""
        os.set_blocking(self._said, False)
        with trio.CancelScope() as self._listening:
            self.status = read_status(await _read_all(self._said, LONGEST_BYTES))
            if self.status is not None and self._log is not None:
                self._log.write([line.encode() + b"\n" for line in self.status.text.splitlines()])
        self._heard.set()

    async def said_all(self) -> None:
        """Wait for the record of a process that is gone; not for ever, as one that it has left may hold the pipe."""
        with trio.move_on_after(DRAIN_S):
            await self._heard.wait()
        self._listening.cancel()

    async def reaped(self) -> int:
        """Wait for the end of the process, end what is left of its group, and only then give its pid back."""
        if self.process.returncode is None:
            await _exited(self.process.pid)
            self.send(signal.SIGKILL)
            self.process.wait()
        return self.process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started in its group."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # there is nobody left in it
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close the pipes, the lifeline among them."""
        self._ours.close()

    def ending(self) -> Ending:
        """Say how it ended."""
        return Ending(
            node=self.node,
            ranks=self.ranks,
            pid=self.process.pid,
            returncode=self.process.returncode,
            status=self.status,
            stopped=self.stopped,
            tail=[line.decode(errors="replace").rstrip("\n") for line in self.err.tail],
            log=self._log.path if self._log else None,
        )


def _environment(what: Launch, node: int, descriptors: Mapping[str, int]) -> dict[str, str]:
    told = member_variables(
        node=node,
        nodes=what.nodes,
        ranks_per_node=what.ranks_per_node,
        endpoint=what.endpoint,
        job=what.job,
        descriptors=descriptors,
    )
    return {**what.environ, **told, "PYTHONUNBUFFERED": "1"}


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed with the two stacks."""
    reads, writes = os.pipe()
    reader.callback(os.close, reads)
    writer.callback(os.close, writes)
    return reads, writes


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


async def _read_all(descriptor: int, most_bytes: int) -> bytes:
    data = b""
    while len(data) <= most_bytes:
        try:
            more = os.read(descriptor, most_bytes)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(descriptor)
            continue
        if not more:
            break
        data += more
    return data


async def _exited(pid: int) -> None:
    """Wait until a child has ended, without reaping it: until that is done nobody else can get its pid."""
    if not hasattr(os, "pidfd_open"):
        await trio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT, abandon_on_cancel=True)
        return
    descriptor = os.pidfd_open(pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
