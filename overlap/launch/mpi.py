"""Seats in an MPI job: the connection and variables of mpiexec, passed to processes that the launcher starts.

An MPI library finds its peers through the process manager of mpiexec, over a connection that a process inherits, and
by a few variables. mpiexec watches only its own children, does not distinguish a failure from an end, and waits for
ever for a process that dies before it has called MPI. So mpiexec starts stubs of a few lines here: each hands its
connection and its variables to the launcher and stays until the launcher hangs up. The processes of the program are
the launcher's own, as they are over sockets.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

import trio

from ..errors import UsageError
from ..kernel_facts import parent_pid, state_letter
from .lifeline import tie_to_pipe

# How long mpiexec may take to start its stubs, of a few milliseconds each.
_START_S = 60.0
# How long a helper of MPI may be stopped, counted in looks: as long as a process that others wait for.
STOPPED_S, LOOK_S = 15.0, 1.0
# Longest time for mpiexec to notice the end of its stubs; then it is killed.
_LEAVE_S = 2.0
_LONGEST_BYTES = 1 << 16

# Runs in a bare interpreter (-I -S: 10 ms). PMI_FD names the connection to the process manager of mpiexec.
_STUB = """\
import json, os, socket, sys
told = {name: value for name, value in os.environ.items() if name.startswith(("PMI", "MPI_", "HYD"))}
connection = int(told["PMI_FD"])
launcher = socket.socket(socket.AF_UNIX)
launcher.connect(sys.argv[1])
socket.send_fds(launcher, [json.dumps(told).encode()], [connection])
os.close(connection)
launcher.recv(1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Position of one process in an MPI job."""

    descriptor: int  # The connection to the process manager, which the process inherits
    environ: Mapping[str, str]  # Variables in which the library looks for it
    stub: trio.socket.SocketType  # The connection to its stub, which is readable once the stub has ended
    pid: int  # Id of the stub

    async def wait_until_lost(self) -> str:
        """Wait until the stub has ended, or the stub or a parent stays stopped; return which, as a sentence.

        Its parents are the process manager of this machine and mpiexec, which MPI waits for when it starts and ends.
        Stopped processes are counted in looks: the launcher may be stopped as well.
        """
        looks: Counter[int] = Counter()
        helpers = {self.pid: "the helper", **dict.fromkeys(_parents(self.pid), "a process")}
        while max(looks.values(), default=0) * LOOK_S < STOPPED_S:
            with trio.move_on_after(LOOK_S):
                await trio.lowlevel.wait_readable(self.stub)
                return f"the helper of mpiexec (pid {self.pid}) that holds its place has ended"
            looks = Counter({pid: looks[pid] + 1 for pid in helpers if state_letter(pid) == "T"})
        pid = max(looks, key=looks.__getitem__)
        return f"{helpers[pid]} of mpiexec (pid {pid}) has been stopped for {STOPPED_S:g} s, as SIGSTOP does"


def _parents(pid: int) -> list[int]:
    """Return the ids of the parents of a process up to mpiexec, which leads its session; nearest first."""
    parents: list[int] = []
    with suppress(OSError, IndexError):
        session = os.getsid(pid)
        while pid != session:
            pid = parent_pid(pid)
            parents.append(pid)
    return parents


def find_mpiexec() -> str:
    """Return the path of the mpiexec next to this Python, which belongs to its mpi4py; else of the first on PATH.

    Raises:
        UsageError: If mpi4py or mpiexec is missing.
    """
    if find_spec("mpi4py") is None:
        raise UsageError("--transport mpi: mpi4py is not installed: pip install mpi4py")
    where = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    mpiexec = shutil.which("mpiexec", path=where)
    if mpiexec is None:
        raise UsageError("--transport mpi: there is no mpiexec: pip install mpich")
    return mpiexec


@asynccontextmanager
async def seats(mpiexec: str, count: int, environ: Mapping[str, str]) -> AsyncIterator[list[Seat]]:
    """Start mpiexec, and yield the seats of its processes, by rank; after the block mpiexec ends.

    Args:
        mpiexec: Path of the command.
        count: How many.
        environ: Environment of mpiexec.

    Raises:
        UsageError: If mpiexec does not start `count` processes on this machine.
    """
    with ExitStack() as open_stubs, ExitStack() as meeting:
        folder = meeting.enter_context(tempfile.TemporaryDirectory(prefix="overlap-mpi-"))
        listener = meeting.enter_context(socket.socket(socket.AF_UNIX))
        path = os.path.join(folder, "seats")
        listener.bind(path)
        listener.listen(count)
        job = _Mpiexec(mpiexec, count, path, environ)
        try:
            seats_by_rank = await _accept_stubs(job, listener, count, open_stubs)
            meeting.close()
            if sorted(seats_by_rank) != list(range(count)):
                started = f"mpiexec started {len(seats_by_rank)} of {count} processes on this machine"
                raise UsageError(f"--transport mpi: {started}{job.last_words()}")
            yield [seats_by_rank[rank] for rank in range(count)]
        finally:
            open_stubs.close()  # hangs up on the stubs
            with trio.CancelScope(shield=True):
                await job.end()


async def _accept_stubs(job: _Mpiexec, listener: socket.socket, count: int, open_stubs: ExitStack) -> dict[int, Seat]:
    """Accept the connections of the stubs, and return the seats by rank; fewer if mpiexec ends or is late."""
    seats_by_rank: dict[int, Seat] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(job.read_output, nursery.cancel_scope)
        with trio.move_on_after(_START_S), trio.socket.from_stdlib_socket(listener.dup()) as stubs:
            while len(seats_by_rank) < count:
                stub, _ = await stubs.accept()
                rank, seat = await _receive_seat(open_stubs.enter_context(stub))
                open_stubs.callback(os.close, seat.descriptor)
                seats_by_rank[rank] = seat
        nursery.cancel_scope.cancel()
    return seats_by_rank


async def _receive_seat(stub: trio.socket.SocketType) -> tuple[int, Seat]:
    """Receive the seat of one process from its stub: its rank, and its connection to the process manager."""
    await trio.lowlevel.wait_readable(stub)
    with socket.socket(fileno=os.dup(stub.fileno())) as connection:
        written, (descriptor,), *_ = socket.recv_fds(connection, _LONGEST_BYTES, 1)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    variables, (pid, _, _) = json.loads(written), struct.unpack("3i", credentials)
    environ = {**variables, "PMI_FD": str(descriptor)}
    return int(variables["PMI_RANK"]), Seat(descriptor=descriptor, environ=environ, stub=stub, pid=pid)


class _Mpiexec:
    """The mpiexec that starts the stubs, in a session of its own; the kernel ends it with the launcher."""

    def __init__(self, mpiexec: str, count: int, path: str, environ: Mapping[str, str]) -> None:
        self._output = b""
        lifeline, self._held = os.pipe()
        try:
            self._process = subprocess.Popen(
                [mpiexec, "-n", str(count), sys.executable, "-I", "-S", "-c", _STUB, path],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline],
                start_new_session=True,
            )
            tie_to_pipe(lifeline, self._process.pid)
        finally:
            os.close(lifeline)

    async def read_output(self, until: trio.CancelScope) -> None:
        """Read the output of mpiexec, and cancel a scope when it ends."""
        assert self._process.stdout is not None
        while True:
            await trio.lowlevel.wait_readable(self._process.stdout)
            more = os.read(self._process.stdout.fileno(), _LONGEST_BYTES)
            if not more:
                until.cancel()
                return
            self._output += more

    def last_words(self) -> str:
        """Return the last line of the output, as the end of a sentence."""
        lines = self._output.decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    async def end(self) -> None:
        """Wait until mpiexec has noticed the end of its stubs, and kill what is left of its session."""
        assert self._process.stdout is not None
        with trio.move_on_after(_LEAVE_S):
            await self.read_output(trio.CancelScope())
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        os.close(self._held)
