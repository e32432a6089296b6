"""What a Trio user expects of errors, cancellation and tasks, in one process, over two wires, and in virtual time."""

import asyncio
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from tests.embedded.connecting import MemoryStore, in_threads
from tests.interpreters import Python

from . import structured

SCRIPT = Path(structured.__file__)
TIMEOUT_S = structured.TIMEOUT_S

ENDS_WELL = {
    structured.receive_cancelled: ["cancelled True, got [0, 1, 2]"],
    structured.receive_of_nothing: ["rank 0 went on", "rank 1 went on"],
    structured.cancel: ["True, FutureCancelledError, True, True, got 7, False, False"],
    structured.daemon: ["True, True, ['ended'], True"] * 2,
    structured.errors_that_were_seen: ["100 0"] * 2,
    structured.waits_in_vain: ["0 200 0"] * 2,
    structured.callback_that_raises: ["called True"] * 2,
}
# What the rank that fails prints: at once, and the virtual instant shows it.
FAILS = {
    structured.compute_dropped: ("compute 'boom'", "stopped", " at 0.1 s"),
    structured.compute_kept: ("compute 'boom'", "stopped, True", " at 0.1 s"),
    structured.task_dropped: ("task 'task_boom'", "stopped", " at 0 s"),
}
WIRES = {"memory": [], "sockets": ["--transport", "efa"]}

named = pytest.mark.parametrize("program", ENDS_WELL, ids=lambda program: program.__name__)
failing = pytest.mark.parametrize("program", FAILS, ids=lambda program: program.__name__)
wires = pytest.mark.parametrize("wire", WIRES)
Program = Callable[[overlap.Rank], Any]


def raising_line(program: Program) -> int:
    first = program.__code__.co_firstlineno
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    return next(line for line in range(first, len(lines)) if lines[line - 1].endswith("# raises"))


def start(program: Program, wire: str, cwd: Path) -> Python:
    command = ["-m", "overlap", "run", "--processes", "2", *WIRES[wire], SCRIPT, program.__name__]
    return Python(*command, cwd=cwd)


def lines(printed: str) -> list[str]:
    """Return the lines of the processes of a job."""
    return [re.sub(r"^\[process \d\] ", "", line) for line in printed.splitlines()]


@named
def test_in_one_process_a_program_goes_on(program: Program, clock: Any, capfd: pytest.CaptureFixture[str]) -> None:
    overlap.run(program, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
    assert sorted(capfd.readouterr().out.splitlines()) == ENDS_WELL[program]


@failing
def test_in_one_process_an_error_comes_at_once(program: Program, clock: Any, capfd: pytest.CaptureFixture[str]) -> None:
    name, line, at = FAILS[program]
    with pytest.raises(overlap.RankFailedError) as failed:
        overlap.run(program, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
    assert capfd.readouterr().out == f"{line.replace('stopped', 'stopped' + at * (clock == 'virtual'))}\n"
    cause = failed.value.__cause__
    assert (failed.value.rank, repr(cause)) == (0, "ValueError('boom')")
    [note] = cause.__notes__
    place = f"structured.py:{raising_line(program)}) while nobody awaited it"
    assert note.startswith(f"raised by {name} (")
    assert place in note


@pytest.mark.slow
@wires
@named
def test_between_processes_a_program_goes_on(program: Program, wire: str, tmp_path: Path) -> None:
    with start(program, wire, tmp_path) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert sorted(lines(printed)) == ENDS_WELL[program]


@pytest.mark.slow
@wires
@failing
def test_between_processes_an_error_comes_at_once(program: Program, wire: str, tmp_path: Path) -> None:
    name, line, _ = FAILS[program]
    with start(program, wire, tmp_path) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, lines(printed)) == (1, [line]), errors
    assert f"raised by {name} (" in errors
    assert f"structured.py:{raising_line(program)}) while nobody awaited it" in errors
    assert errors.splitlines()[-1].endswith(": ValueError: boom")


@pytest.mark.parametrize("transport", [None, "efa"], ids=["memory", "sockets"])
def test_a_connection_whose_receive_has_timed_out_on_asyncio_can_be_left(transport: str | None) -> None:
    store = MemoryStore()

    async def receive(world: overlap.Connection) -> float:
        future = world.rank.recv(structured.NUMBER, src=1 - world.rank.rank)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(structured.wait_for(future), 0.2)
        return float((await world.rank.all_reduce(np.ones(1)))[0])

    def live(rank: int) -> float:
        with overlap.connect(rank, 2, store=store, transport=transport) as world:
            return asyncio.run(receive(world))

    assert in_threads(live, 2) == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["task", "compute"])
def test_an_error_from_elsewhere_that_ends_a_task_is_not_lost(way: str, clock: Any) -> None:
    """The task was given the error, but nobody was given the error of the task."""

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            return
        future = rank.recv(structured.NUMBER, src=1)
        if way == "task":
            rank.spawn(structured.wait_for, future)
        else:
            await trio.sleep(1)
            rank.compute(lambda: future.result(), seconds=0.1)
        await trio.sleep(1)

    with pytest.raises(overlap.RankFailedError, match="rank 1 left too early: RankLeftError"):
        overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)


def test_a_daemon_whose_clients_have_left_fails_nobody(clock: Any) -> None:
    async def serve(rank: overlap.Rank) -> None:
        for turn in count(1):
            request = rank.recv(structured.NUMBER, src=None)
            await request
            rank.send(np.array([turn]), dst=request.src, tag=structured.DATA)

    async def main(rank: overlap.Rank) -> list[int]:
        if rank.rank == 0:
            server = rank.spawn(serve, rank, daemon=True)
            while not server.failed:  # noqa: ASYNC110 (an await would be given the error)
                await trio.sleep(0.01)
            return []
        rank.send(np.array([0]), dst=0)
        return (await rank.recv(structured.NUMBER, src=0, tag=structured.DATA)).tolist()

    assert overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S) == [[], [1]]
