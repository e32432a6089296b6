"""What is forked from a process with ranks is no rank: whatever it asks of one raises, and the world goes on."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import trio

import overlap
from tests.interpreters import Python

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

WHY = (
    "this process is a fork of the one that has this rank, and is no rank itself: use none in it, or let it join a "
    "world of its own by overlap.connect"
)
TIMEOUT_S = 60.0


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raised(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()!r}"
    except overlap.PeerFailedError as error:
        return str(error)


def what_a_fork_is_told(rank: overlap.Rank, pending: overlap.Future[object]) -> list[str]:
    x = np.ones(4)
    uses: list[Callable[[], object]] = [
        rank.barrier,
        lambda: rank.all_reduce(x),
        lambda: rank.send(x, 1),
        lambda: rank.recv(x, 1),
        lambda: rank.all_gather_object(1),
        lambda: rank.compute(len, "a"),
        lambda: rank.group([0, 1]).barrier(),
        rank.world.abort,
        pending.result,
    ]
    return [raised(use) for use in uses]


async def forking(rank: overlap.Rank, way: Callable[[Callable[[], None], overlap.Rank], object], out: int) -> float:
    pending = rank.recv(((1,), "float64"), 1 - rank.rank, tag=5)
    await rank.barrier()
    if rank.rank == 0:
        told = way(lambda: write(out, what_a_fork_is_told(rank, pending)), rank)
        if isinstance(told, overlap.Future):
            await told
        await rank.send(np.ones(1), 1, tag=5)
    come = await pending  # not before rank 0 has forked
    if rank.rank == 1:
        await rank.send(np.ones(1), 0, tag=5)
    return float(come[0] + (await rank.all_reduce(np.ones(1)))[0])


def write(out: int, lines: list[str]) -> None:
    os.write(out, "\n".join(lines).encode())


def by_multiprocessing(work: Callable[[], None], rank: overlap.Rank) -> None:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0


def by_hand(work: Callable[[], None], rank: overlap.Rank) -> None:
    child = os.fork()
    if child == 0:
        work()
        raise SystemExit(3)
    assert end_of(child) == 3


def in_a_compute(work: Callable[[], None], rank: overlap.Rank) -> overlap.Future[None]:
    return rank.compute(by_hand, work, rank)


@pytest.mark.parametrize("way", [by_multiprocessing, by_hand, in_a_compute])
def test_each_use_of_a_rank_raises_one_sentence_and_the_world_goes_on(way: Callable[..., object]) -> None:
    ours, theirs = os.pipe()
    try:
        assert overlap.run(forking, way, theirs, ranks=2, timeout_s=TIMEOUT_S) == [3.0, 3.0]
        assert os.read(ours, 1 << 16).decode().splitlines() == [WHY] * 9
    finally:
        os.close(ours)
        os.close(theirs)


async def returning(rank: overlap.Rank) -> None:
    pass


async def raising(rank: overlap.Rank) -> None:
    raise ValueError("mine")


async def exiting(rank: overlap.Rank) -> None:
    sys.exit("enough")


async def waiting(rank: overlap.Rank) -> None:
    await trio.lowlevel.checkpoint()


async def waiting_for_a_rank(rank: overlap.Rank) -> None:
    await rank.world.split(0)


async def shrugging(rank: overlap.Rank) -> None:
    try:
        await trio.sleep(60)
    except overlap.PeerFailedError:
        sys.exit(7)


async def never_learning(rank: overlap.Rank) -> None:
    while True:
        with suppress(overlap.PeerFailedError):
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("then", "code", "last"),
    [
        (returning, 0, ""),
        (raising, 1, "ValueError: mine"),
        (exiting, 1, "enough"),
        (waiting, 1, f"overlap.errors.PeerFailedError: {WHY}"),
        (waiting_for_a_rank, 1, f"overlap.errors.PeerFailedError: {WHY}"),
        (shrugging, 7, ""),
        (never_learning, 1, f"overlap.errors.PeerFailedError: {WHY}"),
    ],
)
def test_a_fork_ends_where_it_leaves_its_program(
    then: Callable[..., object], code: int, last: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def program(rank: overlap.Rank) -> float:
        child = os.fork() if rank.rank == 0 else None
        if child == 0:
            return await then(rank)  # type: ignore[misc]
        if child is not None:
            assert end_of(child) == code
        return float((await rank.all_reduce(np.ones(1)))[0])

    assert overlap.run(program, ranks=2, timeout_s=TIMEOUT_S) == [2.0, 2.0]
    assert capfd.readouterr().err.splitlines()[-1:] == ([last] if last else [])


def test_a_task_that_forks_and_ends_is_not_waited_for_in_the_fork(capfd: pytest.CaptureFixture[str]) -> None:
    async def task() -> None:
        child = os.fork()
        if child:
            assert end_of(child) == 1

    async def program(rank: overlap.Rank) -> float:
        if rank.rank == 0:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(task)
        return float((await rank.all_reduce(np.ones(1)))[0])

    assert overlap.run(program, ranks=2, timeout_s=TIMEOUT_S) == [2.0, 2.0]
    assert capfd.readouterr().err == f"overlap.errors.PeerFailedError: {WHY}\n"


FORKING = """
import os, numpy as np, overlap
async def main(rank):
    x = np.ones(1 << 16)
    for way in range(3):
        child = os.fork()
        if child == 0:
            if way == 0:
                await rank.all_reduce(x)
            elif way == 1:
                raise ValueError("mine")
            return
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (way < 2)
        for turn in range(5):
            assert (await rank.all_reduce(x))[0] == 2
overlap.run(main)
"""


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize("wires", [["--transport", "efa"], []], ids=["sockets", "memory"])
def test_between_processes_forks_leave_wires_and_files_alone(tmp_path: Path, wires: list[str]) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    command = ["-m", "overlap", "run", "--processes", "2", *wires, "--trace", "run.json", "forking.py"]
    with Python(*command, cwd=tmp_path) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert errors.count("ValueError: mine") == 2
    assert errors.count(f"PeerFailedError: {WHY}") == 2
    assert (tmp_path / "run.json").exists()
