"""Worlds that can never go on are ended, whatever another rank does; right programs that look alike are not."""

import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import pytest
import trio

import overlap
from overlap import DeadlineError, RankLeftError, StallError
from overlap.runtime.blame import stall as stall_watch
from tests.threads import running

from .worlds import TIMEOUT_S

R = overlap.Rank
LIKE = ((1,), float)
QUIET_S = 1.0  # for which a right program seems to hang


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    monkeypatch.setattr(stall_watch, "HOPELESS_S", 0.3)
    monkeypatch.setattr(stall_watch, "notify", lambda text: None)


def test_two_ranks_that_wait_for_each_other_end_while_a_third_one_computes() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.all_reduce(np.ones(1))
        elif rank.rank == 1:
            await rank.recv(LIKE, 0)
        else:
            while True:
                await rank.compute(time.sleep, 0.01)

    with pytest.raises(StallError) as caught:
        overlap.run(main, ranks=3)
    assert caught.value.sentence.startswith("ranks 0-1 wait for each other and cannot go on: rank 0 in all_reduce #0 ")


async def answers(rank: R) -> None:
    """Be the other rank: it sends what rank 0 waits for once it has heard of it."""
    await rank.recv(LIKE, 0)
    await rank.send(np.ones(1), 0)


async def sleeps(rank: R) -> None:
    async def sends_late() -> None:
        await trio.sleep(QUIET_S)
        await rank.send(np.ones(1), 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sends_late)
        await rank.recv(LIKE, 1)


async def beats(rank: R) -> None:
    async def heart() -> None:
        for _ in range(20):
            await trio.sleep(QUIET_S / 20)
        await rank.send(np.ones(1), 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(heart)
        await rank.recv(LIKE, 1)


async def moves_on(rank: R) -> None:
    with trio.move_on_after(QUIET_S):
        await rank.recv(LIKE, 1)
    await rank.send(np.ones(1), 1)
    await rank.recv(LIKE, 1)


async def has_a_thread(rank: R) -> None:
    def work() -> None:
        time.sleep(QUIET_S)
        rank.send(np.ones(1), 1)

    with running(threading.Thread(target=work)):
        await rank.recv(LIKE, 1)


async def reads_a_socket(rank: R) -> None:
    near, far = socket.socketpair()
    timer = threading.Timer(QUIET_S, far.send, [b"x"])
    timer.start()

    async def sends_when_told() -> None:
        with trio.socket.from_stdlib_socket(near) as stream:
            await stream.recv(1)
        await rank.send(np.ones(1), 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sends_when_told)
        await rank.recv(LIKE, 1)
    timer.join()
    far.close()


async def gives_up(rank: R) -> None:
    with pytest.raises(DeadlineError):
        await rank.recv(LIKE, 1, tag=1, timeout_s=QUIET_S)
    await rank.send(np.ones(1), 1)
    await rank.recv(LIKE, 1)


async def takes_from_any(rank: R) -> None:
    if rank.rank == 2:
        await trio.sleep(QUIET_S)
        await rank.send(np.ones(1), 0)
        return
    await rank.recv(LIKE)
    await rank.send(np.ones(1), 1)
    await rank.recv(LIKE, 1)


async def has_a_daemon(rank: R) -> None:
    async def serve() -> None:
        with suppress(RankLeftError):
            await rank.recv(LIKE, 1, tag=5)

    rank.spawn(serve, daemon=True)
    await trio.sleep(QUIET_S)
    await rank.send(np.ones(1), 1)
    await rank.recv(LIKE, 1)


@pytest.mark.everyday(8)
@pytest.mark.parametrize(
    "program", [sleeps, beats, moves_on, has_a_thread, reads_a_socket, gives_up, takes_from_any, has_a_daemon]
)
def test_a_right_program_is_never_ended(program: Callable[[R], Awaitable[None]]) -> None:
    async def main(rank: R) -> None:
        await (answers if rank.rank == 1 else program)(rank)

    overlap.run(main, ranks=3 if program is takes_from_any else 2, timeout_s=TIMEOUT_S)
