"""A job of the launcher, everything that it has started, and what it leaves."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.interpreters import Python, environment

# Of one step of a test; reached only by what hangs, or on a machine with much else to do, which may have more. The
# longest that may be waited for is 15 s of silence.
LIMIT_S = float(os.environ.get("FAULTS_LIMIT_S", "60"))


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*found, *(each for child in found for each in children(child))]


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int, seconds: float = LIMIT_S) -> bool:
    """Wait for the end of a process, our child or not; return whether it has come in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))
    finally:
        os.close(descriptor)


class Job:
    """`overlap run` of a program, behind the command `enter` if there is one, which runs it on another host.

    None of it survives its block.

    Attributes:
        process: The launcher.
        out: What it has printed.
        err: The same of stderr.
        began_s: When it was started.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        program: str,
        arguments: Sequence[str] = (),
        enter: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.before = shared_memory()
        self.began_s = time.monotonic()
        command = ["-m", "overlap", "run", *options, program, *arguments]
        environ = environment(**variables)
        self.process: Python | subprocess.Popen[str]
        if enter:  # the process that forks is in the namespaces of this one
            pipe, entered = subprocess.PIPE, [*enter, sys.executable, *command]
            self.process = subprocess.Popen(entered, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)
        else:
            self.process = Python(*command, cwd=folder, env=environ, start_new_session=True)
        self.out = self.err = ""
        self._seen: set[int] = set()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._pipes = {self.process.stdout.fileno(): "out", self.process.stderr.fileno(): "err"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def nodes(self) -> list[int]:
        """Return the processes that the launcher has started, as far as there are any now."""
        found = children(self.process.pid)
        self._seen.update(found)
        return found

    def pump(self, until_s: float) -> bool:
        """Take in what is printed; False when both pipes have ended or the time is over."""
        if not self._pipes:
            return False
        ready, _, _ = select.select(list(self._pipes), [], [], max(0.0, until_s - time.monotonic()))
        for pipe in ready:
            data = os.read(pipe, 1 << 16).decode(errors="replace")
            name = self._pipes[pipe]
            setattr(self, name, getattr(self, name) + data)
            if not data:
                del self._pipes[pipe]
        return bool(self._pipes) and bool(ready)

    def until(self, text: str) -> float:
        """Wait for a text on stdout or stderr; return when it came."""
        limit_s = time.monotonic() + LIMIT_S
        while text not in self.out + self.err:
            assert self.pump(limit_s), f"no {text!r} in {self.out!r} {self.err!r}"
        self.nodes()
        return time.monotonic()

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        self.nodes()
        limit_s = time.monotonic() + LIMIT_S
        while self.pump(limit_s):
            pass
        return self.process.wait(max(0.1, limit_s - time.monotonic()))

    def check_nothing_is_left(self) -> None:
        """Whatever it started must have ended, and shared memory be as it was."""
        limit_s = time.monotonic() + LIMIT_S
        orphans = [pid for pid in self._seen if lives(pid) and not ends(pid, max(0.0, limit_s - time.monotonic()))]
        assert not orphans, f"processes left: {orphans}"
        assert shared_memory() <= self.before

    def kill(self) -> None:
        """End all of it, however far it has come."""
        seen = {*self._seen, *self.nodes()}
        for pid in [self.process.pid, *seen]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)


def shared_memory() -> set[str]:
    """Return what is ours in shared memory; MPICH leaves some, and other tests run beside this one."""
    return {path.name for path in Path("/dev/shm").glob("*overlap*")}
