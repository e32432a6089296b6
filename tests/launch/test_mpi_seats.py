"""Seats in an MPI job, with a command that starts processes as mpiexec does."""

import os
import signal
import stat
import sys
from pathlib import Path

import pytest
import trio

from overlap.errors import UsageError
from overlap.kernel_facts import parent_pid
from overlap.launch import mpi
from overlap.launch.mpi import seats

# Starts the given number of processes, the last rank first, with a pipe each as the process manager has; says what
# each exit code is when all have ended.
MPIEXEC = f"""#!{sys.executable}
import os, subprocess, sys
count, program = int(sys.argv[2]), sys.argv[3:]
started = []
for rank in reversed(range(count)):
    manager, process = os.pipe()
    os.write(process, b"%d" % rank)
    environ = {{**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": str(count), "PMI_FD": str(manager)}}
    started.append(subprocess.Popen(program, env=environ, pass_fds=[manager]))
codes = [each.wait() for each in started]
with open(os.environ["ENDED"], "w") as file:
    file.write(str(codes))
"""


def command(folder: Path, text: str) -> str:
    """Write an executable file and return its path."""
    path = folder / "mpiexec"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_each_rank_gets_the_connection_and_the_variables_of_its_stub(tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    async def main() -> list[tuple[str, str, bytes]]:
        async with seats(command(tmp_path, MPIEXEC), 3, {**os.environ, "ENDED": str(ended)}) as taken:
            assert not ended.exists()
            return [
                (seat.environ["PMI_RANK"], seat.environ["PMI_SIZE"], os.read(int(seat.environ["PMI_FD"]), 9))
                for seat in taken
            ]

    assert trio.run(main) == [("0", "3", b"0"), ("1", "3", b"1"), ("2", "3", b"2")]
    assert ended.read_text() == "[0, 0, 0]"


def test_an_mpiexec_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    async def main() -> None:
        async with seats(command(tmp_path, "#!/bin/sh\necho first\necho there is no such host >&2\nexit 3\n"), 2, {}):
            raise AssertionError("there are no seats")

    with pytest.raises(UsageError) as caught:
        trio.run(main)
    told = "--transport mpi: mpiexec started 0 of 2 processes on this machine: there is no such host"
    assert str(caught.value) == told


@pytest.mark.slow
def test_an_mpiexec_that_stays_is_killed_when_the_launch_is_given_up(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def main() -> None:
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_once, pid, scope)
                async with seats(
                    command(tmp_path, f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}\nsleep 1e9"), 2, {}
                ):
                    raise AssertionError("there are no seats")

    trio.run(main)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_stub_that_is_killed_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with seats(command(tmp_path, MPIEXEC), 2, {**os.environ, "ENDED": str(tmp_path / "ended")}) as taken:
            os.kill(taken[1].pid, signal.SIGKILL)
            assert await taken[1].wait_until_lost() == (
                f"the helper of mpiexec (pid {taken[1].pid}) that holds its place has ended"
            )
            with trio.move_on_after(0) as scope:
                await taken[0].wait_until_lost()
            assert scope.cancelled_caught

    trio.run(main)


@pytest.mark.parametrize("parents", [0, 1])
def test_a_helper_that_stays_stopped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parents: int) -> None:
    monkeypatch.setattr(mpi, "LOOK_S", 0.01)
    monkeypatch.setattr(mpi, "STOPPED_S", 0.05)

    async def main() -> None:
        async with seats(command(tmp_path, MPIEXEC), 1, {**os.environ, "ENDED": str(tmp_path / "ended")}) as taken:
            pid = parent_pid(taken[0].pid) if parents else taken[0].pid
            os.kill(pid, signal.SIGSTOP)
            try:
                lost = await taken[0].wait_until_lost()
            finally:
                os.kill(pid, signal.SIGCONT)
            name = "a process" if parents else "the helper"
            assert lost == f"{name} of mpiexec (pid {pid}) has been stopped for 0.05 s, as SIGSTOP does"

    trio.run(main)


async def cancel_once(path: Path, scope: trio.CancelScope) -> None:
    """Cancel a scope as soon as there is a file."""
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - nothing tells of a file
        await trio.sleep(0.01)
    scope.cancel()


@pytest.mark.parametrize(
    ("mpi4py", "mpiexec", "told"),
    [
        (False, True, "--transport mpi: mpi4py is not installed: pip install mpi4py"),
        (True, False, "--transport mpi: there is no mpiexec: pip install mpich"),
        (True, True, None),
    ],
)
def test_what_an_mpi_job_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpi4py: bool, mpiexec: bool, told: str | None
) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: {"mpi4py": "found" if mpi4py else None}[name])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if mpiexec:
        (tmp_path / "mpiexec").touch(mode=0o755)
    if told is None:
        assert mpi.find_mpiexec() == str(tmp_path / "mpiexec")
    else:
        with pytest.raises(UsageError) as caught:
            mpi.find_mpiexec()
        assert str(caught.value) == told
